"""Shapes that are recorded, passes that are not, and the measuring of passes."""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter
from engine_runs import byte_target, run
from tiny_dflash import VOCAB, tiny_target

from paceline.bench.passes import Engines, mocked_engine
from paceline.config import EngineConfig
from paceline.draft.base import Drafter, NoDrafter
from paceline.engine.engine import Engine
from paceline.model import measure
from paceline.model.measure import measure_passes
from paceline.model.target import ForwardBatch, ForwardOutput
from paceline.model.torch.cuda_graphs import Grid, Recorder, Recordings, Region, row_sizes
from paceline.model.torch.decoder import Decoder
from paceline.model.torch.recorded_pass import MAX_COUNT, GraphDecoder, pass_grid
from paceline.types import SamplingParams


class Doubling(Region):
    kind = "doubling"

    def __init__(self, *shape: int) -> None:
        self.shape, self.runs = shape, 0

    def compute(self) -> None:
        self.runs += 1


class FakeCuda:
    """The calls of torch.cuda that a capture makes, on record."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.captures: list[dict[str, Any]] = []
        self.is_capturing = False
        for name in ("device", "stream"):
            patch.setattr(torch.cuda, name, lambda value: nullcontext())
        patch.setattr(torch.cuda, "graph_pool_handle", object)
        patch.setattr(torch.cuda, "current_stream", lambda: self)
        patch.setattr(torch.cuda, "Stream", lambda device: FakeStream())
        patch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        patch.setattr(torch.cuda, "graph", self.graph)

    def wait_stream(self, stream: object) -> None: ...

    @contextmanager
    def graph(self, graph: object, **options: Any) -> Any:
        self.captures.append(options)
        yield


class FakeStream:
    def wait_stream(self, stream: object) -> None: ...


class FakeGraph:
    def replay(self) -> None: ...


def test_captures_share_a_pool_and_ignore_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, recorder = FakeCuda(monkeypatch), Recorder(torch.device("cuda"))
    recordings = Recordings(recorder, "doubling", Grid([1, 2], [4, 8]), Doubling)
    assert recordings.find(1, 4) is None and recorder.eager["doubling"] == 1, "nothing is captured in traffic"
    recordings.record()
    assert recorder.num_recorded == 4 == len(cuda.captures)
    assert {each["capture_error_mode"] for each in cuda.captures} == {"thread_local"}
    for shared in ("pool", "stream"):
        assert len({id(each[shared]) for each in cuda.captures}) == 1
    assert recorder.seconds > 0 and not recorder.replayed
    region = recordings.find(2, 5)
    assert region is not None and region.shape == (2, 8) and region.runs == 3  # two to warm up, one recorded
    recorder.run(region)
    assert region.runs == 3 and recorder.replayed["doubling"] == 1, "a replay does not call Python"
    assert recordings.find(3, 4) is None and recorder.eager["doubling"] == 2
    recordings.record()
    assert recorder.num_recorded == 4


class Littering(Region):
    """Makes as much garbage as starts the collector several times; a cycle that is collected says so."""

    kind = "littering"

    def __init__(self, *shape: int) -> None:
        self.collected: list[bool] = []

    def compute(self) -> None:
        for _ in range(10 * gc.get_threshold()[0]):
            weakref.finalize(cycle := Cycle(), self.collected.append, gc.isenabled())
            cycle.itself = cycle


class Cycle:
    itself: object


def test_no_graph_of_an_earlier_target_is_destroyed_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, recorder, counts = FakeCuda(monkeypatch), Recorder(torch.device("cuda")), list[int]()

    @contextmanager
    def capture(graph: object, **options: Any) -> Any:
        before = len(region.collected)
        yield
        counts.append(len(region.collected) - before)

    monkeypatch.setattr(torch.cuda, "graph", capture)
    region = Littering()
    recorder.record(region)
    assert region.collected, "the collector runs between captures"
    assert counts == [0] and gc.isenabled() and not cuda.captures


def test_larger_shapes_are_recorded_first() -> None:
    sizes = [rows * count for rows, count in pass_grid(8, 16).shapes]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("num_rows", "most_count", "graphs"),
    [(1, 1, 1), (1, 16, 4), (8, 1, 4), (8, 8, 12), (8, 16, 16), (8, MAX_COUNT, 20), (64, 16, 28)],
)
def test_number_of_graphs(num_rows: int, most_count: int, graphs: int) -> None:
    """The passes that a start on CUDA captures of the target; docs/how-to/gpu.md has it."""
    grid = pass_grid(num_rows, most_count)
    assert len(grid.shapes) == graphs
    assert grid.sizes[1][-1] == most_count and grid.sizes[0][-1] == num_rows


def test_every_pass_within_its_budget_of_shapes_is_covered() -> None:
    rng = random.Random(1)
    for _ in range(200):
        num_rows, most_count = rng.randint(1, 20), rng.randint(1, 40)
        grid = pass_grid(num_rows, most_count)
        needed = [rng.randint(1, size) for size in (num_rows, min(most_count, MAX_COUNT))]
        shape = grid.cover(*needed)
        assert shape is not None and all(size >= least for size, least in zip(shape, needed, strict=True))
        assert grid.cover(num_rows + 1, 1) is None and grid.cover(1, MAX_COUNT + 1) is None


def test_sizes_of_rows() -> None:
    assert [row_sizes(number) for number in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]


def test_what_is_not_recorded_is_computed_and_counted() -> None:
    ordinary, fixed = tiny_target(), tiny_target(kind=GraphDecoder)
    fixed.recorder.records_late = False
    tokens = [3, 1, 4]

    def logits(target: Decoder, count: int) -> torch.Tensor:
        row = target.cache.allocate()
        assert row is not None
        out = target.forward(ForwardBatch([row], [0], [count], tokens[:count])).logits_TV
        target.cache.free(row)
        assert out is not None
        return out.clone()

    torch.testing.assert_close(logits(fixed, 3), logits(ordinary, 3))
    assert fixed.recorder.eager["target"] == 1 and not fixed.recorder.num_recorded
    fixed.record(2)
    recorded = fixed.recorder.num_recorded
    torch.testing.assert_close(logits(fixed, 2), logits(ordinary, 2), atol=1e-4, rtol=1e-4)
    assert fixed.recorder.replayed["target"] == 1 and fixed.recorder.eager["target"] == 1
    fixed.set_taps((0,))
    logits(fixed, 2)
    assert fixed.recorder.eager["target"] == 2, "passes with other taps are not recorded"
    fixed.set_taps(())
    logits(fixed, 2)
    assert fixed.recorder.replayed["target"] == 2, "what was recorded stays, whoever tapped meanwhile"
    assert fixed.recorder.num_recorded == recorded


def test_idle_rows_and_padding_of_a_pass_write_behind_everything() -> None:
    target = tiny_target(num_rows=4, kind=GraphDecoder)
    generator = torch.Generator().manual_seed(0)
    for row in range(4):
        assert target.cache.allocate() == row
        target.forward(ForwardBatch([row], [0], [9], [row] * 9, "none"))
    target.kv.keys[:, :, :, 9:].normal_(generator=generator)
    target.kv.values[:, :, :, 9:].normal_(generator=generator)
    target.cache.free(1)
    target.cache.rollback([3], [4])
    before = [tensor.clone() for tensor in (target.kv.keys, target.kv.values)]
    target.forward(ForwardBatch([0, 2], [9, 9], [5, 1], [1, 2, 3, 4, 5, 6]))
    assert target.recorder.replayed["target"] == 1
    for tensor, held in zip((target.kv.keys, target.kv.values), before, strict=True):
        written = (tensor != held).any(-1).any(2).any(0)[:, : target.cache.max_len]
        assert written.nonzero().tolist() == [[0, slot] for slot in range(9, 14)] + [[2, 9]]


class Clock:
    """Seconds that only passes take."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr("time.perf_counter", lambda: self.now)


class SlowAtFirst(FakeTarget):
    """The first pass of each size takes 0.3 s and more, as if it were built then; later ones take a millisecond
    for 8 positions."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        super().__init__(vocab_size=258, **options)
        self.clock, self.known = clock, set[int]()

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.clock.now += 0.001 * (5 + batch.num_tokens / 8)
        if batch.num_tokens not in self.known:
            self.known.add(batch.num_tokens)
            self.clock.now += 0.3 + 0.01 * batch.num_tokens
        return super().forward(batch)


def test_passes_are_measured_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measure_passes(SlowAtFirst(Clock(monkeypatch), max_len=256), 64)
    for size in (1, 8, 64):
        assert costs.seconds(size) == pytest.approx(0.001 * (5 + size / 8)), f"{size} positions"


def test_a_slow_target_is_not_measured_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of a second: two sizes, one of them twice, and a first pass of each."""
    clock = Clock(monkeypatch)
    target = SlowAtFirst(clock, max_len=256)
    target.forward = lambda batch: (setattr(clock, "now", clock.now + 1.0), FakeTarget.forward(target, batch))[1]
    assert measure_passes(target, 64).seconds(1) == pytest.approx(1.0)
    assert clock.now == pytest.approx(5.0)


def test_passes_that_another_program_disturbs_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most passes take up to 0.8 s more: the ratio of a round with drafts to one without is right all the same."""
    clock = Clock(monkeypatch)
    target = SlowAtFirst(clock, max_len=256)
    forward, late = target.forward, [0.0, 0.3, 0.0, 0.1, 0.8, 0.2, 0.0, 0.5]

    def disturbed(batch: ForwardBatch) -> ForwardOutput:
        clock.now += late.pop(0) if late else 0.0
        return forward(batch)

    target.forward = disturbed
    costs = measure_passes(target, 64, 8)
    assert [costs.seconds(size) for size in (1, 8)] == pytest.approx([0.001 * (5 + 1 / 8), 0.006])


def test_sizes_that_are_measured_on_cuda() -> None:
    assert measure._cuda_sizes(1) == [1, 2]
    assert measure._cuda_sizes(16) == [1, 8, 16]
    assert measure._cuda_sizes(128) == [1, 8, 16, 64, 128]
    assert measure._cuda_sizes(40) == [1, 8, 16, 40]


@pytest.mark.parametrize(("size", "width", "rows", "counts"), [(8, 16, 1, 8), (32, 16, 2, 16), (64, 8, 3, 8)])
def test_measured_passes_have_the_shape_of_rounds(size: int, width: int, rows: int, counts: int) -> None:
    """Passes take as many rows as there are, `width` tokens each; what they cannot hold is scaled."""
    target, batches = byte_target(num_rows=3, max_len=256), list[ForwardBatch]()

    def timer(work: Any) -> float:
        work()
        return 1.0

    forward = target.forward
    target.forward = lambda batch: (batches.append(batch), forward(batch))[1]
    spent = measure._timed(target, size, width, timer)
    assert [batch.counts for batch in batches] == [[counts] * rows]
    assert spent == size / (rows * counts) and target.cache.num_free == 3


def test_recording_in_traffic_is_part_of_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Recorded(FakeTarget):
        """Records something before each pass."""

        def forward(self, batch: ForwardBatch) -> ForwardOutput:
            assert self.recorder is not None
            self.recorder.seconds += 7.0
            clock.now += 7.0 + 0.001
            return super().forward(batch)

    class Records(ScriptedDrafter):
        def propose(self, batch: Any) -> Any:
            assert target.recorder is not None
            target.recorder.seconds += 3.0
            clock.now += 3.0 + 0.002
            return super().propose(batch)

    target = Recorded(vocab_size=258, num_rows=2)
    target.recorder = Recorder(torch.device("cpu"))
    engine = Engine(target, ByteTokenizer(), Records(target, accuracy=0.5))
    engine.add([1, 2, 3], SamplingParams(max_tokens=12))
    num_drafting = 0
    while engine.has_work:
        engine.step()
        for stats in engine.rounds:
            num_drafting += bool(stats.source_s)  # the last round of an answer may draft nothing
            assert stats.verify_s == pytest.approx(0.001)
            assert stats.draft_s == pytest.approx(0.002 * bool(stats.source_s))
            assert sum(stats.source_s.values()) == pytest.approx(stats.draft_s)
    assert num_drafting


@pytest.mark.slow
def test_the_tiny_target_runs_recorded_as_ordinary() -> None:
    """Rounds over all rows; the recorder of the first has nothing left to record once it was asked to."""
    prompts = [[1, 2, 3], [4, 5], [VOCAB - 1]]
    texts = []
    for kind in (Decoder, GraphDecoder):
        engine = Engine(tiny_target(kind=kind), ByteTokenizer())
        engine.record()
        texts.append([seq.output_ids for seq in run(engine, prompts, SamplingParams(max_tokens=9))])
    assert texts[0] == texts[1]


class Wide(NoDrafter):
    """Drafts nothing, but would draft more than a block, from taps of its own."""

    name, num_drafted, tap_layers = "wide", 9, (0,)


def test_every_engine_of_a_comparison_is_recorded() -> None:
    """The first one too, whose passes are forgotten when a wider drafter is recorded."""
    target = tiny_target(kind=GraphDecoder)
    target.recorder.records_late = False

    def new_engine(drafter: Drafter) -> Engine:
        engine = Engine(target, ByteTokenizer(), drafter)
        engine.record()
        return engine

    llm: Any = SimpleNamespace(target=target, new_engine=new_engine, record_passes=lambda engine: engine.record())
    engines = Engines(llm)
    engines.add("none", NoDrafter())
    engines.add("wide", Wide())
    run(engines.use("none"), [[1, 2, 3]], SamplingParams(max_tokens=5))
    assert target.recorder.replayed["target"] and not target.recorder.eager["target"]


def test_a_mocked_engine_is_recorded() -> None:
    target = tiny_target(kind=GraphDecoder)
    llm: Any = SimpleNamespace(target=target, tokenizer=ByteTokenizer(), config=EngineConfig())
    mocked_engine(llm, Wide(), 2.0)
    assert target.recorder.num_recorded
