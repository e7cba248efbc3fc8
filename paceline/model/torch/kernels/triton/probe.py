"""The least Triton kernel, to see whether one can be compiled and started. Imported on the first use, as it needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def write_one(out):
    tl.store(out, 1)


def starts(index: int) -> bool:
    """Compiles the kernel and starts it on a card. Raises whatever Triton does."""
    with torch.cuda.device(index):
        out = torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")
        kernel: Any = write_one
        kernel[(1,)](out)
        return int(out) == 1
