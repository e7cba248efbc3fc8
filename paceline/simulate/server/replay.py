"""Replays a run of `paceline bench serving` in the simulator and reports the prediction error.

    passes = read_passes(Path("runs/bench-serving-..."))
    rows = compare(passes, costs, ServerShape(), survival)

The run gives the due times of requests (open loops) or the number in flight (closed loops), the prompt tokens to
compute, the answer tokens, and the acceptance. Without `costs`, it also gives the duration of a pass of each size
(`own_costs`). The simulator predicts the content and number of the server's steps, and so all times that a client
observes.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, reraised
from paceline.plan.planner import Planner
from paceline.report.statistics import Rounds
from paceline.simulate.costs.rounds import MeasuredCosts, StepCosts, TimeTable
from paceline.simulate.files import is_amount, read_objects
from paceline.simulate.server.drafts import Survival
from paceline.simulate.server.load import Arrivals, share
from paceline.simulate.server.server import Case, Job, Lookups, Outcome, ServerShape, Simulation
from paceline.types import COPYING, NONE

THROUGHPUT_WITHIN, FIRST_TOKEN_WITHIN = 0.10, 0.30
"""Maximum relative errors at which a prediction counts as correct: of tokens per second (THROUGHPUT_WITHIN), and of the
median time to the first token (FIRST_TOKEN_WITHIN)."""
NEEDED = ("repetition", "due_s", "first_s", "num_prompt", "num_reused", "num_tokens", "wall_s")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded pass: all requests of one load, sent once to the server with one `speculate` setting."""

    speculate: str
    load: Arrivals
    jobs: list[Job]
    """Requests in the order they were sent; failed ones are left out."""
    wall_s: float
    first_token_s: list[float]
    """Seconds to the first token of each job."""
    rounds: Rounds
    """Totals over the rounds of all jobs."""
    own: Rounds
    """Totals over the rounds with drafts of the drafter itself; over all rounds if the run does not record the source
    of drafts. Prompt lookup counts as the drafter if there is no other."""
    lookup: Rounds = field(default_factory=Rounds)
    """Totals over the rounds with drafts from prompt lookup or from a client's prediction."""
    steps: list[tuple[str, float, float, float]] = field(default_factory=list)
    """(kind, size, count, total seconds) of the engine's steps; empty if not recorded. Size is in positions for verify
    (target pass) and draft, in tokens for prefill, and 1 for step (a whole step)."""

    @property
    def tokens_per_s(self) -> float:
        return sum(job.answer_tokens for job in self.jobs) / self.wall_s


@dataclass(frozen=True, slots=True)
class Compared:
    """Simulated and measured figures of one load with one `speculate` setting. Rates are medians over the repetitions,
    times to the first token are medians over all answers."""

    load: str
    speculate: str
    policy: str
    """The simulator's policy that corresponds to `speculate`: off, adaptive, or a number of drafts."""
    num_requests: int
    measured_tokens_per_s: float
    simulated_tokens_per_s: float
    measured_first_token_s: float
    simulated_first_token_s: float
    measured_tokens_per_round: float
    simulated_tokens_per_round: float
    measured_tokens_per_s_range: tuple[float, float]
    errors: list[float]
    """Relative error of tokens per second in each repetition: 0.1 if the simulator predicts 10% more than measured."""

    @property
    def throughput_error(self) -> float:
        return statistics.median(self.errors)

    @property
    def first_token_error(self) -> float:
        return self.simulated_first_token_s / self.measured_first_token_s - 1

    @property
    def has_throughput(self) -> bool:
        return abs(self.throughput_error) <= THROUGHPUT_WITHIN

    @property
    def is_within(self) -> bool:
        return self.has_throughput and abs(self.first_token_error) <= FIRST_TOKEN_WITHIN


def read_passes(folder: Path) -> list[Recorded]:
    """Reads a run folder of `paceline bench serving`. Returns its passes in the order they ran; a pass sends all
    requests of one load once. Raises ConfigError if metrics.jsonl is invalid or has no answered request."""
    file = folder / "metrics.jsonl"
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in read_objects(file, "--against takes the folder of a run of paceline bench serving"):
        needed = ("repetition", "wall_s") if line.get("error") or "steps" in line else NEEDED
        if line.get("wall_s") == 0 or not all(isinstance(line.get(name), int | float) for name in needed):
            raise ConfigError(
                f"{file} lacks {', '.join(NEEDED)} of each request: run paceline bench serving of this version"
            )
        key = line.get("rate"), line.get("concurrency"), line.get("speculate"), line.get("repetition")
        groups.setdefault(key, []).append(line)
    passes = [each for each in map(_recorded, groups.values()) if each.jobs]
    if not passes:
        raise ConfigError(f"{file} holds no answered request: run paceline bench serving again")
    return passes


def _recorded(lines: list[dict[str, Any]]) -> Recorded:
    first = lines[0]
    whole = [line for line in lines if not line.get("error") and line.get("num_tokens", 0) > 0]
    whole.sort(key=lambda line: line["due_s"])
    sources = [_sources(line) for line in whole]
    jobs = [
        Job(
            arrives_at=max(line["due_s"], 0.0),
            prompt_tokens=max(line["num_prompt"] - line["num_reused"], 1),
            answer_tokens=line["num_tokens"],
        )
        for line in whole
    ]
    return Recorded(
        speculate=str(first.get("speculate")),
        load=Arrivals(first.get("rate"), first.get("concurrency")),
        jobs=jobs,
        wall_s=first["wall_s"],
        first_token_s=[line["first_s"] for line in whole],
        rounds=Rounds.sum(map(_rounds, whole)),
        own=Rounds.sum(own for own, _ in sources),
        lookup=Rounds.sum(lookup for _, lookup in sources),
        steps=_steps([each for line in lines for each in line.get("steps") or ()]),
    )


def _steps(steps: list[Any]) -> list[tuple[str, float, float, float]]:
    with reraised(
        ConfigError, "the times of a pass cannot be read", "run paceline bench serving again", TypeError, ValueError
    ):
        return [(str(kind), float(size), float(count), float(seconds)) for kind, size, count, seconds in steps]


def _rounds(record: dict[str, Any]) -> Rounds:
    """Reads num_rounds, num_drafted and accepted_histogram, each of which may be missing. Raises ConfigError."""
    num_rounds, num_drafted = record.get("num_rounds") or 0, record.get("num_drafted") or 0
    histogram = record.get("accepted_histogram") or []
    if not isinstance(histogram, list) or not all(map(is_amount, (num_rounds, num_drafted, *histogram))):
        raise ConfigError(f"the rounds of a request must be counts, not {record}: run paceline bench serving again")
    return Rounds(num_rounds, num_drafted, tuple(histogram))


def _sources(line: dict[str, Any]) -> tuple[Rounds, Rounds]:
    """Returns the rounds with the drafter's own drafts (prompt lookup only if that is the drafter), and those with
    drafts from prompt lookup or predictions. Without recorded sources all rounds are the drafter's. Raises ConfigError.

    "rounds_by_source": {"dflash": {"num_rounds": 3, "num_drafted": 45, "accepted_histogram": [1, 0, 2]}, "ngram":
    ...}"""
    by_source = line.get("rounds_by_source") or {}
    if not isinstance(by_source, dict) or not all(isinstance(each, dict) for each in by_source.values()):
        raise ConfigError(
            f"rounds_by_source must hold the rounds of each source, not {by_source}: run paceline bench serving again"
        )
    known = {name: _rounds(each) for name, each in by_source.items() if name != NONE}
    lookup = Rounds.sum(known.pop(name, Rounds()) for name in COPYING)
    return Rounds.sum(known.values()) if known else lookup if by_source else _rounds(line), lookup


def rows_of(folder: Path) -> int | None:
    """Returns the maximum batch size (--max-batch) of the servers in a run folder of `paceline bench serving`; None if
    it is not recorded."""
    try:
        words = json.loads((folder / "config.json").read_text(encoding="utf-8"))["server"]
        rows = int(words[words.index("--max-batch") + 1])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return rows if rows > 0 else None


def recorded_survival(passes: Sequence[Recorded]) -> Survival:
    """Returns the drafter's survival curve in a recorded run: shares of rounds whose first 1, 2, ... drafts were
    accepted. () if nothing was drafted. Uses only the rounds of one load and `speculate` setting, the one with the most
    drafts per round. If the run records the source of drafts, only rounds with the drafter's own drafts count.

    The curve is exact if all these rounds had the same number of drafts. Otherwise every round is assumed to have had
    their mean number, rounded. Positions above this number get the mean acceptance chance of the positions up to it.
    """
    drafting = [each for each in passes if each.own.num_drafted and sum(each.own.accepted_histogram)]
    if not drafting:
        return ()
    most = max(drafting, key=lambda each: each.own.drafted_per_round)
    return _survival(
        Rounds.sum(each.own for each in drafting if (each.load, each.speculate) == (most.load, most.speculate))
    )


def recorded_lookups(passes: Sequence[Recorded]) -> Lookups | None:
    """Returns the share of a recorded run's rounds that verified prompt lookup drafts, and the survival curve of these
    drafts. Uses only one load and `speculate` setting of the run: the one where this share is largest. Returns None
    without such drafts, or if prompt lookup was the only drafter."""
    groups: dict[tuple[Arrivals, str], list[Recorded]] = {}
    for each in passes:
        if each.lookup.num_drafted and each.lookup != each.own:
            groups.setdefault((each.load, each.speculate), []).append(each)

    def part(group: list[Recorded]) -> float:
        return share(sum(each.lookup.num_rounds for each in group), sum(each.rounds.num_rounds for each in group))

    most = max(groups.values(), key=part, default=[])
    return Lookups(min(part(most), 1.0), _survival(Rounds.sum(each.lookup for each in most))) if most else None


def _survival(rounds: Rounds) -> Survival:
    """Returns the survival curve of these rounds; see `recorded_survival`."""
    histogram, always = rounds.accepted_histogram, max(round(rounds.drafted_per_round), 1)
    chances: list[float] = []
    for place in range(1, max(len(histogram), always + 1)):
        reached, stood = sum(histogram[place - 1 :]), sum(histogram[place:])
        chances.append(share(stood, reached) if place <= always else statistics.fmean(chances[:always]))
    return tuple(itertools.accumulate(chances, operator.mul))


def policy_for(speculate: str, most: int) -> str:
    """Returns the simulator's policy (rule for the number of drafts) for a `speculate` setting of the benchmark. "auto"
    gives "adaptive", "full" gives `most`, a number gives itself but at most `most`, any other setting gives "off".
    `most`: maximum drafts per round; 0 always gives "off"."""
    if speculate == "auto":
        return "adaptive" if most else "off"
    wanted = most if speculate == "full" else int(speculate) if speculate.isdecimal() else 0
    return str(min(wanted, most) or "off")


def own_costs(passes: Sequence[Recorded]) -> list[MeasuredCosts]:
    """Returns one cost model for each pass, from the step times that the run recorded. A step is a verification, a
    prefill chunk or a drafting pass. Raises ConfigError if a pass has no step times.

    First, the mean seconds of each type and size of step are computed over all passes. For each pass, the means of a
    type are then multiplied by a factor, with which they add up to the time that the pass spent on this type.
    """
    if not all(each.steps for each in passes):
        raise ConfigError(
            "the run does not tell what its steps took: run paceline bench serving again, or give --steps"
        )
    steps = [step for each in passes for step in each.steps]
    means = {
        kind: _rising([step[1:] for step in steps if step[0] == kind])
        for kind in ("verify", "prefill", "draft", "step")
    }
    fewest = sum(math.ceil(job.prompt_tokens / max(means["prefill"])) for each in passes for job in each.jobs)
    adapts, costs = sum(count for kind, _, count, _ in steps if kind == "prefill") > fewest, list[MeasuredCosts]()
    for each in passes:
        spent_s, usual_s = defaultdict[str, float](float), defaultdict[str, float](float)
        for kind, size, count, seconds in each.steps:
            spent_s[kind] += seconds
            usual_s[kind] += count * means[kind][size]
        pace = {kind: spent_s[kind] / usual_s[kind] for kind in usual_s}
        verify, prefill, *draft = (
            TimeTable.of([(1.0, size, pace.get(kind, pace["verify"]) * mean_s) for size, mean_s in means[kind].items()])
            for kind in ("verify", "prefill", "draft")
            if means[kind]
        )
        num_rounds = sum(count for kind, _, count, _ in each.steps if kind == "verify")
        host_s = (2 * spent_s["step"] - sum(spent_s.values())) / num_rounds
        costs.append(MeasuredCosts(verify, draft[0] if draft else None, prefill, host_s, prefill_adapts=adapts))
    return costs


def _rising(steps: list[tuple[float, float, float]]) -> dict[float, float]:
    """Returns size -> mean seconds, from (size, count, total seconds), non-decreasing: sizes that violate this are
    averaged (isotonic regression), which keeps the total."""
    blocks: list[tuple[float, float, list[float]]] = []
    for size, same in itertools.groupby(sorted(steps), key=operator.itemgetter(0)):
        (_, counts, spent), sizes = zip(*same, strict=True), [size]
        count, seconds = sum(counts), sum(spent)
        while blocks and blocks[-1][1] * count > seconds * blocks[-1][0]:
            more, more_s, smaller = blocks.pop()
            count, seconds, sizes = count + more, seconds + more_s, smaller + sizes
        blocks.append((count, seconds, sizes))
    return {size: seconds / count for count, seconds, sizes in blocks for size in sizes}


def compare(
    passes: Sequence[Recorded], costs: StepCosts | None, server: ServerShape, survival: Survival, *, seed: int = 0
) -> list[Compared]:
    """Simulates the recorded passes, in the order they ran, and compares each load and `speculate` setting with the
    measurements. `costs`: step times for all passes; None uses those that each pass recorded. `survival`: shares of
    rounds whose first 1, 2, ... drafts are accepted. Raises ConfigError if `costs` is None and the passes recorded no
    step times.

    All passes with the same `speculate` setting use one planner, which keeps its estimates from pass to pass."""
    lookups, planners = recorded_lookups(passes), dict[str, Planner]()
    groups: dict[tuple[Arrivals, str], list[tuple[Recorded, Outcome]]] = {}
    for each, own in zip(passes, own_costs(passes) if costs is None else [costs] * len(passes), strict=True):
        group = groups.setdefault((each.load, each.speculate), [])
        case = Case(each.jobs, own, server, survival, seed + len(group), lookups)
        planner = planners.setdefault(each.speculate, case.planner(policy_for(each.speculate, len(survival))))
        group.append((each, Simulation(case, planner, each.jobs, each.load.concurrency).run()))
    return [_compared(group, policy_for(speculate, len(survival))) for (_, speculate), group in groups.items()]


def _compared(group: list[tuple[Recorded, Outcome]], policy: str) -> Compared:
    """Compares the repetitions of one load and setting."""
    recorded = [each for each, _ in group]
    requests = [request for _, outcome in group for request in outcome.requests]
    num_rounds = sum(each.num_rounds for each in requests)
    simulated, measured = [each.num_tokens / each.wall_s for _, each in group], [each.tokens_per_s for each in recorded]
    return Compared(
        load=str(recorded[0].load),
        speculate=recorded[0].speculate,
        policy=policy,
        num_requests=len(requests),
        measured_tokens_per_s=statistics.median(measured),
        simulated_tokens_per_s=statistics.median(simulated),
        measured_first_token_s=statistics.median(value for each in recorded for value in each.first_token_s),
        simulated_first_token_s=statistics.median(each.first_token_s for each in requests),
        measured_tokens_per_round=Rounds.sum(each.rounds for each in recorded).tokens_per_round,
        simulated_tokens_per_round=1 + share(sum(each.num_accepted_total for each in requests), num_rounds),
        measured_tokens_per_s_range=(min(measured), max(measured)),
        errors=[prediction / value - 1 for prediction, value in zip(simulated, measured, strict=True)],
    )
