"""Selects PyTorch's attention kernels: on GPUs, for passes outside CUDA graphs and without Triton, and on CPUs whose
flash kernel fails.

Masks are floating-point numbers, which the flash kernel does not support. The memory-efficient kernel does; cases that
it does not support (head sizes, strides) fall back to the math kernel, which stores the whole score matrix. cuDNN is
excluded: it builds a plan for every shape, and prefill chunks vary in length.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_UNCHANGED = contextlib.nullcontext()
KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def chosen_kernels(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context manager in which PyTorch's attention does not use slow or faulty kernels. On CUDA it excludes
    cuDNN's kernels; on a CPU it is `working_kernels`.

    Entering it takes some 30 us on CUDA, so enter it once per pass. Entering another one inside it costs almost
    nothing.
    """
    if device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled():
        return sdpa_kernel(KERNELS)
    return working_kernels(device)


def working_kernels(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context manager in which PyTorch's attention works on this device. On a CPU whose flash kernel rejects
    bfloat16, attention uses the math kernel. On other devices the context manager has no effect."""
    is_broken = device.type == "cpu" and torch.backends.cuda.flash_sdp_enabled() and _is_flash_broken()
    return sdpa_kernel(SDPBackend.MATH) if is_broken else _UNCHANGED


@functools.cache
def _is_flash_broken() -> bool:
    """True if PyTorch's flash kernel for CPUs refuses bfloat16.

    With ATEN_CPU_CAPABILITY below avx512 on a processor that multiplies bfloat16, torch 2.13 arranges keys, from 64
    queries on, for instructions that the kernel was compiled without ("pack_vnni2 is only supported when avx512 is
    supported").
    """
    query = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16)
    try:
        F.scaled_dot_product_attention(query, query, query)
    except RuntimeError:
        return True
    return False
