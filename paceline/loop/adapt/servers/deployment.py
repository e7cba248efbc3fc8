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
    """Interface to the servers on which drafters are deployed, with a subclass per engine. Every method that sends a
    request raises DownloadError if a server refuses it, and UnreachableError (a subclass of DownloadError) if a server
    does not answer."""

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
        """Record that `drafter` (folder or name) serves now. Needed for vLLM and SGLang, which do not report their
        drafter; has no effect for a paceline server."""

    @abstractmethod
    def members(self) -> dict[str, str]:
        """Returns {name on the server: drafter}, where a drafter is a folder or a model name. All vLLM or SGLang
        servers together have one entry, named "drafter". If a user loaded another drafter on one of them by hand, and
        this server reports it, that drafter has an entry, too, under the server's address."""

    @abstractmethod
    def place_of(self, drafter: str) -> str:
        """Returns the name that this drafter (folder or model name) has on the server; for vLLM and SGLang always
        "drafter". Raises DownloadError if a paceline server does not have it."""

    @abstractmethod
    def pinned(self, cluster: str) -> str | None:
        """Returns the name of the drafter that a cluster (group of similar requests) is routed to; None if it has no
        route. Raises DeployError if the server cannot route clusters (vLLM, SGLang) or does not know this one."""

    @abstractmethod
    def load(self, name: str, folder: Path, save_undo: Callable[[], None] = ignore) -> None:
        """Load the drafter in `folder` under `name`; it replaces a drafter that has this name. If there are several
        servers, only the first one loads it.

        Before the server gets the request, the field `undo` gets what `roll_back` needs, and `save_undo` is called to
        store it. If `save_undo` raises an error, nothing is loaded. After an UnreachableError it is unknown if the
        server has changed; `roll_back` restores it. After other errors of a first call the server has the earlier
        drafter."""

    def load_others(self, name: str, folder: Path, save_undo: Callable[[], None] = ignore) -> None:
        """Load the drafter on the other servers, one after the other, once `load` has loaded it on the first one.
        `save_undo` is called before each server gets its request, as in `load`. After an error the servers before the
        failed one keep the new drafter; `roll_back` restores them."""

    @abstractmethod
    def route(self, cluster: str, name: str, save_undo: Callable[[], None] = ignore) -> None:
        """Route all requests of a cluster to the drafter `name`. First the field `undo` gets what `roll_back` needs,
        then `save_undo` is called, then the server gets the request. Raises DeployError if the server cannot route
        clusters or does not know this one."""

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
        """Returns the counts of two groups of servers at the latest reading: (of the server with the drafter on trial,
        of all others together). If no drafter is on trial, the first server forms the first group. Returns None if
        there are no other servers."""
        return None

    def drafts(self, name: str) -> float | None:
        """Returns the number of rounds in which the drafter `name` has drafted; None if the server does not count it by
        name."""
        return None

    def holds(self, name: str, drafter: str) -> bool:
        """True if `drafter` is still loaded under this name, as far as the server reports it. Servers that do not
        report their drafters are assumed to have it."""
        return True

    def is_well(self) -> bool:
        """True if all servers report that they are healthy. While one of several servers tries a new drafter, only this
        one is asked. Raises UnreachableError if a server that is asked does not answer."""
        return all(is_well(client) for client in self._needed())

    def _needed(self) -> list[Client]:
        """Servers that must answer."""
        return self._clients

    def check_start(self) -> None:
        """Check that the servers support the way of loading drafters that the options choose. Raises ConfigError if one
        does not; servers that do not answer are skipped."""

    def close(self) -> None:
        """Close the connections to the servers."""
        for client in self._clients:
            client.close()
