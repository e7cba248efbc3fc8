"""Overhead of a round: one constant for launches, scheduling, sampling and synchronisation, added to the predicted
cost.

    added_s = overhead_s(costs, Load(1, 4096), plain_rate=75.0)
    costs = with_overhead(costs, added_s)

The overhead is given, or computed from one measured rate of plain decoding, or fitted to the rounds in a server's log.
Measured speed-ups are not used, so predictions with an overhead can be compared with them. It is a part of
`StepCosts.host_s`; the formulas of `speedup.py` stay the same.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ConfigError
from paceline.simulate.costs.rounds import MeasuredCosts, RooflineCosts, StepCosts
from paceline.simulate.server_logs import Seen, read_server
from paceline.simulate.speedup import Load


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds added to every round, and the source of this number."""

    seconds: float
    source: str
    """Description of the source for readers."""


def overhead_s(costs: StepCosts, load: Load, plain_rate: float) -> float:
    """Returns the overhead in seconds: the difference between the measured and the predicted time of a plain round.
    `plain_rate`: measured tokens/s of each stream of `load`, with plain decoding.

    A plain round (without drafts) gives each stream one token, so its measured time is 1 / plain_rate. Raises
    ConfigError if plain_rate is not above 0, or faster than `costs` allow without any overhead.
    """
    if not 0 < plain_rate < float("inf"):
        raise ConfigError(f"plain_rate must be above 0 tokens/s, not {plain_rate:g}")
    predicted_s = costs.round_s(load.batch, 0, load.context)
    added_s = 1.0 / plain_rate - predicted_s
    if added_s < -1e-9 * predicted_s:
        raise ConfigError(
            f"plain_rate {plain_rate:g} tokens/s is a step of {1e3 / plain_rate:.2f} ms, but the prediction takes "
            f"{1e3 * predicted_s:.2f} ms without any overhead ({1 / predicted_s:.0f} tokens/s): the model was stored "
            "smaller, on more or faster GPUs, or several streams were counted together; see --precision, --gpus, "
            "--hardware, --context"
        )
    return max(added_s, 0.0)


def with_overhead(costs: StepCosts, added_s: float) -> StepCosts:
    """Returns the same costs with `added_s` seconds added to each round. Raises ConfigError for costs that are not in
    seconds."""
    if not isinstance(costs, RooflineCosts | MeasuredCosts):
        raise ConfigError("an overhead needs costs in seconds, the toy model has none: leave --toy or the overhead out")
    return replace(costs, host_s=costs.host_s + added_s)


def overhead_of(
    costs: StepCosts, context: int, overhead_ms: float | None, plain_rate: float | None, server_log: Path | None
) -> Overhead | None:
    """Returns the overhead of a round from one of three sources: given in milliseconds, computed from `plain_rate`
    (tokens/s of plain decoding with one stream), or fitted to a server's log. None if no source is given. `costs`:
    round times without overhead; `context`: cached tokens per sequence. Raises ConfigError."""
    if overhead_ms is not None:
        return Overhead(overhead_ms / 1e3, "as given")
    if server_log is not None:
        return fitted(costs, context, read_server(server_log), server_log.name)
    if plain_rate is None:
        return None
    return Overhead(
        overhead_s(costs, Load(1, context), plain_rate), f"from {plain_rate:g} tokens/s of one plain stream"
    )


def fitted(costs: StepCosts, context: int, seen: Seen, name: str) -> Overhead:
    """Returns the overhead fitted to a server's log: the median difference between measured round times and those that
    `costs` predicts. `seen`: the parsed log; `context`: cached tokens per sequence, used for intervals for which the
    log reports none; `name`: the log's name, for messages.

    Raises ConfigError if no round is known, or if the rounds were faster than `costs`.
    """
    if not seen.samples:
        raise ConfigError(f"{name} tells of tokens a round but of no round's time: give a log of a steady load")
    times = [
        (each.round_s, costs.round_s(each.running, each.num_drafted, round(each.context or context)))
        for each in seen.samples
    ]
    added_s = statistics.median(measured - predicted for measured, predicted in times)
    if added_s < 0:
        measured, predicted = (statistics.median(each) for each in zip(*times, strict=True))
        raise ConfigError(
            f"{name}: a round took {1e3 * measured:.2f} ms, but the prediction takes {1e3 * predicted:.2f} ms without "
            "any "
            "overhead: check --model, --hardware, --gpus, --precision, --drafter-cost and --block against the server's"
        )
    off = statistics.median(abs((predicted + added_s) / measured - 1) for measured, predicted in times)
    counts = sorted(each.running for each in seen.samples)
    requests = f"{counts[0]} to {counts[-1]}" if counts[0] < counts[-1] else f"{counts[0]}"
    source = f"the median over {len(times)} intervals of {name} ({seen.server}, {requests} requests)"
    return Overhead(added_s, f"{source}, whose rounds are then met within {off:.0%}")
