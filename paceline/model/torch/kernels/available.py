"""Decides where the Triton kernels run: on NVIDIA GPUs of Ampere or later on which Triton can start a kernel."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

log = logging.getLogger("paceline.model")
LEAST_CAPABILITY = (8, 0)
"""Minimum CUDA compute capability; older GPUs have no bfloat16 products."""
OVERLAPPING_CAPABILITY = (9, 0)
"""CUDA compute capability (Hopper) from which a kernel's programs may start before the previous kernel has ended."""


def can_use(device: torch.device | str) -> bool:
    """Return True if the Triton kernels can process tensors on `device`; otherwise PyTorch operations are used."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip or find_spec("triton") is None:
        return False
    return _starts_kernels(torch.cuda.current_device() if device.index is None else device.index)


@cache
def overlap_options(device: torch.device) -> dict[str, bool]:
    """Return the launch options with which a Triton kernel may start before the previous kernel ends
    (`triton/overlap.py`), to save time. On devices that do not support this, only OVERLAPS: False."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < OVERLAPPING_CAPABILITY:
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}


def launch(module: str, kernel: str, grid: tuple[int, ...], args: list[Tensor | float], **constants: int | str) -> None:
    """Launch a Triton kernel, the function `kernel` of `triton/{module}.py`, on the device of its first argument. Does
    nothing if the grid is empty. `constants`: constexpr arguments, and launch options such as num_warps."""
    assert isinstance(args[0], Tensor)
    if 0 not in grid:
        kernels = importlib.import_module(f"paceline.model.torch.kernels.triton.{module}")
        with torch.cuda.device_of(args[0]):
            getattr(kernels, kernel)[grid](*args, **constants)


@cache
def _starts_kernels(index: int) -> bool:
    """True if Triton compiles and starts a kernel on this GPU, which also needs a C compiler, Python's headers and a
    cache folder."""
    if torch.cuda.get_device_capability(index) < LEAST_CAPABILITY:
        return False
    try:
        from paceline.model.torch.kernels.triton.probe import starts

        return starts(index)
    except Exception as error:  # noqa: BLE001 Triton raises what its compiler, its driver and the C compiler raise
        log.warning(
            "Triton starts no kernel on cuda:%d (%s: %s): PyTorch's operations run in their place, slower. Most often "
            "a C compiler (gcc) or Python's headers (python3-dev) are missing",
            index, type(error).__name__, error,
        )  # fmt: skip
        return False
