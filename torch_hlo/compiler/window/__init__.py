"""Windows that slide: reduce-window, running folds, gradients of pooling. The pass, the CPU
kernels, the GPU kernels."""
