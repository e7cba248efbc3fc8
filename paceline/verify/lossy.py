"""Lossy verification: rules that accept drafts which lossless rules would reject, and the cost of that. Pure functions.

`target` is the request's own distribution at a position (temperature, filters, penalties, grammar), `draft` the
distribution that a draft was sampled from; a certain draft has draft(x) = 1. Every rule is a probability a(x) of
accepting the draft x, at least the lossless one:

    a0(x) = min(1, target(x) / draft(x)),    a0(x) <= a(x) <= 1,    a(x) = 0 where target(x) = 0

    typical      a = 1 where target(x) > min(eps, delta * exp(-entropy(target))), else a0
    relaxed      a = 1 where x is one of the target's top n (of equals the lowest ids) and
                 target(x) > max(target) - delta, else a0
    threshold    a = 1 where target(x) >= single, else min(1, target(x) / (acc * draft(x)))
    lenience     a = min(1, target(x) / (l * draft(x)))
    mixture      a = min(1, lam * target(x) / draft(x) + 1 - lam)

A token with target(x) = 0 is never accepted, whatever the rule. A rejected draft is replaced as by the rule
`rejection`: by a sample from the residual max(target - draft, 0). So, for every rule, the **output distribution** at a
position is

    output(x) = target(x) + e(x) - E / Z * max(target(x) - draft(x), 0)
    e(x) = draft(x) * (a(x) - a0(x)),   E = sum of e,   Z = sum of max(target - draft, 0)

E is also the total variation between output and target. The output is, for **typical**, **relaxed**, and **threshold**
with acc 1: draft(x) itself for allowed tokens that the draft overrates, not the target cut to the allowed set; for
**lenience**: min(draft(x), target(x) / l) for overrated tokens; for **mixture**: exactly lam * target + (1 - lam) *
draft, if target(x) > 0 wherever draft(x) > 0.

**Certain drafts and trees.** The children c_1 .. c_m of a node, in the drafter's order, are certain drafts. The
target's own token is sampled with the noise of its position, as in plain decoding; a child that equals this token is
accepted. Otherwise child i is accepted, if no child before it was, with probability b_i = (a(c_i) - target(c_i)) / (1 -
target(c_i)); if none is, the target's token is the output:

    output(c_i) = target(c_i) + (1 - target(C)) * b_i * product over j < i of (1 - b_j),  C = all children
    output(x) = target(x) * product of (1 - b_j)  for x not in C

With one child, a chain, this is output(c) = a(c) and output(x) = (1 - a(c)) * target(x) / (1 - target(c)): the formula
above. If every b is 0, the text equals plain decoding's, bit for bit.

**Greedy requests** output the most probable token. If it is drafted, it is accepted. Otherwise the first child is
accepted that the model's distribution at temperature 1, `model`, allows: typical and relaxed as above with `model` for
target; threshold: model(x) >= single or model(x) > acc * max(model); lenience: model(x) > l * max(model) (2211.17192,
A.5); mixture: lam * model(x) + 1 - lam > lam * max(model), the argmax of the mixture with a certain draft. Output and
target are single tokens then: the total variation is 1 if they differ, else 0, and instead of the Kullback-Leibler
divergence, which would be infinite, the log of max(model) / model(x) is counted.

Budget: with `Ledger.max_tv`, a position is decided losslessly if its total variation exceeds the remaining budget. E is
known before anything is sampled there (for certain drafts: given the drafts).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.lossy import Ledger, Lenience, Lossy, Mixture, Relaxed, Rule, Threshold, Typical
from paceline.verify import rules
from paceline.verify.rules import CheckedRow, RowVerdict


def allowed(rule: Rule, target_V: Tensor) -> Tensor | None:
    """Returns bool [V]: True for each token that the lossy rule accepts as a draft with certainty. None for the rules
    lenience and mixture, which accept drafts only with a probability. `target_V`: the target's distribution at the
    draft's position (at temperature 1 for a greedy request)."""
    if isinstance(rule, Typical):
        entropy = float(torch.special.entr(target_V).sum(dtype=torch.float64))
        return target_V > min(rule.eps, rule.delta * math.exp(-entropy))
    if isinstance(rule, Relaxed):
        near_V = (target_V > target_V.max() - rule.delta) & (target_V > 0)
        return near_V & _likeliest(target_V, rule.n)
    if isinstance(rule, Threshold):
        return target_V >= rule.single
    return None


def _likeliest(target_V: Tensor, count: int) -> Tensor:
    """Returns the `count` most probable tokens, [V] of bool; of equals the lowest ids."""
    if count >= len(target_V):
        return torch.ones_like(target_V, dtype=torch.bool)
    last = target_V.topk(count).values[-1]
    chosen_V = target_V > last
    ties = (target_V == last).nonzero().flatten()
    chosen_V[ties[: count - int(chosen_V.sum())]] = True
    return chosen_V


def chances(rule: Rule, target_X: Tensor, draft_X: Tensor, allowed_X: Tensor | None) -> Tensor:
    """Returns for each of X tokens the probability a(x) that the lossy rule accepts it as a draft. `target_X`,
    `draft_X`: the tokens' probabilities in target and drafter. `allowed_X`: the result of `allowed` for these X tokens.
    Results for tokens with draft probability 0 are meaningless."""
    scale = rule.l if isinstance(rule, Lenience) else rule.acc if isinstance(rule, Threshold) else 1.0
    chance_X = target_X / (draft_X.clamp(min=torch.finfo(draft_X.dtype).tiny) * scale)
    if isinstance(rule, Mixture):
        chance_X = chance_X * rule.lam + (1.0 - rule.lam)
    if allowed_X is not None:
        chance_X = chance_X.masked_fill(allowed_X, 1.0)
    return chance_X.clamp(max=1.0).masked_fill(target_X <= 0, 0.0)


_LOSSLESS = Lenience(1.0)


class Tilt(NamedTuple):
    """Deviation of the output distribution from the target's at one position."""

    tv: float
    """Total variation, 0 to 1."""
    kl: Callable[[], float]
    """Function that returns the Kullback-Leibler divergence of the output from the target, in nats."""


def tilt(target_V: Tensor, draft_V: Tensor, chance_V: Tensor) -> Tilt:
    """Computes how far the output distribution deviates from the target's at one position with a sampled draft.
    `target_V`, `draft_V`: distributions of target and drafter at this position. `chance_V`: probability that each token
    is accepted as a draft, from `chances`."""
    extra_V = (draft_V * (chance_V - chances(_LOSSLESS, target_V, draft_V, None))).clamp_(min=0.0)
    tv = float(extra_V.sum(dtype=torch.float64))

    def kl() -> float:
        short_V = (target_V - draft_V).clamp_(min=0.0).double()
        mass = float(short_V.sum())
        output_V = target_V.double() + extra_V
        if mass > 0:
            output_V -= short_V * min(tv / mass, 1.0)
        output_V.clamp_(min=0.0)
        return max(float(torch.special.xlogy(output_V, output_V / target_V.double().clamp(min=1e-300)).sum()), 0.0)

    return Tilt(tv, kl)


def drawn(lossy: Lossy, row: CheckedRow, ledger: Ledger) -> RowVerdict:
    """Judges one row's chain of sampled drafts by the request's lossy settings. Adds to `ledger` how far each decision
    deviates from the target's distribution. With lossless settings the result equals that of `rules.rejection`, bit for
    bit."""
    assert row.draft_probs_KV is not None
    target_probs_JV, num_drafted = row.target_probs(), len(row.draft_tokens)
    for slot, lossless in enumerate(rules.accept_probs(row.draft_tokens, row.draft_probs_KV, target_probs_JV)):
        target_V, draft_V = target_probs_JV[slot], row.draft_probs_KV[slot]
        chance_V = chances(lossy.rule, target_V, draft_V, allowed(lossy.rule, target_V))
        cost, coin = tilt(target_V, draft_V, chance_V), row.uniforms.accept(slot)
        is_lossy = cost.tv > 0 and ledger.holds(cost.tv)
        # `max`: the float32 quotient in chance_V may be rounded below `lossless`.
        chance = max(float(chance_V[row.draft_tokens[slot]]), lossless) if is_lossy else lossless
        ledger.add(cost.tv, cost.kl(), lossless <= coin < chance) if is_lossy else ledger.add()
        if not coin < chance:
            return RowVerdict(slot, rules.draw_residual(row, slot, target_probs_JV))
    ledger.add()
    return RowVerdict(num_drafted, row.draw(num_drafted))


def child_chances(rule: Rule, target_V: Tensor, children: list[int]) -> list[float]:
    """Returns for each child of a tree node the probability that the lossy rule accepts it, given that the target's own
    token is not a child and that no earlier child was accepted (b_i in the module's docstring). `target_V`: the
    target's distribution after the node. `children`: token ids of the children, in the drafter's order."""
    if not children:
        return []
    ids_N = torch.tensor(children, device=target_V.device)
    allowed_V, target_N = allowed(rule, target_V), target_V[ids_N]
    allowed_N = None if allowed_V is None else allowed_V[ids_N]
    chance_N = chances(rule, target_N, torch.ones_like(target_N), allowed_N)
    return [
        max(chance - target, 0.0) / (1.0 - target) if target < 1.0 else 0.0
        for chance, target in zip(chance_N.tolist(), target_N.tolist(), strict=True)
    ]


def tilt_children(target_V: Tensor, children: list[int], chance_N: list[float]) -> Tilt:
    """Computes how far the output distribution deviates from the target's after a tree node with the certain
    (deterministic) drafts `children`. `target_V`: the target's distribution after the node. `chance_N`: acceptance
    probability of each child, from `child_chances`."""
    known = target_V[torch.tensor(children, device=target_V.device)].tolist()
    outside = max(1.0 - sum(known), 0.0)
    left = math.prod(1.0 - chance for chance in chance_N)

    def kl() -> float:
        total, before = outside * left * math.log(left) if left > 0 else 0.0, 1.0
        for target, chance in zip(known, chance_N, strict=True):
            output = target + outside * chance * before
            before *= 1.0 - chance
            total += output * math.log(output / target) if output > 0 and target > 0 else 0.0
        return max(total, 0.0)

    return Tilt(outside * (1.0 - left), kl)


class Followed(NamedTuple):
    """Result of `follow`: indices of the accepted nodes, root to leaf, and the token after them."""

    accepted: list[int]
    next_token: int


def follow(
    lossy: Lossy,
    tokens: list[int],
    parents: Iterable[int],
    own: Callable[[list[int]], int],
    probs: Callable[[list[int]], Tensor],
    coin: Callable[[int], float],
    ledger: Ledger,
    is_greedy: bool,
) -> Followed:
    """Judges a tree of certain (deterministic) drafts by a request's lossy settings; a chain is a tree too. Adds to
    `ledger` how far each decision deviates from the target's distribution. With lossless settings the result equals
    that of `rules.match` along the tree, bit for bit.

    - `tokens`: token ids of the nodes. `parents`: index of each node's parent, -1 for nodes after the last committed
      token.
    - `own`: function of the caller (indices of the accepted nodes, from the root) -> the target's own token after them.
      If it returns a negative number, judging ends, and this number becomes the result's next token.
    - `probs`: function of the caller (indices of the accepted nodes) -> the target's distribution after them, [V]; for
      a greedy request at temperature 1.
    - `coin`: function of the caller (draft position) -> random number in [0, 1), by which drafts at this position are
      accepted. Unused if `is_greedy`.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    accepted, node = list[int](), -1
    step = _greedy_step if is_greedy else _drawn_step
    while True:
        here, token = children.get(node, []), own(accepted)
        if token < 0:
            return Followed(accepted, token)
        drafts = [tokens[each] for each in here]
        choice = step(lossy.rule, drafts, token, lambda: probs(accepted), lambda: coin(len(accepted)), ledger)
        if choice is None:
            return Followed(accepted, token)
        node = here[choice]
        accepted.append(node)


def _greedy_step(
    rule: Rule, children: list[int], token: int, probs: Callable[[], Tensor], coin: Callable[[], float], ledger: Ledger
) -> int | None:
    """Returns the index of the accepted child, None for the target's own `token`."""
    if token in children or not children or not ledger.holds(1.0):
        ledger.add()
        return children.index(token) if token in children else None
    model_V = probs()
    allowed_V, best = allowed(rule, model_V), float(model_V[token])
    for place, child in enumerate(children):
        if accepts_greedily(rule, float(model_V[child]), best, allowed_V is not None and bool(allowed_V[child])):
            ledger.add(1.0, math.log(best / float(model_V[child])), True)
            return place
    ledger.add()
    return None


def accepts_greedily(rule: Rule, prob: float, best: float, is_allowed: bool) -> bool:
    """True if a greedy request accepts a draft that is not the top token. `prob`, `best`: probabilities of the draft
    and of the top token at temperature 1. `is_allowed`: the draft is in the rule's set `allowed`."""
    if isinstance(rule, Lenience | Threshold):
        part = rule.l if isinstance(rule, Lenience) else rule.acc
        return prob > 0 and (is_allowed or prob > part * best)
    if isinstance(rule, Mixture):
        return prob > 0 and rule.lam * prob + (1.0 - rule.lam) > rule.lam * best
    return prob > 0 and is_allowed


def _drawn_step(
    rule: Rule, children: list[int], token: int, probs: Callable[[], Tensor], coin: Callable[[], float], ledger: Ledger
) -> int | None:
    own = children.index(token) if token in children else None
    if not children:
        ledger.add()
        return None
    target_V = probs()
    chance_N = child_chances(rule, target_V, children)
    cost = tilt_children(target_V, children, chance_N) if any(chance_N) else None
    if cost is None or not ledger.holds(cost.tv):
        ledger.add()
        return own
    choice = own
    if own is None:
        # One random number decides among all children; `reached`: chance that one of those so far is accepted.
        draw, reached, left = coin(), 0.0, 1.0
        for place, chance in enumerate(chance_N):
            reached, left = reached + left * chance, left * (1.0 - chance)
            if draw < reached:
                choice = place
                break
    ledger.add(cost.tv, cost.kl(), choice != own)
    return choice
