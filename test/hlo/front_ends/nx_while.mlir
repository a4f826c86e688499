// Elixir's Nx, written by hand after EXLA's documents (defn with while and cond): state as several values, conditions
// computed as i8 and compared, an if with results, integers of 32 bits.
module {
  func.func public @main(%arg0: tensor<i32>) -> (tensor<i32>, tensor<f32>) {
    %c = stablehlo.constant dense<0> : tensor<i32>
    %cst = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %0:3 = stablehlo.while(%iterArg = %c, %iterArg_0 = %arg0, %iterArg_1 = %cst) : tensor<i32>, tensor<i32>, tensor<f32>
    cond {
      %1 = stablehlo.compare  LT, %iterArg, %iterArg_0,  SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      %2 = stablehlo.convert %1 : (tensor<i1>) -> tensor<ui8>
      %c_2 = stablehlo.constant dense<0> : tensor<ui8>
      %3 = stablehlo.compare  NE, %2, %c_2,  UNSIGNED : (tensor<ui8>, tensor<ui8>) -> tensor<i1>
      stablehlo.return %3 : tensor<i1>
    } do {
      %c_2 = stablehlo.constant dense<1> : tensor<i32>
      %1 = stablehlo.and %iterArg, %c_2 : tensor<i32>
      %2 = stablehlo.compare  EQ, %1, %c_2,  SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      %3 = "stablehlo.if"(%2) ({
        %cst_3 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
        %5 = stablehlo.multiply %iterArg_1, %cst_3 : tensor<f32>
        stablehlo.return %5 : tensor<f32>
      }, {
        %cst_3 = stablehlo.constant dense<5.000000e-01> : tensor<f32>
        %5 = stablehlo.add %iterArg_1, %cst_3 : tensor<f32>
        stablehlo.return %5 : tensor<f32>
      }) : (tensor<i1>) -> tensor<f32>
      %4 = stablehlo.add %iterArg, %c_2 : tensor<i32>
      stablehlo.return %4, %iterArg_0, %3 : tensor<i32>, tensor<i32>, tensor<f32>
    }
    return %0#0, %0#2 : tensor<i32>, tensor<f32>
  }
}
