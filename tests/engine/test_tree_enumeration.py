"""Trees under every sampling option, by enumeration over a small vocabulary; mistakes on purpose must be seen.

Decoding is a function of one number for each token at each position of the answer: the token wins whose number over its
probability is the least (`model/sampling/race.py`). For every answer that the target can give, numbers are told with
which plain decoding gives it: at each position its token wins by far, or hardly. The engine with trees, given either,
must say that answer: then it says each with the target's probability, since races of exponential numbers are won with
it (`test_race.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from doubles import ByteTokenizer, FakeTarget, TreeDrafter
from engine_runs import run
from torch import Tensor

from paceline.engine import round as decode
from paceline.engine.engine import Engine
from paceline.engine.round import RuleJudge
from paceline.model.sampling.logits import penalise, target_probs
from paceline.model.sampling.race import race
from paceline.plan.planner import FixedPlanner, Plan
from paceline.plan.trees import Tree
from paceline.rng import Noise
from paceline.types import DraftBlock, SamplingParams, Sequence
from paceline.verify.rules import Uniforms

pytestmark = pytest.mark.slow

VOCAB, NUM_TOKENS, PROMPT, EDGE = 4, 4, [1, 2], 1e-3
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalised": {"repetition_penalty": 1.5, "frequency_penalty": 0.7},
    "plain": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 2},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
    "biased": {"temperature": 1.0, "logit_bias": {1: 0.9, 3: -float("inf")}},
    "everything": {
        "temperature": 1.3,
        "top_p": 0.95,
        "min_p": 0.02,
        "top_k": 3,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logit_bias": {1: 0.6, 2: -0.4},
    },
}
Answers = dict[tuple[int, ...], list[list[float]]]


def target_of() -> FakeTarget:
    return FakeTarget(vocab_size=VOCAB, sharpness=1.2, num_rows=16, max_len=32)


@cache
def answers_of(way: str) -> Answers:
    """Every answer that plain decoding can give, with the probabilities of all tokens at each of its positions."""
    target, params = target_of(), SamplingParams(**WAYS[way])
    answers: Answers = {(): []}
    for _ in range(NUM_TOKENS):
        longer: Answers = {}
        for answer, before in answers.items():
            tokens = PROMPT + list(answer)
            logits_1V = penalise(target.logits_after(tokens)[None].clone(), params, tokens, Counter(answer), [])
            probs = target_probs(logits_1V, params)[0].double() if not params.is_greedy else torch.zeros(VOCAB).double()
            if params.is_greedy:
                probs[logits_1V[0].argmax()] = 1.0
            shares = (probs / probs.sum()).tolist()
            longer |= {(*answer, token): [*before, shares] for token, share in enumerate(shares) if share > 0}
        answers = longer
    return answers


class Wide(FixedPlanner):
    """Trees of ten drafts."""

    def __init__(self) -> None:
        super().__init__(num_nodes=10)


def numbers_for(winner: int, shares: list[float], lead: float) -> list[float]:
    """Numbers with which this token wins: all others come in together at 1, those that cannot be drawn sooner."""
    return [share * (lead if token == winner else 1.0) if share else lead / 2 for token, share in enumerate(shares)]


def matches(
    way: str, monkeypatch: pytest.MonkeyPatch, planner: FixedPlanner | None = None, accuracy: float = 0.7
) -> list[bool]:
    """Check that the engine gives each answer, with race numbers by which its tokens win narrowly, and clearly."""
    cases = [(answer, shares) for answer, shares in answers_of(way).items() for _ in range(2)]
    numbers = [
        [numbers_for(token, each, EDGE if index % 2 else 1 - EDGE) for token, each in zip(answer, shares, strict=True)]
        for index, (answer, shares) in enumerate(cases)
    ]
    right = Noise.exponentials

    def exponentials(noise: Noise, tokens: list[int]) -> list[float]:
        is_own = noise.seed < len(numbers) and 0 <= noise.position - len(PROMPT) < NUM_TOKENS
        return (
            [numbers[noise.seed][noise.position - len(PROMPT)][each] for each in tokens]
            if is_own
            else right(noise, tokens)
        )

    monkeypatch.setattr(Noise, "exponentials", exponentials)
    target = target_of()
    drafter = TreeDrafter(target, num_drafted=3, width=3, accuracy=accuracy)
    engine = Engine(target, ByteTokenizer(), drafter, planner=planner or Wide())
    params = [SamplingParams(**WAYS[way], seed=seed, max_tokens=NUM_TOKENS) for seed in range(len(cases))]
    done = run(engine, [PROMPT] * len(cases), params)
    accepted = sum(each.num_accepted for seq in done for each in seq.rounds)
    assert accepted > 0, "else nothing was proved"
    return [tuple(seq.output_ids) == answer for seq, (answer, _) in zip(done, cases, strict=True)]


@pytest.mark.parametrize("way", WAYS)
def test_every_answer_comes_with_its_probability(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = answers_of(way)
    masses = [
        math.prod(each[token] for token, each in zip(answer, shares, strict=True)) for answer, shares in answers.items()
    ]
    assert sum(masses) == pytest.approx(1.0, abs=1e-5)
    assert len(answers) == 1 if WAYS[way].get("temperature") is None else len(answers) > 10
    assert all(matches(way, monkeypatch))


# Mistakes. Each is a change of one place of the engine, and takes effect in the way that is named with it.


def keyed_by_node(patch: pytest.MonkeyPatch) -> None:
    """The number is that of the node in its tree, not of the token's position."""

    def wrong(judge: RuleJudge, seq: Sequence, path: list[int], slots: list[int], logits_JV: Tensor) -> int:
        return race(logits_JV[slots[-1]], seq.params, Uniforms.of(seq).noise(slots[-1]))

    patch.setattr(RuleJudge, "_draw", wrong)


def one_number_for_a_round(patch: pytest.MonkeyPatch) -> None:
    """Every token of a round is drawn with the number of its first."""

    def wrong(judge: RuleJudge, seq: Sequence, path: list[int], slots: list[int], logits_JV: Tensor) -> int:
        return race(logits_JV[slots[-1]], seq.params, Uniforms.of(seq).noise(0))

    patch.setattr(RuleJudge, "_draw", wrong)


def siblings_logits(patch: pytest.MonkeyPatch) -> None:
    """Behind a draft the logits of the node beside it are read."""

    def wrong(judge: RuleJudge, seq: Sequence, path: list[int], slots: list[int], logits_JV: Tensor) -> int:
        slot = min(slots[-1] + (len(slots) > 1), len(logits_JV) - 1)
        return race(logits_JV[slot], seq.params, Uniforms.of(seq).noise(len(path)))

    patch.setattr(RuleJudge, "_draw", wrong)


def wrong_ancestor(patch: pytest.MonkeyPatch) -> None:
    """The pass hangs the second slot's nodes on a sibling of their parent."""

    def wrong(draft: DraftBlock) -> list[int]:
        hung: list[int] = []
        for tokens, tree in zip(draft.tokens_B, draft.trees_B or [], strict=True):
            parents = list(range(-1, len(tokens) - 1)) if tree is None else tree.parents
            siblings = [node for node, parent in enumerate(parents) if parent < 0]
            moved = [
                next((each for each in siblings if each != parent and each < node), parent)
                if parent in siblings
                else parent
                for node, parent in enumerate(parents)
            ]
            hung += [-1, *(parent + 1 for parent in moved)]
        return hung

    patch.setattr(decode, "_parents", wrong)


def padded(tree: Tree) -> Tree:
    """With one more token of each kind behind its first node, in the places of its own children."""
    more = list(range(VOCAB))
    ranks, gains = [*tree.ranks, *[1] * VOCAB], [*tree.gains, *[0.0] * VOCAB]
    return Tree([*tree.tokens, *more], [*tree.parents, *[0] * VOCAB], ranks, gains, [*tree.logprobs, *[0.0] * VOCAB])


class Padded(Wide):
    """Trees that are filled up with VOCAB tokens behind the first node."""

    def narrow(self, plan: Plan, confidence_B: Any, candidates_B: Any = None) -> list[int | Tree]:
        widths = super().narrow(plan, confidence_B, candidates_B)
        return [padded(tree) if isinstance(tree, Tree) and tree.tokens else tree for tree in widths]


def reachable_padding(patch: pytest.MonkeyPatch) -> None:
    """The pass computes padding apart, behind the anchor; the judge walks into it all the same."""
    right = decode._parents

    def wrong(draft: DraftBlock) -> list[int]:
        parents, begin = right(draft), 0
        for tokens, tree in zip(draft.tokens_B, draft.trees_B or [], strict=True):
            end = begin + 1 + len(tokens)
            if tree is not None:
                parents[end - VOCAB : end] = [0] * VOCAB
            begin = end
        return parents

    patch.setattr(decode, "_parents", wrong)


MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], type[FixedPlanner]]] = {
    "keyed by node": (keyed_by_node, Wide),
    "one number for a round": (one_number_for_a_round, Wide),
    "sibling's logits": (siblings_logits, Wide),
    "wrong ancestor": (wrong_ancestor, Wide),
    "reachable padding": (reachable_padding, Padded),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake, planner = MISTAKES[name]
    mistake(monkeypatch)
    assert not all(matches("top-p", monkeypatch, planner(), accuracy=1.0))


def test_padding_that_the_pass_knows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(matches("plain", monkeypatch, Padded(), accuracy=1.0))
