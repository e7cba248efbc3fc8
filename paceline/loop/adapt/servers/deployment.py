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
    """Interface to the servers on which drafters are deployed: loads drafters, routes requests to them, reads counters
    and rolls changes back. Every method that sends a request raises DownloadError if a server refuses it, and
    UnreachableError (a subclass) if a server does not answer."""

    traces_rounds = False
    """True if these servers' traces contain the accepted drafts of each round."""

    def __init__(self, config: DeployConfig) -> None:
        key = config.admin_key or os.environ.get("PACELINE_ADMIN_KEY")
        self.config, self._clients = config, [Client(url, key, config.patience_s) for url in config.servers]
        self.needs_same_shapes = config.hot_swap
        """True if the running servers load only drafters with the tensor shapes of the one that they have."""
        self.undo = list[list[str | None]]()
        """Changes that `roll_back` will undo, as JSON lists; a restarted daemon passes its saved ones to `resume`."""
        self.meters = Meters({client.url: {} for client in self._clients})
        """Counter sums by server address; a restarted daemon restores them from its saved state."""

    def serves(self, drafter: str) -> None:
        """Record that `drafter` (folder or name) serves now. Needed for vLLM and SGLang, which do not report it."""

    @abstractmethod
    def members(self) -> dict[str, str]:
        """Returns the drafters on the server, as {name on the server: folder or model name}. All vLLM or SGLang servers
        share one drafter, named "drafter". If a user has loaded another drafter on one of them by hand, and the server
        reports it, that drafter is listed under the server's address."""

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
        """Load the drafter in `folder` under `name`, in place of a drafter of this name. With several servers only the
        first one loads it.

        `save_undo`: function of the caller that writes the field `undo` to disk, so that a restarted daemon can roll
        back. It is called before the server gets the request. If it raises an error, nothing is loaded.

        After an UnreachableError it is unknown which drafter the server has: the call may be repeated. After any other
        error of a first call the server has its earlier drafter."""

    def load_others(self, name: str, folder: Path, save_undo: Callable[[], None] = ignore) -> None:
        """Load the drafter on the remaining servers, one after the other, after `load` on the first one. `save_undo` is
        called before each server gets its request, as in `load`. If a server fails, those before it keep the new
        drafter; `roll_back` restores them."""

    @abstractmethod
    def route(self, cluster: str, name: str, save_undo: Callable[[], None] = ignore) -> None:
        """Route all requests of a cluster (group of similar requests) to the drafter `name`. `save_undo` is called
        before the request, as in `load`. Raises DeployError if the server cannot route clusters or does not know this
        one."""

    def loaded_by_hand(self, name: str, before: str | None) -> None:
        """Record that a user has loaded a drafter under `name`, so that `roll_back` can undo it. `before`: the earlier
        drafter of this name, which `roll_back` restores; None if the name was unused."""

    def resume(self, undo: list[list[str | None]]) -> None:
        """Take over the changes of an earlier daemon, which may have been killed during one of them. `undo`: the
        attribute `undo` of the earlier daemon's deployment, as it was saved."""
        self.undo = undo

    def keep(self) -> None:
        """Accept the changes so far: `roll_back` no longer undoes them."""
        self.undo = []

    @abstractmethod
    def roll_back(self, save_undo: Callable[[], None] = ignore) -> None:
        """Undo all changes since the last `keep`, the latest first. `save_undo` is called when a command begins that
        would outlive the daemon."""

    def counts(self) -> Counts:
        return self.meters.read(self._clients, self.config.served_name, {client.url for client in self._needed()})

    def counts_apart(self) -> tuple[Counts, Counts] | None:
        """Returns the counters at the latest reading, to compare two drafters: (counts of the servers that have the
        drafter on trial, counts of all other servers together). Without a trial the first server takes the place of
        those on trial. Returns None if there are no other servers."""
        return None

    def drafts(self, name: str) -> float | None:
        """Returns the number of rounds in which the drafter `name` has drafted; None if the server does not count
        rounds by drafter."""
        return None

    def holds(self, name: str, drafter: str) -> bool:
        """True if `drafter` is still loaded under this name. Servers that do not report their drafters are assumed to
        have it."""
        return True

    def is_well(self) -> bool:
        """True if the servers report that they are healthy. Checks all of them; while one of several servers tries a
        new drafter, checks only that one. Raises UnreachableError if a checked server does not answer."""
        return all(is_well(client) for client in self._needed())

    def _needed(self) -> list[Client]:
        """Servers that must answer."""
        return self._clients

    def check_start(self) -> None:
        """Checks the servers before the daemon starts. Raises ConfigError if one does not support the chosen way of
        loading drafters. Servers that do not answer are skipped."""

    def close(self) -> None:
        for client in self._clients:
            client.close()
