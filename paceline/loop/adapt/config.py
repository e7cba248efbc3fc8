"""Options of the `paceline adapt` commands, as frozen dataclasses: every field is an option. Imports no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.bounds import Amount, Checked, Count, Positive, Share, Timeout, TimeoutMinutes, check, within
from paceline.errors import ConfigError, refuse

SCENARIOS = ("two-bases", "slow-drift", "new-schema", "weekend", "noise", "empty-day", "two-bases-drift")
ENGINES = ("paceline", "vllm", "sglang")
POLICIES = ("seasonal", "naive")
UNPROVEN = ("take-back", "keep")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Thresholds of the seasonal policy, which decides hourly whether to train a drafter. It compares the acceptance
    length of each cluster (group of similar requests) with its usual value at this hour of the day and week. In option
    names, "periods" are days."""

    least_loss: Annotated[float, within("above 0 and below 1", above=0, most=0.99)] = 0.05
    """Smallest drop of acceptance length that raises an alarm, as a share."""
    least_swing: Annotated[float, within("above 0 and below 1", above=0, most=0.99)] = 0.15
    """Smallest drop of acceptance length, from the hours with the best mix of clusters to those with the worst, that
    justifies a second drafter, as a share."""
    least_customer: Share = 0.1
    """Smallest share of all tokens at which a customer (all requests with one tag) may get a separate drafter because
    its acceptance is low."""
    least_gap: Annotated[float, within("above 0 and below 1", above=0, most=0.99)] = 0.25
    """Smallest share by which a customer's acceptance length must be below that of all other traffic for a separate
    drafter."""
    hold_periods: Count = 1
    """Days that a drop must last before the policy acts."""
    early_periods: Count = 6
    """Days that a drop must last before the policy acts in the first week of traffic; longer than a weekend."""
    cool_down_days: Amount = 2.0
    """Days between the end of one training and the start of the next."""
    horizon_days: Positive = 7.0
    """Days within which a training must pay for itself."""
    recovered: Share = 0.5
    """Share of a loss that a training is expected to recover."""
    max_clusters: Count = 16
    """Maximum number of clusters that are tracked separately; all further traffic forms one more cluster."""

    def __post_init__(self) -> None:
        check(self)
        if self.early_periods < self.hold_periods:
            raise ConfigError("early_periods must be at least hold_periods: less is known in the first week, not more")


@dataclass(frozen=True, slots=True)
class PriceConfig(Checked):
    """Prices of serving and training, in any currency. The policy trains only if a training saves more serving cost
    than it costs itself. Prices are per core-hour or per GPU-hour: use the same unit for all."""

    serving_price: Amount = 1.0
    """Price of one serving hour of a core or GPU."""
    training_price: Amount = 1.0
    """Price of one training hour of a core or GPU; less than the serving price for hardware that would otherwise be
    idle, such as 0.2."""
    training_hours: Positive = 1.0
    """Core- or GPU-hours that one training is expected to take, until a real one has been measured."""
    round_ms: Positive = 20.0
    """Milliseconds of one round on your server."""
    units: Positive = 1.0
    """Cores or GPUs that one round keeps busy."""


@dataclass(frozen=True, slots=True)
class ReplayConfig(Checked):
    """Options of `paceline adapt replay`, which tests a policy (the rules that decide when to train) on stored traces
    or synthetic traffic, faster than real time. Drifts (lasting drops of acceptance) of synthetic traffic begin at
    known hours, so the policy's reactions can be checked."""

    scenario: Annotated[str, SCENARIOS] = "two-bases"
    """Synthetic traffic to replay."""
    policy: Annotated[str, POLICIES] = "seasonal"
    """Policy: seasonal, or naive (retrain whenever acceptance in the latest hours is lower than before)."""
    seeds: Count = 1
    """Number of repetitions, each with its own traffic."""
    first_seed: Annotated[int, within("0 or more", least=0)] = 0
    """Seed of the first repetition."""
    days: Annotated[int, within("at least 7 days", least=7)] = 14
    """Days of synthetic traffic."""
    traces: Path | None = None
    """Folder of traces to replay instead of a scenario."""
    out: Path | None = None
    """JSON Lines file to write: one line for each hour of the first repetition, with the policy's observations and
    decision."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Folder with the traces of served requests, and folder where `paceline adapt` stores its log, its trainings and
    the history of drafters."""

    traces: Path
    """Folder of traces, written by paceline serve --traces or paceline record."""
    state: Path = Path("runs/adapt")
    """Folder for all that paceline adapt and paceline mcp write: logs, hourly sums (counted.jsonl), the history of
    drafters (lineage.json), answers to train on (windows) and trainings."""


@dataclass(frozen=True, slots=True)
class CandidateConfig:
    """Options of the gate, which compares a candidate drafter with the incumbent (the drafter that serves now) on
    stored requests."""

    incumbent: str = "default"
    """Drafter that serves now: a folder, default, or a hub id."""
    clusters: tuple[str, ...] = ()
    """Cluster (group of similar requests) whose acceptance fell. With several, the candidate must be faster on all of
    them together, and must not lose too much on any of them [default: the one with the most traffic]."""
    tags: tuple[str, ...] = ()
    """Judge by all requests with this tag (x-paceline-tag) and no others, as for a drafter that serves only them."""
    tracked: tuple[str, ...] = ()
    """Cluster that is judged separately; all clusters not named with this option are judged together, as "other"
    [default: every cluster is judged separately]."""
    since: int = 0
    """First hour of the requests to judge by, counted from 1970."""
    ood: tuple[Path, ...] = ()
    """Out-of-domain answers, on which the candidate must not get worse."""
    temperature: float | None = None
    """Temperature of requests that name none [default: from the target's generation_config.json, else 1]."""
    requests: Count = 200
    """Maximum number of requests that are scored in each set: the clusters whose acceptance fell, every other cluster,
    and out-of-domain answers."""
    held_out_only: bool = False
    """Judge only by held-out prompts, which trainings never use."""
    least_requests: Annotated[int, within("at least 6", least=6)] = 20
    """Minimum number of prompts to compare drafters on. With fewer on the clusters whose acceptance fell, there is no
    verdict; other sets with fewer are ignored. At least 6, as fewer may all gain by chance."""
    most_loss: Share = 0.02
    """Loss of tokens/s on another cluster or on out-of-domain answers, as a share, at which a candidate is refused, if
    chance does not explain the loss."""
    shares: tuple[Annotated[float, within("above 0 and at most 1", above=0, most=1)], ...] = (1.0, 0.75, 0.5)
    """Comma-separated shares of the candidate's weights, judged in descending order: 1 is the candidate itself, 0.75 a
    blend of 75% of its weights and 25% of the incumbent's. The next share is judged only if the one before it loses too
    much on other traffic."""

    def __post_init__(self) -> None:
        check(self)
        refuse(
            ConfigError,
            (not self.shares, "give at least one share: 1 is the candidate as it is"),
            (bool(self.tags) and bool(self.clusters), "--tag and --cluster both choose requests: leave one out"),
            (self.temperature is not None and not 0 <= self.temperature <= 2, "temperature must be between 0 and 2"),
        )


@dataclass(frozen=True, slots=True)
class RetrainConfig:
    """Options of the training of a candidate drafter, which runs as a separate process at low priority and can be
    resumed."""

    general: tuple[Path, ...] = ()
    """Folders of general answers. Trainings use them in addition to the recent traffic, so that the drafter does not
    get worse on other text."""
    minutes: Positive = 30.0
    """Maximum minutes of training per candidate."""
    learning_rates: tuple[Annotated[float, within("above 0", above=0)], ...] = (2e-4,)
    """Comma-separated learning rates; one candidate is trained with each, and the gate picks the best."""
    train_threads: Count | None = None
    """CPU threads of a training [default: PyTorch's choice]."""
    window_hours: Count = 48
    """Hours of traffic before the decision that a training uses; more if the alarm fired earlier."""
    train_command: str | None = None
    """Shell command that trains a candidate, on this machine or others, on the answers in the folder PACELINE_WINDOW.
    It must write the drafter to PACELINE_OUT/drafter, and exit with status 0 [default: paceline train on this
    machine]."""
    train_units: Positive | None = None
    """Cores or GPUs that a training keeps busy, for its cost [default: --train-threads, else this machine's cores]."""
    train_hours_budget: Positive | None = None
    """Core- or GPU-hours after which a training is stopped; its candidate is then not judged [default: no limit]."""
    features_from: str | None = None
    """Address of vLLM with hidden-state extraction, or of paceline serve --features, for trainings [default: this
    machine computes hidden states]."""
    features_folder: Path | None = None
    """Folder where vLLM's connector writes hidden states, as this machine sees it."""

    def __post_init__(self) -> None:
        check(self)
        has_command = self.train_command is not None
        refuse(
            ConfigError,
            (not self.learning_rates, "give at least one learning rate"),
            (has_command and not (self.train_command or "").strip(), "train_command is empty: give a shell command"),
            (
                has_command and self.features_from is not None,
                "train_command starts the training itself: give features_from to the paceline train in it",
            ),
            (
                self.features_folder is not None and self.features_from is None,
                "features_folder needs features_from: give the server's address",
            ),
        )


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """Options of the daemon that watches a server and replaces its drafter. Probation is the trial period after a new
    drafter goes live."""

    every_s: Timeout = 60.0
    """Seconds between checks of trainings and of the server; decisions are made once an hour."""
    probation_minutes: Positive = 60.0
    """Minimum minutes on probation before a new drafter is accepted."""
    most_probation_hours: Positive = 24.0
    """Maximum hours on probation, if the traffic is too little to judge the drafter."""
    unproven: Annotated[str, UNPROVEN] = "take-back"
    """Roll back a drafter that had too little traffic to be judged (take-back), or keep it; one loaded by hand is kept.
    If the server gets worse, is unhealthy or silent, every drafter is rolled back."""
    most_errors: Share = 0.02
    """Increase of the share of failed requests at which a drafter is rolled back."""
    most_wait_hours: Positive = 24.0
    """Hours of retries while a server does not answer, before a swap is given up."""
    most_drop: Share = 0.05
    """Drop of acceptance length since the swap at which a drafter is rolled back, as a share."""
    metrics_port: Annotated[int, within("between 1 and 65535", least=1, most=65535)] | None = None
    """Loopback port for Prometheus metrics [default: none]."""
    most_slowdown: Share = 0.25
    """Increase of the time of a round at which a drafter is rolled back, as a share."""
    dry_run: bool = False
    """Decide and write the log, but train and swap nothing."""

    def __post_init__(self) -> None:
        check(self)
        if 60 * self.most_probation_hours < self.probation_minutes:
            raise ConfigError("most_probation_hours must be at least probation_minutes: it is the longer of the two")


@dataclass(frozen=True, slots=True)
class DeployConfig:
    """Options that name the servers to deploy new drafters on, and how to load a drafter there."""

    engine: Annotated[str, ENGINES] = "paceline"
    """Engine of the servers: paceline, vllm or sglang."""
    servers: tuple[str, ...] = ()
    """Address of a server; several receive the drafter one after the other."""
    admin_key: str | None = None
    """Key of the admin API; also read from PACELINE_ADMIN_KEY."""
    restart: str | None = None
    """Command that restarts one server with the drafter in PACELINE_DRAFTER."""
    publish: str | None = None
    """Command that sends the drafter's tensors to a running vLLM that has the route /start_draft_weight_update."""
    hot_swap: bool = False
    """Load a drafter's weights into a running vLLM that was started with paceline's worker extension."""
    draft_field: str | None = None
    """Field of SGLang's /update_weights_from_disk that marks weights as the drafter's."""
    method: str = "dflash"
    """Method in vLLM's speculative config; eagle3 for EAGLE-3 drafters."""
    num_drafted: int = 7
    """Draft tokens per round in vLLM's speculative config."""
    patience_s: Timeout = 600.0
    """Seconds after a change within which a server must be healthy again."""
    check_length: bool = True
    """After a change of a vLLM or SGLang server, compare its acceptance length on twenty prompts with paceline's."""
    served_name: str | None = None
    """Model whose requests are counted [default: the only one in the metrics; required if there are several]."""

    def __post_init__(self) -> None:
        check(self)
        if self.engine == "paceline" and len(self.servers) > 1:
            raise ConfigError("give one paceline server: each looks after itself")
        if self.servers and self.engine == "vllm" and not (self.restart or self.publish or self.hot_swap):
            raise ConfigError("vllm needs --restart or --publish, a command, or --hot-swap")
        if self.hot_swap and self.engine != "vllm":
            raise ConfigError(f"--hot-swap is for vllm: {self.engine} has no such extension")
        if self.hot_swap and self.publish is not None:
            raise ConfigError("--hot-swap and --publish both replace weights in a running vLLM: give one of them")
        if self.servers and self.engine == "sglang" and not (self.restart or self.draft_field):
            raise ConfigError("sglang needs --restart or --draft-field")


@dataclass(frozen=True, slots=True)
class OtherEngineConfig(Checked):
    """Options of `paceline serve` to start vLLM or SGLang with a drafter, in place of paceline's own engine, and to
    check that acceptance length is as high there as in paceline."""

    engine: Annotated[str, ENGINES] = "paceline"
    """Engine that serves: paceline, or vllm or sglang started with this drafter; arguments after -- are that engine's
    own options."""
    engine_command: str | None = None
    """Command that starts that engine [default: vllm serve, or python -m sglang.launch_server]."""
    ready_minutes: TimeoutMinutes = 30.0
    """Maximum minutes until that engine is ready."""
    check: bool = True
    """Compare that engine's acceptance length on twenty prompts with paceline's once it is ready."""
    expected: Annotated[float, within("at least 1", least=1)] | None = None
    """Expected acceptance length [default: measured with the target, before the engine is started]."""
    strict: bool = False
    """Stop that engine if its acceptance length is clearly lower, instead of only warning."""
