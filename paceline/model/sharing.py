"""Memory that the drafters of one target hold once: equal weight matrices, and cache rows.

    with sharing(target) as held:
        drafter.bind(target)      # matrices and caches made here are shared with those of earlier drafters
    drafter.held = held

Two matrices are equal if shape, dtype and bytes are (compared by hash). A cache is shared by drafters whose caches have
one shape: a row of the target belongs to one sequence, a sequence to one drafter, so no two drafters use the same row
at the same time, and each keeps lengths of its own. Only a pool may share, because it knows whose keys and values a row
holds (`draft/pool.py`). Nothing is kept alive here: memory is free when its last drafter is.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Held = dict[Hashable, tuple[int, int]]
"""Key of each shared matrix that a drafter holds -> (its bytes, number of places in the drafter that use it)."""
T = TypeVar("T")
_COPY, _READ = "copy", "read"


class Owner(Protocol):
    """Protocol of a target: its shared matrices and cache tensors, and its KV cache."""

    @property
    def shared(self) -> WeakValueDictionary[Hashable, Any]: ...
    @property
    def cache(self) -> object: ...


class _Sharing:
    """The shared memory of one target, while one drafter is being prepared."""

    def __init__(self, target: Owner, *, has_weights: bool) -> None:
        self.has_weights = has_weights
        self.items: WeakValueDictionary[Hashable, Any] = target.shared
        self.cache_id = id(target.cache)  # a cache that replaces this one has other rows
        self.held: Held = {}


_present: ContextVar[_Sharing | None] = ContextVar("sharing", default=None)


@contextlib.contextmanager
def sharing(target: Owner, *, has_weights: bool = True) -> Iterator[Held]:
    """Share weight matrices and cache tensors that this thread creates within the context: if another drafter of
    `target` has an equal one, it is used instead. Yields the dict of the shared matrices in use (`Held`), which is
    filled as they are created. Without `has_weights` only cache tensors are shared, as weights in training change in
    place."""
    token = _present.set(now := _Sharing(target, has_weights=has_weights))
    try:
        yield now.held
    finally:
        _present.reset(token)


def matrix(make: Callable[[], T], sources: list[Tensor], *form: Hashable, num_bytes: Callable[[T], int]) -> T:
    """Return the shared matrix for these `sources`, or create it with `make` and share it. Two matrices are equal if
    their `sources` and `form` are; `form`: everything else that the matrix depends on, such as its format. `num_bytes`
    returns its size. Returns `make()` outside `sharing`, or if that shares no weights."""
    now = _present.get()
    if now is None or not now.has_weights:
        return make()
    key = (*form, *map(_digest, sources))
    item = now.items.get(key)
    if item is None:
        item = now.items[key] = make()
    now.held[key] = num_bytes(item), 1 + now.held.get(key, (0, 0))[1]
    return item


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor; within `sharing`, an equal copy that another drafter holds, if there is one."""
    return matrix(tensor.clone, [tensor], _COPY, num_bytes=lambda copy: copy.nbytes)


def once(tensor: Tensor) -> Tensor:
    """Return the tensor itself; within `sharing`, an equal one that another drafter holds, if there is one."""
    return matrix(lambda: tensor, [tensor], _READ, num_bytes=lambda same: same.nbytes)


def is_as_read(key: Hashable) -> bool:
    """Return True if a key of `Held` belongs to a tensor from `copied` or `once`: weights as they were read, which a
    drafter keeps when it is bound again."""
    return isinstance(key, tuple) and key[0] in (_COPY, _READ)


def cache_tensor(make: Callable[[], Tensor], shape: tuple[int, ...], *form: Hashable) -> Tensor:
    """Return a tensor for a KV cache; within `sharing`, the tensor of another drafter's cache with the same `shape` and
    `form` (such as the dtype), if there is one, else a new one from `make`."""
    now = _present.get()
    if now is None:
        return make()
    key = ("cache", now.cache_id, shape, *form)
    tensor = now.items.get(key)
    if tensor is None:
        tensor = now.items[key] = make()
    return tensor


def _digest(tensor: Tensor) -> Hashable:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return tuple(tensor.shape), tensor.dtype, tensor.device, hashlib.sha256(data.data).digest()
