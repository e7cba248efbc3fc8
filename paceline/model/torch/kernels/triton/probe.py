"""A minimal Triton kernel, to test whether Triton can compile and start one."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def write_one(out):
    tl.store(out, 1)


def starts(index: int) -> bool:
    """Test whether Triton works on the GPU with this index, by running a small kernel. Returns True if the kernel's
    result is right; raises Triton's error if it cannot be compiled or started."""
    with torch.cuda.device(index):
        out = torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")
        kernel: Any = write_one
        kernel[(1,)](out)
        return int(out) == 1
