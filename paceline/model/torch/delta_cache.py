"""The cache of a model with gated delta nets: keys and values of its attention layers, and the states of the others.

A state cannot be taken back by moving a length, so it lags behind. What each position adds to it is known without what comes
later (`delta_net.py`), and stays in the row's *trail*: the row is its state after `settled` positions, and a trail of the
positions behind them. A pass reads both. A rollback only shortens the trail, of each row by itself; a path of a tree keeps the
path's entries. When a trail is full its older half goes into the state; so at least `HALF` positions behind the pass before can
be taken back at no cost. Further back the row's tokens, which the cache remembers, are read again by the next pass.

Rows are not copied (`adopt`): a prefix that another row has read is read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import MemoryBudgetError, reraised
from paceline.model.config.decoder import DecoderConfig
from paceline.model.kv_cache import StaticKVCache
from paceline.model.target import ForwardBatch
from paceline.model.torch.attention import ancestors

ROOM = 64
"""Positions of a trail; also how many tokens of a row are computed at once."""
HALF = ROOM // 2


@dataclass(slots=True)
class Settling:
    """R rows whose first positions of the trail go into the state."""

    rows_R: Tensor
    gone_R: Tensor
    """How many go."""
    most_gone: int
    most_left: int
    """Of any of the rows."""


@dataclass(slots=True)
class Stage:
    """C tokens of each of R rows, computed together."""

    rows_R: Tensor
    tokens_RC: Tensor
    """Their places among the tokens of the pass."""
    held_R: Tensor
    """Positions of each row's trail that come before."""
    most_held: int
    seen_RCC: Tensor | None
    """Of a tree: which tokens each one follows, itself among them. None: each follows those before it."""
    before_RCK: Tensor | None
    """Of a tree: the K places that the convolution sees for each token, itself the last, among the K - 1 inputs before the pass
    and those of the pass."""
    settling: Settling | None
    """What comes first."""
    live_RC: Tensor | None = None
    """Of a pass of fixed shape: which tokens count. The others leave no trace in the trails."""


@dataclass(eq=False)
class FixedStage:
    """J tokens of each of the rows 0..B-1, whose lengths are known on the device alone."""

    counts_B: Tensor
    """How many of a row's tokens count."""
    gone_B: Tensor
    """Positions of each row's trail that go into the state first,"""
    held_B: Tensor
    """and those that are left, at most the room less J."""
    depths_BJ: Tensor
    bits_BJ: Tensor
    """Whom each token follows; see `kernels.attend.Sight`."""
    live_T: Tensor

    @classmethod
    def of(
        cls, starts_B: Tensor, counts_B: Tensor, settled_B: Tensor, room: int, relation_2BJ: Tensor, live_T: Tensor
    ) -> FixedStage:
        """Of rows that are `settled_B` positions long in their states; a row without tokens stays as it is."""
        depths_BJ, bits_BJ = relation_2BJ
        held_B = (starts_B - settled_B).masked_fill(counts_B == 0, 0)
        gone_B = (held_B - HALF).masked_fill(held_B + depths_BJ.shape[1] <= room, 0)
        return cls(counts_B, gone_B, held_B - gone_B, depths_BJ, bits_BJ, live_T)

    def whole(self, room: int, kernel: int) -> Stage:
        """The stage of the greatest lengths, for PyTorch's operations; `kernel`: tokens that a convolution sees."""
        num_rows, count = self.bits_BJ.shape
        device = self.bits_BJ.device
        slot_J, rows_B = torch.arange(count, device=device), torch.arange(num_rows, device=device)
        seen_BJJ = (self.bits_BJ[:, :, None] >> slot_J) & 1 != 0
        wanted_BJK = self.depths_BJ[..., None] - torch.arange(kernel - 1, -1, -1, device=device)
        is_own_BJKJ = seen_BJJ[:, :, None] & (self.depths_BJ[:, None, None] == wanted_BJK[..., None])
        own_BJK = kernel - 1 + (is_own_BJKJ * slot_J).sum(-1)
        before_BJK = torch.where(wanted_BJK < 0, kernel - 1 + wanted_BJK, own_BJK)
        places = torch.arange(num_rows * count, device=device).view(num_rows, count)
        settling = Settling(rows_B, self.gone_B, room - HALF, HALF)
        live_BJ = self.live_T.view(num_rows, count)
        return Stage(rows_B, places, self.held_B, room, seen_BJJ, before_BJK, settling, live_BJ)


@dataclass(slots=True)
class DeltaMemory:
    """States and trails of one layer, of all rows B: N positions of room, H value heads."""

    states_BHKV: Tensor
    """float32: of each head a matrix from keys to values."""
    windows_BWX: Tensor
    """The last inputs of the convolution that are settled."""
    inputs_BNX: Tensor
    """Of the trail: inputs of the convolution,"""
    keys_BNK: Tensor
    """normed keys of each key head, float32 [B, N, key heads, key_dim],"""
    changes_BNHV: Tensor
    """what each position adds for its key, float32,"""
    decays_BNH: Tensor
    """and the logarithm of what it leaves of the state before it, float32."""

    def tensors(self) -> tuple[Tensor, ...]:
        return self.states_BHKV, self.windows_BWX, self.inputs_BNX, self.keys_BNK, self.changes_BNHV, self.decays_BNH

    @property
    def trail(self) -> tuple[Tensor, ...]:
        return self.inputs_BNX, self.keys_BNK, self.changes_BNHV, self.decays_BNH


class DeltaCache(StaticKVCache):
    """A StaticKVCache for the layers with attention, and a `DeltaMemory` for each of the other layers."""

    def __init__(
        self,
        config: DecoderConfig,
        num_rows: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        head_dim: int | None = None,
        slack: int = 0,
        inputs: torch.dtype | None = None,
    ) -> None:
        """head_dim and slack: of keys and values, where they are stored otherwise; inputs: in what those of convolutions are
        kept [default: dtype]."""
        assert config.delta is not None
        num_linear = len(config.linear_layers)
        shape = (config.num_layers - num_linear, num_rows, config.num_kv_heads, max_len, head_dim or config.head_dim)
        super().__init__(*shape, dtype, device, slack=slack)
        self._shape, self._dtype, self._device = config.delta, inputs or dtype, device
        unmade = f"no memory for the states of {num_rows} rows"
        with reraised(MemoryBudgetError, unmade, "lower max_batch", RuntimeError, MemoryError):
            self.memories = [self._memory(ROOM) for _ in range(num_linear)]
        self.room = ROOM
        """Positions of the trails, more where a tree needed them."""
        self._tokens: list[list[int]] = [[] for _ in range(num_rows)]
        """What each row holds, to be read again if need be."""
        self._settled = [0] * num_rows
        self._unread: set[int] = set()
        """Rows whose state is gone."""

    def _memory(self, room: int) -> DeltaMemory:
        one, rows, full = self._shape, self.num_rows, {"dtype": torch.float32, "device": self._device}
        return DeltaMemory(
            torch.zeros(rows, one.num_value_heads, one.key_dim, one.value_dim, **full),
            torch.zeros(rows, one.kernel - 1, one.channels, dtype=self._dtype, device=self._device),
            torch.zeros(rows, room, one.channels, dtype=self._dtype, device=self._device),
            torch.zeros(rows, room, one.num_key_heads, one.key_dim, **full),
            torch.zeros(rows, room, one.num_value_heads, one.value_dim, **full),
            torch.zeros(rows, room, one.num_value_heads, **full),
        )

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(tensor.nbytes for memory in self.memories for tensor in memory.tensors())

    def allocate(self, wanted: int | None = None) -> int | None:
        row = super().allocate(wanted)
        if row is not None:
            self._forget(row)
        return row

    def adopt(self, source: int, row: int, length: int) -> None:
        raise NotImplementedError("rows with recurrent states are not copied: their target must not be width-invariant")

    def rollback(self, rows: list[int], lengths: list[int]) -> None:
        super().rollback(rows, lengths)
        for row, length in zip(rows, lengths, strict=True):
            if length < self._settled[row]:
                tokens = self._tokens[row][:length]
                self._forget(row)
                self._tokens[row] = tokens
                if length:
                    self._unread.add(row)
            del self._tokens[row][length:]

    def _move(self, row: int, start: int, slots: list[int]) -> None:
        super()._move(row, start, slots)
        self._tokens[row][start : start + len(slots)] = [self._tokens[row][start + slot] for slot in slots]
        first = start - self._settled[row]
        assert first >= 0, "the pass that a path is kept of is the row's last one"
        for memory in self.memories:
            for tensor in memory.trail:
                tensor[row, first : first + len(slots)] = tensor[row, [first + slot for slot in slots]]

    def _forget(self, row: int) -> None:
        self._settled[row], self._tokens[row] = 0, []
        self._unread.discard(row)
        for memory in self.memories:
            memory.states_BHKV[row] = 0.0
            memory.windows_BWX[row] = 0.0

    def lost(self, rows: list[int]) -> Iterator[ForwardBatch]:
        """Passes that read again what rows have lost, to be run one after another before a pass of these rows."""
        for row in sorted(self._unread.intersection(rows)):
            tokens = self._tokens[row]
            self._forget(row)
            self.lengths[row] = 0
            yield ForwardBatch([row], [0], [len(tokens)], tokens, "none")

    def stages(self, batch: ForwardBatch) -> list[Stage]:
        """What every layer computes for this pass, in order; from now on the cache counts on it."""
        first, by_count = 0, dict[int, list[tuple[int, int]]]()
        for row, count in zip(batch.rows, batch.counts, strict=True):
            assert row not in self._unread
            by_count.setdefault(count, []).append((row, first))
            self._tokens[row] += batch.tokens[first : first + count]
            first += count
        stages: list[Stage] = []
        held = dict(zip(batch.rows, self.held(batch.rows), strict=True))
        for count, members in by_count.items():
            if batch.parents is not None:
                self._make_room(count)
            size = count if batch.parents is not None else ROOM
            for begin in range(0, count, size):
                stages.append(self._stage(members, begin, min(size, count - begin), held, batch.parents))
        return stages

    def settled(self, row: int) -> int:
        """Positions of the row that its state holds."""
        return self._settled[row]

    def passed(self, batch: ForwardBatch, count: int) -> None:
        """Takes note of what a pass of fixed shape did, whose rows had room for `count` tokens; before `append`."""
        first = 0
        for row, own, held in zip(batch.rows, batch.counts, self.held(batch.rows), strict=True):
            self._tokens[row] += batch.tokens[first : first + own]
            self._settled[row] += self._too_many(held, count)
            first += own

    def held(self, rows: list[int]) -> list[int]:
        """Positions of each row's trail."""
        return [self.lengths[row] - self._settled[row] for row in rows]

    def settles(self, batch: ForwardBatch) -> list[tuple[int, int, int]]:
        """In the place of `stages`, for a pass that goes through rows token by token: which row of the pass, before which
        of its tokens, and how many positions go into the state. From now on the cache counts on it."""
        first, settles = 0, list[tuple[int, int, int]]()
        for index, (row, count, held) in enumerate(zip(batch.rows, batch.counts, self.held(batch.rows), strict=True)):
            assert row not in self._unread
            self._tokens[row] += batch.tokens[first : first + count]
            first += count
            if batch.parents is not None:
                self._make_room(count)
            size = count if batch.parents is not None else ROOM
            for begin in range(0, count, size):
                more = min(size, count - begin)
                gone = self._too_many(held, more)
                if gone:
                    settles.append((index, begin, gone))
                self._settled[row] += gone
                held += more - gone
        return settles

    def _too_many(self, held: int, count: int) -> int:
        """Positions that leave a trail when `count` more come."""
        return 0 if held + count <= self.room else held - min(held, HALF, max(self.room - count, 0))

    def _stage(
        self, members: list[tuple[int, int]], begin: int, count: int, held: dict[int, int], parents: list[int] | None
    ) -> Stage:
        """`members`: rows, and where their tokens of the pass begin; `held` is kept up to date."""
        rows, firsts = [row for row, _ in members], [first + begin for _, first in members]
        settling = self._settling(rows, count, held)
        before = [held[row] for row in rows]
        for row in rows:
            held[row] += count
        seen = windows = None
        if parents is not None:
            own = [parents[first : first + count] for first in firsts]
            seen = torch.stack([ancestors(each)[0] for each in own]).to(self._device)
            windows = torch.tensor([_windows(each, self._shape.kernel) for each in own], device=self._device)
        tokens_RC = self._whole(firsts)[:, None] + torch.arange(count, device=self._device)
        return Stage(self._whole(rows), tokens_RC, self._whole(before), max(before), seen, windows, settling)

    def _settling(self, rows: list[int], count: int, held: dict[int, int]) -> Settling | None:
        """Makes room in the trails for `count` more."""
        full = [row for row in rows if held[row] + count > self.room]
        if not full:
            return None
        gone = [self._too_many(held[row], count) for row in full]
        for row, number in zip(full, gone, strict=True):
            held[row] -= number
            self._settled[row] += number
        return Settling(self._whole(full), self._whole(gone), max(gone), max(held[row] for row in full))

    def _make_room(self, count: int) -> None:
        """For a tree of so many tokens, which is computed as a whole."""
        if count <= self.room:
            return
        for memory in self.memories:
            with torch.inference_mode(False):
                larger = self._memory(count)
            for old, new in zip(memory.trail, larger.trail, strict=True):
                new[:, : self.room] = old
            memory.inputs_BNX, memory.keys_BNK, memory.changes_BNHV, memory.decays_BNH = larger.trail
        self.room = count

    def _whole(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self._device)


def _windows(parents: list[int], kernel: int) -> list[list[int]]:
    """Of each token of a tree the places of what the convolution sees: 0 to kernel - 2 are before the pass."""
    windows: list[list[int]] = []
    for token, parent in enumerate(parents):
        before = list(range(kernel)) if parent < 0 else windows[parent]
        windows.append([*(before[:-1] if parent < 0 else before[1:]), kernel - 1 + token])
    return windows
