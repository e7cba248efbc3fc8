"""The audit's arithmetic on tokens drawn from a small model's own distributions: honest servers, and planted faults."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from doubles import FakeTarget
from torch import Tensor

from paceline.loop.audit import checks, scores
from paceline.loop.audit.config import TOLERANCES
from paceline.loop.audit.evidence import Draw, Group, judged
from paceline.loop.audit.scores import scores_of
from paceline.lossy import Lossy
from paceline.model.sampling.logits import target_probs
from paceline.types import SamplingParams
from paceline.verify.lossy import allowed, chances

pytestmark = pytest.mark.slow
SEEDS = range(20)
VOCABULARY, NUM_PROMPTS, ANSWERS, LENGTH = 48, 8, 64, 32
ALLOWED = TOLERANCES["bfloat16"]


def table(seed: int) -> Tensor:
    """Logits [V, V] of a model that looks at one token."""
    model = FakeTarget(VOCABULARY, order=1, sharpness=2.0, seed=seed)
    return torch.stack([model.logits_after([token]) for token in range(VOCABULARY)])


MODEL = table(0)
DRAFTER = MODEL + 1.5 * table(1)
"""Logits as far from the model's as a weak drafter's are."""

Rows = Callable[[float, float], Tensor]
"""Temperature and top-p to probabilities [V, V] of the next token after each one."""


def honest(temperature: float, top_p: float, logits_VV: Tensor = MODEL) -> Tensor:
    return target_probs(logits_VV, SamplingParams(temperature=temperature, top_p=top_p))


def flattened(temperature: float, top_p: float) -> Tensor:
    return honest(1.15 * temperature, top_p)


def wrong_top_p(temperature: float, top_p: float) -> Tensor:
    return honest(temperature, top_p if top_p == 1 else 0.9)


def smaller_top_p(temperature: float, top_p: float) -> Tensor:
    return honest(temperature, top_p if top_p == 1 else 0.7)


def lossy(temperature: float, top_p: float, text: str = "typical:eps=0.09,delta=0.3") -> Tensor:
    """Output distribution of such a rule, as verify/lossy.py derives it."""
    rule, lossless = Lossy.of(text).rule, Lossy.of("lenience:1").rule
    target_VV, draft_VV = honest(temperature, top_p), honest(temperature, top_p, DRAFTER)
    rows = []
    for target_V, draft_V in zip(target_VV, draft_VV, strict=True):
        chance_V = chances(rule, target_V, draft_V, allowed(rule, target_V))
        extra_V = draft_V * (chance_V - chances(lossless, target_V, draft_V, None))
        short_V = (target_V - draft_V).clamp(min=0)
        rows.append((target_V + extra_V - short_V * extra_V.sum() / short_V.sum()).clamp(min=0))
    return torch.stack(rows)


class Server:
    """Draws answers of LENGTH tokens from its rows; with `slip_every` a drafter's likeliest token comes now and
    then."""

    def __init__(self, rows: Rows, seed: int, slip_every: int = 0, greedy_VV: Tensor = MODEL) -> None:
        self.rows, self.slip_every, self.greedy_VV = rows, slip_every, greedy_VV
        self.random = torch.Generator().manual_seed(seed)
        self.num_said = 0

    def group(self, temperature: float, top_p: float = 1.0, answers: int = ANSWERS) -> Group:
        rows_VV = self.rows(temperature, top_p) if temperature else self.greedy_VV.argmax(-1)
        prompts = [index % NUM_PROMPTS for index in range(answers)]
        last_N, drawn = torch.tensor(prompts), list[Tensor]()
        for _ in range(LENGTH):
            if temperature:
                next_N = torch.multinomial(rows_VV[last_N], 1, generator=self.random).squeeze(-1)
            else:
                next_N = rows_VV[last_N]
            if self.slip_every:
                number_N = torch.arange(self.num_said, self.num_said + answers)
                self.num_said += answers
                is_slip_N = number_N % self.slip_every == self.slip_every - 1
                next_N = torch.where(is_slip_N, DRAFTER[last_N].argmax(-1), next_N)
            drawn.append(next_N)
            last_N = next_N
        group = Group(f"temperature {temperature:g}, top-p {top_p:g}", temperature, top_p)
        before_NT = torch.stack([torch.tensor(prompts), *drawn[:-1]], 1)
        scores = scores_of(
            MODEL[before_NT.flatten()], torch.stack(drawn, 1).flatten().tolist(), temperature, top_p, 0.02
        )
        for index, prompt in enumerate(prompts):
            part = slice(index * LENGTH, (index + 1) * LENGTH)
            own = {name: getattr(scores, name)[part] for name in scores.__slots__ if name != "binary"}
            own["binary"] = {name: (one[part], other[part]) for name, (one, other) in scores.binary.items()}
            tokens = tuple(int(each[index]) for each in drawn)
            group.draws.append(Draw(prompt, tokens, type(scores)(**own)))
        return group


def audited(server: Server) -> list[checks.Finding]:
    groups = [server.group(1.0), server.group(0.7), server.group(1.0, 0.8)]
    tests = judged(groups, ALLOWED.nats, 0.01)
    greedy = checks.greedy(server.group(0.0, answers=NUM_PROMPTS).draws, ALLOWED.tie)
    return [*checks.sampled(groups, tests, 0.01), *checks.nucleus(groups, ALLOWED), greedy]


FAULTS: dict[str, Callable[[int], Server]] = {
    "flattened": lambda seed: Server(flattened, seed),
    "lossy rule": lambda seed: Server(lossy, seed),
    "wrong top-p": lambda seed: Server(wrong_top_p, seed),
    "smaller top-p": lambda seed: Server(smaller_top_p, seed),
    "slipped tokens": lambda seed: Server(honest, seed, slip_every=100),
    "another model": lambda seed: Server(honest, seed, greedy_VV=table(7)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_at_every_seed(name: str) -> None:
    missed = [seed for seed in SEEDS[:3] if checks.verdict_of(audited(FAULTS[name](seed))) != "faulty"]
    assert missed == []


def test_honest_servers_pass() -> None:
    """Twenty audits, and at most one false alarm; the stated rate is one in a hundred."""
    verdicts = [checks.verdict_of(audited(Server(honest, seed))) for seed in SEEDS]
    assert verdicts.count("faulty") <= 1 and verdicts.count("unsure") == 0


def test_scores_of_a_few_positions_at_a_time_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 3, 3 and 1 positions."""
    tokens = [1, 5, 0, 7, 7, 2, 9]
    whole = scores_of(MODEL[:7], tokens, 0.8, 0.9, 0.02)
    monkeypatch.setattr(scores, "LOGITS", 3 * MODEL.shape[1])
    pieces = scores_of(MODEL[:7], tokens, 0.8, 0.9, 0.02)
    assert len(whole.nll_T) == len(pieces.nll_T) == 7
    for name in scores.ARRAYS:
        np.testing.assert_array_equal(getattr(pieces, name), getattr(whole, name), name)
    assert pieces.binary.keys() == whole.binary.keys()
    for name, pair in whole.binary.items():
        np.testing.assert_array_equal(pieces.binary[name], pair, name)
