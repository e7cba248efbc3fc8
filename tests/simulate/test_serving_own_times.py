"""A recorded run replayed with its own step times: paces that change, noise, and chunks that adapt."""

from __future__ import annotations

from collections import defaultdict

import pytest
from replayed import JOBS, STEPS, SURVIVAL, answers_of

from paceline.report.statistics import Rounds, add_histograms
from paceline.simulate.costs.rounds import StepCosts, table_of
from paceline.simulate.server.load import Arrivals
from paceline.simulate.server.replay import Recorded, compare, own_costs
from paceline.simulate.server.server import Case, Job, ServerShape, Simulation

pytestmark = pytest.mark.slow

Step = tuple[str, float, float, float]


class Weather(StepCosts):
    """STEPS on a machine whose pace changes every 40 rounds; keeps what was taken, as a server's metrics do."""

    host_s = STEPS["host_s"]

    def __init__(self, paces: tuple[float, ...]) -> None:
        self.paces, self.inner, self.num_rounds = paces, table_of(STEPS), 0
        self.taken: dict[tuple[str, float], list[float]] = defaultdict(list)

    @property
    def steps(self) -> list[Step]:
        return [(*key, len(times), sum(times)) for key, times in self.taken.items()]

    def _taken(self, kind: str, size: float, seconds: float) -> float:
        seconds *= self.paces[self.num_rounds // 40 % len(self.paces)]
        self.taken[kind, round(size)].append(seconds)
        self.taken["step", 1].append(seconds + self.host_s * (kind == "verify"))
        return seconds

    def verify_s(self, batch: float, positions: float, context: float) -> float:
        self.num_rounds += 1
        return self._taken("verify", batch * positions, self.inner.verify_s(batch, positions, context))

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        return self._taken("draft", batch * num_drafted, self.inner.draft_s(batch, num_drafted, context))

    def prefill_s(self, tokens: int, context: int) -> float:
        return self._taken("prefill", tokens, self.inner.prefill_s(tokens, context))


def weathered(policy: str, number: int, *paces: float) -> Recorded:
    """Repetition `number` of three in flight on such a machine."""
    costs, load = Weather(paces), Arrivals(concurrency=3)
    case = Case(JOBS, costs, ServerShape(), SURVIVAL, seed=number)
    planner = case.planner(policy)
    simulation = Simulation(case, planner, JOBS, load.concurrency)
    costs.taken.clear()
    outcome = simulation.run()
    answers = answers_of(outcome)
    histogram = add_histograms([each.accepted_histogram for each in answers])
    rounds = Rounds(sum(histogram), sum(each.num_drafted or 0 for each in answers), tuple(histogram))
    firsts = [each.first_token_s for each in outcome.requests]
    speculate = "off" if policy == "off" else "full"
    return Recorded(speculate, load, JOBS, outcome.wall_s, firsts, rounds, rounds, steps=costs.steps)


def test_a_pace_that_changes_is_the_runs_own() -> None:
    """A machine that is three times slower now and then, within passes and between them: the run's own step times say
    so, and those of a quiet minute do not."""
    paces = enumerate([(1.0,), (1.0, 3.0), (2.0, 3.0)])
    passes = [weathered(policy, number, *pace) for number, pace in paces for policy in ("off", "7")]
    off, full = compare(passes, None, ServerShape(), SURVIVAL)
    assert len(off.errors) == len(full.errors) == 3
    assert max(map(abs, off.errors + full.errors)) < 0.02, (off.errors, full.errors)
    assert off.measured_tokens_per_s_range[1] > 2 * off.measured_tokens_per_s_range[0]
    quiet = compare(passes, table_of(STEPS), ServerShape(), SURVIVAL)
    assert all(each.throughput_error > 0.5 and not each.has_throughput for each in quiet)


def test_own_times_leave_their_sum_as_it_was() -> None:
    """Noise that makes a larger pass look faster is averaged away, not cut off; what a pass never did is taken from the
    run, at the pass's own pace."""
    common: list[Step] = [
        ("verify", 1, 100, 1.0),
        ("verify", 2, 50, 0.4),
        ("verify", 4, 1, 0.4),
        ("prefill", 8, 2, 0.1),
    ]
    slow: list[Step] = [
        ("verify", 1, 100, 3.0),
        ("verify", 8, 100, 9.0),
        ("draft", 6, 10, 0.6),
        ("draft", 12, 10, 0.9),
        ("prefill", 8, 2, 0.3),
    ]
    steps = [[*common, ("step", 1, 151, 2.1)], [*slow, ("step", 1, 200, 14.3)]]
    jobs = [Job(0.0, 8, 1), Job(0.0, 8, 1)]
    passes = [
        Recorded("off", Arrivals(concurrency=1), jobs, 1.0, [0.1], Rounds(), Rounds(), steps=each) for each in steps
    ]
    costs_by_pass = own_costs(passes)
    for costs, own in zip(costs_by_pass, steps, strict=True):
        passed = [(size, count, seconds) for kind, size, count, seconds in own if kind == "verify"]
        assert sum(count * costs.verify_s(1, size, 0) for size, count, _ in passed) == pytest.approx(
            sum(s for *_, s in passed)
        )
        times = [costs.verify_s(1, size, 0) for size in range(1, 100)]
        assert times == pytest.approx(sorted(times)) and times[0] > 0
    fast_costs, slow_costs = costs_by_pass
    assert fast_costs.verify_s(1, 1, 0) == fast_costs.verify_s(1, 2, 0), (
        "50 passes of two positions took less than those of one"
    )
    assert slow_costs.verify_s(8, 1, 0) == slow_costs.verify_s(1, 8, 0) > 2 * slow_costs.verify_s(1, 2, 0)
    assert slow_costs.verify_s(1, 2, 0) > 1.5 * fast_costs.verify_s(1, 2, 0)
    assert slow_costs.draft_s(2, 3, 0) == pytest.approx(0.06) and 0 < fast_costs.draft_s(2, 3, 0) < 0.06
    assert (fast_costs.host_s, slow_costs.host_s) == (pytest.approx(0.2 / 151), pytest.approx(0.5 / 200))
    assert fast_costs.prefill_s(8, 8) == pytest.approx(0.05) and slow_costs.prefill_s(8, 8) == pytest.approx(0.15)


@pytest.mark.parametrize(("prompt", "adapts"), [(8, False), (4, False), (16, False), (3, True)])
def test_whether_chunks_adapt_is_seen_from_their_number(prompt: int, adapts: bool) -> None:
    """Six chunks of at most eight tokens: more than these prompts need in whole chunks, or not."""
    steps: list[Step] = [("verify", 1, 9, 0.1), ("prefill", 8, 2, 0.1), ("prefill", 3, 4, 0.1), ("step", 1, 9, 0.4)]
    jobs = [Job(0.0, prompt, 1)] * (5 if adapts else 6)
    recorded = Recorded("off", Arrivals(concurrency=1), jobs, 1.0, [0.1], Rounds(), Rounds(), steps=steps)
    assert own_costs([recorded])[0].prefill_adapts is adapts
