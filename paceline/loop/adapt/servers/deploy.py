"""Where a drafter is put to work: paceline's own server, vLLM or SGLang, behind one small protocol.

    deployment = open_deployment(DeployConfig(servers=("http://127.0.0.1:8000",), admin_key="..."))
    before = deployment.counts()
    deployment.load(deployment.place_of("default"), Path("runs/adapt/tickets/drafter"))
    tokens_per_round(before, deployment.counts())
    deployment.roll_back()

A deployment is well, or raises DownloadError in one line; `roll_back` gives back what was there before.
UnreachableError means that a server does not answer now: it may have carried the call out or not, and the call may be
made again; DeployError that the servers have not judged the drafter: nothing about it is known.

paceline   the admin API of its pool (`serve/admin.py`, docs/reference/http-api.md): POST /admin/drafters/NAME loads a drafter,
           health-checked, under traffic; POST /admin/clusters/CLUSTER sends requests of a kind to a member
vllm       where the version has it, POST /start_draft_weight_update, then `publish` sends the tensors, then
           /finish_weight_update; else `restart` for one server after the other, each well again before the next
sglang     POST /update_weights_from_disk with the field that this build has for draft weights (`draft_field`: none is
           assumed, because a build without one would replace the target's own weights); else `restart`

`publish` and `restart` are commands of the user's. They find PACELINE_SERVER, PACELINE_DRAFTER (a folder) and
PACELINE_SPECULATIVE_CONFIG (JSON, as --speculative-config of vLLM takes it) in their environment.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from paceline.errors import DeployError, DownloadError, PacelineError, UnreachableError
from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.servers.counters import Counts, Meters, ask, drafts_of, is_well
from paceline.loop.adapt.servers.vllm_sglang.restart import SglangServers, VllmServers
from paceline.net.streaming import Client
from paceline.report.tables import ignore
from paceline.types import NONE

log = logging.getLogger("paceline.loop.adapt")


class Deployment(Protocol):
    """The contract; every method raises DownloadError when a server does not answer, or refuses."""

    traces_rounds: bool
    """Whether traces of its requests tell how many drafts stood in each round."""
    undo: list[list[str | None]]
    """What `roll_back` will take back, as JSON: a daemon that goes on after another sets it."""
    meters: Meters
    """By address of a server: what it has counted. A daemon that goes on after another sets it."""

    def serves(self, drafter: str) -> None:
        """Note the drafter that serves now, for servers that do not say."""
        ...

    def members(self) -> dict[str, str]:
        """Name -> drafter (folder, or name) of what drafts there now."""
        ...

    def place_of(self, drafter: str) -> str:
        """The name under which this drafter serves."""
        ...

    def pinned(self, cluster: str) -> str | None:
        """The member that requests of a cluster are sent to, if they are. DownloadError where none can be sent."""
        ...

    def load(self, name: str, folder: Path, noted: Callable[[], None] = ignore) -> None:
        """Put a drafter to work under a name, in the place of any other.

        `noted` is called when `undo` has it, before a server is asked: what it raises ends the load. When it raises, the
        servers work as before; after an UnreachableError they may not, and `undo` knows that."""
        ...

    def route(self, cluster: str, name: str, noted: Callable[[], None] = ignore) -> None:
        """Send requests of a cluster to this member; `noted` as of `load`."""
        ...

    def found(self, name: str, before: str | None) -> None:
        """Somebody else has put this member to work, in the place of `before`: `roll_back` takes that back."""
        ...

    def keep(self) -> None:
        """What was loaded has proved itself: there is nothing to take back."""
        ...

    def roll_back(self) -> None:
        """Undo what was done since `keep`, the latest first; nothing when nothing was."""
        ...

    def counts(self) -> Counts: ...

    def drafts(self, name: str) -> float | None:
        """Rounds in which this member has drafted; None where a server does not count by member."""
        ...

    def holds(self, name: str, drafter: str) -> bool:
        """False if the server has another drafter under this name by now, or none."""
        ...

    def is_well(self) -> bool:
        """True if all servers say that they are well."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


def open_deployment(config: DeployConfig, incumbent: Path | None = None) -> Deployment:
    """`incumbent`: the folder of the drafter that vLLM or SGLang serves with now: what rolling back gives back."""
    if config.engine == "paceline":
        return PacelineServer(config)
    return VllmServers(config, incumbent) if config.engine == "vllm" else SglangServers(config, incumbent)


class PacelineServer:
    """Members of a pool, loaded under traffic, and the clusters that are sent to one of them."""

    traces_rounds = True

    def __init__(self, config: DeployConfig) -> None:
        self._client = Client(config.servers[0], config.admin_key or os.environ.get("PACELINE_ADMIN_KEY"), config.patience_s)
        self._served_name = config.served_name
        self.undo = list[list[str | None]]()
        """("drafter", name, what it was made from before) and ("cluster", name, the member it was sent to before)."""
        self.meters, self._leaving = Meters({self._client.url: {}}), set[str]()

    def serves(self, drafter: str) -> None:
        pass  # it says so itself

    def members(self) -> dict[str, str]:
        rows = self._listed("drafters")
        for row in rows:
            if row["name"] in self._leaving and row["state"] == "draining" and not row["rows"]:
                self._ask("DELETE", "drafters", row["name"])  # its memory is free
                self._leaving.remove(row["name"])
        return {row["name"]: row["drafter"] for row in rows if row["state"] == "ready" and row["name"] != NONE}

    def place_of(self, drafter: str) -> str:
        members = self.members()
        for name, made_from in members.items():
            if drafter == made_from or (Path(drafter).is_dir() and str(Path(drafter).resolve()) == made_from):
                return name
        there = ", ".join(f"{name} ({made_from})" for name, made_from in members.items()) or "none"
        raise DownloadError(f"{self._client.url} does not serve with {drafter}, but with {there}: name one with --incumbent")

    def pinned(self, cluster: str) -> str | None:
        for row in self._listed("clusters"):
            if row["label"] == cluster:
                return row["pinned"]
        url = self._client.url
        raise DeployError(f"{url} knows no requests of {cluster!r}: it needs --route auto, and such traffic")

    def load(self, name: str, folder: Path, noted: Callable[[], None] = ignore) -> None:
        self._change("drafter", name, self.members().get(name), str(folder.absolute()), noted)

    def route(self, cluster: str, name: str, noted: Callable[[], None] = ignore) -> None:
        self._change("cluster", cluster, self.pinned(cluster), name, noted)

    def _change(self, kind: str, name: str, before: str | None, drafter: str, noted: Callable[[], None]) -> None:
        """Noted before it is asked for: a request whose answer was lost may have been carried out."""
        is_noted = any(each[:2] == [kind, name] for each in self.undo)  # it is tried again
        if not is_noted:
            self.undo.append([kind, name, before])
        try:
            noted()
            self._ask("POST", f"{kind}s", name, {"drafter": drafter})
        except UnreachableError:
            raise
        except PacelineError:
            if not is_noted:
                self.undo.pop()
            raise

    def found(self, name: str, before: str | None) -> None:
        self.undo.append(["drafter", name, before])

    def keep(self) -> None:
        self.undo = []

    def roll_back(self) -> None:
        while self.undo:
            kind, name, before = self.undo[-1]
            assert name is not None
            if kind == "cluster":
                self._release(name, before)
            else:
                self._take_out(name, before)
            self.undo.pop()

    def _release(self, cluster: str, before: str | None) -> None:
        """Send a cluster where it went before; a server that was started again may not know it any more."""
        try:
            self._ask("POST" if before else "DELETE", "clusters", cluster, {"drafter": before} if before else None)
        except UnreachableError:
            raise
        except DownloadError as error:
            log.warning("the cluster %s is not sent back: %s", cluster, error)

    def _take_out(self, name: str, before: str | None) -> None:
        """Give back the drafter from before; where there was none, or it is refused now, requests get other members."""
        if before is not None:
            try:
                self._ask("POST", "drafters", name, {"drafter": before})
                return
            except UnreachableError:
                raise
            except DownloadError as error:
                log.warning("the drafter from before is not taken back under the name %s: %s", name, error)
        if name in self.members():
            self._ask("POST", "drafters", f"{name}/drain", {})
        self._leaving.add(name)

    def _listed(self, kind: str) -> list[dict[str, Any]]:
        rows = ask(self._client, "GET", "/admin/drafters").get(kind)
        keys = {"name", "drafter", "state", "rows"} if kind == "drafters" else {"label", "pinned"}
        if not isinstance(rows, list) or not all(isinstance(row, dict) and keys <= row.keys() for row in rows):
            raise DeployError(f"{self._client.url}/admin/drafters lists no {kind}: start a paceline server of this version")
        return rows

    def _ask(self, method: str, kind: str, name: str, body: dict[str, Any] | None = None) -> None:
        ask(self._client, method, f"/admin/{kind}/{quote(name)}", body)

    def counts(self) -> Counts:
        return self.meters.read([self._client], self._served_name)

    def drafts(self, name: str) -> float | None:
        return drafts_of(self._client, name)

    def holds(self, name: str, drafter: str) -> bool:
        return self.members().get(name) == drafter

    def is_well(self) -> bool:
        return is_well(self._client)

    def close(self) -> None:
        self._client.close()
