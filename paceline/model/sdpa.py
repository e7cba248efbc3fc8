"""PyTorch's kernels of scaled-dot-product attention on a GPU: chosen here, and named for reports.

Our masks are floating-point numbers, which the flash kernel does not take. The memory-efficient one does; what it does
not take either (head sizes, strides) goes to the math kernel, which holds the whole matrix of scores. cuDNN's is left
out: it makes a new plan for every shape, and a prefill has a new length in every chunk.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.model.config import DecoderConfig

_UNCHANGED = contextlib.nullcontext()
KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def chosen_kernels(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On CUDA attention within runs on one of KERNELS; elsewhere nothing changes.

    Entering takes some 30 us, so a pass enters it once: within it, or where cuDNN is off anyway, it only reads a flag.
    """
    is_needed = device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()
    return sdpa_kernel(KERNELS) if is_needed else _UNCHANGED


def kernel_of(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None = None) -> str:
    """The kernel that PyTorch takes for this product: efficient_attention, flash_attention or math."""
    with chosen_kernels(query.device):
        choice = torch._fused_sdp_choice(query, keys, values, mask, 0.0, False, scale=scale)
    return SDPBackend(choice).name.lower()


def decoding_kernel(
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    num_rows: int = 1,
    count: int = 16,
    span: int = 4096,
) -> str:
    """The kernel of a decode pass: `count` tokens of each row against the first `span` positions of a longer cache.

    "products" where scores are capped or have sinks, which are computed without such a kernel.
    """
    if config.attention_cap or config.has_sinks:
        return "products"
    queries = config.num_heads // config.num_kv_heads * count
    query = torch.empty(num_rows, config.num_kv_heads, queries, config.head_dim, dtype=dtype, device=device)
    cache = torch.empty(num_rows, config.num_kv_heads, span + 32, config.head_dim, dtype=dtype, device=device)
    mask = torch.empty(num_rows, 1, queries, span, dtype=dtype, device=device)
    return kernel_of(query, cache[:, :, :span], cache[:, :, :span], mask, config.attention_scale)
