"""Decode passes of fixed shape for CUDA graphs: without replay, a GPU waits for Python at small batch sizes.

Attention reads row lengths on the device (`kernels/attend.py`), and rows and tokens are rounded up to a grid, so that
few graphs suffice. Idle rows and padding tokens write to scratch positions after max_len, which are never read. On CPU
the same pass runs without a graph; `tests/model/test_recorded_pass.py` compares it with the eager one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.model.config.decoder import DecoderConfig, RopeKind
from paceline.model.target import ForwardBatch, ForwardOutput
from paceline.model.torch.attention import PLAIN, AttentionPlan, CacheWriter, Scores, ancestors
from paceline.model.torch.cuda_graphs import Grid, Recorder, Recordings, Region, row_sizes
from paceline.model.torch.decoder import Decoder, Tables
from paceline.model.torch.delta_cache import DeltaCache, FixedStage, Stage
from paceline.model.torch.kernels.attend import MOST_BITS, Sight, attend
from paceline.model.torch.kernels.layer import Places

MAX_COUNT = MOST_BITS
"""Maximum tokens per row of a pass of fixed shape; also the number of scratch positions after each cache row."""
_COUNTS = (1, 4, 8, 16)


def can_record(config: DecoderConfig) -> bool:
    """Return True if a pass of this model can be part of a larger CUDA graph, for example together with sampling. In
    such a graph the host does not know the tokens and row lengths. For models with gated delta nets the host must count
    the positions in each recurrent state, so the result is False."""
    return config.delta is None


class StaticWriter(CacheWriter):
    """Writes keys and values of J tokens to each of the cache rows 0..B-1. Those of padding tokens are written to
    scratch positions, which are never read."""

    def __init__(self, num_rows: int, count: int, scratch: int, device: torch.device) -> None:
        """`count`: J; `scratch`: the first of the J scratch positions in each row."""
        self.slot_J = torch.arange(count, device=device)
        self._scratch_J = scratch + self.slot_J
        self._rows_T = torch.arange(num_rows, device=device).repeat_interleave(count)

    def point(self, starts_B: Tensor, counts_B: Tensor) -> Tensor:
        """Set the positions that `write` writes to in the next pass. starts_B: length of each row before the pass;
        counts_B: number of its valid tokens. Returns the positions [B, J] of each row's J tokens: starts_B + 0, 1, ...
        J - 1."""
        slots_BJ = starts_B[:, None] + self.slot_J
        self.own_BJ = self.slot_J < counts_B[:, None]
        self._slots_T = torch.where(self.own_BJ, slots_BJ, self._scratch_J).flatten()
        return slots_BJ

    @property
    def places(self) -> Places:
        return Places(self._rows_T, self._slots_T)

    def write(self, cache: Tensor, new_THD: Tensor) -> None:
        cache[self._rows_T, :, self._slots_T] = new_THD


class StaticPlan(AttentionPlan):
    """The positions that each token attends to (an `AttentionPlan`), for passes of fixed shape. Row lengths are read on
    the device, so that one CUDA graph fits all lengths."""

    def __init__(self, sight: Sight, live_T: Tensor | None = None) -> None:
        self._sight, self.live_T = sight, live_T

    def attend(self, query_THD: Tensor, keys: Tensor, values: Tensor, scores: Scores = PLAIN) -> Tensor:
        return attend(query_THD, keys, values, self._sight, scores)


class StaticPass(Region):
    """Target pass of one fixed shape: J tokens for each of the cache rows 0..B-1, from buffers at fixed addresses."""

    kind = "target"

    def __init__(self, decoder: Decoder, num_rows: int, count: int, logits_TV: Tensor, taps_TF: Tensor | None) -> None:
        """`count`: J. `logits_TV`, `taps_TF`: output buffers of at least B * J rows, which passes of other shapes may
        share."""
        self._decoder = decoder
        self._num_rows, self._count = num_rows, count
        device, size = decoder.device, num_rows * count
        # Counts of 0: warm-up and capture write to scratch positions only, also while rows are in use.
        self._inputs = torch.zeros(size + 3 * num_rows, dtype=torch.long, device=device)
        tokens_T, self.starts_B, self.counts_B, self.committed_B = self._inputs.split([size, *[num_rows] * 3])
        """committed_B: number of each row's positions in the states of gated delta nets, which the pass increases."""
        self.tokens_BJ = tokens_T.view(num_rows, count)
        self.relation_2BJ = _chains(num_rows, count).to(device)
        """(depths, bits) of each token: its number of ancestors in the pass, and a bit mask of them and itself; see
        Sight."""
        self._is_chain = True
        self.logits_TV, self.taps_TF = logits_TV[:size], None if taps_TF is None else taps_TF[:size]
        self._writer = StaticWriter(num_rows, count, decoder.cache.max_len, device)
        mixtures, per_token = decoder.num_mixtures, decoder.config.experts_per_token
        kind: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.chosen_LTK = torch.zeros(mixtures, size, per_token, **kind) if mixtures else None
        """Indices of each token's experts in each layer with experts; see Target.experts_read."""

    @property
    def inputs(self) -> list[Tensor]:
        return [self._inputs, self.relation_2BJ]

    @property
    def outputs(self) -> list[Tensor]:
        buffers = (self.logits_TV, self.taps_TF, self.chosen_LTK)
        return [buffer for buffer in buffers if buffer is not None]

    def compute(self) -> None:
        """Run the pass on the input buffers; writes `logits_TV` and `taps_TF`, B * J rows in order of cache rows."""
        self.compute_of(self.tokens_BJ, self.starts_B, self.counts_B)

    def compute_of(self, tokens_BJ: Tensor, starts_B: Tensor, counts_B: Tensor) -> None:
        """Run the pass on these tensors instead of the input buffers, as a part of a larger CUDA graph; writes
        `logits_TV` and `taps_TF`. starts_B: length of each row before the pass; counts_B: number of its valid
        tokens."""
        decoder = self._decoder
        self._writer.point(starts_B, counts_B)
        depths_BJ, bits_BJ = self.relation_2BJ
        lengths = starts_B, counts_B, self._count
        live_T = self._writer.own_BJ.flatten()
        plans = {
            window: StaticPlan(Sight(*lengths, window=window, depths_BJ=depths_BJ, bits_BJ=bits_BJ), live_T)
            for window in decoder.windows
        }
        positions_T = (starts_B[:, None] + depths_BJ).flatten()
        tables: dict[RopeKind, Tables] = {kind: rope.tables_at(positions_T) for kind, rope in decoder.ropes.items()}
        stages: Sequence[Stage] | FixedStage = ()
        if isinstance(decoder.kv, DeltaCache):
            own = starts_B, counts_B, self.committed_B
            stages = FixedStage.of(*own, decoder.kv.room, self.relation_2BJ, live_T)
            self.committed_B.add_(stages.gone_B)  # the host counts the same: `DeltaCache.passed`
        hidden, taps = decoder.run_layers(tokens_BJ.flatten(), plans, self._writer, tables, stages)
        self.logits_TV.copy_(decoder.head(decoder.final_norm(hidden)))
        if self.taps_TF is not None and taps is not None:
            self.taps_TF.copy_(taps)
        chosen_LTK = decoder.chosen_experts()
        if self.chosen_LTK is not None and chosen_LTK is not None:
            self.chosen_LTK.copy_(chosen_LTK)

    def fill(self, batch: ForwardBatch) -> list[int]:
        """Copy a batch to the pass's input buffers; a row with fewer than J tokens is padded. Returns the index of each
        of the batch's tokens among the B * J tokens of the pass, by which the caller finds its results."""
        num_rows, count = self._num_rows, self._count
        tokens, starts, counts, committed = [0] * (num_rows * count), [0] * num_rows, [0] * num_rows, [0] * num_rows
        kv = self._decoder.kv
        places: list[int] = []
        for row, start, own in zip(batch.rows, batch.starts, batch.counts, strict=True):
            tokens[row * count : row * count + own] = batch.tokens[len(places) : len(places) + own]
            starts[row], counts[row] = start, own
            committed[row] = kv.committed(row) if isinstance(kv, DeltaCache) else 0
            places += range(row * count, row * count + own)
        self._inputs.copy_(torch.tensor(tokens + starts + counts + committed))
        self.set_parents(batch.rows, batch.counts, batch.parents)
        return places

    def set_parents(self, rows: list[int], counts: list[int], parents: list[int] | None) -> None:
        """Set the tokens' parents in a tree for the next pass; arguments as in ForwardBatch. None: each row is a
        chain."""
        if parents is None and self._is_chain:
            return
        self._is_chain = parents is None
        relation_2BJ = _chains(self._num_rows, self._count)
        if parents is not None:
            begin = 0
            for row, count in zip(rows, counts, strict=True):
                seen_CC, depths = ancestors(parents[begin : begin + count])
                relation_2BJ[0, row, :count] = torch.tensor(depths)
                relation_2BJ[1, row, :count] = (seen_CC.long() << torch.arange(count)).sum(-1)
                begin += count
        self.relation_2BJ.copy_(relation_2BJ)


def _chains(num_rows: int, count: int) -> Tensor:
    """Depths and bits [2, B, J] of rows whose tokens form chains."""
    slot_J = torch.arange(count)
    return torch.stack([slot_J, (2 << slot_J) - 1])[:, None].repeat(1, num_rows, 1)  # bits 0 to j


class GraphDecoder(Decoder):
    """A Decoder whose decode passes have fixed shapes, so that `record` can capture them as CUDA graphs."""

    slack = MAX_COUNT

    def __init__(self, config: DecoderConfig, tensors: Iterable[tuple[str, Tensor]], **options: Any) -> None:
        """`options`: the other arguments of Decoder."""
        super().__init__(config, tensors, **options)
        self.recorder = self._recorder = self.recorder or Recorder(self.device)

    def allocate_cache(self, num_rows: int, max_len: int) -> None:
        super().allocate_cache(num_rows, max_len)
        self._most_count = 0
        self.rounds: dict[Any, Any] = {}
        """Data of `engine/device_round.py` that depends on this cache: its rows, and rounds without a drafter that are
        captured as CUDA graphs."""
        self._forget(MAX_COUNT)

    def _forget(self, most_count: int) -> None:
        """Discard all captured CUDA graphs; later passes may have up to `most_count` tokens per row."""
        self._grid = pass_grid(self.cache.num_rows, most_count)
        self._recordings: dict[tuple[int, ...], Recordings[StaticPass]] = {}
        """Captured CUDA graphs by tapped layers: a captured pass returns the taps with which it was captured."""
        self._logits_TV: Tensor | None = None

    def record(self, most_count: int) -> None:
        """Capture decode passes as CUDA graphs: one for every shape (rows, tokens per row) of `pass_grid`, with up to
        `most_count` tokens per row. A graph returns the outputs of the layers that are tapped during this call. On
        other devices passes of these shapes are computed directly."""
        if most_count > self._most_count:
            self._most_count = most_count
            self._forget(most_count)
        self._tapping().record()

    def _tapping(self) -> Recordings[StaticPass]:
        """Captured CUDA graphs for the current taps."""
        if self.tap_layers not in self._recordings:
            rows, counts = self._grid.sizes
            kind: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
            if self._logits_TV is None:
                self._logits_TV = torch.zeros(rows[-1] * counts[-1], self.vocab_size, **kind)
            outputs = (self._logits_TV, None)
            if self.tap_layers:
                taps_TF = torch.zeros(rows[-1] * counts[-1], len(self.tap_layers) * self.hidden_size, **kind)
                outputs = (self._logits_TV, taps_TF)

            def make(num_rows: int, count: int) -> StaticPass:
                return StaticPass(self, num_rows, count, *outputs)

            self._recordings[self.tap_layers] = Recordings(self._recorder, StaticPass.kind, self._grid, make)
        return self._recordings[self.tap_layers]

    def static_pass(self, num_rows: int, count: int) -> StaticPass:
        """Create a pass of fixed shape, to be captured as a part of a larger CUDA graph (`StaticPass.compute_of`). The
        pass returns the outputs of the layers that are tapped now. `count`: tokens per row, one of `counts`."""
        return self._tapping().make(num_rows, count)

    @property
    def counts(self) -> Sequence[int]:
        """Numbers of tokens per row for which passes are captured, ascending."""
        return self._grid.sizes[1]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        longest = max(batch.counts)
        is_prompt = batch.logits == "none" or (batch.logits == "last" and longest > self._grid.sizes[1][-1])
        if is_prompt or longest > MAX_COUNT:
            return self._ordinary(batch)
        self._read_again(batch)
        count = self._grid.round_up(1, longest) or MAX_COUNT  # too wide for the grid: `find` returns None
        static = self._tapping().find(max(batch.rows) + 1, count)
        if static is None:
            return self._ordinary(batch)
        places = static.fill(batch)
        self._recorder.run(static)
        if isinstance(self.kv, DeltaCache):
            self.kv.passed(batch, count)
        self.cache.append(batch.rows, batch.counts)
        self.experts_read = static.chosen_LTK
        logit_places = [places[index] for index in batch.logit_rows]
        taps_TF = None if static.taps_TF is None else rows_at(static.taps_TF, places)
        # Views of buffers that the next pass overwrites, unless `rows_at` had to gather rows.
        return ForwardOutput(rows_at(static.logits_TV, logit_places), taps_TF)

    def _ordinary(self, batch: ForwardBatch) -> ForwardOutput:
        """Run an eager pass. If a large tree made it reallocate the pending windows of delta nets, captured graphs are
        discarded."""
        room = self.kv.room if isinstance(self.kv, DeltaCache) else 0
        out = super().forward(batch)
        if isinstance(self.kv, DeltaCache) and self.kv.room != room:
            self._forget(self._grid.sizes[1][-1])
        return out


def rows_at(tensor: Tensor, places: list[int]) -> Tensor:
    """Return the rows of a pass's output with the indices `places`, as a view if these are consecutive, else a copy;
    without indices, no rows."""
    if not places:
        return tensor[:0]
    if places == list(range(places[0], places[0] + len(places))):
        return tensor[places[0] : places[0] + len(places)]
    return tensor[torch.tensor(places, device=tensor.device)]


def pass_grid(num_rows: int, most_count: int) -> Grid:
    """Return the grid of shapes (rows, tokens per row) of target passes to capture, up to these maxima."""
    most_count = min(most_count, MAX_COUNT)
    return Grid(row_sizes(num_rows), [*(count for count in _COUNTS if count < most_count), most_count])
