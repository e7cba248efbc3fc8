"""Programs that start while those of the kernel before still run (programmatic dependent launch, from Hopper on)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def overlap(OVERLAPS: tl.constexpr):
    """Let the next kernel start its programs, then wait until the kernel before has ended and what it wrote can be read.

    Every program of a kernel that is launched with `launch_pdl` must call it before it reads or writes what another kernel
    writes or reads. Each waits for the kernel before alone; that one has ended only when its own wait was over.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
