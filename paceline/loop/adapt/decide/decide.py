"""What to do about an alarm: a pure function of what is known, which says why, and why not the other things.

In this order: nothing while a training runs; the best member of the pool there is, once it is known how good they are; a
second member for a mix that returns with a period; a training, if it pays within the horizon and none has just been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.loop.adapt.config import PolicyConfig, PriceConfig
from paceline.loop.adapt.traffic.hours import DAY

Action = Literal["none", "too little", "score", "route", "propose", "retrain"]
IDLE: tuple[Action, ...] = ("none", "too little")
"""Actions of a decision to do nothing: acceptance is as usual, or what is usual is not known yet."""
ENOUGH = 0.5
"""A member that wins back this share of a loss is as good as a training, and free."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A cluster whose acceptance fell within it, for long enough."""

    cluster: str
    loss: float
    """Fall of tokens a round, as a share."""
    tokens_per_round: float
    """Now, with the member that serves it."""
    tokens_per_hour: float
    members: Mapping[str, float] | None = field(default_factory=dict)
    """Tokens a round of every other member that is good enough on this cluster's newest traces; None: not known yet."""


@dataclass(frozen=True, slots=True)
class Mix:
    """The mix of clusters, and what it alone does to acceptance."""

    has_moved: bool = False
    """It moved for long enough, and not with the season."""
    period: int | None = None
    """Hours after which it returns."""
    swing: float = 0.0
    """How far acceptance swings with it, from its better hours to its worse, as a share."""
    weakest: str | None = None
    """The cluster whose coming and going does that."""
    tokens_per_round: float = 1.0
    """Of that cluster."""
    tokens_per_hour: float = 0.0
    best: float = 1.0
    """Tokens a round of the cluster that does best."""


@dataclass(frozen=True, slots=True)
class View:
    """All that a decision is made from."""

    hour: int
    alarms: Sequence[Alarm] = ()
    mix: Mix = Mix()
    is_training: bool = False
    trained_at: int | None = None
    """Hour at which the latest training ended."""
    proposed: frozenset[str] = frozenset()
    """Clusters that a member of their own was proposed for."""
    too_little: str = ""
    """The traffic seen so far, as "10 requests, 1 hour", while it is too little to know what is usual."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done, why, and why not the rest."""

    action: Action = "none"
    clusters: tuple[str, ...] = ()
    member: str | None = None
    """Of a route: where to."""
    why: str = ""
    declined: Mapping[str, str] = field(default_factory=dict)
    """Action -> why not."""

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do."""
        return self.action in IDLE


def saving(prices: PriceConfig, horizon_days: float, tokens_per_hour: float, before: float, after: float) -> float:
    """What fewer rounds are worth over the horizon: tokens x (rounds a token before - after) x time of a round x price."""
    rounds = tokens_per_hour * DAY * horizon_days * max(1 / before - 1 / after, 0.0)
    return rounds * prices.round_ms / 3.6e6 * prices.units * prices.serving_price


def decide(view: View, config: PolicyConfig, prices: PriceConfig) -> Decision:
    """The one thing to do now."""
    declined: dict[str, str] = {}
    if view.is_training:
        return Decision(why="a training is running", declined={"retrain": "one is running already"})
    for alarm in view.alarms:
        if alarm.members is None:
            why = f"what the other members would bring to {alarm.cluster!r} is found out first"
            return Decision("score", (alarm.cluster,), why=why)
        wanted = alarm.tokens_per_round * (1 + ENOUGH * alarm.loss / (1 - alarm.loss))
        best = max(alarm.members, key=alarm.members.__getitem__, default=None)
        if best is not None and alarm.members[best] >= wanted:
            why = f"{best} brings {alarm.members[best]:.2f} tokens a round there, {alarm.tokens_per_round:.2f} now"
            return Decision("route", (alarm.cluster,), best, why, {"retrain": "a member that is there is good enough"})
    declined["route"] = "no member is good enough" if view.alarms else "no cluster fell"
    proposal = _proposal(view, config, prices)
    if isinstance(proposal, Decision):
        return proposal
    declined["propose"] = proposal
    training = _training(view, config, prices)
    if isinstance(training, str):
        if view.too_little and not view.alarms:
            why = f"{view.too_little}; what is usual is known after more than two days of traffic"
            return Decision("too little", why=why, declined={**declined, "retrain": training})
        why = training if view.alarms else "acceptance is as it usually is"
        return Decision(why=why, declined={**declined, "retrain": training})
    return Decision(training.action, training.clusters, why=training.why, declined=declined)


def _proposal(view: View, config: PolicyConfig, prices: PriceConfig) -> Decision | str:
    """A second, regional member, or why not."""
    mix = view.mix
    if mix.period is None:
        return "the mix of clusters returns with no period"
    if mix.swing < config.least_swing:
        return f"acceptance swings by {mix.swing:.0%} with the mix, a second member needs {config.least_swing:.0%}"
    if mix.weakest is None or mix.weakest in view.proposed:
        return "it was proposed before"
    after = mix.tokens_per_round + config.recovered * max(mix.best - mix.tokens_per_round, 0.0)
    gain = saving(prices, config.horizon_days, mix.tokens_per_hour, mix.tokens_per_round, after)
    if gain <= prices.training_hours * prices.training_price:
        return f"a second member would save {gain:.2f} in {config.horizon_days:g} days, less than its training costs"
    why = (
        f"the mix returns every {mix.period} hours and takes acceptance down by {mix.swing:.0%}: a member of its own for "
        f"{mix.weakest!r} ({mix.tokens_per_round:.2f} tokens a round) serves those hours; a retrained one would lose the others"
    )
    return Decision("propose", (mix.weakest,), why=why, declined={"retrain": "what returns with a period is no drift"})


def _training(view: View, config: PolicyConfig, prices: PriceConfig) -> Decision | str:
    """A training on all clusters that fell, or why not."""
    if not view.alarms:
        return "the mix moved, but no cluster fell" if view.mix.has_moved else "no alarm holds"
    since = None if view.trained_at is None else view.hour - view.trained_at
    if since is not None and since < config.cool_down_days * DAY:
        return f"the last training ended {since} hours ago, {config.cool_down_days * DAY:g} must pass"
    gain, cost = 0.0, prices.training_hours * prices.training_price
    for alarm in view.alarms:
        now = alarm.tokens_per_round
        after = now * (1 + config.recovered * alarm.loss / (1 - alarm.loss))
        gain += saving(prices, config.horizon_days, alarm.tokens_per_hour, now, after)
    if gain <= cost:
        return f"it would save {gain:.2f} in {config.horizon_days:g} days and cost {cost:.2f}"
    names = tuple(alarm.cluster for alarm in view.alarms)
    lost = ", ".join(f"{alarm.cluster!r} lost {alarm.loss:.0%}" for alarm in view.alarms)
    return Decision("retrain", names, why=f"{lost}; it saves {gain:.2f} in {config.horizon_days:g} days and costs {cost:.2f}")
