"""A queue that never empties: every round stands beside a chunk of a prompt, and drafts that pay are checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from paceline.plan.chunks import FREE_EVERY, ChunkSizes
from paceline.simulate.costs.rounds import StepCosts
from paceline.simulate.server.server import Case, Job, Outcome, ServerShape


@dataclass(frozen=True)
class Costs(StepCosts):
    """A pass takes 10 ms and 2 ms for each position beyond 32; a block of drafts takes 1 ms."""

    host_s: float = 0.0005
    prefill_adapts = True

    def verify_s(self, batch: float, positions: float, context: float) -> float:
        return 0.010 + 0.002 * max(batch * positions - 32, 0)

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        return 0.001


@pytest.mark.slow
def test_drafts_are_checked_while_prompts_wait_all_the_time() -> None:
    """Four rows and four requests that wait, always. Drafts cost a tenth of a round and bring more than a token."""
    jobs = [Job(0.0, 600, 100)] * 40
    case = Case(jobs, Costs(), ServerShape(max_rows=4), tuple(0.6**place for place in range(1, 8)))

    def speed(outcome: Outcome) -> float:
        return outcome.num_tokens / outcome.wall_s

    assert speed(case.run("adaptive", concurrency=8)) > 1.5 * speed(case.run("off", concurrency=8))


def test_rounds_that_kept_to_the_limit_do_not_lower_it() -> None:
    sizes = ChunkSizes(256, adapts=True)
    sizes.decoded(2.0, beside_chunk=False)
    for _ in range(FREE_EVERY - 1):
        assert sizes.most_round_s == 2.0
        sizes.decoded(1.0, beside_chunk=True)
    assert sizes.most_round_s == math.inf, "one round shows what rounds take without it"
    sizes.decoded(2.2, beside_chunk=True)
    assert sizes.most_round_s == pytest.approx(2.2)


def test_a_round_that_was_disturbed_raises_the_limit_by_a_quarter_at_most() -> None:
    sizes = ChunkSizes(256, adapts=True)
    sizes.decoded(2.0, beside_chunk=False)
    sizes.decoded(30.0, beside_chunk=False)
    assert sizes.most_round_s == pytest.approx(2.5)
    for _ in range(30):
        sizes.decoded(2.0, beside_chunk=False)
    assert sizes.most_round_s == pytest.approx(2.0, rel=0.01)
