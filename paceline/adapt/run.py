"""The process of `paceline adapt watch`: signals, the clock, the port for Prometheus, and nothing else."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paceline.adapt.config import (
    CandidateConfig,
    DeployConfig,
    PolicyConfig,
    PriceConfig,
    RetrainConfig,
    StoreConfig,
    WatchConfig,
)
from paceline.adapt.deploy import open_deployment
from paceline.adapt.metrics import AdaptMetrics
from paceline.adapt.policy import SeasonalPolicy
from paceline.adapt.watch import Watcher
from paceline.config import EngineConfig
from paceline.errors import CacheError, ConfigError, reraised
from paceline.train.ranks import Ranks, only_run


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
    """Until SIGTERM or Ctrl-C. Raises ConfigError when another daemon has the folder, CacheError when it cannot be written."""
    with reraised(CacheError, f"cannot write {store.state}", "choose another --state", OSError):
        store.state.mkdir(parents=True, exist_ok=True)
    incumbent = Path(candidate.incumbent)
    deployment = open_deployment(deploy, incumbent if incumbent.is_dir() else None) if deploy.servers else None
    decides = SeasonalPolicy(policy, prices)
    metrics = AdaptMetrics(decides)
    if watch.metrics_port is not None:
        with reraised(ConfigError, f"port {watch.metrics_port} cannot be opened", "choose another --metrics-port", OSError):
            metrics.serve(watch.metrics_port)
    ended = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: ended.set())
    with only_run(store.state, "adapting", Ranks(), say):
        watcher = Watcher(store, engine, deployment, decides, candidate, retrain, watch, say, metrics=metrics)
        say(f"adapt: watching {store.traces}; a line an hour in {watcher.log.file}")
        while not ended.is_set():
            watcher.tick(time.time())
            ended.wait(watch.every_s)
        watcher.stop()
