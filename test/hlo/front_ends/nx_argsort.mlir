// Elixir's Nx, written by hand after EXLA's documents (Nx.argsort, Nx.argmax): a sort of two arrays with its comparator,
// a reduction of two arrays, unsigned integers.
module {
  func.func public @main(%arg0: tensor<2x4xf32>) -> (tensor<2x4xui32>, tensor<2xi32>) {
    %0 = stablehlo.iota dim = 1 : tensor<2x4xui32>
    %1:2 = "stablehlo.sort"(%arg0, %0) <{dimension = 1 : i64, is_stable = true}> ({
    ^bb0(%arg1: tensor<f32>, %arg2: tensor<f32>, %arg3: tensor<ui32>, %arg4: tensor<ui32>):
      %4 = stablehlo.compare  LT, %arg1, %arg2,  TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %4 : tensor<i1>
    }) : (tensor<2x4xf32>, tensor<2x4xui32>) -> (tensor<2x4xf32>, tensor<2x4xui32>)
    %2 = stablehlo.iota dim = 1 : tensor<2x4xi32>
    %cst = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %c = stablehlo.constant dense<0> : tensor<i32>
    %3:2 = stablehlo.reduce(%arg0 init: %cst), (%2 init: %c) across dimensions = [1] : (tensor<2x4xf32>, tensor<2x4xi32>, tensor<f32>, tensor<i32>) -> (tensor<2xf32>, tensor<2xi32>)
     reducer(%arg1: tensor<f32>, %arg3: tensor<f32>) (%arg2: tensor<i32>, %arg4: tensor<i32>)  {
      %4 = stablehlo.compare  GT, %arg1, %arg3,  FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
      %5 = stablehlo.compare  EQ, %arg1, %arg3,  FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
      %6 = stablehlo.minimum %arg2, %arg4 : tensor<i32>
      %7 = stablehlo.select %4, %arg2, %arg4 : tensor<i1>, tensor<i32>
      %8 = stablehlo.select %5, %6, %7 : tensor<i1>, tensor<i32>
      %9 = stablehlo.select %4, %arg1, %arg3 : tensor<i1>, tensor<f32>
      stablehlo.return %9, %8 : tensor<f32>, tensor<i32>
    }
    return %1#1, %3#1 : tensor<2x4xui32>, tensor<2xi32>
  }
}
