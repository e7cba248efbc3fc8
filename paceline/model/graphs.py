"""Decode passes of fixed shape, for CUDA graphs: at a few rows a GPU waits for Python, unless a recorded pass is replayed.

A `StaticPass` computes rows 0..B-1 of the cache, J tokens each, against the first S positions, from static buffers
only; shapes are rounded up to a grid so that few graphs cover everything. Rows that have no part in a pass, and
tokens that pad a row, write to scratch positions behind max_len, where no token ever looks. On CPU the same pass runs
without a graph, which is how `tests/model/test_graphs.py` compares it with the ordinary one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.model.attention import PLAIN, AttentionPlan, CacheWriter, Scores, ancestors, attend_rows
from paceline.model.config import DecoderConfig, RopeKind
from paceline.model.decoder import Decoder, Tables
from paceline.model.record import ALIGNED, Grid, Recorder, Recordings, Region, row_sizes, spans
from paceline.model.target import ForwardBatch, ForwardOutput

MAX_COUNT = 32
"""Most tokens a row may bring to a static pass, and scratch positions behind each row of the cache."""
MOST_GRAPHS = 96
"""Target passes that are recorded at most: 10 to 20 seconds of captures."""
_COUNTS = (1, 4, 8, 16)


def can_record(config: DecoderConfig) -> bool:
    """True for a model whose passes have a fixed form. Tokens of each expert, and positions by which a delta net's
    state lags behind, are not known when a pass is recorded."""
    return not config.num_experts and config.delta is None


class StaticWriter(CacheWriter):
    """Writes J tokens to each of the cache rows 0..B-1; tokens behind a row's own count go to its scratch positions."""

    def __init__(self, num_rows: int, count: int, scratch: int, device: torch.device) -> None:
        """`scratch`: the first of J positions in each row that hold nothing."""
        self.slot_J = torch.arange(count, device=device)
        self._scratch_J = scratch + self.slot_J
        self._rows_T = torch.arange(num_rows, device=device).repeat_interleave(count)

    def point(self, starts_B: Tensor, counts_B: Tensor) -> Tensor:
        """Write behind these lengths from now on; returns the slots [B, J] as if all of them counted."""
        slots_BJ = starts_B[:, None] + self.slot_J
        own_BJ = self.slot_J < counts_B[:, None]
        self._slots_T = torch.where(own_BJ, slots_BJ, self._scratch_J).flatten()
        return slots_BJ

    def write(self, cache: Tensor, new_THD: Tensor) -> None:
        cache[self._rows_T, :, self._slots_T] = new_THD


class StaticPlan(AttentionPlan):
    """The attention of a static pass, for one window: over the whole rectangle of its shape."""

    def __init__(self, num_rows: int, length: int, visible_BJS: Tensor, group: int, dtype: torch.dtype) -> None:
        """`visible_BJS`: which of the first `length` positions of its row each token sees."""
        self._num_rows, self._length = num_rows, length
        mask = torch.zeros(visible_BJS.shape, dtype=dtype, device=visible_BJS.device)
        self._mask_B1TS = mask.masked_fill_(~visible_BJS, float("-inf")).repeat(1, group, 1)[:, None]

    def attend(self, query_THD: Tensor, keys: Tensor, values: Tensor, scores: Scores = PLAIN) -> Tensor:
        keys, values = (tensor[: self._num_rows, :, : self._length] for tensor in (keys, values))
        return attend_rows(query_THD, keys, values, self._mask_B1TS, scores)


class StaticPass(Region):
    """One shape: B rows, J tokens each, S cache positions."""

    kind = "target"

    def __init__(
        self, decoder: Decoder, num_rows: int, count: int, span: int, logits_TV: Tensor, taps_TF: Tensor | None
    ) -> None:
        """`logits_TV` and `taps_TF`: buffers of at least B * J rows, which passes of other shapes may share."""
        self._decoder = decoder
        self._num_rows, self._count, self._span = num_rows, count, span
        device, size = decoder.device, num_rows * count
        self._inputs = torch.zeros(size + 2 * num_rows, dtype=torch.long, device=device)
        tokens_T, self.starts_B, self.counts_B = self._inputs.split([size, num_rows, num_rows])
        self.tokens_BJ = tokens_T.view(num_rows, count)
        self.depths_BJ = torch.arange(count, device=device).repeat(num_rows, 1)
        """How many tokens of its row's pass each follows."""
        self.seen_BJJ = torch.ones(count, count, dtype=torch.bool, device=device).tril().repeat(num_rows, 1, 1)
        """Which tokens of its row's pass each sees."""
        self._is_chain = True
        self.logits_TV, self.taps_TF = logits_TV[:size], None if taps_TF is None else taps_TF[:size]
        self._writer = StaticWriter(num_rows, count, decoder.cache.max_len, device)
        self._key_S = torch.arange(span, device=device)

    @property
    def inputs(self) -> list[Tensor]:
        return [self._inputs, self.depths_BJ, self.seen_BJJ]

    @property
    def outputs(self) -> list[Tensor]:
        return [self.logits_TV] if self.taps_TF is None else [self.logits_TV, self.taps_TF]

    def compute(self) -> None:
        """Fill `logits_TV` and `taps_TF`, row after row, from the buffers."""
        decoder = self._decoder
        self._writer.point(self.starts_B, self.counts_B)
        positions_BJ = self.starts_B[:, None] + self.depths_BJ
        shape = self._num_rows, self._span
        plans = {
            window: StaticPlan(*shape, self._visible(window, positions_BJ), decoder.group, decoder.dtype)
            for window in decoder.windows
        }
        positions_T = positions_BJ.flatten()
        tables: dict[RopeKind, Tables] = {kind: rope.tables_at(positions_T) for kind, rope in decoder.ropes.items()}
        hidden, taps = decoder.run_layers(self.tokens_BJ.flatten(), plans, self._writer, tables)
        self.logits_TV.copy_(decoder.head(decoder.final_norm(hidden)))
        if self.taps_TF is not None and taps is not None:
            self.taps_TF.copy_(taps)

    def _visible(self, window: int | None, positions_BJ: Tensor) -> Tensor:
        key_S, count = self._key_S, self._count
        place_BS = key_S - self.starts_B[:, None]  # among the tokens of the pass, where it is from 0 to J - 1
        at_BS = place_BS.clamp(0, count - 1)
        seen = self.seen_BJJ.gather(2, at_BS[:, None].expand(-1, count, -1)) & (place_BS < count)[:, None]
        seen |= (place_BS < 0)[:, None]
        if window is not None:
            own_BS = self.starts_B[:, None] + self.depths_BJ.gather(1, at_BS)
            position_BS = torch.where(place_BS < 0, key_S, own_BS)
            seen &= positions_BJ[:, :, None] - position_BS[:, None] < window
        return seen

    def fill(self, batch: ForwardBatch) -> list[int]:
        """Give it the tokens of a batch; returns their places in the pass. One copy to the device, three for trees."""
        num_rows, count = self._num_rows, self._count
        # An idle row begins at position 0: begun beyond the span it would see no key at all, and become NaN.
        tokens, starts, counts = [0] * (num_rows * count), [0] * num_rows, [0] * num_rows
        places: list[int] = []
        for row, start, own in zip(batch.rows, batch.starts, batch.counts, strict=True):
            tokens[row * count : row * count + own] = batch.tokens[len(places) : len(places) + own]
            starts[row], counts[row] = start, own
            places += range(row * count, row * count + own)
        self._inputs.copy_(torch.tensor(tokens + starts + counts))
        self.set_parents(batch.rows, batch.counts, batch.parents)
        return places

    def set_parents(self, rows: list[int], counts: list[int], parents: list[int] | None) -> None:
        """Who follows whom in the next pass, as ForwardBatch has it."""
        if parents is None and self._is_chain:
            return
        self._is_chain = parents is None
        depths_BJ = torch.arange(self._count).repeat(self._num_rows, 1)
        seen_BJJ = torch.ones(self._count, self._count, dtype=torch.bool).tril().repeat(self._num_rows, 1, 1)
        if parents is not None:
            begin = 0
            for row, count in zip(rows, counts, strict=True):
                seen_BJJ[row, :count, :count], depths = ancestors(parents[begin : begin + count])
                depths_BJ[row, :count] = torch.tensor(depths)
                begin += count
        self.depths_BJ.copy_(depths_BJ)
        self.seen_BJJ.copy_(seen_BJJ)


class GraphDecoder(Decoder):
    """The decoder with decode passes of fixed shape; on CUDA each shape is captured once, by `record`, and replayed."""

    slack = MAX_COUNT + ALIGNED

    def __init__(self, config: DecoderConfig, tensors: Iterable[tuple[str, Tensor]], **options: Any) -> None:
        """`options` are Decoder's."""
        super().__init__(config, tensors, **options)
        self.recorder = self._recorder = self.recorder or Recorder(self.device)

    def allocate_cache(self, num_rows: int, max_len: int) -> None:
        super().allocate_cache(num_rows, max_len)
        self._most_count = 0
        self._forget(MAX_COUNT)

    def _forget(self, most_count: int) -> None:
        """Drop what is recorded; passes may have up to `most_count` tokens a row from now on."""
        self._grid = pass_grid(self.cache.num_rows, self.cache.max_len, most_count)
        self._recordings: dict[tuple[int, ...], Recordings[StaticPass]] = {}
        """By the layers that are tapped: recorded passes return the taps that they were recorded with."""
        self._logits_TV: Tensor | None = None

    def record(self, most_count: int) -> None:
        """Records the whole grid of passes; see Target.record."""
        if not can_record(self.config):
            return
        if most_count > self._most_count:
            self._most_count = most_count
            self._forget(most_count)
        self._tapping().record()

    def _tapping(self) -> Recordings[StaticPass]:
        """Passes that tap what is tapped now."""
        if self.tap_layers not in self._recordings:
            rows, counts, _ = self._grid.sizes
            kind: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
            if self._logits_TV is None:
                self._logits_TV = torch.zeros(rows[-1] * counts[-1], self.vocab_size, **kind)
            outputs = (self._logits_TV, None)
            if self.tap_layers:
                taps_TF = torch.zeros(rows[-1] * counts[-1], len(self.tap_layers) * self.hidden_size, **kind)
                outputs = (self._logits_TV, taps_TF)

            def make(num_rows: int, count: int, span: int) -> StaticPass:
                return StaticPass(self, num_rows, count, span, *outputs)

            self._recordings[self.tap_layers] = Recordings(self._recorder, StaticPass.kind, self._grid, make)
        return self._recordings[self.tap_layers]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        longest = max(batch.counts)
        is_prompt = batch.logits == "none" or (batch.logits == "last" and longest > self._grid.sizes[1][-1])
        if is_prompt or longest > MAX_COUNT or not can_record(self.config):
            return super().forward(batch)
        count = self._grid.round_up(1, longest) or MAX_COUNT
        static = self._tapping().find(max(batch.rows) + 1, count, max(batch.starts) + count)
        if static is None:
            return super().forward(batch)
        places = static.fill(batch)
        self._recorder.run(static)
        self.cache.append(batch.rows, batch.counts)
        wanted = [places[index] for index in batch.logit_rows]
        taps_TF = None if static.taps_TF is None else self._at(static.taps_TF, places)
        return ForwardOutput(self._at(static.logits_TV, wanted), taps_TF)

    def _at(self, tensor: Tensor, places: list[int]) -> Tensor:
        """Rows of a pass's outputs; places side by side are a view."""
        if places == list(range(places[0], places[0] + len(places))):
            return tensor[places[0] : places[0] + len(places)]
        return tensor[torch.tensor(places, device=self.device)]


def pass_grid(num_rows: int, max_len: int, most_count: int) -> Grid:
    """Shapes (rows, tokens a row, cache positions) of target passes with up to `most_count` tokens a row; MOST_GRAPHS
    at most, unless rows and tokens alone make more."""
    most_count = min(most_count, MAX_COUNT)
    rows, counts = row_sizes(num_rows), [*(count for count in _COUNTS if count < most_count), most_count]
    return Grid(rows, counts, spans(max_len + MAX_COUNT, MOST_GRAPHS // (len(rows) * len(counts))))
