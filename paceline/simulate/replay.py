"""A run of `paceline bench serving` replayed in the simulator: the same arrivals, prompts and answers; how far is it off?

    passes = read_passes(Path("runs/bench-serving-..."))
    rows = compare(passes, costs, ServerShape(), survival)

Taken from the run: when requests were due (open loops) or how many were in flight (closed ones), prompt tokens that had to be
computed, answer tokens, and how many drafts stood. Predicted: every time.
"""

from __future__ import annotations

import itertools
import json
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.figures import Rounds
from paceline.simulate.costs import StepCosts
from paceline.simulate.files import is_amount, read_objects
from paceline.simulate.load import Arrivals, share
from paceline.simulate.serving import LOOKUP, Case, Job, Lookups, ServerShape, Survival
from paceline.types import NONE

THROUGHPUT_WITHIN, FIRST_TOKEN_WITHIN = 0.10, 0.30
"""Relative errors of tokens per second and of the median time to the first token that count as predicted."""
NEEDED = ("repetition", "due_s", "first_s", "num_prompt", "num_reused", "num_tokens", "wall_s")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One pass of the run: the requests of one load to one contender, once."""

    speculate: str
    load: Arrivals
    jobs: list[Job]
    """In the order they were sent, without those that failed."""
    wall_s: float
    first_token_s: list[float]
    """Time to the first token of each job."""
    rounds: Rounds
    """Of all jobs."""
    own: Rounds
    """Those with the drafter's own drafts; all where the run does not tell the source."""
    found: Rounds = field(default_factory=Rounds)
    """Those with drafts found in the text so far, beside a drafter."""

    @property
    def tokens_per_s(self) -> float:
        return sum(job.answer_tokens for job in self.jobs) / self.wall_s


@dataclass(frozen=True, slots=True)
class Compared:
    """A load and contender, simulated and measured: medians over repetitions, first tokens over all their answers."""

    load: str
    speculate: str
    policy: str
    """The simulator's, in place of the server's."""
    num_requests: int
    measured_tokens_per_s: float
    simulated_tokens_per_s: float
    measured_first_token_s: float
    simulated_first_token_s: float
    measured_tokens_per_round: float
    simulated_tokens_per_round: float

    @property
    def throughput_error(self) -> float:
        """Relative: 0.1 when the simulator says 10% more than was measured."""
        return self.simulated_tokens_per_s / self.measured_tokens_per_s - 1

    @property
    def first_token_error(self) -> float:
        return self.simulated_first_token_s / self.measured_first_token_s - 1

    @property
    def is_within(self) -> bool:
        return abs(self.throughput_error) <= THROUGHPUT_WITHIN and abs(self.first_token_error) <= FIRST_TOKEN_WITHIN


def read_passes(folder: Path) -> list[Recorded]:
    """The passes of a run folder, in the order they ran. Raises ConfigError when it holds none that can be replayed."""
    file = folder / "metrics.jsonl"
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in read_objects(file, "--against takes the folder of a run of paceline bench serving"):
        needed = ("repetition", "wall_s") if line.get("error") else NEEDED
        if line.get("wall_s") == 0 or not all(isinstance(line.get(name), int | float) for name in needed):
            raise ConfigError(f"{file} lacks {', '.join(NEEDED)} of each request: run paceline bench serving of this version")
        key = line.get("rate"), line.get("concurrency"), line.get("speculate"), line.get("repetition")
        groups.setdefault(key, []).append(line)
    passes = [each for each in map(_recorded, groups.values()) if each.jobs]
    if not passes:
        raise ConfigError(f"{file} holds no answered request: run paceline bench serving again")
    return passes


def _recorded(lines: list[dict[str, Any]]) -> Recorded:
    first = lines[0]
    whole = [line for line in lines if not line.get("error") and line["num_tokens"] > 0]
    whole.sort(key=lambda line: line["due_s"])
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
        own=Rounds.sum(map(_own, whole)),
        found=Rounds.sum(map(_found, whole)),
    )


def _rounds(told: dict[str, Any]) -> Rounds:
    """From num_rounds, num_drafted and accepted_histogram, each of which may be missing. Raises ConfigError."""
    num_rounds, num_drafted = told.get("num_rounds") or 0, told.get("num_drafted") or 0
    histogram = told.get("accepted_histogram") or []
    if not isinstance(histogram, list) or not all(map(is_amount, (num_rounds, num_drafted, *histogram))):
        raise ConfigError(f"the rounds of a request must be counts, not {told}: run paceline bench serving again")
    return Rounds(num_rounds, num_drafted, tuple(histogram))


def _sources(line: dict[str, Any]) -> dict[str, Rounds]:
    """Of "rounds_by_source": {"dflash": {"num_rounds": 3, "num_drafted": 45, "accepted_histogram": [1, 0, 2]}, "ngram": ...},
    without rounds that drafted nothing. Raises ConfigError."""
    told = line.get("rounds_by_source") or {}
    if not isinstance(told, dict) or not all(isinstance(each, dict) for each in told.values()):
        raise ConfigError(f"rounds_by_source must hold the rounds of each source, not {told}: run paceline bench serving again")
    return {name: _rounds(each) for name, each in told.items() if name != NONE}


def _own(line: dict[str, Any]) -> Rounds:
    """The rounds of the drafter; those of lookups only where lookups are the drafter. Raises ConfigError."""
    known = _sources(line)
    names = known.keys() - {LOOKUP} or known.keys()
    return Rounds.sum(known[name] for name in names) if line.get("rounds_by_source") else _rounds(line)


def _found(line: dict[str, Any]) -> Rounds:
    """Those of lookups. Raises ConfigError."""
    return _sources(line).get(LOOKUP, Rounds())


def rows_of(folder: Path) -> int | None:
    """--max-batch of the servers that the run started; None where it does not say."""
    try:
        words = json.loads((folder / "config.json").read_text(encoding="utf-8"))["server"]
        return int(words[words.index("--max-batch") + 1])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def recorded_survival(passes: Sequence[Recorded]) -> Survival:
    """The drafter's survival curve in the pass whose rounds drafted most; () when it drafted nothing.

    Where the run tells the source of each round's drafts, lookups and rounds without drafts do not count. The curve is exact
    where every round drafted the same number of tokens. Where the server chose the number, it is not known for a single round:
    places up to the average number are taken as always drafted, and those beyond it to stand as often as these on average. A
    run with the contender `full` knows all of them.
    """
    drafting = [each for each in passes if each.own.num_drafted and sum(each.own.accepted_histogram)]
    if not drafting:
        return ()
    most = max(drafting, key=lambda each: each.own.drafted_per_round)
    return _survival(Rounds.sum(each.own for each in drafting if (each.load, each.speculate) == (most.load, most.speculate)))


def recorded_lookups(passes: Sequence[Recorded]) -> Lookups | None:
    """What was found in the text so far in the load whose rounds checked most of it; None where nothing was, or where lookups
    are the drafter. What the server found and did not check is not known."""
    groups: dict[tuple[Arrivals, str], list[Recorded]] = {}
    for each in passes:
        if each.found.num_drafted and each.found != each.own:
            groups.setdefault((each.load, each.speculate), []).append(each)
    shares = [
        (share(sum(each.found.num_rounds for each in group), sum(each.rounds.num_rounds for each in group)), group)
        for group in groups.values()
    ]
    if not shares:
        return None
    largest, group = max(shares, key=operator.itemgetter(0))
    return Lookups(min(largest, 1.0), _survival(Rounds.sum(each.found for each in group)))


def _survival(rounds: Rounds) -> Survival:
    """As `recorded_survival` has it."""
    histogram, always = rounds.accepted_histogram, max(round(rounds.drafted_per_round), 1)
    chances: list[float] = []
    for place in range(1, max(len(histogram), always + 1)):
        reached, stood = sum(histogram[place - 1 :]), sum(histogram[place:])
        chances.append(share(stood, reached) if place <= always else statistics.fmean(chances[:always]))
    return tuple(itertools.accumulate(chances, operator.mul))


def policy_for(speculate: str, most: int) -> str:
    """The simulator's policy for a contender of the benchmark."""
    if speculate == "auto":
        return "adaptive" if most else "off"
    wanted = most if speculate == "full" else int(speculate) if speculate.isdecimal() else 0
    return str(min(wanted, most) or "off")


def compare(
    passes: Sequence[Recorded], costs: StepCosts, server: ServerShape, survival: Survival, *, seed: int = 0
) -> list[Compared]:
    """One line for each load and contender. Raises ConfigError."""
    groups: dict[tuple[Arrivals, str], list[Recorded]] = {}
    for each in passes:
        groups.setdefault((each.load, each.speculate), []).append(each)
    case = Case([], costs, server, survival, seed, recorded_lookups(passes))
    return [_compared(group, case) for group in groups.values()]


def _compared(group: list[Recorded], case: Case) -> Compared:
    """The repetitions of one load and contender."""
    policy = policy_for(group[0].speculate, len(case.survival))
    outcomes = [
        replace(case, jobs=each.jobs, seed=case.seed + number).run(policy, concurrency=each.load.concurrency)
        for number, each in enumerate(group)
    ]
    requests = [request for outcome in outcomes for request in outcome.requests]
    num_rounds = sum(each.num_rounds for each in requests)
    return Compared(
        load=str(group[0].load),
        speculate=group[0].speculate,
        policy=policy,
        num_requests=len(requests),
        measured_tokens_per_s=statistics.median(each.tokens_per_s for each in group),
        simulated_tokens_per_s=statistics.median(each.num_tokens / each.wall_s for each in outcomes),
        measured_first_token_s=statistics.median(value for each in group for value in each.first_token_s),
        simulated_first_token_s=statistics.median(each.first_token_s for each in requests),
        measured_tokens_per_round=Rounds.sum(each.rounds for each in group).tokens_per_round,
        simulated_tokens_per_round=1 + share(sum(each.num_accepted_total for each in requests), num_rounds),
    )
