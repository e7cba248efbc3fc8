"""Decode passes of fixed shape, for CUDA graphs: at a few rows a GPU waits for Python, unless a recorded pass is replayed.

A `StaticPass` computes rows 0..B-1 of the cache, J tokens each, against the first S positions, from static buffers only;
shapes are rounded up to buckets so that few graphs cover everything. Rows that have no part in a pass, and tokens that pad a
row, write beyond their row's length, where nothing is read. On CPU the same pass runs without a graph, which is how
`tests/model/test_graphs.py` compares it with the ordinary one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.model.attention import PLAIN, AttentionPlan, CacheWriter, Scores, ancestors, attend_rows
from paceline.model.config import RopeKind
from paceline.model.decoder import Decoder, Tables
from paceline.model.target import ForwardBatch, ForwardOutput

MAX_COUNT = 32
"""Most tokens a row may bring to a static pass; also the spare positions behind each row of the cache."""
_MIN_SPAN = 256


class StaticPass(CacheWriter):
    """One shape: B rows, J tokens each, S cache positions. It is the CacheWriter of that pass, too."""

    def __init__(self, decoder: Decoder, num_rows: int, count: int, span: int) -> None:
        self._decoder = decoder
        self._num_rows, self._count, self._span = num_rows, count, span
        device = decoder.device
        self.tokens_BJ = torch.zeros(num_rows, count, dtype=torch.long, device=device)
        self.starts_B = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.depths_BJ = torch.arange(count, device=device).repeat(num_rows, 1)
        """How many tokens of its row's pass each follows."""
        self.seen_BJJ = torch.ones(count, count, dtype=torch.bool, device=device).tril().repeat(num_rows, 1, 1)
        """Which tokens of its row's pass each sees."""
        self._is_chain = True
        self.logits: Tensor | None = None
        self.taps: Tensor | None = None

    def compute(self) -> None:
        """Fill `logits` [B * J, V] and `taps` from the buffers; only tensor work on fixed addresses."""
        decoder, device = self._decoder, self._decoder.device
        self._slots_BJ = self.starts_B[:, None] + torch.arange(self._count, device=device)
        self._positions_BJ = self.starts_B[:, None] + self.depths_BJ
        self._rows_T = torch.arange(self._num_rows, device=device).repeat_interleave(self._count)
        plans = {window: _Plan(self._num_rows, self._span, self._mask(window)) for window in decoder.windows}
        positions_T = self._positions_BJ.flatten()
        tables: dict[RopeKind, Tables] = {kind: rope.tables_at(positions_T) for kind, rope in decoder.ropes.items()}
        hidden, taps = decoder.run_layers(self.tokens_BJ.flatten(), plans, self, tables)
        self.logits, self.taps = decoder.head(decoder.final_norm(hidden)), taps

    def _mask(self, window: int | None) -> Tensor:
        key = torch.arange(self._span, device=self._decoder.device)
        place_BS = key - self.starts_B[:, None]  # among the tokens of the pass, where it is from 0 to J - 1
        at_BS = place_BS.clamp(0, self._count - 1)
        seen = self.seen_BJJ.gather(2, at_BS[:, None].expand(-1, self._count, -1)) & (place_BS < self._count)[:, None]
        seen |= (place_BS < 0)[:, None]
        if window is not None:
            own_BS = self.starts_B[:, None] + self.depths_BJ.gather(1, at_BS)
            position_BS = torch.where(place_BS < 0, key, own_BS)
            seen &= self._positions_BJ[:, :, None] - position_BS[:, None] < window
        hidden = ~seen
        mask = torch.zeros(hidden.shape, dtype=self._decoder.dtype, device=key.device).masked_fill_(hidden, float("-inf"))
        return mask.repeat(1, self._decoder.group, 1)[:, None]

    def write(self, cache: Tensor, new_THD: Tensor) -> None:
        cache[self._rows_T, :, self._slots_BJ.flatten()] = new_THD

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


class _Plan(AttentionPlan):
    """The attention of a static pass, for one window: over the whole rectangle of its shape."""

    def __init__(self, num_rows: int, length: int, seen: Tensor) -> None:
        self._num_rows, self._length, self._seen = num_rows, length, seen

    def attend(self, query_THD: Tensor, keys: Tensor, values: Tensor, scores: Scores = PLAIN) -> Tensor:
        keys, values = (tensor[: self._num_rows, :, : self._length] for tensor in (keys, values))
        return attend_rows(query_THD, keys, values, self._seen, scores)


class GraphDecoder(Decoder):
    """The decoder with decode passes of fixed shape; on CUDA each shape is captured once and replayed."""

    slack = MAX_COUNT

    def allocate_cache(self, num_rows: int, max_len: int) -> None:
        super().allocate_cache(num_rows, max_len)
        self._passes: dict[tuple[int, int, int], tuple[StaticPass, torch.cuda.CUDAGraph | None]] = {}

    def set_taps(self, tap_layers: tuple[int, ...]) -> None:
        super().set_taps(tap_layers)
        self._passes = {}  # captured passes return the taps they were captured with

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if batch.logits != "all" or max(batch.counts) > MAX_COUNT or self.config.delta is not None:
            return super().forward(batch)
        count = _power_of_two(max(batch.counts))
        num_rows = _power_of_two(max(batch.rows) + 1, limit=self.cache.num_rows)
        needed = max(self.cache.lengths[:num_rows]) + count
        span = _power_of_two(max(needed, _MIN_SPAN), limit=self.kv.keys.shape[3])
        static, graph = self._pass_of(num_rows, count, span)
        tokens = [[0] * count for _ in range(num_rows)]
        places: list[int] = []  # of the batch's tokens in the static pass
        for row, own in zip(batch.rows, batch.counts, strict=True):
            tokens[row][:own] = batch.tokens[len(places) : len(places) + own]
            places += range(row * count, row * count + own)
        static.tokens_BJ.copy_(torch.tensor(tokens))
        static.starts_B.copy_(torch.tensor(self.cache.lengths[:num_rows]))
        static.set_parents(batch.rows, batch.counts, batch.parents)
        if graph is None:
            static.compute()
        else:
            graph.replay()
        self.cache.append(batch.rows, batch.counts)
        assert static.logits is not None
        if places == list(range(num_rows * count)):
            return ForwardOutput(static.logits, static.taps)
        index = torch.tensor(places, device=self.device)
        return ForwardOutput(static.logits[index], None if static.taps is None else static.taps[index])

    def _pass_of(self, num_rows: int, count: int, span: int) -> tuple[StaticPass, torch.cuda.CUDAGraph | None]:
        key = (num_rows, count, span)
        if key not in self._passes:
            static = StaticPass(self, num_rows, count, span)
            # During warm-up and capture every row writes behind its end, as idle rows do.
            static.starts_B.copy_(torch.tensor(self.cache.lengths[:num_rows]))
            graph = _capture(static) if self.device.type == "cuda" else None
            self._passes[key] = static, graph
        return self._passes[key]


def _capture(static: StaticPass) -> torch.cuda.CUDAGraph:
    """Warm up on a side stream, as capture demands, then record one pass."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            static.compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.compute()
    return graph


def _power_of_two(value: int, limit: int | None = None) -> int:
    """The next power of two, at most `limit`."""
    rounded = 1 << (value - 1).bit_length()
    return rounded if limit is None else min(rounded, limit)
