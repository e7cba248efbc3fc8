"""Base class of the servers that get a drafter: `deploy.open_deployment` opens those of an engine."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.servers.counters import Counts, Meters, is_well
from paceline.net.streaming import Client
from paceline.report.tables import ignore


class Deployment(ABC):
    """Interface to the servers on which drafters are deployed. Every method that sends a request raises DownloadError
    if a server refuses it, and UnreachableError (a subclass) if a server does not answer."""

    traces_rounds = False
    """True if these servers' traces contain the accepted drafts of each round."""

    def __init__(self, config: DeployConfig) -> None:
        key = config.admin_key or os.environ.get("PACELINE_ADMIN_KEY")
        self.config, self._clients = config, [Client(url, key, config.patience_s) for url in config.servers]
        self.needs_same_shapes = config.hot_swap
        """True if the running servers load only drafters with the tensor shapes of the one that they have."""
        self.undo = list[list[str | None]]()
        """Changes that `roll_back` will undo, as JSON lists; a restarted daemon sets it from its saved state."""
        self.meters = Meters({client.url: {} for client in self._clients})
        """Counter sums by server address; a restarted daemon restores them from its saved state."""

    def serves(self, drafter: str) -> None:
        """Record that `drafter` (folder or name) serves now, which vLLM and SGLang do not report."""

    @abstractmethod
    def members(self) -> dict[str, str]:
        """Returns {name on the server: drafter}, where a drafter is a folder or a model name. All vLLM or SGLang
        servers together have one entry, named "drafter". A drafter that a user loaded on one of them by hand has an
        entry under the server's address, if the server reports it."""

    @abstractmethod
    def place_of(self, drafter: str) -> str:
        """Returns the name that this drafter (folder or model name) has on the server; for vLLM and SGLang "drafter".
        Raises DownloadError if a paceline server does not have it."""

    @abstractmethod
    def pinned(self, cluster: str) -> str | None:
        """Returns the name of the drafter that a cluster (group of similar requests) is routed to; None if it has no
        route. Raises DeployError if the server cannot route clusters (vLLM, SGLang) or does not know this one."""

    @abstractmethod
    def load(self, name: str, folder: Path, save_undo: Callable[[], None] = ignore) -> None:
        """Load the drafter in `folder` under `name`, in place of a drafter of this name. Of several servers only the
        first one loads it.

        Before the server gets the request, the field `undo` gets what `roll_back` needs, and `save_undo` is called to
        store it. If `save_undo` raises an error, nothing is loaded. After an UnreachableError it is unknown if the
        server has changed. After other errors of a first call the server has the earlier drafter."""

    def load_others(self, name: str, folder: Path, save_undo: Callable[[], None] = ignore) -> None:
        """Load the drafter on the other servers, one after the other. `save_undo` is called before each server gets its
        request, as in `load`. After an error the servers before the failed one keep the new drafter; `roll_back`
        restores them."""

    @abstractmethod
    def route(self, cluster: str, name: str, save_undo: Callable[[], None] = ignore) -> None:
        """Route all requests of a cluster to the drafter `name`, with `undo` and `save_undo` as in `load`. Raises
        DeployError if the server cannot route clusters or does not know this one."""

    def loaded_by_hand(self, name: str, before: str | None) -> None:
        """Record that a user has loaded a drafter under `name`, so that `roll_back` can restore `before`, the drafter
        that had the name until then (None: there was none)."""

    def keep(self) -> None:
        """Accept the changes so far: `roll_back` no longer undoes them."""
        self.undo = []

    @abstractmethod
    def roll_back(self) -> None:
        """Undo all changes since the last `keep`, the latest first."""

    def counts(self) -> Counts:
        return self.meters.read(self._clients, self.config.served_name, {client.url for client in self._needed()})

    def counts_apart(self) -> tuple[Counts, Counts] | None:
        """Returns (counts of the server with the drafter on trial, counts of all other servers together) at the latest
        reading; None if there are no other servers. Without a trial the first server counts as the one with it."""
        return None

    def drafts(self, name: str) -> float | None:
        """Returns the number of rounds in which the drafter `name` has drafted; None if the server does not count
        it."""
        return None

    def holds(self, name: str, drafter: str) -> bool:
        """True if `drafter` is still loaded under this name. Servers that do not report their drafters are assumed to
        have it."""
        return True

    def is_well(self) -> bool:
        """True if all servers report that they are healthy. While one of several servers tries a new drafter, only this
        one is asked. Raises UnreachableError if it does not answer."""
        return all(is_well(client) for client in self._needed())

    def _needed(self) -> list[Client]:
        """Servers that must answer."""
        return self._clients

    def check_start(self) -> None:
        """Raises ConfigError if a server does not support the chosen way of loading drafters. Servers that do not
        answer are skipped."""

    def close(self) -> None:
        for client in self._clients:
            client.close()
