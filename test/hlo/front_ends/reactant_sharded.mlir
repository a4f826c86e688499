// Julia's Reactant, written by hand after its documents (Sharding.Mesh, NamedSharding): Shardy's mesh in the module,
// numbers of partitions as i64.
module @reactant_matmul attributes {mhlo.num_partitions = 2 : i64, mhlo.num_replicas = 1 : i64} {
  sdy.mesh @mesh = <["x"=2]>
  func.func @main(%arg0: tensor<4x2xf32> {enzymexla.memory_effects = [], sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %arg1: tensor<3x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}) -> (tensor<3x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{?}, {?}]>}) attributes {enzymexla.memory_effects = []} {
    %0 = stablehlo.dot_general %arg1, %arg0, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<3x4xf32>, tensor<4x2xf32>) -> tensor<3x2xf32>
    return %0 : tensor<3x2xf32>
  }
}
