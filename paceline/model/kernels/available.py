"""Tells where the Triton kernels run: on CUDA, where Triton can be imported."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from shutil import which

import torch


def can_use(device: torch.device | str) -> bool:
    """True if tensors on `device` can be given to the Triton kernels."""
    return torch.device(device).type == "cuda" and has_triton()


@cache
def has_triton() -> bool:
    """True if Triton is installed, and a C compiler, by which it makes the launchers of kernels. Triton comes with
    PyTorch's builds for CUDA and is not imported before a kernel runs."""
    return find_spec("triton") is not None and any((os.environ.get("CC"), which("gcc"), which("clang")))
