"""DFlash's two passes in fixed shapes, for CUDA graphs: drafting a block, and injecting context (computing its keys and
values). They read and write fixed buffers.

Both compute rows 0..B-1 of the target's cache. Idle rows, and positions after a row's count, write to unread scratch
positions at the end of each row of the drafter's cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.tapped import Verified
from paceline.model.kv_cache import StaticKVCache
from paceline.model.sampling.device_race import Draws
from paceline.model.torch.attention import AttentionPlan, CacheWriter, Rope
from paceline.model.torch.cuda_graphs import Grid, Recorder, Recordings, Region, row_sizes
from paceline.model.torch.kernels.attend import Sight
from paceline.model.torch.recorded_pass import StaticPlan, StaticWriter

Kind = tuple[int | None, bool]
"""Type of a draft layer: (sliding window or None, True if causal)."""


class DecodePath(Protocol):
    """Interface of the decode path whose passes are captured here. `paths.TorchPath` implements and documents it."""

    config: DFlashConfig
    dtype: torch.dtype
    device: torch.device
    rope: Rope
    cache: StaticKVCache
    kinds: list[Kind]

    def embed_block(self, tokens_T: Tensor) -> Tensor: ...

    def run_layers(
        self,
        hidden_TD: Tensor,
        size: int,
        plans: Mapping[Kind, AttentionPlan],
        writer: CacheWriter,
        tables: tuple[Tensor, Tensor],
    ) -> Tensor: ...

    def conclude(self, hidden_TD: Tensor, num_rows: int, width: int, anchors_B: Tensor) -> tuple[Tensor, ...]: ...

    def choose(self, outputs: Sequence[Tensor], drawn: tuple[Draws, Tensor] | None) -> tuple[Tensor, Tensor]: ...

    def write_context(self, taps_TF: Tensor, writer: CacheWriter, tables: tuple[Tensor, Tensor]) -> None: ...


class StaticBlock(Region):
    """Pass of fixed shape, captured as a CUDA graph, that drafts a block after the context of each of B rows."""

    kind = "block"

    def __init__(self, path: DecodePath, num_rows: int, outputs: list[Tensor]) -> None:
        """`outputs`: result buffers of at least B rows; passes for other numbers of rows may share them."""
        self._path, self._num_rows = path, num_rows
        self._size, device = path.config.block_size, path.device
        self._inputs_3B = torch.zeros(3, num_rows, dtype=torch.long, device=device)
        self._tokens_BJ = torch.full((num_rows, self._size), path.config.mask_token_id, device=device)
        self._writer = StaticWriter(num_rows, self._size, path.cache.max_len, device)
        self.outputs = [output[:num_rows] for output in outputs]

    @property
    def inputs(self) -> list[Tensor]:
        return [self._inputs_3B]

    def compute(self) -> None:
        """Draft the blocks and write the results into `outputs`. Inputs, from the buffers that `fill` wrote: each row's
        last committed token, its context length, and its block size, which is 0 for a row that drafts nothing."""
        for output, results in zip(self.outputs, self.conclude(*self._inputs_3B.unbind()), strict=True):
            output.copy_(results)

    def conclude(self, anchors_B: Tensor, starts_B: Tensor, counts_B: Tensor) -> tuple[Tensor, ...]:
        """Runs the draft layers on one block for each of B rows. Returns what the decode path's `conclude` computes
        from their output, such as drafts and logits. `anchors_B`: last committed tokens. `starts_B`: context lengths.
        `counts_B`: the block size, or 0 for a row that drafts nothing."""
        path, size = self._path, self._size
        self._tokens_BJ[:, 0] = anchors_B
        slots_BJ = self._writer.point(starts_B, counts_B)
        plans = {
            (window, is_causal): StaticPlan(Sight(starts_B, counts_B, size, window=window, is_causal=is_causal))
            for window, is_causal in set(path.kinds)
        }
        tables = path.rope.tables_at(slots_BJ.flatten())
        hidden_TD = path.embed_block(self._tokens_BJ.flatten())
        hidden_TD = path.run_layers(hidden_TD, size, plans, self._writer, tables)
        return path.conclude(hidden_TD, self._num_rows, path.config.num_slots, anchors_B)

    def fill(self, rows: list[int], anchors: list[int]) -> None:
        """Write the inputs of these rows to the buffers, in one copy. `anchors`: last committed tokens."""
        lengths, inputs = self._path.cache.lengths, [[0] * self._num_rows for _ in range(3)]
        for row, anchor in zip(rows, anchors, strict=True):
            inputs[0][row], inputs[1][row], inputs[2][row] = anchor, lengths[row], self._size
        self._inputs_3B.copy_(torch.tensor(inputs))


class StaticInject(Region):
    """Pass of fixed shape, captured as a CUDA graph, that computes keys and values of up to J new positions of each of
    B rows in all draft layers, from the target's hidden states."""

    kind = "inject"

    def __init__(self, path: DecodePath, num_rows: int, count: int) -> None:
        self._path, self._num_rows, self._count = path, num_rows, count
        device = path.device
        num_features = len(path.config.target_layer_ids) * path.config.target_hidden_size
        self._inputs_2B = torch.zeros(2, num_rows, dtype=torch.long, device=device)
        self._taps_BJF = torch.zeros(num_rows, count, num_features, dtype=path.dtype, device=device)
        self._writer = StaticWriter(num_rows, count, path.cache.max_len, device)

    @property
    def inputs(self) -> list[Tensor]:
        return [self._inputs_2B, self._taps_BJF]

    @property
    def outputs(self) -> list[Tensor]:
        return [self._path.cache.keys, self._path.cache.values]

    def compute(self) -> None:
        """Compute keys and values from the input buffers, and write them into the path's cache."""
        starts_B, counts_B = self._inputs_2B.unbind()
        write_behind(self._path, self._writer, starts_B, counts_B, self._taps_BJF.flatten(0, 1))

    def fill(self, rows: list[int], starts: list[int], counts: list[int], taps_TF: Tensor) -> None:
        """Write the inputs of these rows to the buffers. `starts`: context length of each row. `counts`: number of its
        new positions. `taps_TF`: the target's hidden states at the new positions, row after row, F = tapped layers *
        hidden size."""
        inputs, begin = [[0] * self._num_rows for _ in range(2)], 0
        for row, start, count in zip(rows, starts, counts, strict=True):
            inputs[0][row], inputs[1][row] = start, count
            # Positions after `count` keep stale values, whose results go to scratch positions.
            self._taps_BJF[row, :count] = taps_TF[begin : begin + count]
            begin += count
        self._inputs_2B.copy_(torch.tensor(inputs))


def write_behind(path: DecodePath, writer: StaticWriter, starts_B: Tensor, counts_B: Tensor, taps_TF: Tensor) -> None:
    """Compute the drafter's keys and values of newly verified positions, and write them into the path's cache after the
    rows' contexts. Each of B rows has up to J new positions.

    `writer`: cache writer for B rows of J positions. `starts_B`: context lengths. `counts_B`: number of new positions.
    `taps_TF` [B * J, F]: the target's hidden states, F = tapped layers * hidden size.
    """
    slots_BJ = writer.point(starts_B, counts_B)
    path.write_context(taps_TF, writer, path.rope.tables_at(slots_BJ.flatten()))


class BlockDrafting:
    """Block drafting of DFlash within a decode round that is captured as one CUDA graph (see `tapped.StaticDrafting`).
    Drafts a block, and writes keys and values of all verified positions."""

    def __init__(self, path: DecodePath, num_rows: int, count: int) -> None:
        """`count`: J = K + 1, the verified positions of a row."""
        self._path, self._num_drafted = path, count - 1
        self._block = StaticBlock(path, num_rows, [])
        self._writer = StaticWriter(num_rows, count, path.cache.max_len, path.device)
        self._place_K = torch.arange(1, count, device=path.device)

    def draft(
        self, anchor_B: Tensor, length_B: Tensor, is_live_B: Tensor, draws: Draws | None
    ) -> tuple[Tensor, Tensor]:
        outputs = self._block.conclude(anchor_B, length_B, is_live_B * self._path.config.block_size)
        drawn = None if draws is None else (draws, length_B[:, None] + self._place_K)
        return self._path.choose([output[:, : self._num_drafted] for output in outputs], drawn)

    def write_behind(self, verified: Verified) -> None:
        write_behind(self._path, self._writer, verified.length_B, verified.counts_B, verified.taps_TF)


class StaticForms:
    """The drafting passes of one decode path, captured as CUDA graphs for several numbers of rows. There are two types:
    one drafts blocks, the other writes keys and values of verified positions to the drafter's cache (injects them)."""

    def __init__(self, path: DecodePath, recorder: Recorder) -> None:
        rows, size = row_sizes(path.cache.num_rows), path.config.block_size
        self._path, self._recorder = path, recorder

        # One eager pass with idle rows gives the shapes of the outputs.
        results = StaticBlock(path, rows[-1], []).conclude(
            *torch.zeros(3, rows[-1], dtype=torch.long, device=path.device)
        )
        outputs = [torch.zeros_like(tensor) for tensor in results]

        def block(num_rows: int) -> StaticBlock:
            return StaticBlock(path, num_rows, outputs)

        def inject(num_rows: int, count: int) -> StaticInject:
            return StaticInject(path, num_rows, count)

        self.blocks = Recordings(recorder, StaticBlock.kind, Grid(rows), block)
        self.injects = Recordings(recorder, StaticInject.kind, Grid(rows, [size]), inject)

    def record(self) -> None:
        """Capture the passes that draft blocks, and those that inject at most one block of positions per row. Longer
        injections always run operation by operation."""
        self.blocks.record()
        self.injects.record()

    def inject(self, rows: list[int], starts: list[int], counts: list[int], taps_TF: Tensor) -> bool:
        """Write keys and values of these rows' new positions to the drafter's cache by a captured pass. Arguments: see
        `StaticInject.fill`. Returns False, and does nothing, if no captured pass has enough rows and positions."""
        if max(counts) > self._path.config.block_size or not (region := self.injects.find(max(rows) + 1, max(counts))):
            return False
        region.fill(rows, starts, counts, taps_TF)
        self._recorder.run(region)
        return True

    def block(self, rows: list[int], anchors: list[int]) -> list[Tensor] | None:
        """Drafts a block for each of these rows by a captured pass; returns None if no captured pass has enough rows.
        `anchors`: last committed tokens.

        Returns the tensors that the decode path's `conclude` computes. Their first dimension is the cache row. The next
        call overwrites them.
        """
        region = self.blocks.find(max(rows) + 1)
        if region is None:
            return None
        region.fill(rows, anchors)
        self._recorder.run(region)
        return region.outputs
