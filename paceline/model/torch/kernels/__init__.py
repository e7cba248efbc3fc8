"""Triton kernels of the decoder's passes on CUDA, each beside the PyTorch formula that other devices run."""
