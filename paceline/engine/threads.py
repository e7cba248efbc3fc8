"""Runs PyTorch on one thread while the engine steps, without affecting other threads of the process.

torch.set_num_threads sets the number for the whole process: a thread of another library that computes for the first
time during a step would keep it. OpenMP and MKL, which PyTorch computes with, also have a number for each calling
thread; this module sets those numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import torch

SetThreads = Callable[[int], int]
"""Function that sets the number of threads for the calling thread. MKL's function returns the previous number."""


def _setters() -> tuple[SetThreads, SetThreads] | None:
    """Returns the setters of OpenMP and MKL; None for a PyTorch build without OpenMP, whose threads do not spin."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.PyDLL(torch._C.__file__)  # keeps the GIL: each call takes less than to let it go
        return library.omp_set_num_threads, getattr(library, "MKL_Set_Num_Threads_Local", lambda num_threads: 0)
    return None


_SETTERS = _setters()


def limit_threads() -> tuple[int, int] | None:
    """Limits PyTorch operations of the calling thread to one CPU thread; those of other threads are not affected.
    Returns the previous settings, to be passed to `restore_threads`; None if nothing was changed."""
    num_threads = torch.get_num_threads()  # has a thread that did not compute yet take the process's number now
    if num_threads == 1 or not _SETTERS:
        return None
    set_openmp, set_mkl = _SETTERS
    set_openmp(1)
    return num_threads, set_mkl(1)


def restore_threads(before: tuple[int, int] | None) -> None:
    """Restores the calling thread's settings that `limit_threads` returned."""
    if before and _SETTERS:
        set_openmp, set_mkl = _SETTERS
        set_openmp(before[0])
        set_mkl(before[1])
