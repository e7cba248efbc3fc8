"""Lets a kernel's programs start while those of the previous kernel still run (CUDA's programmatic dependent launch,
from Hopper on)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def overlap(OVERLAPS: tl.constexpr):
    """Let this kernel and the next one overlap, which hides the time of launches: allows the next kernel to start its
    programs, then waits until the previous kernel has ended and its writes are visible. Does nothing unless OVERLAPS.

    Every program of a kernel launched with `launch_pdl` must call this before it accesses data shared with other
    kernels.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
