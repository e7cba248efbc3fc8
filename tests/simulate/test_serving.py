"""The simulated server: queueing theory where it has an answer, conservation, repeatability, and policies in their
order."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
from simulated_servers import COSTS, HALF, ONE_ROW, Adapting, Costs, jobs_of, run

from paceline.errors import ConfigError
from paceline.plan.chunks import LEAST_CHUNK
from paceline.plan.planner import FixedPlanner
from paceline.report.statistics import Spread
from paceline.simulate.config import ServingConfig
from paceline.simulate.server.drafts import drafted, num_accepted
from paceline.simulate.server.load import (
    Lengths,
    LoadFigures,
    arriving,
    capacity,
    figures_of,
    parse_lengths,
    poisson,
    sweep,
    workload,
)
from paceline.simulate.server.server import (
    BestPlanner,
    Case,
    Job,
    ServerShape,
    Simulation,
    make_planner,
)

pytestmark = pytest.mark.slow


def lengths(text: str) -> Lengths:
    return parse_lengths("--x", text)


CHUNKY = Costs(base_s=0.0, position_s=0.001, free=0, host_s=0.0)
"""A millisecond a position, nothing else."""


# Queueing theory


def test_one_row_with_a_random_service_waits_as_m_g_1() -> None:
    """Pollaczek-Khinchine: mean wait = rate * E[S^2] / (2 * (1 - load)), the service being the prompt's
    milliseconds."""
    source, rate = random.Random(1), 8.0
    lengths = [source.randint(1, 120) for _ in range(10_000)]
    jobs = [Job(time, length, 1) for time, length in zip(poisson(rate, len(lengths), 3), lengths, strict=True)]
    outcome = run(jobs, costs=CHUNKY, server=ONE_ROW)
    load, square = rate * statistics.fmean(lengths) / 1e3, statistics.fmean(length**2 for length in lengths) / 1e6
    waited = statistics.fmean(each.wait_s for each in outcome.requests)
    assert waited == pytest.approx(rate * square / (2 * (1 - load)), rel=0.05)
    assert outcome.busy_s / outcome.wall_s == pytest.approx(load, rel=0.02)


def test_littles_law() -> None:
    """Mean queue = rate x mean wait, the queue integrated independently of the figures."""
    jobs = jobs_of(400, rate=6.0)
    outcome = run(jobs, server=ServerShape(max_rows=2))
    events = sorted(
        (when, change) for each in outcome.requests for when, change in ((each.arrived_at, 1), (each.admitted_at, -1))
    )
    area = now = 0.0
    last = 0.0
    for when, change in events:
        area, now, last = area + now * (when - last), now + change, when
    figures = figures_of(outcome, "off", 1.0, rate=6.0)
    assert figures.mean_queue == pytest.approx(area / outcome.wall_s)
    assert figures.mean_queue > 0.1 and figures.max_queue >= 3


def test_capacity_is_where_the_queue_begins_to_grow() -> None:
    case = Case(jobs_of(1000, answer=8), COSTS, ServerShape(max_rows=4), HALF)
    most = capacity(case, "off")
    below, above = sweep(case, ["off"], rates=[0.8 * most, 1.3 * most])
    assert not below.is_saturated and above.is_saturated
    assert below.requests_per_s == pytest.approx(0.8 * most, rel=0.06)
    assert above.requests_per_s == pytest.approx(most, rel=0.04)
    assert above.max_queue > 200 > 40 > below.max_queue


# The engine's steps


def test_one_request_alone() -> None:
    """Prefill, then rounds: every time is known."""
    [each] = run([Job(1.0, 10, 4)], costs=CHUNKY, server=ServerShape(prefill_chunk=4)).requests
    # Chunks of 4, 4 and 2 positions; the first token does not wait for a round.
    assert each.chunks == [(pytest.approx(time), 1) for time in (1.010, 1.011, 1.012, 1.013)]
    assert each.num_rounds == 3 and each.first_token_at == pytest.approx(1.010)


def test_a_round_takes_verifying_drafting_and_the_host() -> None:
    """Two rows of equal length that never miss, so that every round drafts three, but for the last tokens."""
    outcome = run([Job(0.0, 10, 9)] * 2, "3", survival=(1.0,) * 3)
    both, prefill = COSTS.verify_s(2, 4, 0), 2 * COSTS.verify_s(1, 10, 0)
    # The first row's token goes out alone; the second's prompt comes before the first round of both.
    assert outcome.busy_s == pytest.approx(prefill + 2 * (both + COSTS.draft_s(1, 3, 0) + COSTS.host_s))
    assert outcome.prefill_s == pytest.approx(prefill)
    assert outcome.row_seconds == pytest.approx(2 * (outcome.busy_s - prefill))


def test_a_long_prompt_delays_the_others_by_a_chunk_at_a_time() -> None:
    jobs = [Job(0.0, 1, 200), Job(0.05, 100, 1)]
    chunked = run(jobs, costs=CHUNKY, server=ServerShape(prefill_chunk=10)).requests[0]
    whole = run(jobs, costs=CHUNKY, server=ServerShape(prefill_chunk=None)).requests[0]
    fair = run(
        jobs, costs=Adapting(base_s=0.0, position_s=0.001, free=0, host_s=0.0), server=ServerShape(prefill_chunk=None)
    ).requests[0]
    longest = [
        max(later[0] - sooner[0] for sooner, later in zip(each.chunks[1:], each.chunks[2:], strict=False))
        for each in (chunked, whole, fair)
    ]
    assert longest == [pytest.approx(0.011), pytest.approx(0.101), pytest.approx(0.001 * (LEAST_CHUNK + 1))]


def test_no_more_rows_than_there_are() -> None:
    jobs = jobs_of(9, prompt=1, answer=50)
    outcome = run(jobs, server=ServerShape(max_rows=3))
    assert [round(each.wait_s, 6) > 0 for each in outcome.requests] == [False] * 3 + [True] * 6
    for moment in (each.first_token_at for each in outcome.requests):
        assert sum(each.admitted_at <= moment < each.finished_at for each in outcome.requests) <= 3
    assert figures_of(outcome, "off", 1.0).mean_rows <= 3


def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    outcome = run(jobs_of(12), concurrency=3)
    ends = sorted(each.finished_at for each in outcome.requests)
    starts = sorted(each.arrived_at for each in outcome.requests)
    assert starts == [0.0] * 3 + ends[:9]
    assert figures_of(outcome, "off", 1.0, concurrency=3).load == "3 in flight"


def test_what_a_request_costs_outside_the_engine_delays_only_itself() -> None:
    jobs = jobs_of(50, rate=5.0)
    quick, slow = (run(jobs, server=ServerShape(request_s=spent)).requests for spent in (0.0, 0.25))
    assert [each.first_token_at + 0.25 for each in quick] == pytest.approx([each.first_token_at for each in slow])


# Whatever the policy


@pytest.mark.parametrize("policy", ["off", "3", "7", "best", "adaptive"])
@pytest.mark.parametrize("concurrency", [None, 5])
def test_every_request_finishes_once_and_tokens_add_up(policy: str, concurrency: int | None) -> None:
    jobs = arriving(workload(150, lengths("1-700"), lengths("1-40"), 7), poisson(20.0, 150, 7))
    outcome = run(jobs, policy, concurrency=concurrency)
    for job, each in zip(jobs, outcome.requests, strict=True):
        assert each.num_tokens == sum(count for _, count in each.chunks) == job.answer_tokens
        assert each.finished_at == each.chunks[-1][0]
        assert each.num_prefilled == job.prompt_tokens
        assert each.arrived_at <= each.admitted_at < each.first_token_at <= each.finished_at
        assert each.num_tokens == 1 + each.num_rounds + each.num_accepted_total
        assert each.num_accepted_total <= each.num_drafted_total
        times = [when for when, _ in each.chunks]
        assert times == sorted(times)
    assert outcome.num_tokens == sum(job.answer_tokens for job in jobs)
    assert 0 < outcome.busy_s <= outcome.wall_s + 1e-9


@pytest.mark.parametrize("policy", ["4", "adaptive"])
def test_the_same_seed_gives_the_same_figures(policy: str) -> None:
    case = Case(workload(40, lengths("5-60"), lengths("5-60"), 2), COSTS, ServerShape(), HALF, seed=2)
    once, again = (sweep(case, [policy], rates=[3.0, 9.0], concurrencies=[2]) for _ in range(2))
    assert once == again
    other = sweep(replace(case, seed=3), [policy], rates=[3.0, 9.0], concurrencies=[2])
    assert [each.tokens_per_s for each in other] != [each.tokens_per_s for each in once]


def test_acceptance_is_drawn_from_the_survival_curve() -> None:
    survival = (0.9, 0.6, 0.6, 0.1)
    outcome = run(jobs_of(200, answer=200, rate=100.0), "4", survival=survival)
    figures = figures_of(outcome, "4", 1.0)
    assert figures.tokens_per_round == pytest.approx(1 + sum(survival), rel=0.02)
    assert figures.drafted_per_round == pytest.approx(4, rel=0.03)
    kept = [num_accepted(survival, luck / 1000, 4) for luck in range(1000)]
    assert [sum(each >= place for each in kept) / 1000 for place in range(1, 5)] == pytest.approx(survival, abs=0.002)
    certain = run(jobs_of(1, answer=41), "4", survival=(1.0,) * 4).requests[0]
    assert certain.num_rounds == 8 and certain.num_accepted_total == 32


# Policies


def test_drafts_that_never_stand_never_pay() -> None:
    jobs, nothing = jobs_of(60, rate=3.0), (0.0,) * 7
    plain = run(jobs, survival=nothing)
    for policy in ("1", "7", "adaptive"):
        outcome = run(jobs, policy, survival=nothing)
        assert outcome.busy_s > plain.busy_s and outcome.wall_s >= plain.wall_s
        theirs, ours = (figures_of(each, policy, 1.0).total.mean for each in (outcome, plain))
        assert theirs and ours and theirs > ours
    assert run(jobs, "best", survival=nothing).wall_s == plain.wall_s


@pytest.mark.parametrize(("concurrency", "chance"), [(1, 0.9), (16, 0.3)])
def test_best_keeps_up_with_every_fixed_number(concurrency: int, chance: float) -> None:
    survival = tuple(chance**place for place in range(1, 8))
    case = Case(jobs_of(32, answer=120), COSTS, ServerShape(max_rows=16), survival)
    policies = ["off", *map(str, range(1, 8)), "best", "adaptive"]
    rates = {each.policy: each.tokens_per_s for each in sweep(case, policies, concurrencies=[concurrency])}
    fixed = [rates[name] for name in policies[:-2]]
    assert rates["best"] >= 0.99 * max(fixed)
    assert rates["adaptive"] >= 0.93 * max(fixed)
    assert rates["best"] > 1.02 * min(fixed)


def test_speculation_pays_when_few_are_there_and_costs_when_many_are() -> None:
    case = Case(jobs_of(64, answer=60), Costs(position_s=0.003), ServerShape(max_rows=32), HALF)
    alone = {each.policy: each for each in sweep(case, ["off", "3"], concurrencies=[1])}
    crowd = {each.policy: each for each in sweep(case, ["off", "3"], concurrencies=[32])}
    assert alone["3"].tokens_per_s > 1.15 * alone["off"].tokens_per_s
    assert crowd["3"].tokens_per_s < 0.95 * crowd["off"].tokens_per_s


def test_the_best_length_for_a_batch() -> None:
    best = make_planner("best", HALF, COSTS, 100, 256)
    assert isinstance(best, BestPlanner)
    for rows in (1, 2, 8, 64):
        speeds = [(1 + sum(HALF[:count])) / COSTS.round_s(rows, count, 100) for count in range(8)]
        assert best.choose(rows) == speeds.index(max(speeds))
    assert best.choose(64) == 0 < best.choose(1)
    assert BestPlanner(0, 256, survival=(0.0, 0.0), round_s=lambda rows, count: 1.0).choose(1) == 0


def test_a_drafter_knows_what_it_is_sure_of() -> None:
    """Its drafts come to the survival curve, and what it was sure of stood more often."""
    luck, survival = random.Random(5), (0.8, 0.5, 0.4)
    drafts = [drafted(survival, luck, 3, has_confidence=True) for _ in range(6000)]
    for place, share in enumerate(survival):
        assert statistics.fmean(each.num_right > place for each in drafts) == pytest.approx(share, abs=0.02)
    firsts = sorted((each.confidence[0], each.num_right > 0) for each in drafts if each.confidence)
    low, high = firsts[:1500], firsts[-1500:]
    assert statistics.fmean(stood for _, stood in low) < 0.6 and statistics.fmean(stood for _, stood in high) > 0.97


def test_a_fixed_number_draws_by_the_curve_alone() -> None:
    draft = drafted(HALF, random.Random(1), 7, has_confidence=False)
    assert draft.confidence is None and 0 <= draft.num_right <= 7


# Workloads and nonsense


def test_lengths() -> None:
    source = random.Random(0)
    assert {parse_lengths("--x", "12")(source) for _ in range(9)} == {12}
    spread = [parse_lengths("--x", "3-5")(source) for _ in range(200)]
    assert set(spread) == {3, 4, 5}
    skewed = [parse_lengths("--x", "lognormal:200,0.5")(source) for _ in range(4000)]
    assert statistics.median(skewed) == pytest.approx(200, rel=0.05)
    assert workload(5, lengths("1-9"), lengths("1-9"), 1) == workload(5, lengths("1-9"), lengths("1-9"), 1)


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "9-3", "x", "lognormal:200", "lognormal:0,1", "lognormal:nan,1", "other:3", "1-99999999999"]
)
def test_a_length_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="write it as 128"):
        parse_lengths("--prompt-tokens", text)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ServingConfig(max_rows=0),
        lambda: ServingConfig(prefill_chunk=-1),
        lambda: ServingConfig(request_overhead=float("nan")),
        lambda: ServingConfig(concurrency=(0,)),
        lambda: ServingConfig(rate=(0.0,)),
        lambda: run([Job(float("nan"), 1, 1)]),
        lambda: run([Job(0.0, 0, 1)]),
        lambda: run([Job(0.0, 1, 0)]),
        lambda: make_planner("fastest", HALF, COSTS, 1, 256),
        lambda: make_planner("8", HALF, COSTS, 1, 256),
        lambda: make_planner("-1", HALF, COSTS, 1, 256),
        lambda: sweep(Case(jobs_of(1), COSTS, ServerShape(), HALF), ["off"]),
        lambda: sweep(Case([], COSTS, ServerShape(), HALF), ["off"], rates=[1.0]),
    ],
)
def test_nonsense_is_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        wrong()


def test_spreads() -> None:
    assert Spread.of([]) == Spread(None, None, None, None)
    assert Spread.of([float(value) for value in range(101)]) == Spread(50.0, 50.0, 90.0, 99.0)


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    figures: LoadFigures = figures_of(run(jobs_of(2, answer=1)), "off", 1.0)
    assert figures.inter_token == Spread(None, None, None, None) and figures.tokens_per_round == 1.0


def test_nobody_asks() -> None:
    assert Simulation(Case([], COSTS, ServerShape(), HALF), FixedPlanner(0), []).run().wall_s == 0.0
