"""The engine with a target that answers from its cache: drafters that always, never, sometimes agree; any order of
events."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter
from engine_runs import byte_target, check_logprobs, collect, drafters, run

from paceline.engine.engine import Engine
from paceline.engine.round import RuleJudge
from paceline.errors import ContextLengthError, PromptError, SamplingError
from paceline.model.target import ForwardBatch, ForwardOutput
from paceline.report.statistics import Rounds
from paceline.types import SamplingParams, Sequence
from paceline.verify.rules import RULES, mocked

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11, 12, 13], [3, 1]]
NAMES = list(drafters(FakeTarget()))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_greedy_is_the_targets_own_text(name: str, num_rows: int) -> None:
    target = byte_target(num_rows=num_rows)
    engine = Engine(target, ByteTokenizer(), drafters(target)[name], prefill_chunk=3)
    for prompt, seq in zip(PROMPTS, run(engine, PROMPTS, SamplingParams(max_tokens=23)), strict=True):
        assert seq.output_ids == target.greedy(prompt, 23)
        assert seq.lossless
        assert seq.finish_reason == "length"


def test_rounds_without_drafts_are_timed_where_nobody_drafts() -> None:
    target = byte_target(num_rows=2)
    plain, params = SamplingParams(max_tokens=8, max_drafted=0), SamplingParams(max_tokens=60)
    engine = Engine(target, ByteTokenizer(), ScriptedDrafter(target, accuracy=0.0))
    (alone,) = run(engine, PROMPTS[:1], plain)
    times = alone.timings
    assert times.num_plain == len(alone.rounds) == 7
    assert times.plain_s == pytest.approx(times.draft_s + times.verify_s + times.host_s)
    beside, drafting = run(engine, PROMPTS[:2], [plain, params])
    assert (beside.timings.num_plain, beside.timings.plain_s) == (0, 0.0)
    assert all(each.num_drafted == 0 for each in beside.rounds)
    assert drafting.timings.num_plain == sum(each.num_drafted == 0 for each in drafting.rounds) == 1  # the last token's
    assert 0 < drafting.timings.plain_s < drafting.timings.verify_s


def test_a_step_records_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation would pay for them: a step is entered in inference mode, and nobody below needs to know."""
    target, seen = byte_target(), []
    engine, forward = Engine(target, ByteTokenizer(), ScriptedDrafter(target)), target.forward
    monkeypatch.setattr(
        target, "forward", lambda batch: seen.append(torch.is_inference_mode_enabled()) or forward(batch)
    )
    run(engine, PROMPTS[:1], SamplingParams(max_tokens=4))
    assert seen and all(seen) and not torch.is_inference_mode_enabled()


def test_tokens_per_round_follow_the_drafter() -> None:
    target = byte_target()
    rounds = {}
    for name in ("none", "always", "never"):
        engine = Engine(target, ByteTokenizer(), drafters(target)[name])
        (seq,) = run(engine, [[1, 2]], SamplingParams(max_tokens=21))
        figures = Rounds.counted(seq.rounds)
        rounds[name] = figures.num_rounds
        assert sum(figures.accepted_histogram) == figures.num_rounds
        assert figures.num_accepted == sum(each.num_accepted for each in seq.rounds)
    assert rounds == {"none": 20, "always": 4, "never": 20}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_same_text_alone_and_in_a_batch(name: str) -> None:
    target = byte_target(sharpness=1.0, num_rows=8)
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, presence_penalty=0.4, seed=seed, max_tokens=10) for seed in range(8)
    ]
    prompts = [[seed, 2 * seed + 1] for seed in range(8)]
    engine = Engine(target, ByteTokenizer(), drafters(target)[name])
    together = [seq.output_ids for seq in run(engine, prompts, params)]
    alone = [run(engine, [prompt], [own])[0].output_ids for prompt, own in zip(prompts, params, strict=True)]
    assert together == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", ["never", "sometimes"])
def test_with_certain_drafts_a_seed_gives_plain_decodings_text(name: str) -> None:
    target = byte_target(sharpness=1.0)
    params = SamplingParams(temperature=1.0, top_k=40, repetition_penalty=1.2, seed=5, max_tokens=30)
    plain = run(Engine(target, ByteTokenizer()), PROMPTS, params)
    drafted = run(Engine(target, ByteTokenizer(), drafters(target)[name]), PROMPTS, params)
    assert [seq.output_ids for seq in drafted] == [seq.output_ids for seq in plain]


@pytest.mark.parametrize("rule", RULES)
def test_with_every_rule_a_seed_gives_plain_decodings_text(rule: str) -> None:
    target = byte_target(sharpness=1.5)
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=20)
    plain = run(Engine(target, ByteTokenizer()), PROMPTS[:2], params)
    drafter = ScriptedDrafter(target, accuracy=0.9)
    drafted = run(Engine(target, ByteTokenizer(), drafter, judge=RuleJudge(RULES[rule])), PROMPTS[:2], params)
    assert [seq.output_ids for seq in drafted] == [seq.output_ids for seq in plain]
    assert sum(each.num_accepted for seq in drafted for each in seq.rounds) > 0


class _Spelling(FakeTarget):
    """Answers "abcdefghij..." whatever the prompt, so that stop strings fall where a test wants them."""

    def logits_after(self, tokens: object) -> torch.Tensor:
        last = list(tokens)[-1]  # pyright: ignore[reportArgumentType]
        logits = torch.zeros(self.vocab_size)
        logits[(last + 1) % 256 if 97 <= last < 122 else 97] = 9.0
        return logits


@pytest.mark.parametrize("name", ["none", "always", "sometimes"])
@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"), [(("fg",), "abcde", 7), (("gx", "ef"), "abcd", 6), (("zzz",), "abcdefghijkl", 12)]
)
def test_stop_strings_end_text_and_tokens_inside_a_block(
    name: str, stop: tuple[str, ...], text: str, num_tokens: int
) -> None:
    target = _Spelling(vocab_size=258)
    engine = Engine(target, ByteTokenizer(), drafters(target)[name])
    engine.add([1], SamplingParams(max_tokens=12, stop=stop, logprobs=0))
    chunks = collect(engine)
    assert "".join(chunk.text for chunk in chunks) == text
    seq = chunks[-1].sequence
    assert sum(len(chunk.token_ids) for chunk in chunks) == num_tokens == seq.num_output == len(seq.logprobs)
    assert seq.finish_reason == ("length" if stop == ("zzz",) else "stop")
    assert 1 + sum(each.num_accepted + 1 for each in seq.rounds) == num_tokens  # each token once, none after the stop
    assert engine.target.cache.num_free == engine.target.cache.num_rows


@pytest.mark.parametrize("name", ["none", "always"])
def test_end_tokens_stop_inside_a_block(name: str) -> None:
    target = _Spelling(vocab_size=258)
    engine = Engine(target, ByteTokenizer(), drafters(target)[name], eos_token_ids=(ord("d"),))
    kept, ignored, own = run(
        engine,
        [[1], [1], [1]],
        [
            SamplingParams(max_tokens=8),
            SamplingParams(max_tokens=8, ignore_eos=True),
            SamplingParams(max_tokens=8, stop_token_ids=(ord("b"),)),
        ],
    )
    assert bytes(kept.output_ids) == b"abcd"
    assert kept.finish_reason == "stop"
    assert bytes(ignored.output_ids) == b"abcdefgh"
    assert bytes(own.output_ids) == b"ab"


@pytest.mark.parametrize("name", ["none", "always", "sometimes"])
def test_logprobs_are_the_targets(name: str) -> None:
    target = byte_target(sharpness=1.0)
    engine = Engine(target, ByteTokenizer(), drafters(target)[name])
    (seq,) = run(engine, [[1, 2]], SamplingParams(temperature=0.7, top_k=9, seed=3, max_tokens=9, logprobs=2))
    assert len(seq.output_ids) == 9
    check_logprobs(target, seq, 2)


class _Sparing(FakeTarget):
    """Leaves out what nobody will read, as the native pass does."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        out = super().forward(batch)
        return (
            ForwardOutput(None, out.taps_TF, out.best_T()) if batch.only_argmax and out.logits_TV is not None else out
        )


@pytest.mark.parametrize(
    "shape",
    [{}, {"logprobs": 0}, {"temperature": 0.7}, {"logit_bias": {3: 1.0}}, {"presence_penalty": 0.5}],
    ids=["plain", "logprobs", "sampled", "biased", "penalised"],
)
def test_only_what_nobody_reads_is_left_out(shape: dict[str, Any]) -> None:
    """Beside a plain neighbour and alone; a request that reads its logits gets them from its first token on."""
    target = _Sparing(vocab_size=258)
    params = SamplingParams(max_tokens=9, seed=1, **shape)
    for both in ([params], [SamplingParams(max_tokens=9), params]):
        seq = run(Engine(target, ByteTokenizer(), drafters(target)["sometimes"]), PROMPTS[: len(both)], both)[-1]
        (expected,) = run(Engine(byte_target(), ByteTokenizer()), [PROMPTS[len(both) - 1]], params)
        assert seq.output_ids == expected.output_ids
        assert [one.token_id for one in seq.logprobs] == (seq.output_ids if "logprobs" in shape else [])
    assert any(call.only_argmax for call in target.calls)


def test_a_long_prompt_does_not_stall_the_others() -> None:
    target = byte_target(num_rows=2, max_len=400)
    engine = Engine(target, ByteTokenizer(), prefill_chunk=10)
    quick = engine.add([1, 2], SamplingParams(max_tokens=60))
    engine.step()
    engine.add([3] * 300, SamplingParams(max_tokens=5))
    for _ in range(20):
        assert any(chunk.sequence.request_id == quick for chunk in engine.step())
    assert max(sum(call.counts) for call in target.calls) <= 10


@pytest.mark.parametrize(("of_target", "of_drafter", "during"), [(True, True, 1), (True, False, 2), (False, True, 2)])
def test_pytorch_s_threads_stay_out_of_the_way_of_others(
    monkeypatch: pytest.MonkeyPatch, of_target: bool, of_drafter: bool, during: int
) -> None:
    before, seen = torch.get_num_threads(), []
    target = byte_target()
    target.has_own_threads = of_target
    drafter = ScriptedDrafter(target, accuracy=0.5)
    drafter.has_own_threads = of_drafter
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda batch: (seen.append(torch.get_num_threads()), forward(batch))[1])
    try:
        torch.set_num_threads(2)
        run(Engine(target, ByteTokenizer(), drafter), PROMPTS[:1], SamplingParams(max_tokens=9))
        assert torch.get_num_threads() == 2 and set(seen) == {during}
    finally:
        torch.set_num_threads(before)


def test_requests_wait_when_the_cache_is_full_and_come_in_order() -> None:
    target = byte_target(num_rows=2)
    engine = Engine(target, ByteTokenizer(), drafters(target)["always"])
    for prompt in PROMPTS:
        engine.add(prompt, SamplingParams(max_tokens=6))
    assert len(engine.scheduler.waiting) == 3
    finished = [chunk.sequence.request_id for chunk in collect(engine) if chunk.finish_reason]
    assert sorted(finished) == [0, 1, 2, 3, 4]
    assert set(finished[:2]) == {0, 1}


def test_abort_frees_the_row_wherever_the_request_is() -> None:
    target = byte_target(num_rows=1, max_len=128)
    engine = Engine(target, ByteTokenizer(), drafters(target)["always"], prefill_chunk=4)
    running = engine.add([1, 2], SamplingParams(max_tokens=50))
    waiting = engine.add([3, 4], SamplingParams(max_tokens=50))
    last = engine.add([5] * 20, SamplingParams(max_tokens=2))
    engine.step()
    assert engine.abort(waiting) is not None
    assert engine.abort(running) is not None
    engine.check_integrity()
    engine.step()
    assert engine.scheduler.prefilling[0].request_id == last
    assert engine.abort(last) is not None
    engine.check_integrity()
    assert not engine.has_work
    assert engine.abort(last) is None


@pytest.mark.parametrize("where", ["start", "drop"])
def test_a_drafter_that_raises_loses_no_row(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = byte_target(num_rows=2, is_width_invariant=True)
    drafter = ScriptedDrafter(target)
    engine = Engine(target, ByteTokenizer(), drafter)
    running = engine.add([1, 2], SamplingParams(max_tokens=30))

    def broken(seq: Sequence) -> None:
        drafter.num_observed.pop(seq.row, None)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(drafter, where, broken)
        with pytest.raises(ZeroDivisionError):
            engine.abort(engine.add([3, 4]))
    engine.check_integrity()
    run(engine, [[5], [6]], SamplingParams(max_tokens=3))
    engine.check_integrity()
    assert not engine.has_work and engine.abort(running) is None and engine.pool.num_rows(engine.pool.default) == 0


def test_an_answer_whose_drafter_raises_at_its_end_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = byte_target(num_rows=2)
    engine = Engine(target, ByteTokenizer(), ScriptedDrafter(target))
    running = engine.add([1, 2], SamplingParams(max_tokens=30))
    broken = engine.add([3, 4], SamplingParams(max_tokens=9))
    with monkeypatch.context() as patch:
        patch.setattr(engine.drafter, "drop", lambda seq: 1 / 0 if seq.request_id == broken else None)
        chunks = [chunk for _ in range(20) for chunk in engine.step()]
    errors = {chunk.sequence.request_id: chunk.sequence.error for chunk in chunks if chunk.finish_reason}
    assert errors[running] is None and isinstance(errors[broken], ZeroDivisionError)
    own = [token for chunk in chunks if chunk.sequence.request_id == running for token in chunk.token_ids]
    assert own == target.greedy([1, 2], 30)


def test_mocked_acceptance_is_labelled() -> None:
    target = byte_target()
    drafter = ScriptedDrafter(target, num_drafted=7, accuracy=0.0)
    engine = Engine(target, ByteTokenizer(), drafter, judge=RuleJudge(mocked(4)))
    (seq,) = run(engine, [[1]], SamplingParams(max_tokens=41))
    assert not seq.lossless
    assert len(seq.rounds) == pytest.approx(10, abs=1)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "remedy"),
    [
        ([], SamplingParams(), PromptError, "at least one token"),
        ([300], SamplingParams(), PromptError, "vocabulary of 258"),
        ([1] * 60, SamplingParams(max_tokens=10), ContextLengthError, "raise max_len"),
        ([1], SamplingParams(logit_bias={999: 1.0}, max_tokens=4), SamplingError, "remove it"),
        ([1], SamplingParams(stop_token_ids=(-1,), max_tokens=4), SamplingError, "stop_token_ids names token -1"),
        ([1], SamplingParams(stop_token_ids=(5, 258), max_tokens=4), SamplingError, "remove it"),
    ],
)
def test_bad_requests_are_refused_at_the_door(
    prompt: list[int], params: SamplingParams, error: type[Exception], remedy: str
) -> None:
    engine = Engine(byte_target(max_len=64), ByteTokenizer())
    with pytest.raises(error, match=remedy):
        engine.add(prompt, params)
    assert not engine.has_work
    engine.check_integrity()


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"max_tokens": 0},
        {"stop": ("",)},
        {"seed": -1},
        {"logit_bias": {1: float("nan")}},
    ],
)
def test_impossible_sampling_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SamplingError):
        SamplingParams(**wrong)  # pyright: ignore[reportArgumentType]
