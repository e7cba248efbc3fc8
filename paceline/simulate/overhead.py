"""What a round takes beyond what is predicted: launches, scheduling, sampling, synchronisation. One number for every round.

    added_s = overhead_s(costs, Load(1, 4096), plain_rate=75.0)
    costs = with_overhead(costs, added_s)

It is given, or solved for from one measured rate of plain decoding and nothing else: so predictions with it can be compared
with measured speed-ups. It enters as `StepCosts.host_s`; the formulas of `speedup.py` stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.errors import ConfigError
from paceline.simulate.costs import MeasuredCosts, RooflineCosts, StepCosts
from paceline.simulate.speedup import Load


@dataclass(frozen=True, slots=True)
class Overhead:
    """What is added to every round."""

    seconds: float
    source: str
    """Where it is from, for people."""


def overhead_s(costs: StepCosts, load: Load, plain_rate: float) -> float:
    """Seconds to add to a round of `costs` so that plain decoding of `load` gives each stream `plain_rate` tokens a second.

    A plain step of all `load.batch` streams gives each of them one token: 1 / plain_rate - round(0). Raises ConfigError when
    plain_rate is not above 0, or faster than `costs` allow without any overhead.
    """
    if not 0 < plain_rate < float("inf"):
        raise ConfigError(f"plain_rate must be above 0 tokens/s, not {plain_rate:g}")
    predicted_s = costs.round_s(load.batch, 0, load.context)
    added_s = 1.0 / plain_rate - predicted_s
    if added_s < -1e-9 * predicted_s:
        raise ConfigError(
            f"plain_rate {plain_rate:g} tokens/s is a step of {1e3 / plain_rate:.2f} ms, but the prediction takes "
            f"{1e3 * predicted_s:.2f} ms without any overhead ({1 / predicted_s:.0f} tokens/s): the model was stored smaller, "
            "on more or faster GPUs, or several streams were counted together; see --precision, --gpus, --hardware and --context"
        )
    return max(added_s, 0.0)


def with_overhead(costs: StepCosts, added_s: float) -> StepCosts:
    """The same costs, each round `added_s` seconds longer. Raises ConfigError for costs that are no seconds."""
    if not isinstance(costs, RooflineCosts | MeasuredCosts):
        raise ConfigError("an overhead needs costs in seconds, the toy model has none: leave --toy or the overhead out")
    return replace(costs, host_s=costs.host_s + added_s)


def overhead_of(costs: StepCosts, context: int, overhead_ms: float | None, plain_rate: float | None) -> Overhead | None:
    """As it was asked for; `plain_rate` is that of one stream that decodes alone. Raises ConfigError."""
    if overhead_ms is not None:
        return Overhead(overhead_ms / 1e3, "as given")
    if plain_rate is None:
        return None
    return Overhead(overhead_s(costs, Load(1, context), plain_rate), f"from {plain_rate:g} tokens/s of one plain stream")
