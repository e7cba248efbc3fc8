"""A run of `paceline bench serving` once more, in the simulator: the same arrivals, prompts and answers; how far is it off?

    passes = read_passes(Path("runs/bench-serving-..."))
    rows = compare(passes, costs, ServerShape(), survival)

What is taken from the run: when requests were due (open loops) or how many were in flight (closed ones), prompt tokens that had
to be computed, answer tokens, and how drafts fared. What is predicted: every time.
"""

from __future__ import annotations

import itertools
import json
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.simulate.arrivals import Job, Survival
from paceline.simulate.costs import StepCosts
from paceline.simulate.load import Case
from paceline.simulate.serving import PrefillSeconds, ServerShape

THROUGHPUT_WITHIN, FIRST_TOKEN_WITHIN = 0.15, 0.30
"""Relative errors of tokens per second and of the median time to the first token that count as predicted."""
NEEDED = ("repetition", "due_s", "first_s", "num_prompt", "num_reused", "num_tokens", "wall_s")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One pass of the run: the requests of one load to one contender, once."""

    speculate: str
    rate: float | None
    concurrency: int | None
    jobs: list[Job]
    """In the order they were sent, without those that failed."""
    wall_s: float
    first_s: list[float]
    num_rounds: int
    num_drafted: int
    histogram: list[int]
    """histogram[n]: rounds in which exactly n drafts stood."""
    num_failed: int = 0

    @property
    def load(self) -> str:
        return f"{self.rate:g} per second" if self.rate else f"{self.concurrency} in flight"

    @property
    def tokens_per_s(self) -> float:
        return sum(job.answer_tokens for job in self.jobs) / self.wall_s

    @property
    def drafted_per_round(self) -> float:
        return self.num_drafted / self.num_rounds if self.num_rounds else 0.0


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
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(
            f"{folder} holds no run of paceline bench serving ({error.strerror or error}): check --against"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is damaged ({error}): run paceline bench serving again") from error
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        if not isinstance(line, dict) or not _is_complete(line):
            raise ConfigError(f"{file} lacks {', '.join(NEEDED)} of each request: run paceline bench serving of this version")
        key = line.get("rate"), line.get("concurrency"), line.get("speculate"), line.get("repetition")
        groups.setdefault(key, []).append(line)
    passes = [_recorded(group) for group in groups.values()]
    passes = [each for each in passes if each.jobs]
    if not passes:
        raise ConfigError(f"{file} holds no answered request: run paceline bench serving again")
    return passes


def _is_complete(line: dict[str, Any]) -> bool:
    """What a failed request needs, and an answered one."""
    needed = ("repetition", "wall_s") if line.get("error") else NEEDED
    return line.get("wall_s") != 0 and all(isinstance(line.get(name), int | float) for name in needed)


def _recorded(lines: list[dict[str, Any]]) -> Recorded:
    first = lines[0]
    whole = [line for line in lines if not line.get("error") and line["num_tokens"] > 0]
    whole.sort(key=lambda line: line["due_s"])
    histograms = [line.get("accepted_histogram") or [] for line in whole]
    longest = max((len(each) for each in histograms), default=0)
    return Recorded(
        speculate=str(first.get("speculate")),
        rate=first.get("rate"),
        concurrency=first.get("concurrency"),
        jobs=[
            Job(max(line["due_s"], 0.0), max(line["num_prompt"] - line["num_reused"], 1), line["num_tokens"]) for line in whole
        ],
        wall_s=first["wall_s"],
        first_s=[line["first_s"] for line in whole],
        num_rounds=sum(line.get("num_rounds") or 0 for line in whole),
        num_drafted=sum(line.get("num_drafted") or 0 for line in whole),
        histogram=[sum(each[place] for each in histograms if place < len(each)) for place in range(longest)],
        num_failed=len(lines) - len(whole),
    )


def recorded_survival(passes: Sequence[Recorded]) -> Survival:
    """How drafts fared in the pass whose rounds drafted most; () when nothing was drafted.

    Exact where every round drafted the same number. Where the server chose it, a round does not tell: places up to the average
    number are taken as always drafted, those beyond it to stand as often as these did. A run with the contender `full` knows.
    """
    drafting = [each for each in passes if each.num_drafted and sum(each.histogram)]
    if not drafting:
        return ()
    most = max(drafting, key=lambda each: each.drafted_per_round)
    chosen = [each for each in drafting if (each.load, each.speculate) == (most.load, most.speculate)]
    longest = max(len(each.histogram) for each in chosen)
    always = max(round(most.drafted_per_round), 1)
    chances: list[float] = []
    for place in range(1, max(longest, always + 1)):
        reached, stood = (sum(sum(each.histogram[first:]) for each in chosen) for first in (place - 1, place))
        chances.append((stood / reached if reached else 0.0) if place <= always else statistics.fmean(chances[:always]))
    return tuple(itertools.accumulate(chances, operator.mul))


def policy_for(speculate: str, most: int) -> str:
    """The simulator's policy for a contender of the benchmark."""
    if speculate == "auto":
        return "adaptive" if most else "off"
    if speculate == "full":
        return str(most) if most else "off"
    return str(min(int(speculate), most)) if speculate.isdecimal() and int(speculate) and most else "off"


def compare(
    passes: Sequence[Recorded],
    costs: StepCosts,
    server: ServerShape,
    survival: Survival,
    *,
    seed: int = 0,
    prefill_s: PrefillSeconds | None = None,
) -> list[Compared]:
    """One line for each load and contender. Raises ConfigError."""
    groups: dict[tuple[str, str], list[Recorded]] = {}
    for each in passes:
        groups.setdefault((each.load, each.speculate), []).append(each)
    made = []
    for (load, speculate), group in groups.items():
        policy = policy_for(speculate, len(survival))
        outcomes = []
        for number, each in enumerate(group):
            case = Case(each.jobs, costs, server, survival, seed + number, prefill_s)
            outcomes.append(case.run(policy, concurrency=each.concurrency))
        firsts = [one.first_s - one.arrival_s for outcome in outcomes for one in outcome.served]
        rounds = [one for outcome in outcomes for one in outcome.served]
        num_rounds = sum(one.num_rounds for one in rounds)
        recorded_rounds = sum(each.num_rounds for each in group)
        made.append(
            Compared(
                load=load,
                speculate=speculate,
                policy=policy,
                num_requests=sum(len(each.jobs) for each in group),
                measured_tokens_per_s=statistics.median(each.tokens_per_s for each in group),
                simulated_tokens_per_s=statistics.median(each.num_tokens / each.wall_s for each in outcomes),
                measured_first_token_s=statistics.median(value for each in group for value in each.first_s),
                simulated_first_token_s=statistics.median(firsts),
                measured_tokens_per_round=1 + _share([_num_accepted(each) for each in group], recorded_rounds),
                simulated_tokens_per_round=1 + _share([one.num_accepted for one in rounds], num_rounds),
            )
        )
    return made


def _num_accepted(each: Recorded) -> int:
    return sum(count * rounds for count, rounds in enumerate(each.histogram))


def _share(counts: Sequence[int], of: int) -> float:
    return sum(counts) / of if of else 0.0
