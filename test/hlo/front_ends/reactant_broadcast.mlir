// Julia's Reactant, written by hand after its documents (@code_hlo of broadcasts and Enzyme.gradient): names of Julia
// functions in quotes, scalar functions that return their arguments, and attributes of the enzymexla dialect.
module @"reactant_#loss" attributes {mhlo.num_partitions = 1 : i64, mhlo.num_replicas = 1 : i64} {
  func.func private @"*_broadcast_scalar"(%arg0: tensor<f32>, %arg1: tensor<f32>) -> (tensor<f32>, tensor<f32>, tensor<f32>) {
    %0 = stablehlo.multiply %arg0, %arg1 : tensor<f32>
    return %0, %arg0, %arg1 : tensor<f32>, tensor<f32>, tensor<f32>
  }
  func.func private @"Const{typeof(loss)}(Main.loss)_autodiff"(%arg0: tensor<3x2xf32>, %arg1: tensor<2xf32>) -> (tensor<f32>, tensor<3x2xf32>) {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %cst_0 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
    %0 = stablehlo.transpose %arg0, dims = [1, 0] : (tensor<3x2xf32>) -> tensor<2x3xf32>
    %1 = stablehlo.dot_general %arg1, %0, contracting_dims = [0] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2xf32>, tensor<2x3xf32>) -> tensor<3xf32>
    %2 = stablehlo.multiply %1, %1 : tensor<3xf32>
    %3 = stablehlo.reduce(%2 init: %cst) applies stablehlo.add across dimensions = [0] : (tensor<3xf32>, tensor<f32>) -> tensor<f32>
    %4:3 = call @"*_broadcast_scalar"(%3, %cst_0) : (tensor<f32>, tensor<f32>) -> (tensor<f32>, tensor<f32>, tensor<f32>)
    %5 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<3xf32>
    %6 = stablehlo.multiply %1, %5 : tensor<3xf32>
    %7 = stablehlo.multiply %6, %5 : tensor<3xf32>
    %8 = stablehlo.dot_general %7, %arg1, contracting_dims = [] x [], precision = [DEFAULT, DEFAULT] {enzymexla.non_negative = [#enzymexla<guaranteed NOTGUARANTEED>]} : (tensor<3xf32>, tensor<2xf32>) -> tensor<3x2xf32>
    return %4#0, %8 : tensor<f32>, tensor<3x2xf32>
  }
  func.func @main(%arg0: tensor<2x3xf32> {enzymexla.memory_effects = []}, %arg1: tensor<2xf32> {enzymexla.memory_effects = []}) -> (tensor<f32>, tensor<2x3xf32>) attributes {enzymexla.memory_effects = []} {
    %0 = stablehlo.transpose %arg0, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
    %1:2 = call @"Const{typeof(loss)}(Main.loss)_autodiff"(%0, %arg1) : (tensor<3x2xf32>, tensor<2xf32>) -> (tensor<f32>, tensor<3x2xf32>)
    %2 = stablehlo.transpose %1#1, dims = [1, 0] : (tensor<3x2xf32>) -> tensor<2x3xf32>
    return %1#0, %2 : tensor<f32>, tensor<2x3xf32>
  }
}
