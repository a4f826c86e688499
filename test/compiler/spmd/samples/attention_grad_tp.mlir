// XLA's partitioner: 16384 bytes sent, 393216 operations per device
module @jit__lambda attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  func.func public @main(%arg0: tensor<8x16x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {}]>}, %arg1: tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>}, %arg2: tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>}, %arg3: tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>}, %arg4: tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}) -> (tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>}, tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>}, tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>}, tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}) {
    %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x16x32xf32>, tensor<32x32xf32>) -> tensor<8x16x32xf32>
    %1 = stablehlo.reshape %0 : (tensor<8x16x32xf32>) -> tensor<8x16x8x4xf32>
    %2 = stablehlo.transpose %1, dims = [0, 2, 1, 3] : (tensor<8x16x8x4xf32>) -> tensor<8x8x16x4xf32>
    %3 = stablehlo.dot_general %arg0, %arg2, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x16x32xf32>, tensor<32x32xf32>) -> tensor<8x16x32xf32>
    %4 = stablehlo.reshape %3 : (tensor<8x16x32xf32>) -> tensor<8x16x8x4xf32>
    %5 = stablehlo.transpose %4, dims = [0, 2, 1, 3] : (tensor<8x16x8x4xf32>) -> tensor<8x8x16x4xf32>
    %6 = stablehlo.dot_general %arg0, %arg3, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x16x32xf32>, tensor<32x32xf32>) -> tensor<8x16x32xf32>
    %7 = stablehlo.reshape %6 : (tensor<8x16x32xf32>) -> tensor<8x16x8x4xf32>
    %8 = stablehlo.transpose %7, dims = [0, 2, 1, 3] : (tensor<8x16x8x4xf32>) -> tensor<8x8x16x4xf32>
    %9 = stablehlo.transpose %5, dims = [0, 1, 3, 2] : (tensor<8x8x16x4xf32>) -> tensor<8x8x4x16xf32>
    %10 = stablehlo.dot_general %2, %9, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [2], precision = [DEFAULT, DEFAULT] : (tensor<8x8x16x4xf32>, tensor<8x8x4x16xf32>) -> tensor<8x8x16x16xf32>
    %cst = stablehlo.constant dense<2.000000e+00> : tensor<f32>
    %11 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<8x8x16x16xf32>
    %12 = stablehlo.divide %10, %11 : tensor<8x8x16x16xf32>
    %c = stablehlo.constant dense<true> : tensor<i1>
    %13 = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<i1>) -> tensor<16x16xi1>
    %14 = call @tril(%13) : (tensor<16x16xi1>) -> tensor<16x16xi1>
    %cst_0 = stablehlo.constant dense<-1.000000e+09> : tensor<f32>
    %15:2 = call @_where(%14, %12, %cst_0) : (tensor<16x16xi1>, tensor<8x8x16x16xf32>, tensor<f32>) -> (tensor<8x8x16x16xf32>, tensor<8x8x16x16xi1>)
    %cst_1 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %16 = stablehlo.reduce(%15#0 init: %cst_1) applies stablehlo.maximum across dimensions = [3] : (tensor<8x8x16x16xf32>, tensor<f32>) -> tensor<8x8x16xf32>
    %cst_2 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %17 = stablehlo.broadcast_in_dim %cst_2, dims = [] : (tensor<f32>) -> tensor<8x8x16xf32>
    %18 = stablehlo.maximum %17, %16 : tensor<8x8x16xf32>
    %19 = stablehlo.broadcast_in_dim %18, dims = [0, 1, 2] : (tensor<8x8x16xf32>) -> tensor<8x8x16x1xf32>
    %20 = stablehlo.broadcast_in_dim %19, dims = [0, 1, 2, 3] : (tensor<8x8x16x1xf32>) -> tensor<8x8x16x16xf32>
    %21 = stablehlo.subtract %15#0, %20 : tensor<8x8x16x16xf32>
    %22 = stablehlo.exponential %21 : tensor<8x8x16x16xf32>
    %cst_3 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %23 = stablehlo.reduce(%22 init: %cst_3) applies stablehlo.add across dimensions = [3] : (tensor<8x8x16x16xf32>, tensor<f32>) -> tensor<8x8x16xf32>
    %24 = stablehlo.broadcast_in_dim %23, dims = [0, 1, 2] : (tensor<8x8x16xf32>) -> tensor<8x8x16x1xf32>
    %25 = stablehlo.broadcast_in_dim %24, dims = [0, 1, 2, 3] : (tensor<8x8x16x1xf32>) -> tensor<8x8x16x16xf32>
    %26 = stablehlo.divide %22, %25 : tensor<8x8x16x16xf32>
    %27 = stablehlo.multiply %24, %24 : tensor<8x8x16x1xf32>
    %cst_4 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %28 = stablehlo.broadcast_in_dim %cst_4, dims = [] : (tensor<f32>) -> tensor<8x8x16x1xf32>
    %29 = stablehlo.divide %28, %27 : tensor<8x8x16x1xf32>
    %30 = stablehlo.dot_general %26, %8, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [2], precision = [DEFAULT, DEFAULT] : (tensor<8x8x16x16xf32>, tensor<8x8x16x4xf32>) -> tensor<8x8x16x4xf32>
    %31 = stablehlo.transpose %30, dims = [0, 2, 1, 3] : (tensor<8x8x16x4xf32>) -> tensor<8x16x8x4xf32>
    %32 = stablehlo.reshape %31 : (tensor<8x16x8x4xf32>) -> tensor<8x16x32xf32>
    %33 = stablehlo.dot_general %32, %arg4, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x16x32xf32>, tensor<32x32xf32>) -> tensor<8x16x32xf32>
    %cst_5 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
    %34 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<8x16x32xf32>
    %35 = stablehlo.multiply %34, %33 : tensor<8x16x32xf32>
    %cst_6 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %36 = stablehlo.broadcast_in_dim %cst_6, dims = [] : (tensor<f32>) -> tensor<8x16x32xf32>
    %37 = stablehlo.multiply %36, %35 : tensor<8x16x32xf32>
    %38 = stablehlo.dot_general %37, %32, contracting_dims = [0, 1] x [0, 1], precision = [DEFAULT, DEFAULT] : (tensor<8x16x32xf32>, tensor<8x16x32xf32>) -> tensor<32x32xf32>
    %39 = stablehlo.transpose %38, dims = [1, 0] : (tensor<32x32xf32>) -> tensor<32x32xf32>
    %40 = stablehlo.dot_general %37, %arg4, contracting_dims = [2] x [1], precision = [DEFAULT, DEFAULT] : (tensor<8x16x32xf32>, tensor<32x32xf32>) -> tensor<8x16x32xf32>
    %41 = stablehlo.reshape %40 : (tensor<8x16x32xf32>) -> tensor<8x16x8x4xf32>
    %42 = stablehlo.transpose %41, dims = [0, 2, 1, 3] : (tensor<8x16x8x4xf32>) -> tensor<8x8x16x4xf32>
    %43 = stablehlo.dot_general %42, %26, batching_dims = [0, 1] x [0, 1], contracting_dims = [2] x [2], precision = [DEFAULT, DEFAULT] : (tensor<8x8x16x4xf32>, tensor<8x8x16x16xf32>) -> tensor<8x8x4x16xf32>
    %44 = stablehlo.transpose %43, dims = [0, 1, 3, 2] : (tensor<8x8x4x16xf32>) -> tensor<8x8x16x4xf32>
    %45 = stablehlo.dot_general %42, %8, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [3], precision = [DEFAULT, DEFAULT] : (tensor<8x8x16x4xf32>, tensor<8x8x16x4xf32>) -> tensor<8x8x16x16xf32>
    %46 = stablehlo.broadcast_in_dim %29, dims = [0, 1, 2, 3] : (tensor<8x8x16x1xf32>) -> tensor<8x8x16x16xf32>
    %47 = stablehlo.multiply %45, %46 : tensor<8x8x16x16xf32>
    %48 = stablehlo.multiply %47, %22 : tensor<8x8x16x16xf32>
    %cst_7 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %49 = stablehlo.reduce(%48 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<8x8x16x16xf32>, tensor<f32>) -> tensor<8x8x16xf32>
    %50 = stablehlo.reshape %49 : (tensor<8x8x16xf32>) -> tensor<8x8x16x1xf32>
    %51 = stablehlo.negate %50 : tensor<8x8x16x1xf32>
    %52 = stablehlo.broadcast_in_dim %24, dims = [0, 1, 2, 3] : (tensor<8x8x16x1xf32>) -> tensor<8x8x16x16xf32>
    %53 = stablehlo.divide %45, %52 : tensor<8x8x16x16xf32>
    %cst_8 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %54 = stablehlo.reduce(%51 init: %cst_8) applies stablehlo.add across dimensions = [3] : (tensor<8x8x16x1xf32>, tensor<f32>) -> tensor<8x8x16xf32>
    %55 = stablehlo.broadcast_in_dim %54, dims = [0, 1, 2] : (tensor<8x8x16xf32>) -> tensor<8x8x16x16xf32>
    %56 = stablehlo.add %53, %55 : tensor<8x8x16x16xf32>
    %57 = stablehlo.multiply %56, %22 : tensor<8x8x16x16xf32>
    %58 = call @_where_0(%15#1, %57) : (tensor<8x8x16x16xi1>, tensor<8x8x16x16xf32>) -> tensor<8x8x16x16xf32>
    %cst_9 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
    %59 = stablehlo.broadcast_in_dim %cst_9, dims = [] : (tensor<f32>) -> tensor<8x8x16x16xf32>
    %60 = stablehlo.divide %58, %59 : tensor<8x8x16x16xf32>
    %61 = stablehlo.dot_general %60, %2, batching_dims = [0, 1] x [0, 1], contracting_dims = [2] x [2], precision = [DEFAULT, DEFAULT] : (tensor<8x8x16x16xf32>, tensor<8x8x16x4xf32>) -> tensor<8x8x16x4xf32>
    %62 = stablehlo.transpose %61, dims = [0, 1, 3, 2] : (tensor<8x8x16x4xf32>) -> tensor<8x8x4x16xf32>
    %63 = stablehlo.dot_general %60, %9, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [3], precision = [DEFAULT, DEFAULT] : (tensor<8x8x16x16xf32>, tensor<8x8x4x16xf32>) -> tensor<8x8x16x4xf32>
    %64 = stablehlo.transpose %62, dims = [0, 1, 3, 2] : (tensor<8x8x4x16xf32>) -> tensor<8x8x16x4xf32>
    %65 = stablehlo.transpose %44, dims = [0, 2, 1, 3] : (tensor<8x8x16x4xf32>) -> tensor<8x16x8x4xf32>
    %66 = stablehlo.reshape %65 : (tensor<8x16x8x4xf32>) -> tensor<8x16x32xf32>
    %67 = stablehlo.dot_general %66, %arg0, contracting_dims = [0, 1] x [0, 1], precision = [DEFAULT, DEFAULT] : (tensor<8x16x32xf32>, tensor<8x16x32xf32>) -> tensor<32x32xf32>
    %68 = stablehlo.transpose %67, dims = [1, 0] : (tensor<32x32xf32>) -> tensor<32x32xf32>
    %69 = stablehlo.transpose %64, dims = [0, 2, 1, 3] : (tensor<8x8x16x4xf32>) -> tensor<8x16x8x4xf32>
    %70 = stablehlo.reshape %69 : (tensor<8x16x8x4xf32>) -> tensor<8x16x32xf32>
    %71 = stablehlo.dot_general %70, %arg0, contracting_dims = [0, 1] x [0, 1], precision = [DEFAULT, DEFAULT] : (tensor<8x16x32xf32>, tensor<8x16x32xf32>) -> tensor<32x32xf32>
    %72 = stablehlo.transpose %71, dims = [1, 0] : (tensor<32x32xf32>) -> tensor<32x32xf32>
    %73 = stablehlo.transpose %63, dims = [0, 2, 1, 3] : (tensor<8x8x16x4xf32>) -> tensor<8x16x8x4xf32>
    %74 = stablehlo.reshape %73 : (tensor<8x16x8x4xf32>) -> tensor<8x16x32xf32>
    %75 = stablehlo.dot_general %74, %arg0, contracting_dims = [0, 1] x [0, 1], precision = [DEFAULT, DEFAULT] : (tensor<8x16x32xf32>, tensor<8x16x32xf32>) -> tensor<32x32xf32>
    %76 = stablehlo.transpose %75, dims = [1, 0] : (tensor<32x32xf32>) -> tensor<32x32xf32>
    return %76, %72, %68, %39 : tensor<32x32xf32>, tensor<32x32xf32>, tensor<32x32xf32>, tensor<32x32xf32>
  }
  func.func private @tril(%arg0: tensor<16x16xi1>) -> tensor<16x16xi1> {
    %0 = stablehlo.iota dim = 0 : tensor<16x16xi32>
    %c = stablehlo.constant dense<0> : tensor<i32>
    %1 = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<i32>) -> tensor<16x16xi32>
    %2 = stablehlo.add %0, %1 : tensor<16x16xi32>
    %3 = stablehlo.iota dim = 1 : tensor<16x16xi32>
    %4 = stablehlo.compare GE, %2, %3, SIGNED : (tensor<16x16xi32>, tensor<16x16xi32>) -> tensor<16x16xi1>
    %c_0 = stablehlo.constant dense<false> : tensor<i1>
    %5 = stablehlo.broadcast_in_dim %c_0, dims = [] : (tensor<i1>) -> tensor<16x16xi1>
    %6 = stablehlo.select %4, %arg0, %5 : tensor<16x16xi1>, tensor<16x16xi1>
    return %6 : tensor<16x16xi1>
  }
  func.func private @_where(%arg0: tensor<16x16xi1>, %arg1: tensor<8x8x16x16xf32>, %arg2: tensor<f32>) -> (tensor<8x8x16x16xf32>, tensor<8x8x16x16xi1>) {
    %0 = stablehlo.convert %arg2 : tensor<f32>
    %1 = stablehlo.broadcast_in_dim %arg0, dims = [2, 3] : (tensor<16x16xi1>) -> tensor<8x8x16x16xi1>
    %2 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<8x8x16x16xf32>
    %3 = stablehlo.select %1, %arg1, %2 : tensor<8x8x16x16xi1>, tensor<8x8x16x16xf32>
    return %3, %1 : tensor<8x8x16x16xf32>, tensor<8x8x16x16xi1>
  }
  func.func private @_where_0(%arg0: tensor<8x8x16x16xi1>, %arg1: tensor<8x8x16x16xf32>) -> tensor<8x8x16x16xf32> {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<8x8x16x16xf32>
    %1 = stablehlo.select %arg0, %arg1, %0 : tensor<8x8x16x16xi1>, tensor<8x8x16x16xf32>
    return %1 : tensor<8x8x16x16xf32>
  }
}
