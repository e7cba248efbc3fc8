"""Losslessness, the whole way: rounds follow rounds until three tokens stand, and the text must be distributed as the target's.

Once by enumeration (every draft, every outcome, in float64) and once by chi-square through the real functions with the real
uniform streams, which also sees a draw used twice. Target and drafter are tables that depend on the whole context.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from checked_rows import Verify, checked
from scipy.stats import chi2
from torch import Tensor

from paceline.model.logits import penalise, sample, target_probs
from paceline.rng import DRAFT, uniform
from paceline.types import SamplingParams
from paceline.verify import lossless
from paceline.verify.rule import CheckedRow, RowVerdict, Uniforms

VOCAB, NUM_TOKENS, PROMPT = 5, 3, (0, 2)
Context = tuple[int, ...]
Table = Callable[[Context], Tensor]

PLAIN = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=0.8, top_p=0.9, min_p=0.03, top_k=4)
EVERYTHING = SamplingParams(
    temperature=1.3,
    top_p=0.95,
    min_p=0.02,
    top_k=4,
    repetition_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=0.7,
    logit_bias={1: 0.6, 3: -0.4},
)
PARAMS = {"plain": PLAIN, "filtered": FILTERED, "everything": EVERYTHING}


@cache
def target_logits(context: Context) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(context) % 2**31)) * 1.5


@cache
def plain_probs(context: Context, name: str) -> Tensor:
    """The target's distribution after a context, as plain decoding sees it: one row, everything already committed."""
    answer = context[len(PROMPT) :]
    logits_1V = penalise(target_logits(context).unsqueeze(0), PARAMS[name], context, Counter(answer), [])
    return target_probs(logits_1V, PARAMS[name])[0]


@cache
def block_probs(context: Context, drafts: Context, name: str) -> Tensor:
    """The J rows of a verify pass: nothing of the draft is committed yet."""
    logits_JV = torch.stack([target_logits((*context, *drafts[:i])) for i in range(len(drafts) + 1)])
    counts = Counter(context[len(PROMPT) :])
    return target_probs(penalise(logits_JV, PARAMS[name], context, counts, list(drafts)), PARAMS[name])


@cache
def drafter_probs(context: Context, drafter: str, name: str) -> Tensor:
    if drafter == "perfect":
        return plain_probs(context, name)
    if drafter == "random":
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash((*context, 99)) % 2**31)) * 1.5
        return torch.softmax(logits, -1)
    target_V = plain_probs(context, name)
    weights_V = torch.full((VOCAB,), 0.02)
    weights_V[target_V.argmin()] = 1.0  # adversarial: where the target has least, or nothing
    weights_V[target_V.argmax()] = 0.0  # and never where it has most
    return weights_V / weights_V.sum()


def exact_text(name: str) -> dict[Context, float]:
    """Probability of each text of NUM_TOKENS tokens under plain decoding."""
    probs = {(): 1.0}
    for _ in range(NUM_TOKENS):
        probs = {
            (*text, token): prob * float(share)
            for text, prob in probs.items()
            for token, share in enumerate(plain_probs((*PROMPT, *text), name).double())
        }
    return probs


# By enumeration


def token_wise_outcomes(drafts: list[int], draft_KV: Tensor | None, target_JV: Tensor) -> list[tuple[float, Tensor]]:
    """For n = 0 .. K: P(n drafts stand) and the distribution of the next token."""
    outcomes, stands = [], 1.0
    for slot, chance in enumerate(lossless.accept_probs(drafts, draft_KV, target_JV)):
        weights_V = lossless.residual_after(checked(drafts, draft_KV, target_JV, Uniforms(0, 0)), slot, target_JV)
        outcomes.append((stands * (1 - chance), weights_V))
        stands *= chance
    return [*outcomes, (stands, target_JV[-1])]


def block_outcomes(drafts: list[int], draft_KV: Tensor | None, target_JV: Tensor) -> list[tuple[float, Tensor]]:
    prefix = lossless.prefix_probs(drafts, draft_KV, target_JV)
    outcomes, left = [(prefix[-1], target_JV[-1])], 1 - prefix[-1]
    for i in range(len(drafts) - 1, -1, -1):
        row = checked(drafts, draft_KV, target_JV, Uniforms(0, 0))
        weights_V = lossless.residual_after(row, i, target_JV, prefix[i])
        chance = lossless.stop_prob(prefix[i], float(weights_V.sum())) if i else 1.0
        outcomes.append((left * chance, weights_V))
        left *= 1 - chance
    return outcomes[::-1]


def wrong_outcomes(drafts: list[int], draft_KV: Tensor | None, target_JV: Tensor) -> list[tuple[float, Tensor]]:
    """A mistake on purpose: the target instead of the residual."""
    return [(prob, target_JV[n]) for n, (prob, _) in enumerate(token_wise_outcomes(drafts, draft_KV, target_JV))]


def enumerate_text(outcomes: Callable, drafter: str, num_drafted: int, name: str) -> dict[Context, float]:
    """Probability of each text when rounds of `num_drafted` follow one another; what is past NUM_TOKENS is cut off."""

    @cache
    def text_from(text: Context) -> dict[Context, float]:
        if len(text) >= NUM_TOKENS:
            return {text[:NUM_TOKENS]: 1.0}
        total: Counter[Context] = Counter()
        for drafts in itertools.product(range(VOCAB), repeat=num_drafted):
            rows = [drafter_probs((*PROMPT, *text, *drafts[:i]), drafter, name) for i in range(num_drafted)]
            drafted = float(torch.stack([row[token] for row, token in zip(rows, drafts, strict=True)]).double().prod())
            if drafted == 0:
                continue
            target_JV = block_probs((*PROMPT, *text), drafts, name).double()
            for num_accepted, (prob, weights_V) in enumerate(outcomes(list(drafts), torch.stack(rows).double(), target_JV)):
                if drafted * prob < 1e-13:
                    continue
                for token, share in enumerate((weights_V / weights_V.sum()).tolist()):
                    if share:
                        for ending, chance in text_from((*text, *drafts[:num_accepted], token)).items():
                            total[ending] += drafted * prob * share * chance
        return dict(total)

    return text_from(())


def largest_error(found: dict[Context, float], name: str) -> float:
    return max(abs(found.get(text, 0.0) - prob) for text, prob in exact_text(name).items())


@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("drafter", ["perfect", "random", "adversarial"])
@pytest.mark.parametrize("outcomes", [token_wise_outcomes, block_outcomes])
def test_enumerated_text_is_the_targets(outcomes: Callable, drafter: str, name: str) -> None:
    for num_drafted in (1, 2):
        assert largest_error(enumerate_text(outcomes, drafter, num_drafted, name), name) < 1e-6  # float32 tables


@pytest.mark.parametrize("outcomes", [token_wise_outcomes, block_outcomes])
def test_enumerated_text_is_the_targets_with_three_drafts(outcomes: Callable) -> None:
    assert largest_error(enumerate_text(outcomes, "random", 3, "plain"), "plain") < 1e-6


def test_enumeration_sees_a_wrong_residual() -> None:
    assert largest_error(enumerate_text(wrong_outcomes, "random", 2, "plain"), "plain") > 1e-3


# Through the real functions and streams

RULES: dict[str, Verify] = {"match": lossless.match, "rejection": lossless.rejection, "block": lossless.block}


def speculate(rule: Verify, drafter: str, num_drafted: int, name: str, seed: int) -> Context:
    """Decode NUM_TOKENS tokens as the engine does: drafts drawn by (anchor position, slot), rounds keyed by their anchor."""
    tokens = PROMPT
    while len(tokens) < len(PROMPT) + NUM_TOKENS:
        anchor_position, drafts, rows = len(tokens) - 1, [], []
        for slot in range(num_drafted):
            row_V = drafter_probs((*tokens, *drafts), drafter.removeprefix("certain "), name)
            certain = drafter.startswith("certain")
            drafts.append(int(row_V.argmax()) if certain else sample(row_V, uniform(seed, DRAFT, anchor_position, slot)))
            rows.append(row_V)
        draft_probs_KV = None if drafter.startswith("certain") or not rows else torch.stack(rows)
        target_JV = block_probs(tokens, tuple(drafts), name)
        verdict = rule(checked(drafts, draft_probs_KV, target_JV, Uniforms(seed, anchor_position)))
        tokens = (*tokens, *drafts[: verdict.num_accepted], verdict.next_token)
    return tokens[len(PROMPT) : len(PROMPT) + NUM_TOKENS]


def chi_square_p_value(texts: list[Context], name: str) -> float:
    """Of the texts against the exact distribution; cells that expect fewer than 5 are put together."""
    counts, statistic, num_cells, rest_found, rest_expected = Counter(texts), 0.0, 0, 0, 0.0
    for text, prob in exact_text(name).items():
        expected = prob * len(texts)
        if prob == 0:
            assert counts[text] == 0, f"impossible text {text}"
        elif expected < 5:
            rest_found, rest_expected = rest_found + counts[text], rest_expected + expected
        else:
            statistic, num_cells = statistic + (counts[text] - expected) ** 2 / expected, num_cells + 1
    if rest_expected > 1:
        statistic, num_cells = statistic + (rest_found - rest_expected) ** 2 / rest_expected, num_cells + 1
    return float(chi2.sf(statistic, num_cells - 1))


CASES = [
    ("match", "certain random", 3, "plain"),
    ("match", "certain adversarial", 2, "everything"),
    ("match", "random", 2, "filtered"),
    ("rejection", "perfect", 2, "everything"),
    ("rejection", "random", 3, "plain"),
    ("rejection", "random", 2, "everything"),
    ("rejection", "adversarial", 2, "filtered"),
    ("rejection", "certain random", 2, "filtered"),
    ("block", "perfect", 3, "filtered"),
    ("block", "random", 1, "plain"),
    ("block", "random", 3, "plain"),
    ("block", "random", 2, "everything"),
    ("block", "adversarial", 3, "everything"),
    ("block", "certain random", 3, "everything"),
]


@pytest.mark.parametrize(("rule", "drafter", "num_drafted", "name"), CASES)
def test_sampled_text_is_the_targets(rule: str, drafter: str, num_drafted: int, name: str) -> None:
    texts = [speculate(RULES[rule], drafter, num_drafted, name, seed) for seed in range(4000)]
    assert chi_square_p_value(texts, name) > 1e-4


def naive(row: CheckedRow) -> RowVerdict:
    """Wrong on purpose: after a rejection the target is sampled, not the residual."""
    target_JV = row.target_probs()
    for slot, chance in enumerate(lossless.accept_probs(row.draft_tokens, row.draft_probs_KV, target_JV)):
        if row.uniforms.accept(slot) >= chance:
            return RowVerdict(slot, sample(target_JV[slot], row.uniforms.residual(slot)))
    return RowVerdict(len(row.draft_tokens), row.draw(len(row.draft_tokens)))


class KeyedBySlot(Uniforms):
    """Wrong on purpose: the second round decides with draws that the first has already looked at."""

    def accept(self, slot: int) -> float:
        return Uniforms(self.seed, 0).accept(slot)


class OneDrawForBoth(Uniforms):
    """Wrong on purpose: the draw that rejected a draft also picks its replacement."""

    def residual(self, slot: int) -> float:
        return self.accept(slot)


def with_uniforms(rule: Verify, kind: type[Uniforms]) -> Verify:
    return lambda row: rule(replace(row, uniforms=kind(row.uniforms.seed, row.uniforms.anchor_position)))


MISTAKES = {
    "target for residual": (naive, 3),
    "rejection keyed by slot": (with_uniforms(lossless.rejection, KeyedBySlot), 3),
    "block keyed by slot": (with_uniforms(lossless.block, KeyedBySlot), 1),
    "one draw for both": (with_uniforms(lossless.rejection, OneDrawForBoth), 3),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_chi_square_sees_a_mistake(mistake: str) -> None:
    rule, num_drafted = MISTAKES[mistake]
    texts = [speculate(rule, "random", num_drafted, "plain", seed) for seed in range(4000)]
    assert chi_square_p_value(texts, "plain") < 1e-10


def test_match_is_plain_decoding_with_any_drafter() -> None:
    for seed in range(200):
        texts = {
            speculate(lossless.match, drafter, num_drafted, "everything", seed)
            for drafter, num_drafted in [
                ("perfect", 0),
                ("perfect", 3),
                ("certain perfect", 2),
                ("adversarial", 3),
                ("random", 1),
            ]
        }
        assert len(texts) == 1
