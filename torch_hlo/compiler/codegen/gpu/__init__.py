"""Code generation for GPUs: the same steps and value emitters, on a grid of threads instead of a thread pool."""
