"""PyTorch's kernels of scaled-dot-product attention on a GPU: for passes that are not recorded, and without Triton.

Our masks are floating-point numbers, which the flash kernel does not take. The memory-efficient one does; what it does
not take either (head sizes, strides) goes to the math kernel, which holds the whole matrix of scores. cuDNN's is left
out: it makes a new plan for every shape, and a prefill has a new length in every chunk.
"""

from __future__ import annotations

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_UNCHANGED = contextlib.nullcontext()
KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def chosen_kernels(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On CUDA attention within runs on one of KERNELS; elsewhere nothing changes.

    Entering takes some 30 us, so a pass enters it once: within it, or where cuDNN is off anyway, it only reads a flag.
    """
    is_needed = device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()
    return sdpa_kernel(KERNELS) if is_needed else _UNCHANGED
