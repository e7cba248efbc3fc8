"""Losslessness, the whole way: rounds follow rounds until three tokens stand, and the text must be distributed as the
target's.

By enumeration: every draft and every outcome, in float64. Target and drafter are tables that depend on the whole
context. The proof by chance, through the engine and the real streams of random numbers, is in
tests/engine/test_distribution.py.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch
from checked_rows import checked
from torch import Tensor

from paceline.model.sampling.logits import penalise, target_probs
from paceline.types import SamplingParams
from paceline.verify import rules
from paceline.verify.rules import Uniforms

pytestmark = pytest.mark.slow

VOCAB, NUM_TOKENS, PROMPT = 5, 3, (0, 2)
Context = tuple[int, ...]

PLAIN = SamplingParams(temperature=1.0)
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
PARAMS = {"plain": PLAIN, "everything": EVERYTHING}


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
def drafter_probs(context: Context, slot: int, drafter: str, name: str) -> Tensor:
    """What draft number `slot` is drawn from; `context` holds the drafts before it, which a block drafter does not look
    at."""
    if drafter == "perfect":
        return plain_probs(context, name)
    if drafter in ("random", "block"):
        key = (*context[: len(context) - slot], slot, 99) if drafter == "block" else (*context, 99)
        return torch.softmax(torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(key) % 2**31)) * 1.5, -1)
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


Outcomes = list[tuple[float, Tensor]]
"""For n = 0 .. K: P(n drafts stand) and the distribution of the next token."""


def rejection_outcomes(drafts: list[int], draft_KV: Tensor | None, target_JV: Tensor) -> Outcomes:
    row = checked(drafts, draft_KV, target_JV, Uniforms(0, 0))
    outcomes, stands = [], 1.0
    for slot, chance in enumerate(rules.accept_probs(drafts, draft_KV, target_JV)):
        outcomes.append((stands * (1 - chance), rules.residual_after(row, slot, target_JV)))
        stands *= chance
    return [*outcomes, (stands, target_JV[len(drafts)])]


def match_outcomes(drafts: list[int], draft_KV: Tensor | None, target_JV: Tensor) -> Outcomes:
    return rejection_outcomes(drafts, None, target_JV)


def block_outcomes(drafts: list[int], draft_KV: Tensor | None, target_JV: Tensor) -> Outcomes:
    row, prefix = checked(drafts, draft_KV, target_JV, Uniforms(0, 0)), rules.prefix_probs(drafts, draft_KV, target_JV)
    outcomes, left = [(prefix[-1], target_JV[len(drafts)])], 1 - prefix[-1]
    for i in range(len(drafts) - 1, -1, -1):
        weights_V = rules.residual_after(row, i, target_JV, prefix[i])
        chance = rules.stop_prob(prefix[i], float(weights_V.sum())) if i else 1.0
        outcomes.append((left * chance, weights_V))
        left *= 1 - chance
    return outcomes[::-1]


def wrong_outcomes(drafts: list[int], draft_KV: Tensor | None, target_JV: Tensor) -> Outcomes:
    """A mistake on purpose: the target instead of the residual."""
    return [(prob, target_JV[n]) for n, (prob, _) in enumerate(rejection_outcomes(drafts, draft_KV, target_JV))]


RULES = {"match": match_outcomes, "rejection": rejection_outcomes, "block": block_outcomes}
Width = Callable[[Tensor, Context], int]
"""How many of the drafts are checked, from what they were drawn from [K, V] and the drafts themselves."""


def all_of_them(draft_KV: Tensor, drafts: Context) -> int:
    return len(drafts)


def by_likeliest_tokens(draft_KV: Tensor, drafts: Context) -> int:
    """The first slots whose most likely token has a fair chance: known before anything is drawn."""
    return _num_leading(draft_KV.amax(-1) > 0.45)


def by_entropy(draft_KV: Tensor, drafts: Context) -> int:
    return _num_leading(torch.special.entr(draft_KV).sum(-1) < 1.2)


def by_drawn_tokens(draft_KV: Tensor, drafts: Context) -> int:
    """A mistake on purpose: whether a draft is checked depends on the token that was drawn."""
    return _num_leading(draft_KV.gather(-1, torch.tensor(drafts).unsqueeze(-1)).squeeze(-1) > 0.3)


def _num_leading(is_sure_K: Tensor) -> int:
    return int(is_sure_K.long().cumprod(0).sum())


def enumerate_text(
    outcomes: Callable[[list[int], Tensor | None, Tensor], Outcomes],
    drafter: str,
    num_drafted: int,
    name: str,
    width: Width = all_of_them,
) -> tuple[dict[Context, float], set[int]]:
    """Probability of each text when rounds of up to `num_drafted` drafts follow one another, and the widths that were
    checked.

    What is past NUM_TOKENS is cut off.
    """
    widths: set[int] = set()

    @cache
    def text_from(text: Context) -> dict[Context, float]:
        if len(text) >= NUM_TOKENS:
            return {text[:NUM_TOKENS]: 1.0}
        total: Counter[Context] = Counter()
        for drafts in itertools.product(range(VOCAB), repeat=num_drafted):
            rows = [drafter_probs((*PROMPT, *text, *drafts[:i]), i, drafter, name) for i in range(num_drafted)]
            draft_KV = torch.stack(rows).double()
            drafted = float(draft_KV.gather(-1, torch.tensor(drafts).unsqueeze(-1)).prod())
            if drafted == 0:
                continue
            num_checked = width(draft_KV, drafts)
            widths.add(num_checked)
            checked_drafts = drafts[:num_checked]
            target_JV = block_probs((*PROMPT, *text), checked_drafts, name).double()
            results = outcomes(list(checked_drafts), draft_KV[:num_checked], target_JV)
            for num_accepted, (prob, weights_V) in enumerate(results):
                if drafted * prob < 1e-13:
                    continue
                for token, share in enumerate((weights_V / weights_V.sum()).tolist()):
                    if share:
                        for ending, chance in text_from((*text, *checked_drafts[:num_accepted], token)).items():
                            total[ending] += drafted * prob * share * chance
        return dict(total)

    return text_from(()), widths


def largest_error(probs: dict[Context, float], name: str) -> float:
    return max(abs(probs.get(text, 0.0) - prob) for text, prob in exact_text(name).items())


@pytest.mark.parametrize(
    ("rule", "drafter", "name"),
    [
        (rule, drafter, list(PARAMS)[(number + place) % 2])
        for number, rule in enumerate(RULES)
        for place, drafter in enumerate(("perfect", "random", "block", "adversarial"))
    ],
)
def test_enumerated_text_is_the_targets(rule: str, drafter: str, name: str) -> None:
    for num_drafted in (1, 2):
        probs, _ = enumerate_text(RULES[rule], drafter, num_drafted, name)
        assert largest_error(probs, name) < 1e-6  # float32 tables


@pytest.mark.parametrize(
    ("width", "rule"),
    [(by_likeliest_tokens, "rejection"), (by_entropy, "block")],
)
def test_how_many_are_checked_may_depend_on_what_they_are_drawn_from(width: Width, rule: str) -> None:
    probs, widths = enumerate_text(RULES[rule], "block", 3, "plain", width)
    assert widths == {0, 1, 2, 3}, "else the choice was not put to the test"
    assert largest_error(probs, "plain") < 1e-6


def test_enumeration_sees_a_width_chosen_by_the_drawn_tokens() -> None:
    probs, widths = enumerate_text(rejection_outcomes, "block", 3, "plain", by_drawn_tokens)
    assert widths == {0, 1, 2, 3}
    assert largest_error(probs, "plain") > 1e-3


def test_match_stays_exact_however_the_width_is_chosen() -> None:
    probs, _ = enumerate_text(match_outcomes, "block", 3, "plain", by_drawn_tokens)
    assert largest_error(probs, "plain") < 1e-6


def test_enumeration_sees_a_wrong_residual() -> None:
    assert largest_error(enumerate_text(wrong_outcomes, "random", 2, "plain")[0], "plain") > 1e-3
