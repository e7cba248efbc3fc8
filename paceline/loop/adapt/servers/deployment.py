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
    """Servers that get a drafter; each engine has a subclass. Methods that send a request raise DownloadError if a
    server does not answer or refuses it."""

    traces_rounds = False
    """True if the traces written for these servers contain the number of accepted drafts of each round."""

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
        """Record which drafter (folder or name) serves now, for servers that do not report it."""

    @abstractmethod
    def members(self) -> dict[str, str]:
        """Returns {name on the server: drafter (folder or name)} for all drafters on the server. Servers with one
        drafter each have the name "drafter"; one that reports another drafter, loaded by hand, is added under its
        address."""

    @abstractmethod
    def place_of(self, drafter: str) -> str:
        """Returns the name under which this drafter (folder or name) is loaded on the server. Raises DownloadError if a
        paceline server does not have it."""

    @abstractmethod
    def pinned(self, cluster: str) -> str | None:
        """Returns the name of the drafter that a cluster (group of similar requests) is routed to; None without a
        route. Raises DownloadError if the server cannot route it."""

    @abstractmethod
    def load(self, name: str, folder: Path, save_undo: Callable[[], None] = ignore) -> None:
        """Load the drafter in `folder` under a name, in place of any drafter with this name. Of several servers only
        the first one, the canary, gets it.

        The data that `roll_back` needs are first put into the field `undo`; then `save_undo` is called, and only then
        does a server get the request. An exception of `save_undo` stops the load. On an error the servers are
        unchanged. After an UnreachableError they may have changed; `roll_back` undoes that, too."""

    def load_others(self, name: str, folder: Path, save_undo: Callable[[], None] = ignore) -> None:
        """Load the drafter on all other servers, one after the other, after `load` has loaded it on the first. Like
        `load`, but an error leaves the servers before the failed one changed, as recorded in `undo`."""

    @abstractmethod
    def route(self, cluster: str, name: str, save_undo: Callable[[], None] = ignore) -> None:
        """Route requests of a cluster to the drafter `name`. The data that `roll_back` needs are first put into the
        field `undo`; then `save_undo` is called, and only then does the server get the request."""

    def loaded_by_hand(self, name: str, before: str | None) -> None:
        """Record that a user has loaded a drafter under `name` in place of the drafter `before`, which `roll_back` will
        restore."""

    def keep(self) -> None:
        """Accept the changes so far: `roll_back` no longer undoes them."""
        self.undo = []

    @abstractmethod
    def roll_back(self) -> None:
        """Undo the changes since `keep`, the latest first."""

    def counts(self) -> Counts:
        return self.meters.read(self._clients, self.config.served_name, {client.url for client in self._needed()})

    def counts_apart(self) -> tuple[Counts, Counts] | None:
        """Returns (counts of the server with the drafter on trial, by default the first one; counts of the others) at
        the latest reading; None without others."""
        return None

    def drafts(self, name: str) -> float | None:
        """Returns the number of rounds drafted by the drafter `name`; None if the server does not count by drafter."""
        return None

    def holds(self, name: str, drafter: str) -> bool:
        """True unless the server reports another drafter, or no drafter, under this name."""
        return True

    def is_well(self) -> bool:
        """True if all servers that must answer report that they are healthy."""
        return all(is_well(client) for client in self._needed())

    def _needed(self) -> list[Client]:
        """Servers that must answer."""
        return self._clients

    def check_start(self) -> None:
        """Raise ConfigError if a running server does not support the configured way of loading a drafter. Servers that
        do not answer are skipped."""

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()
