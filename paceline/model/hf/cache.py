"""KV cache of a Transformers model: one Transformers cache per row, with exact rollback for every type of layer.

Keys and values are cropped. Recurrent state (linear attention, Mamba, short convolutions) is copied before each pass of
several tokens. A rollback into that pass restores the copy and leaves the accepted tokens *pending*: the row's next
pass recomputes them together with its new tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.model.kv_cache import KVCache


def _is_croppable(layer: Any) -> bool:
    """True for layers that hold one entry per position and nothing else; subclasses may hold more."""
    return type(layer).__name__ in ("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer")


def _crop(layer: Any, num_refused: int) -> None:
    if type(layer).__name__ != "DynamicSlidingWindowLayer":
        layer.crop(-num_refused)
    elif layer.is_initialized:  # layer.crop would also drop entries outside the window, which a later rollback may need
        layer.keys, layer.values = layer.keys[..., :-num_refused, :], layer.values[..., :-num_refused, :]
        layer.cumulative_length -= num_refused


def _copy_state(layer: Any) -> Any:
    """A copy that later passes do not modify: unlike keys and values, recurrent states are overwritten in place."""
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return copy.deepcopy(layer)
    copied = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(copied, name, {key: v.clone() if isinstance(v, Tensor) else v for key, v in value.items()})
    return copied


class Row:
    """Transformers cache and tokens of one sequence. Pending tokens, tokens[num_computed:], are not yet in the
    cache."""

    def __init__(self, make_cache: Callable[[], Any]) -> None:
        self._make_cache = make_cache
        self.tokens: list[int] = []
        self._start_over()

    def _start_over(self) -> None:
        self.cache = self._make_cache()
        self.num_computed = 0
        self.stateful = [index for index, layer in enumerate(self.cache.layers) if not _is_croppable(layer)]
        self._saved: dict[int, Any] = {}
        self._saved_len = 0

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.num_computed :]

    def save(self) -> None:
        """Save a copy of the recurrent state before a pass, so that `truncate` can restore it."""
        self._saved = {index: _copy_state(self.cache.layers[index]) for index in self.stateful}
        self._saved_len = self.num_computed

    def truncate(self, length: int) -> None:
        """Roll the row back to its first `length` tokens.

        A recurrent state is replaced by the copy that `save` made, if that contains at most `length` tokens, otherwise
        by the empty state. Tokens that the new state does not contain become pending: the next pass recomputes them.
        """
        del self.tokens[length:]
        if length >= self.num_computed:
            return
        if not self.stateful:
            self._crop_to(length)
        elif self._saved and self._saved_len <= length:
            self._crop_to(self._saved_len)
            for index, layer in self._saved.items():
                self.cache.layers[index] = _copy_state(layer)
        else:
            self._start_over()

    def _crop_to(self, length: int) -> None:
        for layer in self.cache.layers:
            if _is_croppable(layer):
                _crop(layer, self.num_computed - length)
        self.num_computed = length


class HFCache(KVCache):
    """KV cache with one Transformers cache per row. Sliding-window layers keep all positions, for exact rollbacks."""

    def __init__(
        self, make_cache: Callable[[], Any], num_rows: int, max_len: int, *, token_bytes: int, state_bytes: int
    ) -> None:
        super().__init__(num_rows, max_len)
        self._make_cache = make_cache
        self._token_bytes = token_bytes
        self._state_bytes = state_bytes
        self.rows: dict[int, Row] = {}
        """Row index -> cache and tokens of each allocated row."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache when all rows are full; recurrent states count twice (current and saved copy)."""
        return self.num_rows * (self.max_len * self._token_bytes + 2 * self._state_bytes)

    def allocate(self, wanted: int | None = None) -> int | None:
        row = super().allocate(wanted)
        if row is not None:
            self.rows[row] = Row(self._make_cache)
        return row

    def free(self, row: int) -> None:
        super().free(row)
        del self.rows[row]

    def rollback(self, rows: list[int], lengths: list[int]) -> None:
        super().rollback(rows, lengths)
        for row, length in zip(rows, lengths, strict=True):
            self.rows[row].truncate(length)

    def _move(self, row: int, start: int, slots: list[int]) -> None:
        state = self.rows[row]
        tokens = [state.tokens[start + slot] for slot in slots]
        state.truncate(start)
        state.tokens += tokens  # pending: the next pass recomputes them


def make_cache(config: Any) -> Any:
    from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

    cache = DynamicCache(config=config)
    for layer in cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:  # otherwise entries that leave the window are dropped immediately
            layer.activate_past_recording()
    return cache


def tensor_bytes(tensors: list[Any]) -> int:
    """Total bytes of the tensors in the list; other objects are ignored."""
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def cache_bytes(cache: Any, num_tokens: int) -> tuple[int, int]:
    """Measure a Transformers cache of `num_tokens` tokens: (bytes of keys and values per token, bytes of recurrent
    state)."""
    per_token = state = 0
    for layer in cache.layers:
        per_token += tensor_bytes([getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")])
        state += sum(tensor_bytes(list(value.values())) for value in vars(layer).values() if isinstance(value, dict))
    return per_token // num_tokens, state


def is_unused(layer: Any) -> bool:
    """Return True if a cache layer for recurrent state is still empty after a pass. The model then keeps its state
    outside the cache, as RecurrentGemma does, so paceline cannot run it."""
    conv, recurrent = (getattr(layer, name, None) for name in ("conv_states", "recurrent_states"))
    return conv is not None and recurrent is not None and tensor_bytes([*conv.values(), *recurrent.values()]) == 0


def poison_recurrent_state(cache: Any) -> bool:
    """Fill recurrent states with NaN, to test whether a pass reads them; returns False for a cache without them."""
    states = [
        state
        for layer in cache.layers
        for state in getattr(layer, "recurrent_states", {}).values()
        if state is not None
    ]
    for state in states:
        state.fill_(float("nan"))
    return bool(states)
