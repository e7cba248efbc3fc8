"""Modes that watch a region as a recording of it would be: what it launches, reads and refers to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UNRECORDABLE = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique", "_unique2", "unique_dim", "bincount",
    "item", "unique_consecutive", "is_nonzero", "equal", "repeat_interleave.Tensor",
}  # fmt: skip
"""Operations whose results, or their shapes, the host must read."""


def tensors_in(*values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def storages(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


class Launches(TorchDispatchMode):
    """Counts the operations that would launch a kernel, and refuses those that a CUDA graph cannot hold.

    An operation is a launch if it writes into its inputs, or if its results lie in new memory; views are none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, tensors = str(func).removeprefix("aten."), tensors_in(args, kwargs or {})
        if name in UNRECORDABLE or name.partition(".")[0] in UNRECORDABLE:
            raise AssertionError(f"{name} reads values on the host")
        devices = {tensor.device.type for tensor in tensors}
        if len(devices) > 1 or "cpu" in devices:
            raise AssertionError(f"{name} of tensors on {sorted(devices)}")
        out = func(*args, **(kwargs or {}))
        fresh = storages(tensors_in(out)) - storages(tensors)
        if func._schema.is_mutable or (fresh and not name.startswith(("empty", "new_empty"))):
            self.count += 1
        return out


@contextmanager
def no_host_tensors() -> Iterator[None]:
    """`torch.tensor` and its like copy from the host, which meta tensors do not show."""

    def refused(*args: object, **options: object) -> Tensor:
        raise AssertionError("a tensor is made of host values")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("tensor", "as_tensor", "from_numpy", "asarray"):
            patch.setattr(torch, name, refused)
        yield


class Addresses(TorchDispatchMode):
    """Notes the address of every tensor that a region uses and did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[int] = []
        self._made: set[int] = set()
        self._alive: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = tensors_in(args, kwargs or {})
        self.outside += [each.data_ptr() for each in tensors if each.untyped_storage()._cdata not in self._made]
        out = func(*args, **(kwargs or {}))
        fresh = [each for each in tensors_in(out) if not storages([each]) & storages(tensors)]
        self._made |= storages(fresh)
        self._alive += fresh  # or their memory would be given to others
        return out
