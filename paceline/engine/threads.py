"""PyTorch on one thread while the engine steps, without a change for any other thread of the process.

torch.set_num_threads stores the number for the whole process: threads that compute for the first time while a step is
under way would take it for good, those of other libraries and other engines too. OpenMP and MKL, whose threads PyTorch
computes with, also keep a number for each calling thread. These are set here, in the libraries that PyTorch has loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import torch

SetThreads = Callable[[int], int]
"""Sets the calling thread's number; MKL's returns the one before."""


def _setters() -> tuple[SetThreads, SetThreads] | None:
    """Returns the setters of OpenMP and MKL; None for a build of PyTorch without OpenMP, whose threads do not spin."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.PyDLL(torch._C.__file__)  # keeps the GIL: each call takes less than to let it go
        return library.omp_set_num_threads, getattr(library, "MKL_Set_Num_Threads_Local", lambda num_threads: 0)
    return None


_SETTERS = _setters()


def limit_threads() -> tuple[int, int] | None:
    """Limits what the calling thread computes to that thread, until `restore_threads` is given what this returns. Two
    functions, because a context manager took 4% of a tiny model's step."""
    num_threads = torch.get_num_threads()  # has a thread that did not compute yet take the process's number now
    if num_threads == 1 or not _SETTERS:
        return None
    set_openmp, set_mkl = _SETTERS
    set_openmp(1)
    return num_threads, set_mkl(1)


def restore_threads(before: tuple[int, int] | None) -> None:
    """Gives the calling thread its numbers of before."""
    if before and _SETTERS:
        set_openmp, set_mkl = _SETTERS
        set_openmp(before[0])
        set_mkl(before[1])
