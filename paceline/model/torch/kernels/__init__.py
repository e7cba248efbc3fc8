"""Triton kernels of the decoder on CUDA, each with an equivalent PyTorch implementation for other devices."""
