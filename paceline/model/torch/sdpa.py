"""Selects PyTorch's attention kernels on GPUs, for passes outside CUDA graphs and without Triton.

Masks are floating-point numbers, which the flash kernel does not support. The memory-efficient kernel does; cases that
it does not support (head sizes, strides) fall back to the math kernel, which stores the whole score matrix. cuDNN is
excluded: it builds a plan for every shape, and prefill chunks vary in length.
"""

from __future__ import annotations

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_UNCHANGED = contextlib.nullcontext()
KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def chosen_kernels(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context manager in which PyTorch's attention on CUDA uses its memory-efficient, flash or math kernel,
    never cuDNN; no effect on other devices.

    Entering takes some 30 us, so a pass enters it once; nested uses, or with cuDNN already off, only read a flag.
    """
    is_needed = device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()
    return sdpa_kernel(KERNELS) if is_needed else _UNCHANGED
