"""Convolutions and their gradients: layouts, direct, minimal-filtering (Winograd), depthwise and
AMX kernels, GPU kernels."""
