"""The law by which drafts of a sampled request stand, given its text: against every outcome of a round, counted up."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from adapt_requests import request
from checked_rows import checked
from doubles import ScriptedDrafter
from scored import FASTEST, dflash, prompts, served, tiny_llm
from small_llm import Talker, fake_llm
from torch import Tensor

from paceline.engine.llm import LLM
from paceline.loop.adapt.gate import score as module
from paceline.loop.adapt.gate.score import Scorer, score
from paceline.model.sampling.logits import penalise, target_probs
from paceline.model.target import ForwardBatch
from paceline.rng import ACCEPT
from paceline.types import GrammarSpec, SamplingParams, Sequence
from paceline.verify import rules

TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1], [0.3, 0.3, 0.4]], dtype=torch.float64)
DRAFT = torch.tensor([[0.2, 0.7, 0.1], [0.6, 0.1, 0.3], [0.1, 0.2, 0.7]], dtype=torch.float64)
"""Probabilities at three positions [3, V]; none depends on the tokens before."""


def standing(rule: str, drafts: list[int], target_JV: Tensor) -> list[float]:
    """P(exactly n of these drafts stand), n = 0 .. K, as the rule's own parts say."""
    if rule == "rejection":
        each = rules.accept_probs(drafts, DRAFT, target_JV)
        before = [1.0, *itertools.accumulate(each, lambda left, chance: left * chance)]
        return [stood * (1 - chance) for stood, chance in zip(before, [*each, 0.0], strict=True)]
    prefix, row = rules.prefix_probs(drafts, DRAFT, target_JV), checked(drafts, DRAFT, target_JV, rules.Uniforms(0, 0))
    masses = [float(rules.residual_after(row, n, target_JV, prefix[n]).sum()) for n in range(len(drafts))]
    chances = [1.0, *(rules.stop_prob(prefix[n], masses[n]) for n in range(1, len(drafts))), prefix[-1]]
    left, cumulative = 1.0, list[float]()
    for chance in reversed(chances):
        cumulative.append(left * chance)
        left *= 1 - chance
    return cumulative[::-1]


def counted_up(rule: str, text: tuple[int, ...]) -> list[float]:
    """P(at least i drafts stand | the text), i = 1 .. K: all drafts, all numbers that stand, and what follows them."""
    num_slots = len(text)
    target_JV = torch.cat([TARGET, TARGET[:1]])
    joint = [0.0] * (num_slots + 1)
    for drafts in itertools.product(range(3), repeat=num_slots):
        drawn = float(DRAFT[range(num_slots), list(drafts)].prod())
        prefix = rules.prefix_probs(list(drafts), DRAFT, target_JV) if rule == "block" else [1.0] * (num_slots + 1)
        row = checked(list(drafts), DRAFT, target_JV, rules.Uniforms(0, 0))
        for number, chance in enumerate(standing(rule, list(drafts), target_JV)):
            if drafts[:number] != text[:number]:
                continue
            follows = 1.0
            if number < num_slots:
                residual_V = rules.residual_after(row, number, target_JV, prefix[number])
                mass = float(residual_V.sum())
                follows = float(residual_V[text[number]]) / mass if mass else 0.0
                follows *= float(TARGET[range(number + 1, num_slots), list(text[number + 1 :])].prod())
            joint[number] += drawn * chance * follows
    total = float(TARGET[range(num_slots), list(text)].prod())
    assert sum(joint) == pytest.approx(total), "the rule keeps the target's distribution"
    return [sum(joint[i:]) / total for i in range(1, num_slots + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_drafts_stand_as_often_as_all_outcomes_together_say(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of the 27 texts of three tokens: the number against which the scorer holds each i."""
    scorer = Scorer.__new__(Scorer)
    scorer._drafter, scorer._rule = dflash(0), rules.RULES[rule]
    monkeypatch.setattr(
        Scorer, "_target_probs", lambda _, answer, text_ids: [float(TARGET[at, one]) for at, one in enumerate(text_ids)]
    )
    for text in itertools.product(range(3), repeat=3):
        answer = cast(Any, SimpleNamespace(rest=list(text), seq=SimpleNamespace(seed=0, cached_len=0)))

        def stand(drawn: float, answer: Any = answer) -> int:
            monkeypatch.setattr(module, "uniform", lambda *place: drawn)
            return scorer._num_accepted(answer, [0, 0, 0], DRAFT)

        for number, expected in enumerate(counted_up(rule, text), start=1):
            low, high = 0.0, 1.0
            for _ in range(40):
                middle = (low + high) / 2
                low, high = (middle, high) if stand(middle) >= number else (low, middle)
            assert low == pytest.approx(expected, abs=1e-9), text


@pytest.mark.slow
def test_every_round_has_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the round's anchor: its place in prompt and answer, as when a request is served."""
    llm = tiny_llm(FASTEST, rule="rejection")
    seq = served(llm, dflash(0), [(prompts(1)[0], SamplingParams(max_tokens=24, temperature=1.0))])[0]
    recorded = request(prompt_ids=seq.tokens[: seq.prompt_len], answer_ids=seq.output_ids, params=seq.params, seed=77)
    places = list[tuple[int, ...]]()
    monkeypatch.setattr(module, "uniform", lambda *place: places.append(place) or 0.999)
    [scored] = score(llm, dflash(3), [recorded])
    anchor, expected = len(recorded.prompt_ids), list[tuple[int, ...]]()
    for one in scored.rounds:
        expected += [(77, ACCEPT, anchor)] if one.num_drafted else []
        anchor += 1 + one.num_accepted
    assert places == expected and len(set(places)) == len(places) > 5


def seen_chances(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[float]]]:
    """(place in the answer, the target's chances from there on) of every round that is scored from now on."""
    seen, real = list[tuple[int, list[float]]](), Scorer._target_probs

    def chances(self: Scorer, answer: Any, tokens: list[int]) -> list[float]:
        values = real(self, answer, tokens)
        seen.append((answer.at + 1, values))
        return values

    monkeypatch.setattr(Scorer, "_target_probs", chances)
    return seen


def one_by_one(llm: LLM, seq: Sequence) -> list[float]:
    """The target's chance of each token of an answer, each read by itself, penalties and all."""
    row, probs = llm.target.cache.allocate(), list[float]()
    assert row is not None
    with torch.inference_mode():
        for place, token in enumerate(seq.tokens):
            if place >= seq.prompt_len:
                answer = seq.tokens[seq.prompt_len : place]
                logits_JV = penalise(logits_JV.float(), seq.params, seq.tokens[:place], Counter(answer), [])  # noqa: F821
                probs.append(float(target_probs(logits_JV, seq.params)[0, token]))
            logits_JV = llm.target.forward(ForwardBatch([row], [place], [1], [token], "last")).logits_TV
            assert logits_JV is not None
    llm.target.cache.free(row)
    return probs


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"frequency_penalty": 0.9},
        {"repetition_penalty": 1.6, "presence_penalty": 0.5},
        {"temperature": 0.7, "top_p": 0.9, "logit_bias": {3: 1.5}},
    ],
)
def test_the_targets_chances_are_those_of_the_request(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(FASTEST, rule="rejection")
    params = SamplingParams(**{"max_tokens": 24, "temperature": 1.0, "ignore_eos": True} | changes)
    seq = served(llm, dflash(0), [(prompts(1)[0], params)])[0]
    expected, seen = one_by_one(llm, seq), seen_chances(monkeypatch)
    score(llm, dflash(0), [request(prompt_ids=seq.tokens[: seq.prompt_len], answer_ids=seq.output_ids, params=params)])
    assert len(seen) > 5
    for place, chances in seen:
        assert chances == pytest.approx(expected[place : place + len(chances)], rel=1e-4, abs=1e-6)


def test_a_grammar_leaves_no_chance_to_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fake_llm(Talker(), speculate="full")
    params = SamplingParams(max_tokens=30, temperature=1.0, grammar=GrammarSpec("regex", "(ab|cd) and then the end"))
    drafter = ScriptedDrafter(cast(Any, llm.target), accuracy=0.7)
    seq = served(llm, drafter, [(list(b"Go"), params)])[0]
    assert bytes(seq.output_ids[2:-1]) == b" and then the end"
    monkeypatch.setattr(module, "DFlashDrafter", ScriptedDrafter)
    seen = seen_chances(monkeypatch)
    drawing = ScriptedDrafter(cast(Any, llm.target), accuracy=0.7, with_probs=True)
    score(llm, drawing, [request(prompt_ids=list(b"Go"), answer_ids=seq.output_ids, params=params, seed=seq.seed)])
    forced = [chance for place, chances in seen for chance in chances[max(2 - place, 0) :]]
    assert len(forced) > 10 and forced == pytest.approx([1.0] * len(forced))
