"""Replays a policy (which decides hourly when to retrain) on a virtual clock: on synthetic traffic with known drift, or
on stored traces. Nothing is trained.

    paceline adapt replay --scenario two-bases --policy seasonal --seeds 200
    paceline adapt replay --traces traces --policy seasonal

A training takes `world.TRAINING_HOURS` and raises the acceptance of later synthetic traffic; a drafter proposed for one
cluster is trained and then serves it. Stored traffic does not change. The seasonal policy trains on the traffic since
an alarm (a lasting drop of acceptance) fired, the naive one on the traffic during the training.

`net_tokens_per_s` charges all trainings. Serving costs `serving_price` for every hour of the replay, whatever the load;
a training costs `training_price` for TRAINING_HOURS on a machine like the server's (fields of PriceConfig):

    tokens/s      = tokens_per_round / (round_ms / 1000)
    net tokens/s  = tokens/s x serving cost / (serving cost + cost of all trainings)"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.errors import ConfigError
from paceline.loop.adapt.config import PolicyConfig, PriceConfig, ReplayConfig
from paceline.loop.adapt.decide.policy import Line, NaivePolicy, SeasonalPolicy
from paceline.loop.adapt.log import hour_line
from paceline.loop.adapt.traffic.hours import DAY
from paceline.loop.adapt.traffic.stored import read_hours
from paceline.loop.adapt.traffic.world import TRAINING_HOURS, World, make_world
from paceline.report.tables import SILENT, Progress
from paceline.runs.folder import write_whole

Policy = NaivePolicy | SeasonalPolicy
FOUR_WEEKS = 28 * DAY
GRACE = 2 * DAY
"""Hours after the end of a drift in which an alarm still counts as true. An alarm that fired in the day before the
drift counts as true if it was confirmed: the confirmation is due to the drift."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one replay of a policy on `hours` hours of synthetic traffic. `retrains`: trainings of the serving
    drafter; `proposed`: drafters proposed for one cluster; `false_alarms`: alarms (detected drops of acceptance)
    confirmed without a drift."""

    retrains: int
    false_alarms: int
    suspicions: int
    """Alarms that fired, including those not confirmed."""
    proposed: int
    hours: int
    detected_after: int | None = None
    """Hours from the true onset of the drift until an alarm fired that was later confirmed; 0 if it fired before the
    onset."""
    decided_after: int | None = None
    """Hours from the true onset to the training that followed."""
    is_missed: bool = False
    tokens_per_round: float = 0.0
    trainings: int = 0
    """All trainings: of the serving drafter, and of drafters proposed for one cluster."""
    prices: PriceConfig = field(default_factory=PriceConfig)

    @property
    def net_tokens_per_s(self) -> float:
        """Tokens per second of one request x serving cost / (serving cost + cost of all trainings)."""
        tokens_per_s = 1000 * self.tokens_per_round / self.prices.round_ms
        serving = self.hours * self.prices.serving_price
        cost = serving + TRAINING_HOURS * self.trainings * self.prices.training_price
        return tokens_per_s * serving / cost if cost else tokens_per_s


def run(
    config: ReplayConfig,
    policy: PolicyConfig | None = None,
    prices: PriceConfig | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Replays a policy on synthetic traffic, or on the traces in the folder `config.traces` if that is set. Trains no
    model. `policy`, `prices`: settings of the seasonal policy. Raises ConfigError if no trace has rounds.

    Returns the JSON object that `paceline adapt replay` prints. Its keys are:
    - for synthetic traffic: "scenario", "policy", "seeds", and the keys of `summary`;
    - for traces: "policy", "hours", "retrains" (number of trainings decided), "alarms" (number of confirmed ones), and
      "second_member_proposed" (number of additional drafters proposed)."""

    def make() -> Policy:
        return NaivePolicy() if config.policy == "naive" else SeasonalPolicy(policy, prices)

    if config.traces is not None:
        return _stored(config, config.traces, make())
    outcomes = []
    with progress.bar(config.scenario, config.seeds) as advance:
        for seed in range(config.first_seed, config.first_seed + config.seeds):
            lines: list[Line] = []
            world = make_world(config.scenario, seed, config.days)
            outcomes.append(fortnight(world, make(), lines.append, prices))
            advance(config.scenario)
            if seed == config.first_seed:
                _write(config.out, lines)
    return {"scenario": config.scenario, "policy": config.policy, "seeds": config.seeds, **summary(outcomes)}


def fortnight(
    world: World, policy: Policy, report: Callable[[Line], Any] = lambda line: None, prices: PriceConfig | None = None
) -> Outcome:
    """Replays a policy hour by hour on the synthetic traffic of `world`. Trainings that the policy decides on are
    simulated, and change the acceptance of later hours. `report`: function that receives the policy's line of every
    hour. `prices`: used for the net tokens/s of the result."""
    is_seasonal, prices = isinstance(policy, SeasonalPolicy), prices or PriceConfig()
    window: tuple[int, int] | None = None  # hours that the training in progress uses
    ends, is_member, clusters = 0, False, tuple[str, ...]()
    trainings, alarms, proposed = list[int](), list[int](), 0
    for at in range(world.num_hours):
        if window is not None and at >= ends:
            if is_member:
                world.train_member(clusters[0], *window)
            else:
                world.knowledge = world.train(*window, with_replay=is_seasonal)
            window = None
            policy.trained(world.first + at - 1, clusters, TRAINING_HOURS * prices.units)
        line = policy.hour(world.first + at, world.traffic(at))
        report(line)
        alarms += [raised - world.first for _, raised in line.raised]
        proposed += (is_proposed := line.decision.action == "propose")
        if line.decision.action in ("retrain", "propose"):
            trainings += [] if is_proposed else [at]
            ends, clusters, is_member = at + 1 + TRAINING_HOURS, line.decision.clusters, is_proposed
            begin = min([at - DAY, *(raised - world.first for _, raised in line.raised)])
            # The naive one trains on the traffic during the training.
            window = (max(begin, 0), at + 1) if is_seasonal else (at, ends)
            policy.is_training = True
    return replace(_outcome(world, policy, trainings, alarms, proposed), prices=prices)


def _outcome(world: World, policy: Policy, trainings: list[int], alarms: list[int], proposed: int) -> Outcome:
    drift = world.drift
    true = [at for at in alarms if drift and drift.begins - DAY < at <= drift.ends + GRACE]
    after = [at for at in trainings if drift and at >= drift.begins]
    suspicions = len(alarms)
    if isinstance(policy, SeasonalPolicy):
        suspicions = sum(cluster.series.num_raised for cluster in policy.clusters.values()) + policy.mix.num_raised
    return Outcome(
        len(trainings),
        len(alarms) - len(true),
        suspicions,
        proposed,
        world.num_hours,
        max(0, min(true) - drift.onset) if drift and true else None,
        max(0, min(after) - drift.onset) if drift and after else None,
        is_missed=drift is not None and not true,
        tokens_per_round=world.tokens / world.rounds,
        trainings=len(trainings) + proposed,
    )


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Summarises several replays as a JSON object. Most keys are means over the replays:
    - "retrains": trainings of the serving drafter; "most_retrains" is their maximum.
    - "second_member_proposed": times that an additional drafter was proposed.
    - "trainings": all trainings, including those of additional drafters.
    - "tokens_per_round": acceptance length.
    - "net_tokens_per_s": tokens per second, lowered by the cost of trainings (see `Outcome`).
    - "missed": share of replays in which a drift was not detected.
    - "false_alarms_per_4_weeks": alarms confirmed without a drift, per four weeks.
    - "suspicions_per_4_weeks": all alarms that fired, per four weeks.
    - "detection_periods": days from the onset of the drift until an alarm fired that was later confirmed;
      "most_detection_periods" is their maximum.
    - "decision_periods": days from the onset of the drift to the training of the serving drafter.

    The keys that end in "_periods" cover only the replays with an alarm or a training; without any they are None."""
    per_4_weeks = FOUR_WEEKS / fmean(outcome.hours for outcome in outcomes)
    detected = [outcome.detected_after / DAY for outcome in outcomes if outcome.detected_after is not None]
    decided = [outcome.decided_after / DAY for outcome in outcomes if outcome.decided_after is not None]
    return {
        "retrains": fmean(outcome.retrains for outcome in outcomes),
        "most_retrains": max(outcome.retrains for outcome in outcomes),
        "false_alarms_per_4_weeks": per_4_weeks * fmean(outcome.false_alarms for outcome in outcomes),
        "suspicions_per_4_weeks": per_4_weeks * fmean(outcome.suspicions for outcome in outcomes),
        "detection_periods": fmean(detected) if detected else None,
        "most_detection_periods": max(detected, default=None),
        "decision_periods": fmean(decided) if decided else None,
        "missed": fmean(outcome.is_missed for outcome in outcomes),
        "second_member_proposed": fmean(outcome.proposed for outcome in outcomes),
        "tokens_per_round": fmean(outcome.tokens_per_round for outcome in outcomes),
        "trainings": fmean(outcome.trainings for outcome in outcomes),
        "net_tokens_per_s": fmean(outcome.net_tokens_per_s for outcome in outcomes),
    }


def _stored(config: ReplayConfig, traces: Path, policy: Policy) -> dict[str, Any]:
    lines, ends = list[Line](), None
    hours, _ = read_hours(traces)
    if not hours:
        raise ConfigError(f"no request in {traces} has rounds: replay a scenario, or traces of paceline serve --traces")
    for number in range(min(hours), max(hours) + 1):
        if ends is not None and number >= ends:
            policy.trained(number - 1, ())
            ends = None
        line = policy.hour(number, hours.get(number, {}))
        lines.append(line)
        if line.decision.action in ("retrain", "propose"):
            policy.is_training, ends = True, number + 1 + TRAINING_HOURS
    _write(config.out, lines)
    actions = [line.decision.action for line in lines]
    return {
        "policy": config.policy,
        "hours": len(lines),
        "retrains": actions.count("retrain"),
        "alarms": sum(len(line.raised) for line in lines),
        "second_member_proposed": actions.count("propose"),
    }


def _write(out: Path | None, lines: list[Line]) -> None:
    if out is not None:
        write_whole(out, "".join(json.dumps(hour_line(line)) + "\n" for line in lines))
