"""Overhead of a round: seconds for launches, scheduling, sampling and synchronisation, added to the predicted cost.

    added_s = overhead_s(costs, Load(1, 4096), plain_rate=75.0)
    costs = with_overhead(costs, added_s)

The overhead is given, or computed from one measured rate of plain decoding, or fitted to the rounds in a server's log.
A log of rounds with different numbers of positions (sequences times drafted tokens + 1) also yields what the server
takes for each position. Measured speed-ups are not used, so predictions with an overhead can be compared with them. The
constant is a part of `StepCosts.host_s`; the formulas of `speedup.py` stay the same.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ConfigError
from paceline.simulate.costs.rounds import MeasuredCosts, PassFit, RooflineCosts, StepCosts
from paceline.simulate.server_logs import Seen, read_server
from paceline.simulate.speedup import Load


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds added to every round (`seconds`), and where this number comes from."""

    seconds: float
    source: str
    """Description of the source for readers."""
    token_s: float = 0.0
    """Seconds added for each position of each sequence in a target pass."""


def overhead_s(costs: StepCosts, load: Load, plain_rate: float) -> float:
    """Returns the overhead of a round in seconds: the measured time of a plain round (without drafts) less the time
    that `costs` predict. A plain round gives each stream one token, so it takes 1 / plain_rate. `plain_rate`: measured
    tokens/s of each stream of `load`. Raises ConfigError if plain_rate is not above 0, or is higher than `costs`
    allow."""
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


def with_overhead(costs: StepCosts, added_s: float, token_s: float = 0.0) -> StepCosts:
    """Returns `costs` with `added_s` more seconds in each round and, if they are a roofline, `token_s` more for each
    position of a target pass. Raises ConfigError for the toy model, whose costs are not in seconds."""
    if not isinstance(costs, RooflineCosts | MeasuredCosts):
        raise ConfigError("an overhead needs costs in seconds, the toy model has none: leave --toy or the overhead out")
    slower = replace(costs, host_s=costs.host_s + added_s)
    if not token_s or not isinstance(slower, RooflineCosts):
        return slower
    fit = slower.fit or PassFit()
    return replace(slower, fit=replace(fit, token_s=fit.token_s + token_s))


def overhead_of(
    costs: StepCosts, context: int, overhead_ms: float | None, plain_rate: float | None, server_log: Path | None
) -> Overhead | None:
    """Returns the overhead of a round, from the first of these arguments that is not None; None if all three are None.

    - `overhead_ms`: the overhead itself, in milliseconds.
    - `server_log`: a server's log, to whose round times the overhead is fitted.
    - `plain_rate`: measured tokens/s of plain decoding with one stream.

    `costs`: round costs without overhead; `context`: cached tokens per sequence. Raises ConfigError for an unreadable
    log, or a log or rate that is faster than `costs` allow."""
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
    """Returns the overhead fitted to a server's log: how many seconds longer the measured rounds took than `costs`
    predict. `seen`: the parsed log; `context`: cached tokens per sequence, where the log does not report them; `name`:
    name of the log, for messages.

    The overhead is a constant, the median over the log's intervals. For a roofline, seconds per position are fitted too
    if the largest rounds have at least twice the positions of the smallest. Raises ConfigError for a log without times
    of rounds, or with rounds that are faster than `costs` allow."""
    if not seen.samples:
        raise ConfigError(f"{name} tells of tokens a round but of no round's time: give a log of a steady load")
    times = [
        (each.round_s, costs.round_s(each.running, each.num_drafted, round(each.context or context)))
        for each in seen.samples
    ]
    positions = [each.running * (each.num_drafted + 1) for each in seen.samples]
    beyond = [measured - predicted for measured, predicted in times]
    token_s = _slope(positions, beyond) if isinstance(costs, RooflineCosts) else 0.0
    added_s = statistics.median(rest - token_s * number for rest, number in zip(beyond, positions, strict=True))
    if added_s < 0 and token_s:
        added_s, token_s = statistics.median(beyond), 0.0
    if added_s < 0:
        measured, predicted = (statistics.median(each) for each in zip(*times, strict=True))
        raise ConfigError(
            f"{name}: a round took {1e3 * measured:.2f} ms, but the prediction takes {1e3 * predicted:.2f} ms without "
            "any overhead: check --model, --hardware, --gpus, --precision, --drafter-cost and --block against the "
            "server's"
        )
    off = statistics.median(
        abs((predicted + added_s + token_s * number) / measured - 1)
        for (measured, predicted), number in zip(times, positions, strict=True)
    )
    counts = sorted(each.running for each in seen.samples)
    requests = f"{counts[0]} to {counts[-1]}" if counts[0] < counts[-1] else f"{counts[0]}"
    source = f"the median over {len(times)} intervals of {name} ({seen.server}, {requests} requests)"
    return Overhead(added_s, f"{source}, whose rounds are then met within {off:.0%}", token_s)


def _slope(positions: Sequence[float], beyond: Sequence[float]) -> float:
    """Returns the seconds that each position adds, 0 or more. `positions`: number in each measured round; `beyond`: the
    round's seconds that the roofline does not predict."""
    if max(positions) < 2 * min(positions):
        return 0.0
    seconds: dict[float, list[float]] = defaultdict(list)
    for number, rest in zip(positions, beyond, strict=True):
        seconds[number].append(rest)
    medians = {number: statistics.median(each) for number, each in seconds.items()}
    return max(statistics.linear_regression([*medians], [*medians.values()]).slope, 0.0)
