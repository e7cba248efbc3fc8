"""Cache of a model with gated delta nets (linear attention): keys and values of attention layers, and recurrent states.

A recurrent state cannot be shortened, so it lags behind. The update of each position is independent of later positions
(`delta_net.py`) and is kept in the row's *pending window*: a row is its state after `committed` positions, plus the
updates after them. A rollback only shortens the pending window; for a path of a tree, the path's entries are kept. When
a window is full its older half is committed to the state, so at least `HALF` positions before the last pass can be
rolled back for free. For longer rollbacks the next pass recomputes the row from its tokens, which the cache stores.

Rows cannot be copied (`adopt`): a prefix that another row has computed is recomputed.
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
"""Number of positions in a pending window; also the maximum of a row's tokens that are computed at once."""
HALF = ROOM // 2


@dataclass(slots=True)
class Commit:
    """A commit: merges the oldest pending updates of R cache rows into the rows' recurrent states, and removes them
    from the pending windows. A pending update is one that the recurrent state does not contain yet."""

    rows_R: Tensor
    gone_R: Tensor
    """Number of pending positions to commit, for each row."""
    most_gone: int
    most_left: int
    """Maximum number of positions that stay pending in a row; `most_gone`: to commit."""


@dataclass(slots=True)
class Stage:
    """One step of a pass through a gated delta net layer: C new tokens of each of R cache rows, which are computed
    together."""

    rows_R: Tensor
    tokens_RC: Tensor
    """Index of each token among all tokens of the pass."""
    held_R: Tensor
    """Number of pending positions of each row before these tokens."""
    most_held: int
    """Maximum of `held_R`, or an upper bound of it."""
    seen_RCC: Tensor | None
    """For trees: bool, true where the second token is an ancestor of the first or that token itself. None: each row's
    tokens form a chain."""
    conv_inputs_RCK: Tensor | None
    """For trees: the K convolution inputs of each token, its own last, as indices into the K - 1 inputs before the pass
    followed by those of the pass."""
    commit: Commit | None
    """Pending positions to commit before these tokens are computed."""
    live_RC: Tensor | None = None
    """Mask of valid tokens in a pass of fixed shape; others are padding and do not change the pending window."""


@dataclass(eq=False)
class FixedStage:
    """A `Stage` of fixed shape, for CUDA graphs: J tokens of each of the cache rows 0..B-1, with row lengths known only
    on the device."""

    counts_B: Tensor
    """Number of valid tokens of each row; the rest of the J tokens are padding."""
    gone_B: Tensor
    """Number of pending positions of each row to commit to its state first."""
    held_B: Tensor
    """Number of positions still pending after this commit, at most the window's size minus J."""
    depths_BJ: Tensor
    bits_BJ: Tensor
    """Ancestors of each token, and the token itself, as a bit mask over the row's tokens; see
    `kernels.attend.Sight`."""
    live_T: Tensor

    @classmethod
    def of(
        cls, starts_B: Tensor, counts_B: Tensor, committed_B: Tensor, room: int, relation_2BJ: Tensor, live_T: Tensor
    ) -> FixedStage:
        """Build the stage of a pass, by operations on the device. If the pending window has no space for a row's new
        tokens, the row's oldest pending positions are first committed (merged into its recurrent state).

        - starts_B: tokens of each row before the pass.
        - counts_B: new tokens of each row, 0 for a row that the pass does not change.
        - committed_B: positions that each row's recurrent state contains.
        - room: size of the pending window, in positions.
        - relation_2BJ: depth of each token in its tree, and a bit mask of its ancestors and itself.
        - live_T: mask of valid tokens; the others are padding.
        """
        depths_BJ, bits_BJ = relation_2BJ
        held_B = (starts_B - committed_B).masked_fill(counts_B == 0, 0)
        # As `DeltaCache._too_many`, since J is at most HALF: HALF positions stay pending.
        gone_B = (held_B - HALF).masked_fill(held_B + depths_BJ.shape[1] <= room, 0)
        return cls(counts_B, gone_B, held_B - gone_B, depths_BJ, bits_BJ, live_T)

    def whole(self, room: int, kernel: int) -> Stage:
        """Convert this to an equivalent `Stage`, which PyTorch operations can compute. Its fields `most_*` are upper
        bounds, because the row lengths are known only on the device. `room`: size of the pending window; `kernel`:
        number of inputs of the convolution."""
        num_rows, count = self.bits_BJ.shape
        device = self.bits_BJ.device
        slot_J, rows_B = torch.arange(count, device=device), torch.arange(num_rows, device=device)
        seen_BJJ = (self.bits_BJ[:, :, None] >> slot_J) & 1 != 0
        wanted_BJK = self.depths_BJ[..., None] - torch.arange(kernel - 1, -1, -1, device=device)
        is_own_BJKJ = seen_BJJ[:, :, None] & (self.depths_BJ[:, None, None] == wanted_BJK[..., None])
        # A token has one ancestor of each depth: the sum is its slot.
        own_BJK = kernel - 1 + (is_own_BJKJ * slot_J).sum(-1)
        before_BJK = torch.where(wanted_BJK < 0, kernel - 1 + wanted_BJK, own_BJK)
        places = torch.arange(num_rows * count, device=device).view(num_rows, count)
        # A row that commits nothing may have more than HALF left, but its positions then move by 0.
        commit = Commit(rows_B, self.gone_B, room - HALF, HALF)
        live_BJ = self.live_T.view(num_rows, count)
        return Stage(rows_B, places, self.held_B, room, seen_BJJ, before_BJK, commit, live_BJ)


@dataclass(slots=True)
class DeltaMemory:
    """Recurrent states and pending windows (updates not yet in a state) of one gated delta net layer, for B cache rows.
    Each window has N positions; H is the number of value heads."""

    states_BHKV: Tensor
    """Recurrent states, float32: for each head a matrix [key_dim, value_dim]."""
    windows_BWX: Tensor
    """Inputs of the convolution at the W = kernel - 1 latest committed positions."""
    inputs_BNX: Tensor
    """Inputs of the convolution at the pending positions."""
    keys_BNK: Tensor
    """Normed keys at the pending positions, float32 [B, N, key heads, key_dim]."""
    changes_BNHV: Tensor
    """Values that each pending position adds to the state under its key, float32."""
    decays_BNH: Tensor
    """Logarithm of the factor by which each pending position decays the state before it, float32."""

    def tensors(self) -> tuple[Tensor, ...]:
        return self.states_BHKV, self.windows_BWX, self.inputs_BNX, self.keys_BNK, self.changes_BNHV, self.decays_BNH

    @property
    def pending(self) -> tuple[Tensor, ...]:
        return self.inputs_BNX, self.keys_BNK, self.changes_BNHV, self.decays_BNH


class DeltaCache(StaticKVCache):
    """KV cache for the attention layers, with a `DeltaMemory` (recurrent states) for each gated delta net layer."""

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
        """head_dim: stored size of a head, if padded. slack: scratch positions after each row. inputs: stored dtype of
        convolution inputs [default: dtype]."""
        assert config.delta is not None
        num_linear = len(config.linear_layers)
        shape = (config.num_layers - num_linear, num_rows, config.num_kv_heads, max_len, head_dim or config.head_dim)
        super().__init__(*shape, dtype, device, slack=slack)
        self._shape, self._dtype, self._device = config.delta, inputs or dtype, device
        failure = f"no memory for the states of {num_rows} rows"
        with reraised(MemoryBudgetError, failure, "lower max_batch", RuntimeError, MemoryError):
            self.memories = [self._memory(ROOM) for _ in range(num_linear)]
        self.room = ROOM
        """Number of positions in a pending window: ROOM, or more if a tree needed it."""
        self._tokens: list[list[int]] = [[] for _ in range(num_rows)]
        """Tokens of each row, to recompute lost states."""
        self._committed = [0] * num_rows
        self._unread: set[int] = set()
        """Rows whose state is lost."""

    def _memory(self, room: int) -> DeltaMemory:
        one, rows, full = self._shape, self.num_rows, {"dtype": torch.float32, "device": self._device}
        return DeltaMemory(
            torch.zeros(rows, one.num_value_heads, one.key_dim, one.value_dim, **full),
            torch.zeros(rows, one.kernel - 1, one.channels, dtype=self._dtype, device=self._device),
            *self._pending(room),
        )

    def _pending(self, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns empty pending windows of `room` positions: inputs, keys, changes and decays."""
        one, rows, full = self._shape, self.num_rows, {"dtype": torch.float32, "device": self._device}
        return (
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
            if length < self._committed[row]:
                tokens = self._tokens[row][:length]
                self._forget(row)
                self._tokens[row] = tokens
                if length:
                    self._unread.add(row)
            del self._tokens[row][length:]

    def _move(self, row: int, start: int, slots: list[int]) -> None:
        super()._move(row, start, slots)
        self._tokens[row][start : start + len(slots)] = [self._tokens[row][start + slot] for slot in slots]
        first = start - self._committed[row]
        assert first >= 0, "the pass that a path is kept of is the row's last one"
        for memory in self.memories:
            for tensor in memory.pending:
                tensor[row, first : first + len(slots)] = tensor[row, [first + slot for slot in slots]]

    def _forget(self, row: int) -> None:
        self._committed[row], self._tokens[row] = 0, []
        self._unread.discard(row)
        for memory in self.memories:
            memory.states_BHKV[row] = 0.0
            memory.windows_BWX[row] = 0.0  # the pending window is read only up to `held`

    def lost(self, rows: list[int]) -> Iterator[ForwardBatch]:
        """Yield a pass for each of `rows` whose recurrent state was lost; running the pass recomputes the state. A
        state is lost if a rollback removes positions that it already contains.

        Run each pass when it is yielded, before any other pass with these rows. The row is emptied just before its pass
        is yielded.
        """
        for row in sorted(self._unread.intersection(rows)):
            tokens = self._tokens[row]  # `_forget` binds a new list, so this one stays
            self._forget(row)
            self.lengths[row] = 0
            yield ForwardBatch([row], [0], [len(tokens)], tokens, "none")

    def stages(self, batch: ForwardBatch) -> list[Stage]:
        """Split a pass into stages, in order of execution: groups of tokens that a gated delta net layer computes
        together.

        Call this once per pass, because it changes the cache's records. It stores the pass's tokens, and counts the
        positions that the stages will merge into recurrent states as already committed.
        """
        self._store(batch)
        first, by_count = 0, dict[int, list[tuple[int, int]]]()
        for row, count in zip(batch.rows, batch.counts, strict=True):
            by_count.setdefault(count, []).append((row, first))
            first += count
        held = dict(zip(batch.rows, self.held(batch.rows), strict=True))
        stages: list[Stage] = []
        for count, members in by_count.items():
            for begin, size in self._parts(count, batch):
                stages.append(self._stage(members, begin, size, held, batch.parents))
        return stages

    def _store(self, batch: ForwardBatch) -> None:
        """Store a pass's tokens."""
        first = 0
        for row, count in zip(batch.rows, batch.counts, strict=True):
            assert row not in self._unread
            self._tokens[row] += batch.tokens[first : first + count]
            first += count

    def _parts(self, count: int, batch: ForwardBatch) -> list[tuple[int, int]]:
        """(first, size) of the parts of a row's `count` new tokens that are computed at once. A tree is one part, for
        which the pending windows are enlarged if necessary."""
        if batch.parents is not None:
            self._make_room(count)
            return [(0, count)]
        return [(begin, min(ROOM, count - begin)) for begin in range(0, count, ROOM)]

    def committed(self, row: int) -> int:
        """Number of the row's positions that its recurrent state contains."""
        return self._committed[row]

    def passed(self, batch: ForwardBatch, count: int) -> None:
        """Update the cache's records after a pass of fixed shape: stores the pass's tokens, and counts the positions
        that the pass merged into recurrent states as committed. `count`: tokens per row, including padding. Call this
        before `append`."""
        self._store(batch)
        for row, held in zip(batch.rows, self.held(batch.rows), strict=True):
            self._committed[row] += self._too_many(held, count)

    def held(self, rows: list[int]) -> list[int]:
        """Return the number of pending positions of each row: those that its recurrent state does not contain yet."""
        return [self.lengths[row] - self._committed[row] for row in rows]

    def commits(self, batch: ForwardBatch) -> list[tuple[int, int, int]]:
        """Plan where a pass merges pending positions into recurrent states (commits), for an implementation that
        computes each row token by token, without `stages`.

        Returns (row, token, count) for each commit. row: index in the pass; token: index among the row's new tokens,
        before which to commit; count: number of pending positions to commit. Call this once per pass: it stores the
        pass's tokens, and counts the positions as committed.
        """
        self._store(batch)
        commits: list[tuple[int, int, int]] = []
        for index, (row, count, held) in enumerate(zip(batch.rows, batch.counts, self.held(batch.rows), strict=True)):
            for begin, more in self._parts(count, batch):
                gone = self._too_many(held, more)
                if gone:
                    commits.append((index, begin, gone))
                self._committed[row] += gone
                held += more - gone
        return commits

    def _too_many(self, held: int, count: int) -> int:
        """Positions to commit when `count` more arrive."""
        # At most HALF stay, fewer if more than room - HALF arrive.
        return 0 if held + count <= self.room else held - min(held, HALF, max(self.room - count, 0))

    def _stage(
        self, members: list[tuple[int, int]], begin: int, count: int, held: dict[int, int], parents: list[int] | None
    ) -> Stage:
        """`members`: (row, index of its first token in the pass); updates `held`."""
        rows, firsts = [row for row, _ in members], [first + begin for _, first in members]
        commit = self._make_commit(rows, count, held)
        before = [held[row] for row in rows]
        for row in rows:
            held[row] += count
        seen = windows = None
        if parents is not None:
            own = [parents[first : first + count] for first in firsts]
            seen = torch.stack([ancestors(each)[0] for each in own]).to(self._device)
            windows = torch.tensor([_windows(each, self._shape.kernel) for each in own], device=self._device)
        tokens_RC = self._whole(firsts)[:, None] + torch.arange(count, device=self._device)
        return Stage(self._whole(rows), tokens_RC, self._whole(before), max(before), seen, windows, commit)

    def _make_commit(self, rows: list[int], count: int, held: dict[int, int]) -> Commit | None:
        """Commit old positions so that `count` more fit into the pending windows; None if they already do."""
        full = [row for row in rows if held[row] + count > self.room]
        if not full:
            return None
        gone = [self._too_many(held[row], count) for row in full]
        for row, number in zip(full, gone, strict=True):
            held[row] -= number
            self._committed[row] += number
        return Commit(self._whole(full), self._whole(gone), max(gone), max(held[row] for row in full))

    def _make_room(self, count: int) -> None:
        """Enlarge the pending windows for a tree of `count` tokens, which is computed at once."""
        if count <= self.room:
            return
        for memory in self.memories:
            with torch.inference_mode(False):  # inference tensors could not be changed outside that mode
                larger = self._pending(count)
            for old, new in zip(memory.pending, larger, strict=True):
                new[:, : self.room] = old
            memory.inputs_BNX, memory.keys_BNK, memory.changes_BNHV, memory.decays_BNH = larger
        self.room = count

    def _whole(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self._device)


def _windows(parents: list[int], kernel: int) -> list[list[int]]:
    """For each token of a tree, the inputs of its convolution as indices; 0 to kernel - 2 precede the pass."""
    windows: list[list[int]] = []
    for token, parent in enumerate(parents):
        before = list(range(kernel)) if parent < 0 else windows[parent]
        windows.append([*(before[:-1] if parent < 0 else before[1:]), kernel - 1 + token])
    return windows
