"""Main loop of `paceline adapt watch`: handles signals and clock changes, serves metrics, calls `Watcher.tick`."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.config import EngineConfig
from paceline.errors import CacheError, ConfigError, refuse, reraised
from paceline.loop.adapt.config import (
    CandidateConfig,
    DeployConfig,
    PolicyConfig,
    PriceConfig,
    RetrainConfig,
    StoreConfig,
    WatchConfig,
)
from paceline.loop.adapt.decide.policy import SeasonalPolicy
from paceline.loop.adapt.servers.deploy import open_deployment
from paceline.loop.adapt.servers.deployment import Deployment
from paceline.loop.adapt.servers.vllm_sglang.engine_folders import EngineFolders
from paceline.loop.adapt.servers.vllm_sglang.restart import NO_INCUMBENT
from paceline.loop.adapt.watch import Watcher
from paceline.runs.lock import only_run
from paceline.runs.ranks import Ranks

LEAST_MOVE_S = 30.0
"""Smallest clock change in seconds that matters; time servers make smaller ones all the time."""


@dataclass(slots=True)
class Clock:
    """Detects changes of the system clock by comparing it with the monotonic clock. `wall`, `steady`: latest readings
    of the system clock and of the monotonic clock, in seconds."""

    wall: float
    steady: float

    def moved(self, wall: float, steady: float) -> float:
        """Returns the seconds by which the system clock was set forward since the last call (negative: back). Changes
        of less than 30 seconds count as 0. `wall`, `steady`: present readings of both clocks."""
        by = (wall - self.wall) - (steady - self.steady)
        self.wall, self.steady = wall, steady
        return by if abs(by) >= LEAST_MOVE_S else 0.0


def run(
    engine: EngineConfig,
    store: StoreConfig,
    policy: PolicyConfig,
    prices: PriceConfig,
    candidate: CandidateConfig,
    retrain: RetrainConfig,
    deploy: DeployConfig,
    watch: WatchConfig,
    say: Callable[[str], None],
) -> None:
    """Run the adaptation daemon (`paceline adapt watch`) until SIGTERM or Ctrl-C; `say` receives progress texts. Raises
    CacheError if the folder `store.state` cannot be written. Raises ConfigError if another daemon uses this folder, or
    if the metrics port is in use. Also raises it if vLLM or SGLang servers are given, `watch.dry_run` is False and
    `candidate.incumbent` is not a folder: it must be that of the servers' present drafter, to which a rollback
    returns."""
    with reraised(CacheError, f"cannot write {store.state}", "choose another --state", OSError):
        store.state.mkdir(parents=True, exist_ok=True)
    incumbent = Path(candidate.incumbent) if Path(candidate.incumbent).is_dir() else None
    cannot_roll_back = bool(deploy.servers) and deploy.engine != "paceline" and incumbent is None and not watch.dry_run
    text = f"{deploy.engine} does not say what it drafts with, so nothing could be rolled back: {NO_INCUMBENT}"
    refuse(ConfigError, (cannot_roll_back, text))
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with only_run(store.state, "adapting", Ranks(), say):
        deployment = _deployment(deploy, engine, store.state, incumbent) if deploy.servers else None
        watcher = Watcher(store, engine, deployment, SeasonalPolicy(policy, prices), candidate, retrain, watch, say)
        if watch.metrics_port is not None:
            with reraised(
                ConfigError, f"port {watch.metrics_port} cannot be opened", "choose another --metrics-port", OSError
            ):
                watcher.metrics.serve(watch.metrics_port)
        clock = Clock(time.time(), time.monotonic())
        say(f"adapt: watching {store.traces}; a line an hour in {watcher.log.file}")
        while not ended.is_set():
            if by := clock.moved(time.time(), time.monotonic()):
                watcher.clock_moved(by)
            watcher.tick(time.time())
            ended.wait(watch.every_s)
        watcher.stop(time.time())


def _deployment(deploy: DeployConfig, engine: EngineConfig, state: Path, incumbent: Path | None) -> Deployment:
    """Opens the servers, and checks at the start what a rollback needs."""
    folders = None
    if deploy.engine != "paceline":
        folders = EngineFolders(deploy, engine, state / "engine")
        if incumbent is not None:
            folders.given(incumbent)
    deployment = open_deployment(deploy, incumbent, folders)
    deployment.check_start()
    return deployment
