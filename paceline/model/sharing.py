"""Memory that the drafters of one target hold once: equal weight matrices, and caches of equal shape.

    with sharing(target) as held:
        drafter.bind(target)      # matrices and caches made here are shared with those of earlier drafters
    drafter.held = held

Matrices are equal if shape, dtype and bytes are (compared by hash). Drafters can share a cache because a row of the
target belongs to one sequence, and a sequence to one drafter; each drafter keeps its own lengths. Only a pool may
share, because it knows whose keys and values a row holds (`draft/pool.py`). Memory is freed with its last drafter.
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
    """Protocol of a target whose drafters can share memory by `sharing`. `shared`: the matrices and cache tensors that
    its drafters have in common; `cache`: the target's KV cache."""

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
    """Context manager for binding a new drafter to `target`, in which the drafter shares memory with drafters that were
    bound earlier. Within it, `matrix`, `copied`, `once` and `cache_tensor` return a matrix or tensor of an earlier
    drafter if it has the same content or, for caches, the same shape.

    Yields a dict (`Held`) of the matrices that the new drafter uses; `matrix`, `copied` and `once` add their results to
    it. `has_weights` False: share only cache tensors. Use this for training, which changes weights in place.
    """
    token = _present.set(now := _Sharing(target, has_weights=has_weights))
    try:
        yield now.held
    finally:
        _present.reset(token)


def matrix(make: Callable[[], T], sources: list[Tensor], *form: Hashable, num_bytes: Callable[[T], int]) -> T:
    """Return a matrix made from the tensors `sources`, such as weights packed for a device. Within `sharing`, this is
    the matrix of an earlier drafter if one was made from tensors of the same content with equal `form`.

    `make`: creates the matrix if no existing one can be returned. `form`: everything else that the matrix depends on,
    such as its format. `num_bytes`: returns a matrix's size in bytes. Outside `sharing`, and with its option
    `has_weights` False, each call makes a new matrix.
    """
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
    """Return a copy of a tensor. Within `sharing`, returns the copy that another drafter already made of a tensor with
    the same content, if there is one."""
    return matrix(tensor.clone, [tensor], _COPY, num_bytes=lambda copy: copy.nbytes)


def once(tensor: Tensor) -> Tensor:
    """Return the tensor itself, without a copy. Within `sharing`, returns another drafter's tensor with the same
    content in its place, if there is one."""
    return matrix(lambda: tensor, [tensor], _READ, num_bytes=lambda same: same.nbytes)


def is_as_read(key: Hashable) -> bool:
    """Return True if `key`, a key of `Held`, belongs to a tensor from `copied` or `once`: unchanged since it was read
    from a file. Such a tensor stays valid when its drafter is bound again. Other matrices are packed for one target,
    and are made anew."""
    return isinstance(key, tuple) and key[0] in (_COPY, _READ)


def cache_tensor(make: Callable[[], Tensor], shape: tuple[int, ...], *form: Hashable) -> Tensor:
    """Return a tensor for a drafter's KV cache. Within `sharing`, returns the tensor of another drafter's cache with
    equal `shape` and `form`, if there is one: drafters of a target can use one cache because each row belongs to one
    drafter at a time.

    `make`: called to create the tensor if no existing one can be returned. `form`: everything else that must be equal,
    such as the dtype and whether the tensor is for keys or values.
    """
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
