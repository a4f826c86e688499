// XLA's partitioner: 36864 bytes sent, 294912 operations per device
module @jit__lambda attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  func.func public @main(%arg0: tensor<32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}, %arg1: tensor<32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}, %arg2: tensor<32x64xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>}, %arg3: tensor<64x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}, %arg4: tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>}, %arg5: tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}, %arg6: tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>}, %arg7: tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>}, %arg8: tensor<8x16x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {}]>}) -> (tensor<8x16x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}, {}]>}) {
    %0 = sdy.sharding_constraint %arg8 <@mesh, [{"x"}, {"y"}, {}]> : tensor<8x16x32xf32>
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %1 = stablehlo.reduce(%0 init: %cst) applies stablehlo.add across dimensions = [2] : (tensor<8x16x32xf32>, tensor<f32>) -> tensor<8x16xf32>
    %2 = stablehlo.broadcast_in_dim %1, dims = [0, 1] : (tensor<8x16xf32>) -> tensor<8x16x1xf32>
    %cst_0 = stablehlo.constant dense<3.200000e+01> : tensor<f32>
    %3 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<8x16x1xf32>
    %4 = stablehlo.divide %2, %3 : tensor<8x16x1xf32>
    %5 = stablehlo.broadcast_in_dim %4, dims = [0, 1, 2] : (tensor<8x16x1xf32>) -> tensor<8x16x32xf32>
    %6 = stablehlo.subtract %0, %5 : tensor<8x16x32xf32>
    %7 = stablehlo.broadcast_in_dim %arg0, dims = [2] : (tensor<32xf32>) -> tensor<1x1x32xf32>
    %8 = stablehlo.broadcast_in_dim %7, dims = [0, 1, 2] : (tensor<1x1x32xf32>) -> tensor<8x16x32xf32>
    %9 = stablehlo.multiply %8, %6 : tensor<8x16x32xf32>
    %c = stablehlo.constant dense<0> : tensor<i32>
    %10 = call @_var(%0, %c) : (tensor<8x16x32xf32>, tensor<i32>) -> tensor<8x16x1xf32>
    %cst_1 = stablehlo.constant dense<9.99999974E-6> : tensor<f32>
    %11 = stablehlo.broadcast_in_dim %cst_1, dims = [] : (tensor<f32>) -> tensor<8x16x1xf32>
    %12 = stablehlo.add %10, %11 : tensor<8x16x1xf32>
    %13 = stablehlo.rsqrt %12 : tensor<8x16x1xf32>
    %14 = stablehlo.broadcast_in_dim %13, dims = [0, 1, 2] : (tensor<8x16x1xf32>) -> tensor<8x16x32xf32>
    %15 = stablehlo.multiply %9, %14 : tensor<8x16x32xf32>
    %16 = stablehlo.dot_general %15, %arg6, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x16x32xf32>, tensor<32x32xf32>) -> tensor<8x16x32xf32>
    %17 = stablehlo.reshape %16 : (tensor<8x16x32xf32>) -> tensor<8x16x8x4xf32>
    %18 = stablehlo.transpose %17, dims = [0, 2, 1, 3] : (tensor<8x16x8x4xf32>) -> tensor<8x8x16x4xf32>
    %19 = stablehlo.dot_general %15, %arg4, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x16x32xf32>, tensor<32x32xf32>) -> tensor<8x16x32xf32>
    %20 = stablehlo.reshape %19 : (tensor<8x16x32xf32>) -> tensor<8x16x8x4xf32>
    %21 = stablehlo.transpose %20, dims = [0, 2, 1, 3] : (tensor<8x16x8x4xf32>) -> tensor<8x8x16x4xf32>
    %22 = stablehlo.dot_general %15, %arg7, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x16x32xf32>, tensor<32x32xf32>) -> tensor<8x16x32xf32>
    %23 = stablehlo.reshape %22 : (tensor<8x16x32xf32>) -> tensor<8x16x8x4xf32>
    %24 = stablehlo.transpose %23, dims = [0, 2, 1, 3] : (tensor<8x16x8x4xf32>) -> tensor<8x8x16x4xf32>
    %25 = stablehlo.transpose %21, dims = [0, 1, 3, 2] : (tensor<8x8x16x4xf32>) -> tensor<8x8x4x16xf32>
    %26 = stablehlo.dot_general %18, %25, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [2], precision = [DEFAULT, DEFAULT] : (tensor<8x8x16x4xf32>, tensor<8x8x4x16xf32>) -> tensor<8x8x16x16xf32>
    %cst_2 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
    %27 = stablehlo.broadcast_in_dim %cst_2, dims = [] : (tensor<f32>) -> tensor<8x8x16x16xf32>
    %28 = stablehlo.divide %26, %27 : tensor<8x8x16x16xf32>
    %c_3 = stablehlo.constant dense<true> : tensor<i1>
    %29 = stablehlo.broadcast_in_dim %c_3, dims = [] : (tensor<i1>) -> tensor<16x16xi1>
    %30 = call @tril(%29) : (tensor<16x16xi1>) -> tensor<16x16xi1>
    %cst_4 = stablehlo.constant dense<-1.000000e+09> : tensor<f32>
    %31 = call @_where_0(%30, %28, %cst_4) : (tensor<16x16xi1>, tensor<8x8x16x16xf32>, tensor<f32>) -> tensor<8x8x16x16xf32>
    %cst_5 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %32 = stablehlo.reduce(%31 init: %cst_5) applies stablehlo.maximum across dimensions = [3] : (tensor<8x8x16x16xf32>, tensor<f32>) -> tensor<8x8x16xf32>
    %cst_6 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %33 = stablehlo.broadcast_in_dim %cst_6, dims = [] : (tensor<f32>) -> tensor<8x8x16xf32>
    %34 = stablehlo.maximum %33, %32 : tensor<8x8x16xf32>
    %35 = stablehlo.broadcast_in_dim %34, dims = [0, 1, 2] : (tensor<8x8x16xf32>) -> tensor<8x8x16x1xf32>
    %36 = stablehlo.broadcast_in_dim %35, dims = [0, 1, 2, 3] : (tensor<8x8x16x1xf32>) -> tensor<8x8x16x16xf32>
    %37 = stablehlo.subtract %31, %36 : tensor<8x8x16x16xf32>
    %38 = stablehlo.exponential %37 : tensor<8x8x16x16xf32>
    %cst_7 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %39 = stablehlo.reduce(%38 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<8x8x16x16xf32>, tensor<f32>) -> tensor<8x8x16xf32>
    %40 = stablehlo.broadcast_in_dim %39, dims = [0, 1, 2] : (tensor<8x8x16xf32>) -> tensor<8x8x16x1xf32>
    %41 = stablehlo.broadcast_in_dim %40, dims = [0, 1, 2, 3] : (tensor<8x8x16x1xf32>) -> tensor<8x8x16x16xf32>
    %42 = stablehlo.divide %38, %41 : tensor<8x8x16x16xf32>
    %43 = stablehlo.dot_general %42, %24, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [2], precision = [DEFAULT, DEFAULT] : (tensor<8x8x16x16xf32>, tensor<8x8x16x4xf32>) -> tensor<8x8x16x4xf32>
    %44 = stablehlo.transpose %43, dims = [0, 2, 1, 3] : (tensor<8x8x16x4xf32>) -> tensor<8x16x8x4xf32>
    %45 = stablehlo.reshape %44 : (tensor<8x16x8x4xf32>) -> tensor<8x16x32xf32>
    %46 = stablehlo.dot_general %45, %arg5, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x16x32xf32>, tensor<32x32xf32>) -> tensor<8x16x32xf32>
    %47 = stablehlo.add %0, %46 : tensor<8x16x32xf32>
    %48 = sdy.sharding_constraint %47 <@mesh, [{"x"}, {"y"}, {}]> : tensor<8x16x32xf32>
    %cst_8 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %49 = stablehlo.reduce(%48 init: %cst_8) applies stablehlo.add across dimensions = [2] : (tensor<8x16x32xf32>, tensor<f32>) -> tensor<8x16xf32>
    %50 = stablehlo.broadcast_in_dim %49, dims = [0, 1] : (tensor<8x16xf32>) -> tensor<8x16x1xf32>
    %cst_9 = stablehlo.constant dense<3.200000e+01> : tensor<f32>
    %51 = stablehlo.broadcast_in_dim %cst_9, dims = [] : (tensor<f32>) -> tensor<8x16x1xf32>
    %52 = stablehlo.divide %50, %51 : tensor<8x16x1xf32>
    %53 = stablehlo.broadcast_in_dim %52, dims = [0, 1, 2] : (tensor<8x16x1xf32>) -> tensor<8x16x32xf32>
    %54 = stablehlo.subtract %48, %53 : tensor<8x16x32xf32>
    %55 = stablehlo.broadcast_in_dim %arg1, dims = [2] : (tensor<32xf32>) -> tensor<1x1x32xf32>
    %56 = stablehlo.broadcast_in_dim %55, dims = [0, 1, 2] : (tensor<1x1x32xf32>) -> tensor<8x16x32xf32>
    %57 = stablehlo.multiply %56, %54 : tensor<8x16x32xf32>
    %c_10 = stablehlo.constant dense<0> : tensor<i32>
    %58 = call @_var(%48, %c_10) : (tensor<8x16x32xf32>, tensor<i32>) -> tensor<8x16x1xf32>
    %cst_11 = stablehlo.constant dense<9.99999974E-6> : tensor<f32>
    %59 = stablehlo.broadcast_in_dim %cst_11, dims = [] : (tensor<f32>) -> tensor<8x16x1xf32>
    %60 = stablehlo.add %58, %59 : tensor<8x16x1xf32>
    %61 = stablehlo.rsqrt %60 : tensor<8x16x1xf32>
    %62 = stablehlo.broadcast_in_dim %61, dims = [0, 1, 2] : (tensor<8x16x1xf32>) -> tensor<8x16x32xf32>
    %63 = stablehlo.multiply %57, %62 : tensor<8x16x32xf32>
    %64 = stablehlo.dot_general %63, %arg2, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x16x32xf32>, tensor<32x64xf32>) -> tensor<8x16x64xf32>
    %65 = stablehlo.multiply %64, %64 : tensor<8x16x64xf32>
    %66 = stablehlo.multiply %65, %64 : tensor<8x16x64xf32>
    %cst_12 = stablehlo.constant dense<4.471500e-02> : tensor<f32>
    %67 = stablehlo.broadcast_in_dim %cst_12, dims = [] : (tensor<f32>) -> tensor<8x16x64xf32>
    %68 = stablehlo.multiply %67, %66 : tensor<8x16x64xf32>
    %69 = stablehlo.add %64, %68 : tensor<8x16x64xf32>
    %cst_13 = stablehlo.constant dense<0.797884583> : tensor<f32>
    %70 = stablehlo.broadcast_in_dim %cst_13, dims = [] : (tensor<f32>) -> tensor<8x16x64xf32>
    %71 = stablehlo.multiply %70, %69 : tensor<8x16x64xf32>
    %72 = stablehlo.tanh %71 : tensor<8x16x64xf32>
    %cst_14 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %73 = stablehlo.broadcast_in_dim %cst_14, dims = [] : (tensor<f32>) -> tensor<8x16x64xf32>
    %74 = stablehlo.add %73, %72 : tensor<8x16x64xf32>
    %cst_15 = stablehlo.constant dense<5.000000e-01> : tensor<f32>
    %75 = stablehlo.broadcast_in_dim %cst_15, dims = [] : (tensor<f32>) -> tensor<8x16x64xf32>
    %76 = stablehlo.multiply %75, %74 : tensor<8x16x64xf32>
    %77 = stablehlo.multiply %64, %76 : tensor<8x16x64xf32>
    %78 = stablehlo.dot_general %77, %arg3, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x16x64xf32>, tensor<64x32xf32>) -> tensor<8x16x32xf32>
    %79 = stablehlo.add %48, %78 : tensor<8x16x32xf32>
    %80 = sdy.sharding_constraint %79 <@mesh, [{"x"}, {"y"}, {}]> : tensor<8x16x32xf32>
    return %80 : tensor<8x16x32xf32>
  }
  func.func private @_var(%arg0: tensor<8x16x32xf32>, %arg1: tensor<i32>) -> tensor<8x16x1xf32> {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.reduce(%arg0 init: %cst) applies stablehlo.add across dimensions = [2] : (tensor<8x16x32xf32>, tensor<f32>) -> tensor<8x16xf32>
    %1 = stablehlo.broadcast_in_dim %0, dims = [0, 1] : (tensor<8x16xf32>) -> tensor<8x16x1xf32>
    %cst_0 = stablehlo.constant dense<3.200000e+01> : tensor<f32>
    %2 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<8x16x1xf32>
    %3 = stablehlo.divide %1, %2 : tensor<8x16x1xf32>
    %4 = stablehlo.broadcast_in_dim %3, dims = [0, 1, 2] : (tensor<8x16x1xf32>) -> tensor<8x16x32xf32>
    %5 = stablehlo.subtract %arg0, %4 : tensor<8x16x32xf32>
    %6 = chlo.square %5 : tensor<8x16x32xf32> -> tensor<8x16x32xf32>
    %7 = stablehlo.convert %arg1 : (tensor<i32>) -> tensor<f32>
    %cst_1 = stablehlo.constant dense<3.200000e+01> : tensor<f32>
    %8 = stablehlo.subtract %cst_1, %7 : tensor<f32>
    %cst_2 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %9 = stablehlo.reduce(%6 init: %cst_2) applies stablehlo.add across dimensions = [2] : (tensor<8x16x32xf32>, tensor<f32>) -> tensor<8x16xf32>
    %10 = stablehlo.broadcast_in_dim %9, dims = [0, 1] : (tensor<8x16xf32>) -> tensor<8x16x1xf32>
    %11 = stablehlo.broadcast_in_dim %8, dims = [] : (tensor<f32>) -> tensor<8x16x1xf32>
    %12 = stablehlo.divide %10, %11 : tensor<8x16x1xf32>
    %cst_3 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %13 = stablehlo.compare GT, %8, %cst_3, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_4 = stablehlo.constant dense<0x7FC00000> : tensor<f32>
    %14 = call @_where(%13, %12, %cst_4) : (tensor<i1>, tensor<8x16x1xf32>, tensor<f32>) -> tensor<8x16x1xf32>
    return %14 : tensor<8x16x1xf32>
  }
  func.func private @_where(%arg0: tensor<i1>, %arg1: tensor<8x16x1xf32>, %arg2: tensor<f32>) -> tensor<8x16x1xf32> {
    %0 = stablehlo.convert %arg2 : tensor<f32>
    %1 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<8x16x1xf32>
    %2 = stablehlo.select %arg0, %arg1, %1 : tensor<i1>, tensor<8x16x1xf32>
    return %2 : tensor<8x16x1xf32>
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
  func.func private @_where_0(%arg0: tensor<16x16xi1>, %arg1: tensor<8x8x16x16xf32>, %arg2: tensor<f32>) -> tensor<8x8x16x16xf32> {
    %0 = stablehlo.convert %arg2 : tensor<f32>
    %1 = stablehlo.broadcast_in_dim %arg0, dims = [2, 3] : (tensor<16x16xi1>) -> tensor<8x8x16x16xi1>
    %2 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<8x8x16x16xf32>
    %3 = stablehlo.select %1, %arg1, %2 : tensor<8x8x16x16xi1>, tensor<8x8x16x16xf32>
    return %3 : tensor<8x8x16x16xf32>
  }
}
