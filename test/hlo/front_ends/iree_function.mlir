// IREE's importers, written by hand after its documents: one function by its own name, with the declaration of its ABI,
// private functions beside it, a constant as a resource of the file.
module @classifier {
  func.func @predict(%arg0: tensor<1x4xf32> {iree.identifier = "x"}) -> (tensor<1x2xf32> {iree.identifier = "scores"}) attributes {iree.abi.declaration = "sync func @predict(%input0: tensor<1x4xf32>) -> (%output0: tensor<1x2xf32>)"} {
    %cst = stablehlo.constant dense_resource<weights> : tensor<4x2xf32>
    %0 = call @layer(%arg0, %cst) : (tensor<1x4xf32>, tensor<4x2xf32>) -> tensor<1x2xf32>
    return %0 : tensor<1x2xf32>
  }
  func.func private @layer(%arg0: tensor<1x4xf32>, %arg1: tensor<4x2xf32>) -> tensor<1x2xf32> attributes {noinline} {
    %0 = "stablehlo.dot_general"(%arg0, %arg1) {dot_dimension_numbers = #stablehlo.dot<lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [0]>, precision_config = [#stablehlo<precision DEFAULT>, #stablehlo<precision DEFAULT>]} : (tensor<1x4xf32>, tensor<4x2xf32>) -> tensor<1x2xf32>
    %1 = "chlo.broadcast_maximum"(%0, %0) : (tensor<1x2xf32>, tensor<1x2xf32>) -> tensor<1x2xf32>
    func.return %1 : tensor<1x2xf32>
  }
}

{-#
  dialect_resources: {
    builtin: {
      weights: "0x040000000000803F0000004000004040000080400000A0400000C0400000E04000000041"
    }
  }
#-}
