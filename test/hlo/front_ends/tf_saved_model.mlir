// TensorFlow's converter of saved models, written by hand after its documents: attributes of the dialects tf and
// tf_saved_model, locations, a signature by its own name.
#loc = loc(unknown)
#loc1 = loc("x")
module attributes {tf.versions = {bad_consumers = [], min_consumer = 12 : i32, producer = 1994 : i32}, tf_saved_model.semantics} {
  func.func @serving_default(%arg0: tensor<2x3xf32> {tf_saved_model.index_path = ["x"]} loc("x")) -> (tensor<2x3xf32> {tf_saved_model.index_path = ["output_0"]}) attributes {tf.entry_function = {control_outputs = "", inputs = "serving_default_x:0", outputs = "StatefulPartitionedCall:0"}, tf_saved_model.exported_names = ["serving_default"]} {
    %cst = stablehlo.constant dense<[1.000000e+00, -2.000000e+00, 3.000000e+00]> : tensor<3xf32> loc(#loc)
    %cst_0 = stablehlo.constant dense<0.000000e+00> : tensor<2x3xf32> loc(#loc)
    %0 = stablehlo.broadcast_in_dim %cst, dims = [1] : (tensor<3xf32>) -> tensor<2x3xf32> loc(#loc2)
    %1 = stablehlo.add %arg0, %0 : tensor<2x3xf32> loc(#loc2)
    %2 = stablehlo.maximum %1, %cst_0 : tensor<2x3xf32> loc(callsite("Relu"("model.py":12:3) at #loc1))
    return %2 : tensor<2x3xf32> loc(#loc)
  } loc(#loc)
} loc(#loc)
#loc2 = loc(fused["PartitionedCall:", #loc1])
