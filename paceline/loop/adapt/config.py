"""What `paceline adapt` is asked for: frozen dataclasses, whose fields are the commands' options. No PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.bounds import Amount, Count, Positive, Share, check, within
from paceline.errors import ConfigError, refuse

SCENARIOS = ("two-bases", "slow-drift", "new-schema", "weekend", "noise", "empty-day", "two-bases-drift")
ENGINES = ("paceline", "vllm", "sglang")
POLICIES = ("seasonal", "naive")
UNPROVEN = ("take-back", "keep")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """When the seasonal policy acts. A period is a day."""

    least_loss: Annotated[float, within("above 0 and below 1", above=0, most=0.99)] = 0.05
    """Smallest fall of tokens a round that is worth an alarm, as a share."""
    least_swing: Annotated[float, within("above 0 and below 1", above=0, most=0.99)] = 0.15
    """Smallest swing of tokens a round with the mix of clusters that is worth a second member, as a share."""
    hold_periods: Count = 1
    """Days that a fall must last before anything is done."""
    early_periods: Count = 6
    """The same before a whole week has been seen: longer than a weekend, and than a week that began on one."""
    cool_down_days: Amount = 2.0
    """Days between the end of a training and the next."""
    horizon_days: Positive = 7.0
    """A training must have paid for itself after so many days."""
    recovered: Share = 0.5
    """Share of a loss that a training is expected to win back, until trainings here have shown it."""
    max_clusters: Count = 16
    """Clusters that are told apart; the rest of the traffic is one more."""

    def __post_init__(self) -> None:
        check(self)
        if self.early_periods < self.hold_periods:
            raise ConfigError("early_periods must be at least hold_periods: less is known in the first week, not more")


@dataclass(frozen=True, slots=True)
class PriceConfig:
    """What time costs. Hours are core-hours or GPU-hours, the same unit everywhere."""

    serving_price: Amount = 1.0
    """Price of an hour of a core, or GPU, that serves."""
    training_price: Amount = 1.0
    """Price of an hour that trains; 0.2 says that it would be idle otherwise."""
    training_hours: Positive = 1.0
    """Core- or GPU-hours of a training, until one here has been measured."""
    round_ms: Positive = 20.0
    """Milliseconds of a round, until traces tell."""
    units: Positive = 1.0
    """Cores or GPUs that a round keeps busy."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """A policy on a virtual clock: over made traffic whose truth is known, or over stored traces."""

    scenario: Annotated[str, SCENARIOS] = "two-bases"
    """What happens in the made traffic."""
    policy: Annotated[str, POLICIES] = "seasonal"
    """seasonal, or naive: retrain whenever the last hours are below those before."""
    seeds: Count = 1
    """Repetitions, each with its own traffic."""
    first_seed: Annotated[int, within("0 or more", least=0)] = 0
    """Seed of the first repetition."""
    days: Annotated[int, within("at least 7 days", least=7)] = 14
    """Length of the made traffic."""
    traces: Path | None = None
    """Folder of traces to replay in place of a scenario."""
    out: Path | None = None
    """File for the hourly lines of the first repetition, JSON Lines."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where traffic is kept, and where adapt keeps its own."""

    traces: Path
    """Folder of traces, as of paceline serve --traces or paceline record."""
    state: Path = Path("runs/adapt")
    """Folder for the log, lineage.json, windows and trainings."""


@dataclass(frozen=True, slots=True)
class CandidateConfig:
    """What a candidate is compared with, and on what."""

    incumbent: str = "default"
    """Drafter that serves now: a folder, default, or a hub id."""
    cluster: str | None = None
    """Cluster that fell [default: the one with the most traffic]."""
    since: int = 0
    """First hour (of 1970) of the requests to judge by."""
    ood: tuple[Path, ...] = ()
    """Answers of another kind, which must not suffer."""
    temperature: float | None = None
    """Temperature of requests whose client gave none [default: that of the target's generation_config.json, else 1]."""
    requests: Count = 200
    """Requests of a set that are scored at most."""
    held_out_only: bool = False
    """Judge by held-out prompts only: those that a training here never sees."""
    least_requests: Count = 20
    """Prompts of the cluster that fell; fewer prove nothing."""
    most_loss: Share = 0.02
    """Loss of tokens/s elsewhere, and on answers of another kind, from which on a candidate is refused."""
    shares: tuple[Annotated[float, within("above 0 and at most 1", above=0, most=1)], ...] = (1.0, 0.75, 0.5)
    """Comma-separated; one that loses too much elsewhere is tried again part of the way between the incumbent's weights
    and its own."""

    def __post_init__(self) -> None:
        check(self)
        refuse(
            ConfigError,
            (not self.shares, "give at least one share: 1 is the candidate as it is"),
            (self.temperature is not None and not 0 <= self.temperature <= 2, "temperature must be between 0 and 2"),
        )


@dataclass(frozen=True, slots=True)
class RetrainConfig:
    """How a training is run: at low priority, in a process of its own, resumable."""

    general: tuple[Path, ...] = ()
    """Answers of other kinds that are learned beside the window, so that they are not forgotten."""
    minutes: Positive = 30.0
    """Longest training of one candidate."""
    learning_rates: tuple[Annotated[float, within("above 0", above=0)], ...] = (2e-4,)
    """Comma-separated; a candidate is trained with each, and the gate takes the best."""
    train_threads: Count | None = None
    """CPU threads of a training [default: PyTorch's choice]."""
    window_hours: Count = 48
    """Hours of traffic before an alarm was decided on that a training learns from, at least."""

    def __post_init__(self) -> None:
        check(self)
        if not self.learning_rates:
            raise ConfigError("give at least one learning rate")


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """The daemon beside a server."""

    every_s: Positive = 60.0
    """Seconds between looks at trainings and at the server; decisions come once an hour."""
    probation_minutes: Positive = 60.0
    """How long a new drafter is watched before it is kept, at least."""
    most_probation_hours: Positive = 24.0
    """How long it is watched at most, when the traffic is not enough to judge it."""
    unproven: Annotated[str, UNPROVEN] = "take-back"
    """Take such a drafter back, or keep it; one that somebody loaded by hand stays."""
    most_errors: Share = 0.02
    """Rise of the share of requests that end in an error from which on it is rolled back."""
    most_wait_hours: Positive = 24.0
    """How long a server that does not answer is tried again before a swap is given up."""
    most_drop: Share = 0.05
    """Fall of tokens a round against those before the swap from which on it is rolled back."""
    metrics_port: Annotated[int, within("between 1 and 65535", least=1, most=65535)] | None = None
    """Port on loopback for Prometheus [default: none]."""
    most_slowdown: Share = 0.25
    """Rise of the time of a round from which on it is rolled back."""
    dry_run: bool = False
    """Decide and write the log, but train and swap nothing."""

    def __post_init__(self) -> None:
        check(self)
        if 60 * self.most_probation_hours < self.probation_minutes:
            raise ConfigError("most_probation_hours must be at least probation_minutes: it is the longer of the two")


@dataclass(frozen=True, slots=True)
class DeployConfig:
    """Which servers get the drafter, and how."""

    engine: Annotated[str, ENGINES] = "paceline"
    """What serves: paceline, vllm or sglang."""
    servers: tuple[str, ...] = ()
    """Address of a server; several get the drafter one after the other."""
    admin_key: str | None = None
    """Key of the admin API; PACELINE_ADMIN_KEY too."""
    restart: str | None = None
    """Command that restarts one server with the drafter in PACELINE_DRAFTER."""
    publish: str | None = None
    """Command that sends the drafter's tensors to a vLLM that takes them while it runs."""
    draft_field: str | None = None
    """Field by which this SGLang's /update_weights_from_disk knows that weights are the drafter's."""
    method: str = "dflash"
    """Method in vLLM's speculative config."""
    num_drafted: int = 7
    """Drafts of a round, in the same."""
    patience_s: Positive = 600.0
    """Seconds in which a server must be well again."""
    served_name: str | None = None
    """Count requests of this model only [default: the one the metrics tell of; of several one must be named]."""

    def __post_init__(self) -> None:
        check(self)
        refuse(
            ConfigError,
            (self.engine == "paceline" and len(self.servers) > 1, "give one paceline server: each looks after itself"),
            (
                bool(self.servers) and self.engine == "vllm" and not (self.restart or self.publish),
                "vllm needs --restart or --publish: a command",
            ),
            (
                bool(self.servers) and self.engine == "sglang" and not (self.restart or self.draft_field),
                "sglang needs --restart or --draft-field",
            ),
        )


@dataclass(frozen=True, slots=True)
class OtherEngineConfig:
    """Another engine started in the place of our own, with a drafter, and how it is checked."""

    engine: Annotated[str, ENGINES] = "paceline"
    """Which engine serves: our own, or vllm or sglang, started with this drafter; what stands behind -- are its own options."""
    engine_command: str | None = None
    """How that engine is started [default: vllm serve, or python -m sglang.launch_server]."""
    ready_minutes: Positive = 30.0
    """Longest start of that engine."""
    check: bool = True
    """Compare that engine's tokens a round on twenty prompts with ours once it is ready."""
    expected: Annotated[float, within("at least 1", least=1)] | None = None
    """Tokens a round that it should bring [default: measured here, with the target, before it is started]."""
    strict: bool = False
    """Stop that engine when it brings clearly less, in place of saying so."""

    def __post_init__(self) -> None:
        check(self)
