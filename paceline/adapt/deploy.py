"""Where a drafter is put to work: paceline's own server, vLLM or SGLang, behind one small protocol.

    deployment = open_deployment(DeployConfig(servers=("http://127.0.0.1:8000",), admin_key="..."))
    before = deployment.counts()
    deployment.load(deployment.place_of("default"), Path("runs/adapt/tickets/drafter"))
    tokens_per_round(before, deployment.counts())
    deployment.roll_back()

A deployment is well, or raises DownloadError in one line; `roll_back` gives back what was there before.
UnreachableError means that a server does not answer now: it may have carried the call out or not, and the call may be
made again; DeployError that the servers have not judged the drafter: nothing about it is known.

paceline   the admin API of its pool (`serve/admin.py`, docs/drafters.md): POST /admin/drafters/NAME loads a drafter,
           health-checked, under traffic; POST /admin/clusters/CLUSTER sends requests of a kind to a member
vllm       where the version has it, POST /start_draft_weight_update, then `publish` sends the tensors, then
           /finish_weight_update; else `restart` for one server after the other, each well again before the next
sglang     POST /update_weights_from_disk with the field that this build has for draft weights (`draft_field`: none is
           assumed, because a build without one would replace the target's own weights); else `restart`

`publish` and `restart` are commands of the user's. They find PACELINE_SERVER, PACELINE_DRAFTER (a folder) and
PACELINE_SPECULATIVE_CONFIG (JSON, as --speculative-config of vLLM takes it) in their environment.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from paceline.adapt.config import DeployConfig
from paceline.adapt.counts import (
    NOT_NOW,
    Counts,
    SglangCounts,
    Totals,
    ask,
    counts_by_engine,
    counts_of,
    drafts_of,
    is_up,
    is_well,
)
from paceline.bench.client import Client
from paceline.errors import DeployError, DownloadError, UnreachableError
from paceline.types import NONE

log = logging.getLogger("paceline.adapt")
POLL_S = 0.5
ONLY = "drafter"
"""What the one drafter of a server is called that has no pool."""


class Deployment(Protocol):
    """The contract; every method raises DownloadError when a server does not answer, or refuses."""

    traces_rounds: bool
    """Whether traces of its requests tell how many drafts stood in each round."""
    undo: list[list[str | None]]
    """What `roll_back` will take back, as JSON: a daemon that goes on after another sets it."""

    def members(self) -> dict[str, str]:
        """Name -> drafter (folder, or name) of what drafts there now."""
        ...

    def place_of(self, drafter: str) -> str:
        """The name under which this drafter serves."""
        ...

    def pinned(self, cluster: str) -> str | None:
        """The member that requests of a cluster are sent to, if they are. DownloadError where none can be sent."""
        ...

    def load(self, name: str, folder: Path) -> None:
        """Put a drafter to work under a name, in the place of any other.

        When it raises, the servers work as before; after an UnreachableError they may not, and `undo` knows that."""
        ...

    def route(self, cluster: str, name: str) -> None:
        """Send requests of a cluster to this member."""
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
        self._leaving = set[str]()

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

    def load(self, name: str, folder: Path) -> None:
        self._change("drafter", name, self.members().get(name), str(folder.absolute()))

    def route(self, cluster: str, name: str) -> None:
        self._change("cluster", cluster, self.pinned(cluster), name)

    def _change(self, kind: str, name: str, before: str | None, drafter: str) -> None:
        """Noted before it is asked for: a request whose answer was lost may have been carried out."""
        is_noted = any(each[:2] == [kind, name] for each in self.undo)  # it is tried again
        if not is_noted:
            self.undo.append([kind, name, before])
        try:
            self._ask("POST", f"{kind}s", name, {"drafter": drafter})
        except UnreachableError:
            raise
        except DownloadError:
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
        if not isinstance(rows, list):
            raise DeployError(f"{self._client.url}/admin/drafters lists no {kind}: start a paceline server of this version")
        return rows

    def _ask(self, method: str, kind: str, name: str, body: dict[str, Any] | None = None) -> None:
        ask(self._client, method, f"/admin/{kind}/{quote(name)}", body)

    def counts(self) -> Counts:
        return counts_of(self._client, self._served_name)

    def drafts(self, name: str) -> float | None:
        return drafts_of(self._client, name)

    def holds(self, name: str, drafter: str) -> bool:
        return self.members().get(name) == drafter

    def is_well(self) -> bool:
        return is_well(self._client)

    def close(self) -> None:
        self._client.close()


class _Restarted:
    """Servers with one drafter each, which is replaced server by server."""

    traces_rounds = False

    def __init__(self, config: DeployConfig, incumbent: Path | None) -> None:
        self.config, self._serving = config, incumbent
        self.undo = list[list[str | None]]()
        """The folder from before, if one is known."""
        self._clients = [Client(url, config.admin_key, config.patience_s) for url in config.servers]
        self._totals = Totals()

    def members(self) -> dict[str, str]:
        return {} if self._serving is None else {ONLY: str(self._serving)}

    def place_of(self, drafter: str) -> str:
        self._serving = self._serving or (Path(drafter) if Path(drafter).is_dir() else None)
        return ONLY

    def pinned(self, cluster: str) -> str | None:
        raise DeployError("these servers have one drafter each, for all of their traffic")

    def route(self, cluster: str, name: str) -> None:
        self.pinned(cluster)

    def load(self, name: str, folder: Path) -> None:
        """Noted before the first server gets it: a request whose answer was lost may have been carried out."""
        before = None if self._serving is None else str(self._serving)
        is_noted = before is not None and [before] in self.undo  # it is tried again
        if not is_noted:
            self.found(name, before)
        done = list[Client]()
        try:
            for client in self._clients:
                done.append(client)
                self._replace(client, folder)
        except UnreachableError:
            raise
        except DownloadError as error:
            if not is_noted:
                self._give_back(done, error)
                self.undo.pop()
            raise
        self._serving = folder

    def _give_back(self, done: list[Client], error: DownloadError) -> None:
        if self._serving is None:
            raise type(error)(f"{error}; nothing is known to go back to: restart the server by hand") from error
        for client in done:
            self._replace(client, self._serving)

    def found(self, name: str, before: str | None) -> None:
        if before is not None:
            self.undo.append([before])

    def keep(self) -> None:
        self.undo = []

    def roll_back(self) -> None:
        for (before,) in self.undo[:1]:
            assert before is not None
            for client in self._clients:
                self._replace(client, Path(before))
            self._serving, self.undo = Path(before), []

    def counts(self) -> Counts:
        """Of all servers, without those whose page cannot be read now. Raises DownloadError where none can be."""
        return self._totals.read(self._clients, self._read)

    def drafts(self, name: str) -> float | None:
        return None

    def holds(self, name: str, drafter: str) -> bool:
        return True  # these servers do not say what they draft with

    def is_well(self) -> bool:
        return all(is_well(client) for client in self._clients)

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _read(self, client: Client) -> dict[str, Counts]:
        return counts_by_engine(client, self.config.served_name)

    def _replace(self, client: Client, folder: Path) -> None:
        """Give one server the drafter, and wait until it is well."""
        assert self.config.restart is not None
        self._command(self.config.restart, client, folder)
        until = time.monotonic() + self.config.patience_s
        while not is_up(client):
            if time.monotonic() > until:
                raise DeployError(f"{client.url} is not well {self.config.patience_s:g} s after its restart with {folder}")
            time.sleep(POLL_S)

    def _command(self, command: str, client: Client, folder: Path) -> None:
        speculative = {"method": self.config.method, "model": str(folder), "num_speculative_tokens": self.config.num_drafted}
        added = {"PACELINE_SERVER": client.url, "PACELINE_DRAFTER": str(folder)}
        added["PACELINE_SPECULATIVE_CONFIG"] = json.dumps(speculative)
        try:
            limit = self.config.patience_s
            done = subprocess.run(shlex.split(command), env=os.environ | added, capture_output=True, text=True, timeout=limit)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise DeployError(f"{command!r} did not run for {client.url} ({error}): correct it") from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
            raise DeployError(f"{command!r} failed for {client.url} ({said[0]}): correct it")


class VllmServers(_Restarted):
    """Weights while it runs where that is possible, else a rolling restart."""

    def _replace(self, client: Client, folder: Path) -> None:
        if self.config.publish is not None and _takes_weights(client):
            self._command(self.config.publish, client, folder)
            ask(client, "POST", "/finish_weight_update", {})
            if not is_well(client):
                raise DeployError(f"{client.url} is not well with the weights of {folder}")
        elif self.config.restart is not None:
            super()._replace(client, folder)
        else:
            raise DeployError(f"{client.url} takes no draft weights while it runs: give --restart")


class SglangServers(_Restarted):
    """Weights from disk where this build knows a drafter's, else a rolling restart."""

    def __init__(self, config: DeployConfig, incumbent: Path | None) -> None:
        super().__init__(config, incumbent)
        self._counted = SglangCounts()

    def _replace(self, client: Client, folder: Path) -> None:
        if self.config.draft_field is None:
            return super()._replace(client, folder)
        told = ask(
            client, "POST", "/update_weights_from_disk", {"model_path": str(folder.absolute()), self.config.draft_field: True}
        )
        if not told.get("success", False):
            raise DownloadError(f"{client.url} refused the weights ({told.get('message', 'no reason given')})")
        return None

    def _read(self, client: Client) -> dict[str, Counts]:
        return self._counted.read(client, self.config.served_name)


def _takes_weights(client: Client) -> bool:
    """True if this vLLM has begun an update of its draft weights. Raises UnreachableError, also when it is busy."""
    stream = client.post("/start_draft_weight_update", b"{}")
    if stream.failure:
        raise UnreachableError(f"{client.url} does not answer ({stream.failure}): start it, or check its address")
    if stream.status in NOT_NOW:
        raise UnreachableError(f"{client.url} begins no update of its draft weights now: it answered {stream.status}")
    return stream.status == 200
