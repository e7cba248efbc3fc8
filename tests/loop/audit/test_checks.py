"""Findings and verdicts from evidence that is written down here; and errors that say what to do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from upstream import answering, whole

from paceline.config import EngineConfig
from paceline.errors import ConfigError, DownloadError, ModelNotFoundError
from paceline.loop.audit import checks
from paceline.loop.audit.answers import AnswerReader
from paceline.loop.audit.checks import Finding, Stop, Usage
from paceline.loop.audit.config import TOLERANCES, AuditConfig
from paceline.loop.audit.evidence import SLOPES, Draw, Group, buckets, detectable, judged
from paceline.loop.audit.run import audit, stop_in
from paceline.loop.audit.scores import scores_of
from paceline.model.text.tokenizer import Tokenizer
from paceline.net.streaming import Client, served_model, served_name

LOGITS_TV = 2.0 * torch.randn(3, 20, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_scores_are_sums_over_the_distribution(top_p: float) -> None:
    """And E has the expectation 1: exp(l * surprisal - cgf), weighed by p, sums to 1."""
    every = [scores_of(LOGITS_TV[:1], [token], 0.7, top_p) for token in range(20)]
    probs = np.exp([-float(each.nll_T[0]) for each in every])
    assert probs.sum() == pytest.approx(1, abs=1e-5)
    kept = [(each, prob) for each, prob in zip(every, probs, strict=True) if prob > 0]
    mean = sum(prob * each.nll_T[0] for each, prob in kept)
    assert every[0].entropy_T[0] == pytest.approx(mean, abs=1e-5)
    assert every[0].variance_T[0] == pytest.approx(
        sum(prob * (each.nll_T[0] - mean) ** 2 for each, prob in kept), abs=1e-5
    )
    for place, slope in enumerate(SLOPES):
        mass = sum(prob * math.exp(slope * each.nll_T[0] - each.cgf_TL[0, place]) for each, prob in kept)
        assert mass == pytest.approx(1, abs=1e-4)
    for name, (_, chance_T) in every[0].binary.items():
        assert sum(prob * each.binary[name][0][0] for each, prob in kept) == pytest.approx(chance_T[0], abs=1e-5)
    if top_p < 1:
        outside = [each for each, prob in zip(every, probs, strict=True) if prob == 0]
        assert outside and all(each.before_T[0] >= top_p for each in outside)
        assert all(each.before_T[0] < top_p for each, _ in kept) and "cut" in every[0].binary


def draw_of(tokens: list[int], prompt: int = 0) -> Draw:
    return Draw(prompt, tuple(tokens), scores_of(LOGITS_TV[: len(tokens)], tokens, 1.0, tie=0.02))


def test_answers_that_are_all_the_same_are_no_draws() -> None:
    tokens = [7, 11, 3]
    group = Group("one", 1.0, draws=[draw_of(tokens) for _ in range(12)])
    (repeated,) = [each for each in judged([group], 0.0, 0.01) if each.statistic == "equal answers"]
    assert repeated.is_fault and repeated.seen == 1 and repeated.num_tokens == 66
    other = Group("two", 1.0, draws=[draw_of([index, 11, 3]) for index in range(12)])
    assert not any(each.is_fault and each.statistic == "equal answers" for each in judged([other], 0.0, 0.01))


def test_buckets_cover_every_place_once() -> None:
    for longest in (1, 2, 3, 17, 32):
        places = [place for first, last in buckets(longest) for place in range(first, last + 1)]
        assert places == list(range(longest))


@pytest.mark.slow
def test_a_shift_that_would_have_been_found_shrinks_with_the_answers() -> None:
    few, many = (
        Group("one", 1.0, draws=[draw_of([index % 20, 11, 3]) for index in range(count)]) for count in (20, 80)
    )
    shifts = []
    for group in (few, many):
        tests = judged([group], 0.0, 0.01)
        assert (tests[0].statistic, tests[0].positions) == ("surprisal", "all")
        shifts.append(detectable(tests[0], 10, 0.0, 0.01))
    assert shifts[1] == pytest.approx(shifts[0] / 2) and detectable(tests[0], 10, 0.05, 0.01) == pytest.approx(
        shifts[1] + 0.05
    )


def test_greedy_near_ties_are_told_and_no_fault() -> None:
    best = LOGITS_TV.argmax(-1).tolist()
    second = int(LOGITS_TV[1].topk(2).indices[1])
    gap = float(LOGITS_TV[1].topk(2).values.diff().abs())
    same, tied = checks.greedy([draw_of(best)], 0.5), checks.greedy([draw_of([best[0], second, best[2]])], gap + 0.1)
    far = checks.greedy([draw_of([best[0], second, best[2]], prompt=4)], gap - 0.1)
    assert same.outcome == tied.outcome == "passed" and "near ties" in tied.text
    assert far.outcome == "fault" and "prompt 5 at token 2" in far.text
    assert far.figures["first"] == [{"prompt": 4, "position": 2, "gap": pytest.approx(gap)}]
    assert checks.greedy([], 0.5, 3).outcome == "not judged"


def test_seeds() -> None:
    assert checks.seeds([("a", "a"), ("b", "b")]).outcome == "passed"
    assert checks.seeds([("a", "a"), ("b", "c")]).outcome == "note"
    assert checks.seeds([("a", "b")]).outcome == checks.seeds([]).outcome == "not offered"


def test_logprobs_are_judged_by_their_median() -> None:
    near = [(-1.0, -1.01), (-2.0, -2.02), (-9.0, -8.0)] * 11
    assert checks.logprobs(near, 0.15).outcome == "passed" and checks.logprobs([], 0.15).outcome == "not offered"
    assert checks.logprobs([(reported - 0.5, own) for reported, own in near], 0.15).outcome == "fault"
    few = checks.logprobs([(-5.0, -1.0)] * 7, 0.15)
    assert few.outcome == "not judged" and "7 tokens, 32 are needed" in few.text


def test_stop_strings() -> None:
    kept, other = Stop("lo w", "hello world", "hel", "stop"), Stop("lo w", "hello world", "hi", "stop")
    assert checks.stops([kept, other]).outcome == "passed"
    assert checks.stops([other]).outcome == checks.stops([]).outcome == "not judged"
    assert checks.stops([Stop("lo w", "hello world", "hello world", "length")]).outcome == "fault"
    assert checks.stops([Stop("lo w", "hello world", "hel", "length")]).outcome == "fault"
    stop = stop_in("hello world, here I am")
    assert stop and stop in "hello world, here I am" and stop_in("a") is None


@pytest.mark.parametrize(
    ("counted", "outcome"),
    [
        (Usage(5, 5, 8, 8, 8, "length"), "passed"),
        (Usage(5, 5, 4, 3, 8, "stop"), "passed"),
        (Usage(5, 5, None, 8, 8, "length"), "passed"),
        (Usage(5, None, 8, None, 8, "length"), "not offered"),
        (Usage(5, 6, 8, 8, 8, "length"), "fault"),
        (Usage(5, 5, 8, 7, 8, "length"), "fault"),
        (Usage(5, 5, 9, 9, 8, "length"), "fault"),
        (Usage(5, 5, 4, 6, 8, "stop"), "fault"),
        (Usage(5, None, 9, None, 8, "stop"), "not offered"),  # with the end token
        (Usage(5, None, 10, None, 8, "stop"), "fault"),
        (Usage(5, 5, 300, 8, 8, "length"), "fault"),
    ],
)
def test_counts(counted: Usage, outcome: str) -> None:
    assert checks.usage([counted], False).outcome == outcome


def test_another_prompt_is_nothing_to_compare() -> None:
    assert checks.usage([Usage(5, 6, 8, 8, 8, "length")], True).outcome == "not judged"
    assert checks.usage([Usage(5, 6, 300, 300, 8, "length")], True).outcome == "not judged"


def test_verdicts() -> None:
    sampled, greedy = Finding("sampled", "passed", ""), Finding("greedy", "passed", "")
    assert checks.verdict_of([sampled, greedy, Finding("logprobs", "not offered", "")]) == "honest"
    assert checks.verdict_of([sampled]) == "honest"  # nobody asked for greedy answers
    assert checks.verdict_of([greedy]) == checks.verdict_of([sampled, Finding("greedy", "not judged", "")]) == "unsure"
    assert checks.verdict_of([sampled, greedy, *checks.declared_lossy(3)]) == "faulty"


def test_lost_answers_are_allowed_for() -> None:
    """With lost answers, evidence from the remaining ones must not count against the server."""
    draws = [draw_of(LOGITS_TV.argmax(-1).tolist(), prompt=index) for index in range(60)]
    whole_group, half = Group("a", 1.0, draws=draws), Group("a", 1.0, draws=draws, num_lost=60)
    kept, lost = (judged([each], 0.0, 0.01) for each in (whole_group, half))
    assert max(each.log_evidence for each in lost) < max(each.log_evidence for each in kept)
    assert any(each.is_fault for each in kept)
    few = judged([Group("a", 1.0, draws=draws[:1], num_lost=9)], 0.0, 0.01)
    assert checks.sampled([Group("a", 1.0, draws=draws[:1], num_lost=9)], few, 0.01)[0].outcome == "not judged"


def response(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": "length", **choice}], "usage": {"completion_tokens": 2}}


def test_tokens_of_an_answer(model: Path) -> None:
    tokenizer = Tokenizer.from_path(model)
    reader, (one, two), (end,) = AnswerReader(tokenizer), tokenizer.encode("ab"), tokenizer.eos_token_ids

    def ids(body: Any, has_stop: bool = False) -> list[int] | None:
        answer = reader.read(body, has_stop)
        assert answer is not None
        return answer.token_ids

    assert ids(response(text="ab")) == ids(response(text="x", token_ids=[one, two])) == [one, two]
    assert ids(response(message={"content": "ab"})) == [one, two]
    assert ids(response(text="ab", logprobs={"tokens": ["a", "b"], "token_logprobs": [-1, -2]})) == [one, two]
    assert ids(response(text="", logprobs={"content": [{"token": "token_id:5", "logprob": -1}]})) == [5]
    assert ids(response(text="abc")) is None  # three tokens where the server counts two
    assert ids(response(text="ab", token_ids=[10**6])) is None
    assert ids(response(text="ab", finish_reason="stop")) == [one, two, end]
    assert ids(response(text="ab", finish_reason="stop"), has_stop=True) == [one, two]
    assert ids(response(text="\ufffd", logprobs={"tokens": ["\ufffd"], "token_logprobs": [-1]})) is None
    assert ids(response(text="half \ud83d")) is None  # it ended the audit with a PromptError
    assert ids(response(text="ab", logprobs={"content": [{"token": ["a"], "logprob": -1}] * 2})) is None  # a TypeError
    assert reader.read({"choices": []}, False) is None and reader.read("no", False) is None


def test_no_server_is_one_line(model: Path) -> None:
    with pytest.raises(DownloadError, match="there is no server at http://127.0.0.1:9"):
        audit("http://127.0.0.1:9", EngineConfig(model=str(model)))
    with pytest.raises(ConfigError, match="is no address"):
        audit("ftp://x", EngineConfig(model=str(model)))
    with pytest.raises(ConfigError, match="answers must be at least 1"):
        AuditConfig(answers=0)


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        ("401 No", {}, ConfigError, "wants an API key: give the right one with --api-key"),
        ("200 OK", {"data": [{"id": "big"}]}, ModelNotFoundError, "choose --served-name from big"),
        ("404 No", {}, None, ""),
    ],
)
def test_servers_that_cannot_be_asked(status: str, body: Any, kind: Any, message: str) -> None:
    with answering(lambda _: whole(body, status=status)) as upstream:
        client = Client(upstream.url, keeps=False)
        if kind is None:
            assert served_name(client, "small") == "small"  # a server without the list, and a name that was given
            with pytest.raises(ConfigError, match="name its model with --served-name"):
                served_name(client, None)
        else:
            with pytest.raises(kind, match=message):
                served_name(client, "small")
        client.close()


@pytest.mark.parametrize("owner", [{}, {"owned_by": None}])
def test_a_model_without_an_owner_has_an_empty_one(owner: dict[str, None]) -> None:
    with answering(lambda _: whole({"data": [{"id": "small", **owner}]})) as upstream:
        client = Client(upstream.url, keeps=False)
        assert served_model(client, None) == ("small", "")
        client.close()


def test_rounding_grows_from_precision_to_precision() -> None:
    exact, half, quantised = TOLERANCES.values()
    for name in exact.__slots__:
        assert getattr(exact, name) < getattr(half, name) < getattr(quantised, name)
