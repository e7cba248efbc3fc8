"""`min_tokens`, `bad_words`, stop tokens and scores of prompts: the same with and without drafts."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter
from engine_runs import byte_target, run
from small_llm import fake_llm

from paceline.draft.base import Drafter
from paceline.draft.ngram import NgramDrafter
from paceline.engine.engine import Engine
from paceline.engine.round import RuleJudge
from paceline.engine.shape import forbidden_ids, shape
from paceline.errors import PromptError, SamplingError
from paceline.types import SamplingParams, Sequence
from paceline.verify.rules import RULES

EOS = ByteTokenizer.eos_token_id
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]


def engine_of(target: FakeTarget, drafter: Drafter | None = None) -> Engine:
    return Engine(
        target, ByteTokenizer(), drafter, judge=RuleJudge(RULES["auto"]), eos_token_ids=(EOS,), prefill_chunk=3
    )


def drafter_of(name: str, target: FakeTarget) -> Drafter | None:
    accuracy = {"always": 1.0, "never": 0.0, "sometimes": 0.6}
    return (
        NgramDrafter()
        if name == "ngram"
        else ScriptedDrafter(target, accuracy=accuracy[name])
        if name in accuracy
        else None
    )


def answers(params: SamplingParams, name: str = "none") -> list[Sequence]:
    target = byte_target(num_rows=3)
    return run(engine_of(target, drafter_of(name, target)), PROMPTS, params)


SHAPES = {
    "min_tokens": SamplingParams(max_tokens=30, min_tokens=12, logit_bias={EOS: 8.0}),
    "stop_token_ids": SamplingParams(
        max_tokens=30, min_tokens=9, stop_token_ids=tuple(range(0, 256, 2)), ignore_eos=True
    ),
    "bad_words": SamplingParams(max_tokens=30, bad_words=("a", "\x01\x02", "b")),
    "both, seeded": SamplingParams(max_tokens=30, temperature=1.0, seed=5, min_tokens=20, bad_words=("z", "q")),
    "beside penalties": SamplingParams(max_tokens=30, min_tokens=20, frequency_penalty=0.5, bad_words=("e",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["always", "never", "sometimes", "ngram"])
@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_change_no_shaped_answer(name: str, shape: str) -> None:
    plain, drafted = answers(SHAPES[shape]), answers(SHAPES[shape], name)
    assert [seq.output_ids for seq in drafted] == [seq.output_ids for seq in plain]
    assert [seq.finish_reason for seq in drafted] == [seq.finish_reason for seq in plain]


@pytest.mark.parametrize("shape", [name for name in SHAPES if SHAPES[name].min_tokens])
def test_no_end_comes_before_min_tokens(shape: str) -> None:
    params = SHAPES[shape]
    ends = {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])}
    for seq in answers(params):
        assert seq.num_output > params.min_tokens or seq.finish_reason == "length"
        assert not ends & set(seq.output_ids[: params.min_tokens])
    early = SamplingParams(max_tokens=30, logit_bias={EOS: 1000.0})
    assert {seq.num_output for seq in answers(early)} == {1}


def test_bad_words_are_forbidden_as_sequences_of_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert forbidden_ids(tokenizer, SamplingParams(bad_words=(" no", "x"))) == (
        tuple(tokenizer.encode("no", False)),
        tuple(tokenizer.encode(" no", False)),
        tuple(tokenizer.encode("x", False)),
        tuple(tokenizer.encode(" x", False)),
    )
    assert forbidden_ids(tokenizer, SamplingParams(bad_words=("\n",))) == (
        tuple(tokenizer.encode("\n", False)),
        tuple(tokenizer.encode(" \n", False)),
    )
    assert SamplingParams(bad_words="no").bad_words == ("no",)  # pyright: ignore[reportArgumentType]
    (plain,) = run(engine_of(byte_target()), [[1, 2]], SamplingParams(max_tokens=40, ignore_eos=True))
    word = next(bytes(pair).decode() for pair in itertools.pairwise(plain.output_ids) if max(pair) < 128)
    (without,) = run(
        engine_of(byte_target()), [[1, 2]], SamplingParams(max_tokens=40, ignore_eos=True, bad_words=(word,))
    )
    assert word in tokenizer.decode(plain.output_ids) and word not in tokenizer.decode(without.output_ids)


def test_a_long_answer_is_not_read_again_each_round() -> None:
    class Counting(list[int]):
        num_read = 0

        def __getitem__(self, place: Any) -> Any:
            items = super().__getitem__(place)
            self.num_read += len(items) if isinstance(place, slice) else 1
            return items

        def __iter__(self) -> Any:
            self.num_read += len(self)
            return super().__iter__()

    seq = Sequence(0, Counting([1] * 5000), 2, SamplingParams(bad_words=("x",)))
    seq.forbidden = ((7,), (1, 1, 9), (2, 1, 8), (999,))
    shaped_JV = shape(seq, torch.zeros(3, 12), [1, 2])
    assert cast(Counting, seq.tokens).num_read <= 2
    expected_JV = torch.zeros(3, 12)
    expected_JV[:, 7] = expected_JV[:2, 9] = float("-inf")
    assert torch.equal(shaped_JV, expected_JV)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "must not exceed max_tokens"),
        ({"bad_words": ("",)}, "bad_words must be no empty string"),
        ({"bad_words": (" ",)}, "bad_words must be no empty string and not only spaces"),
        ({"min_tokens": -1}, "min_tokens must be 0 or more"),
        ({"min_tokens": 2, "lossy": "typical:eps=0.09,delta=0.3"}, "lossy does not go with min_tokens"),
    ],
)
def test_what_cannot_hold_is_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        SamplingParams(**params)  # pyright: ignore[reportArgumentType]


def test_a_stop_string_that_is_a_special_token_ends_the_answer() -> None:
    params = SamplingParams(max_tokens=20, stop=("<bos>",), logit_bias={256: 1000.0})
    (seq,) = run(engine_of(byte_target()), [[1]], params)
    assert (seq.finish_reason, seq.output_ids) == ("stop", [256])
    with pytest.raises(SamplingError, match="special token '<bos>'"):
        engine_of(byte_target()).add([1], SamplingParams(stop=("x<bos>",)))


@pytest.mark.parametrize("name", ["none", "sometimes"])
def test_scores_of_a_prompt_are_the_targets_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = byte_target(num_rows=2)
    prompt = [(7 * place) % 90 for place in range(40)]
    engine = engine_of(target, drafter_of(name, target))
    params = SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=0)
    batched, logsumexp = list[int](), torch.logsumexp

    def watched(logits_TV: torch.Tensor, *more: Any) -> torch.Tensor:
        batched.append(len(logits_TV))
        return logsumexp(logits_TV, *more)

    monkeypatch.setattr(torch, "logsumexp", watched)
    run(engine, [prompt], SamplingParams(max_tokens=3))  # leaves the prompt in the cache
    for seq in run(engine, [prompt, prompt[:20]], params):
        expected = [
            torch.log_softmax(target.logits_after(prompt[:place]).float(), -1) for place in range(1, seq.prompt_len)
        ]
        assert [each.token_id for each in seq.prompt_logprobs] == prompt[1 : seq.prompt_len]
        own = [float(scores[token]) for scores, token in zip(expected, prompt[1:], strict=False)]
        assert [each.logprob for each in seq.prompt_logprobs] == pytest.approx(own, abs=1e-4)
        assert all(len(each.top) == 2 and each.top[0][1] >= each.logprob - 1e-6 for each in seq.prompt_logprobs)
        assert len(seq.logprobs) == seq.num_output
        assert seq.output_ids == target.greedy(seq.tokens[: seq.prompt_len], 3)
    assert batched.count(3) >= 13 + 6, "a chunk of three tokens is scored at once"


def test_prompts_and_params_of_the_library_are_lists_of_one_length() -> None:
    llm, params = fake_llm(byte_target()), SamplingParams(max_tokens=2)
    [answer] = llm.generate(["a"], (params,))
    assert len(answer.token_ids) == 2
    for every in ((each for each in [params, params]), {1: params, 2: params}.values()):
        assert [len(each.token_ids) for each in llm.generate(["a", "b"], cast(Any, every))] == [2, 2]
    for ask in (lambda: llm.generate(cast(Any, "text")), lambda: llm.generate_ids(cast(Any, [1, 2]))):
        with pytest.raises(PromptError, match="as in"):
            ask()
    with pytest.raises(PromptError, match="messages"):
        llm.chat(cast(Any, [{"role": "user", "content": "a"}]))
    with pytest.raises(SamplingError, match="1 params for 2 prompts"):
        llm.generate(["a", "b"], [params])
    for wrong in ({"max_tokens": 2}, 5, "x", [{"max_tokens": 2}]):
        with pytest.raises(SamplingError, match=r"params must be SamplingParams\(\.\.\.\), not ({'max|5|'x')"):
            llm.generate(["a"], cast(Any, wrong))
    for call in (llm.generate, llm.chat):
        with pytest.raises(PromptError, match=r"give a list of (texts|conversations), as in \[.*\], not None"):
            call(cast(Any, None))
    with pytest.raises(PromptError, match="a prompt must be a text, not 1"):
        llm.generate(cast(Any, [1]))
    with pytest.raises(PromptError, match="a prompt must be a list of token ids"):
        llm.generate_ids(cast(Any, None))
    assert not llm.engine.has_work


def test_an_answer_of_the_library_has_the_scores_of_its_prompt() -> None:
    [with_scores, without] = fake_llm(byte_target()).generate_ids(
        [[1, 2, 3], [1, 2, 3]], [SamplingParams(max_tokens=2, prompt_logprobs=1), SamplingParams(max_tokens=2)]
    )
    assert [each.token_id for each in with_scores.prompt_logprobs] == [2, 3] and without.prompt_logprobs == []
