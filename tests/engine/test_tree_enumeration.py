"""Trees under every sampling option, by enumeration over a small vocabulary; mistakes on purpose must be seen.

Decoding is a function of one number for each position of the answer. For every answer that the target can give, the numbers
are told for which plain decoding gives it: intervals, whose lengths multiply to its probability. The engine with trees, given
the lowest and the highest numbers of these intervals, must say that answer: then it says each with the target's probability,
since the token at a position does not fall as its number rises (inverse transform sampling).
"""

from __future__ import annotations

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
from paceline.model.logits import draw, penalise, target_probs
from paceline.plan import FixedPlanner, Plan
from paceline.rng import SAMPLE, uniform
from paceline.trees import Tree
from paceline.types import DraftBlock, SamplingParams, Sequence
from paceline.verify import rules
from paceline.verify.rules import Uniforms

VOCAB, NUM_TOKENS, PROMPT, EDGE = 4, 4, [1, 2], 1e-3
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalised": {"repetition_penalty": 1.5, "frequency_penalty": 0.7},
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.7},
    "top-k": {"temperature": 1.0, "top_k": 2},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
    "penalised": {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
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
Answers = dict[tuple[int, ...], list[tuple[float, float]]]


def target_of() -> FakeTarget:
    return FakeTarget(vocab_size=VOCAB, sharpness=1.2, num_rows=16, max_len=32)


@cache
def answers_of(way: str) -> Answers:
    """Every answer that plain decoding can give, with the interval of the number at each position for which it does."""
    target, params = target_of(), SamplingParams(**WAYS[way])
    found: Answers = {(): []}
    for _ in range(NUM_TOKENS):
        longer: Answers = {}
        for answer, intervals in found.items():
            tokens = PROMPT + list(answer)
            logits_1V = penalise(target.logits_after(tokens)[None].clone(), params, tokens, Counter(answer), [])
            low = 0.0
            probs = target_probs(logits_1V, params)[0].double() if not params.is_greedy else torch.zeros(VOCAB).double()
            if params.is_greedy:
                probs[logits_1V[0].argmax()] = 1.0
            for token, share in enumerate((probs / probs.sum()).tolist()):
                if share > 0:
                    longer[(*answer, token)] = [*intervals, (low, low + share)]
                low += share
        found = longer
    return found


class Wide(FixedPlanner):
    """Trees of ten drafts."""

    def __init__(self) -> None:
        super().__init__(num_nodes=10)


def said(way: str, monkeypatch: pytest.MonkeyPatch, planner: FixedPlanner | None = None, accuracy: float = 0.7) -> list[bool]:
    """Of each answer whether the engine gives it, with the lowest numbers of its intervals and with the highest."""
    known = [(answer, edges) for answer, edges in answers_of(way).items() for _ in range(2)]
    numbers = [
        [low + (EDGE if index % 2 else 1 - EDGE) * (high - low) for low, high in edges]
        for index, (_, edges) in enumerate(known)
    ]

    def told(seed: int, stream: int, position: int, slot: int = 0) -> float:
        own = stream == SAMPLE and seed < len(numbers) and 0 <= position - len(PROMPT) < NUM_TOKENS
        return numbers[seed][position - len(PROMPT)] if own else uniform(seed, stream, position, slot)

    monkeypatch.setattr(rules, "uniform", told)
    target = target_of()
    drafter = TreeDrafter(target, num_drafted=3, width=3, accuracy=accuracy)
    engine = Engine(target, ByteTokenizer(), drafter, planner=planner or Wide())
    params = [SamplingParams(**WAYS[way], seed=seed, max_tokens=NUM_TOKENS) for seed in range(len(known))]
    done = run(engine, [PROMPT] * len(known), params)
    accepted = sum(each.num_accepted for seq in done for each in seq.rounds)
    assert accepted > 0, "else nothing was proved"
    return [tuple(seq.output_ids) == answer for seq, (answer, _) in zip(done, known, strict=True)]


@pytest.mark.parametrize("way", WAYS)
def test_every_answer_comes_with_its_probability(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = answers_of(way)
    masses = [torch.tensor([high - low for low, high in edges]).prod().item() for edges in found.values()]
    assert sum(masses) == pytest.approx(1.0, abs=1e-5)
    assert len(found) == 1 if WAYS[way].get("temperature") is None else len(found) > 10
    assert all(said(way, monkeypatch))


# Mistakes. Each is a change of one place of the engine, and takes effect in the way that is named with it.


def keyed_by_node(patch: pytest.MonkeyPatch) -> None:
    """The number is that of the node in its tree, not of the token's position."""

    def wrong(judge: RuleJudge, seq: Sequence, path: list[int], slots: list[int], logits_JV: Tensor) -> int:
        return draw(logits_JV[slots[-1]], seq.params, Uniforms.of(seq).sample(slots[-1]))

    patch.setattr(RuleJudge, "_draw", wrong)


def one_number_for_a_round(patch: pytest.MonkeyPatch) -> None:
    """Every token of a round is drawn with the number of its first."""

    def wrong(judge: RuleJudge, seq: Sequence, path: list[int], slots: list[int], logits_JV: Tensor) -> int:
        return draw(logits_JV[slots[-1]], seq.params, Uniforms.of(seq).sample(0))

    patch.setattr(RuleJudge, "_draw", wrong)


def siblings_logits(patch: pytest.MonkeyPatch) -> None:
    """Behind a draft the logits of the node beside it are read."""

    def wrong(judge: RuleJudge, seq: Sequence, path: list[int], slots: list[int], logits_JV: Tensor) -> int:
        slot = min(slots[-1] + (len(slots) > 1), len(logits_JV) - 1)
        return draw(logits_JV[slot], seq.params, Uniforms.of(seq).sample(len(path)))

    patch.setattr(RuleJudge, "_draw", wrong)


def wrong_ancestor(patch: pytest.MonkeyPatch) -> None:
    """The pass hangs the second slot's nodes on a sibling of their parent."""

    def wrong(draft: DraftBlock) -> list[int]:
        hung: list[int] = []
        for tokens, tree in zip(draft.tokens_B, draft.trees_B or [], strict=True):
            parents = list(range(-1, len(tokens) - 1)) if tree is None else tree.parents
            siblings = [node for node, parent in enumerate(parents) if parent < 0]
            moved = [
                next((each for each in siblings if each != parent and each < node), parent) if parent in siblings else parent
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

    def narrow(self, plan: Plan, sure_B: Any, candidates_B: Any = None) -> list[int | Tree]:
        widths = super().narrow(plan, sure_B, candidates_B)
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
@pytest.mark.parametrize("way", ["plain", "top-p"])
def test_a_mistake_is_seen(way: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake, planner = MISTAKES[name]
    mistake(monkeypatch)
    found = said(way, monkeypatch, planner(), accuracy=1.0)
    assert not all(found)


def test_padding_that_the_pass_knows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(said("plain", monkeypatch, Padded(), accuracy=1.0))
