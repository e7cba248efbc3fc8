"""The Triton kernels, imported only on CUDA devices."""
