"""A long prompt that arrives beside others: they go on, it is not starved, and the text is the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles import ByteTokenizer, FakeTarget
from small_llm import fake_llm

from paceline.bench.passes import Request, run_pass
from paceline.data.answers import AnswerShards
from paceline.data.prompts import Prompt
from paceline.engine.engine import Chunk, Engine
from paceline.engine.llm import LLM
from paceline.model.target import ForwardBatch, ForwardOutput
from paceline.plan.costs import PassCosts
from paceline.plan.planner import AdaptivePlanner
from paceline.train.answers.regenerate import Regenerator
from paceline.train.config import AnswerConfig
from paceline.types import SamplingParams

LONG = [(7 * place) % 250 for place in range(1000)]


class Clocked(FakeTarget):
    """Its passes take 4 ms and 0.1 ms a token, by the test's own clock."""

    now = 0.0

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.now += 4e-3 + 0.1e-3 * len(batch.tokens)
        return super().forward(batch)


def engine_of(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Engine, Clocked]:
    target = Clocked(vocab_size=258, num_rows=8, max_len=2048, **options)
    monkeypatch.setattr(time, "perf_counter", lambda: target.now)
    planner = AdaptivePlanner(PassCosts(((1, 4.1e-3), (101, 14.1e-3))), adapts_chunks=target.is_width_invariant)
    return Engine(target, ByteTokenizer(), planner=planner), target


@pytest.mark.slow
def test_running_streams_wait_less_than_three_rounds_for_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, target = engine_of(monkeypatch, is_width_invariant=True)
    running = [engine.add([number + 1, 2, 3], SamplingParams(max_tokens=400)) for number in range(7)]
    while engine.scheduler.prefilling:
        engine.step()
    rounds = []
    for _ in range(20):
        before = target.now
        engine.step()
        rounds.append(target.now - before)
    round_s = statistics.median(rounds)
    late = engine.add(LONG, SamplingParams(max_tokens=4))
    last = dict.fromkeys(running, target.now)
    gaps: list[float] = []
    num_steps, answer = 0, list[int]()
    while not answer:
        chunks = engine.step()
        num_steps += 1
        gained = {chunk.sequence.request_id for chunk in chunks}
        assert gained >= set(running), "a stream gained nothing in a step"
        gaps += [target.now - last[number] for number in running]
        last = dict.fromkeys(running, target.now)
        answer = [token for chunk in chunks if chunk.sequence.request_id == late for token in chunk.token_ids]
    assert max(gaps) < 3 * round_s, f"{max(gaps) / round_s:.1f} rounds"
    assert num_steps < 130, "and the prompt was not starved"
    assert answer[0] == target.greedy(LONG, 1)[0]


def test_alone_a_prompt_is_prefilled_in_large_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, target = engine_of(monkeypatch, is_width_invariant=True)
    for _ in range(2):
        engine.add([5, *LONG], SamplingParams(max_tokens=3))
        while engine.has_work:
            engine.step()
    sizes = [len(call.tokens) for call in target.calls if len(call.tokens) > 1]
    assert sizes[:4] == [256, 256, 256, 233]


def test_where_bits_depend_on_the_chunk_its_size_depends_on_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, target = engine_of(monkeypatch)
    engine.add([1, 2, 3], SamplingParams(max_tokens=60))
    for _ in range(10):
        engine.step()
    engine.add(LONG, SamplingParams(max_tokens=2))
    while engine.has_work:
        engine.step()
    assert [len(call.tokens) for call in target.calls if len(call.tokens) > 3] == [256, 256, 256, 232]


def test_answers_of_one_token_do_not_hold_up_the_others() -> None:
    engine = Engine(FakeTarget(vocab_size=258, num_rows=2, max_len=256), ByteTokenizer())
    running = engine.add([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
    assert [len(chunk.token_ids) for chunk in engine.step()] == [1], (
        "alone, a first token goes out before its first round"
    )
    for number in range(5):
        engine.add([number + 9], SamplingParams(max_tokens=1))
    for _ in range(5):
        assert running in {chunk.sequence.request_id for chunk in engine.step()}
    assert not engine.scheduler.waiting


def test_beside_work_that_nobody_follows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, target = engine_of(monkeypatch, is_width_invariant=True)
    engine.add([1, 2, 3], SamplingParams(max_tokens=60))
    for _ in range(20):
        engine.step()
    target.calls.clear()
    late = engine.add(LONG, SamplingParams(max_tokens=4))
    with engine.whole_chunks():
        chunks = [chunk for _ in range(12) for chunk in engine.step() if chunk.sequence.request_id == late]
    assert [len(call.tokens) for call in target.calls if len(call.tokens) > 100] == [256, 256, 256, 232]
    assert [token for chunk in chunks for token in chunk.token_ids] == target.greedy(LONG, 4)


def generate(llm: LLM, folder: Path) -> None:
    llm.generate_ids([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=2))


def followed(llm: LLM, folder: Path) -> None:
    llm.generate_ids([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=2), lambda chunk: None)


def regenerate(llm: LLM, folder: Path) -> None:
    prompts = [Prompt(name, [{"role": "user", "content": name}], (name,), "test") for name in ("one", "two")]
    Regenerator(llm, AnswerShards(folder), AnswerConfig(2, 100)).run(prompts)


def bench_decode(llm: LLM, folder: Path) -> None:
    run_pass(llm.engine, [Request(name, [1, 2, 3]) for name in "ab"], [SamplingParams(max_tokens=2)] * 2, batch=2)


@pytest.mark.parametrize("use", [generate, followed, regenerate, bench_decode])
def test_prompts_are_read_in_whole_chunks_unless_somebody_follows(
    use: Callable[[LLM, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = fake_llm(FakeTarget(vocab_size=258, num_rows=4, max_len=512, is_width_invariant=True))
    planner, step = llm.engine.planner, llm.engine.step
    assert isinstance(planner, AdaptivePlanner)
    planner.chunks.prefilled(32, 0.032)
    planner.chunks.decoded(1e-3, beside_chunk=False)
    sizes: list[int] = []

    def spied() -> list[Chunk]:
        sizes.append(planner.chunks.size(2))
        return step()

    monkeypatch.setattr(llm.engine, "step", spied)
    use(llm, tmp_path)
    assert sizes and {size == 16 for size in sizes} == {use is not followed}, "its largest chunk"
    assert planner.chunks.size(2) < 16
