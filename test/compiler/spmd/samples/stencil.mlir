// XLA's partitioner: 256 bytes sent, 0 operations per device
module @jit__lambda attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=8]>
  func.func public @main(%arg0: tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> (tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
    %0 = call @_roll_static(%arg0) : (tensor<32x32xf32>) -> tensor<32x32xf32>
    %1 = call @_roll_static_0(%arg0) : (tensor<32x32xf32>) -> tensor<32x32xf32>
    %2 = stablehlo.add %0, %1 : tensor<32x32xf32>
    %3 = call @_roll_static_1(%arg0) : (tensor<32x32xf32>) -> tensor<32x32xf32>
    %4 = stablehlo.add %2, %3 : tensor<32x32xf32>
    %5 = call @_roll_static_2(%arg0) : (tensor<32x32xf32>) -> tensor<32x32xf32>
    %6 = stablehlo.add %4, %5 : tensor<32x32xf32>
    %cst = stablehlo.constant dense<4.000000e+00> : tensor<f32>
    %7 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<32x32xf32>
    %8 = stablehlo.multiply %7, %arg0 : tensor<32x32xf32>
    %9 = stablehlo.subtract %6, %8 : tensor<32x32xf32>
    %cst_0 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %10 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<32x32xf32>
    %11 = stablehlo.multiply %10, %9 : tensor<32x32xf32>
    %12 = stablehlo.add %arg0, %11 : tensor<32x32xf32>
    return %12 : tensor<32x32xf32>
  }
  func.func private @_roll_static(%arg0: tensor<32x32xf32>) -> tensor<32x32xf32> {
    %0 = stablehlo.slice %arg0 [31:32, 0:32] : (tensor<32x32xf32>) -> tensor<1x32xf32>
    %1 = stablehlo.slice %arg0 [0:31, 0:32] : (tensor<32x32xf32>) -> tensor<31x32xf32>
    %2 = stablehlo.concatenate %0, %1, dim = 0 : (tensor<1x32xf32>, tensor<31x32xf32>) -> tensor<32x32xf32>
    return %2 : tensor<32x32xf32>
  }
  func.func private @_roll_static_0(%arg0: tensor<32x32xf32>) -> tensor<32x32xf32> {
    %0 = stablehlo.slice %arg0 [1:32, 0:32] : (tensor<32x32xf32>) -> tensor<31x32xf32>
    %1 = stablehlo.slice %arg0 [0:1, 0:32] : (tensor<32x32xf32>) -> tensor<1x32xf32>
    %2 = stablehlo.concatenate %0, %1, dim = 0 : (tensor<31x32xf32>, tensor<1x32xf32>) -> tensor<32x32xf32>
    return %2 : tensor<32x32xf32>
  }
  func.func private @_roll_static_1(%arg0: tensor<32x32xf32>) -> tensor<32x32xf32> {
    %0 = stablehlo.slice %arg0 [0:32, 31:32] : (tensor<32x32xf32>) -> tensor<32x1xf32>
    %1 = stablehlo.slice %arg0 [0:32, 0:31] : (tensor<32x32xf32>) -> tensor<32x31xf32>
    %2 = stablehlo.concatenate %0, %1, dim = 1 : (tensor<32x1xf32>, tensor<32x31xf32>) -> tensor<32x32xf32>
    return %2 : tensor<32x32xf32>
  }
  func.func private @_roll_static_2(%arg0: tensor<32x32xf32>) -> tensor<32x32xf32> {
    %0 = stablehlo.slice %arg0 [0:32, 1:32] : (tensor<32x32xf32>) -> tensor<32x31xf32>
    %1 = stablehlo.slice %arg0 [0:32, 0:1] : (tensor<32x32xf32>) -> tensor<32x1xf32>
    %2 = stablehlo.concatenate %0, %1, dim = 1 : (tensor<32x31xf32>, tensor<32x1xf32>) -> tensor<32x32xf32>
    return %2 : tensor<32x32xf32>
  }
}
