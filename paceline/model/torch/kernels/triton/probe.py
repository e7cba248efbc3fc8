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
    """Run a small kernel on the GPU with this index. Returns True if its result is right; raises Triton's error if it
    does not run."""
    with torch.cuda.device(index):
        out = torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")
        kernel: Any = write_one
        kernel[(1,)](out)
        return int(out) == 1
