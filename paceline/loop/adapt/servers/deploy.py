"""Deploys drafters on paceline's own server, vLLM or SGLang through one interface.

    deployment = open_deployment(DeployConfig(servers=("http://127.0.0.1:8000",), admin_key="..."))
    before = deployment.counts()
    deployment.load(deployment.place_of("default"), Path("runs/adapt/tickets/drafter"))
    tokens_per_round(before, deployment.counts())
    deployment.roll_back()

Errors are DownloadError or one of its subclasses. UnreachableError: a server does not answer now; it may have executed
the call, which may be repeated. DeployError: the servers refused before they tried the drafter, which may be good.

paceline   admin API (docs/reference/http-api.md): POST /admin/drafters/NAME loads and checks a drafter while the server
           answers requests; POST /admin/clusters/CLUSTER routes a cluster (group of similar requests) to a drafter
vllm       `hot_swap`: POST /paceline/draft-weights, a route of `paceline.interop.draft_weights`. `publish`, if vLLM has
           the routes: POST /start_draft_weight_update, the command, POST /finish_weight_update. Else `restart`
sglang     POST /update_weights_from_disk with the field that this build has for draft weights (`draft_field`; no
           default, because a build without one would replace the target's own weights); else `restart`

`publish` and `restart` are user commands. Their environment has PACELINE_SERVER, PACELINE_DRAFTER (a folder) and
PACELINE_SPECULATIVE_CONFIG (JSON for vLLM's --speculative-config).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paceline.errors import DeployError, PacelineError, RejectedError, UnreachableError
from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.servers.counters import ask, drafts_of
from paceline.loop.adapt.servers.deployment import Deployment
from paceline.loop.adapt.servers.vllm_sglang.engine_folders import EngineFolders
from paceline.loop.adapt.servers.vllm_sglang.restart import SglangServers, VllmServers
from paceline.report.tables import ignore
from paceline.types import NONE

log = logging.getLogger("paceline.loop.adapt")


def open_deployment(
    config: DeployConfig, incumbent: Path | None = None, folders: EngineFolders | None = None
) -> Deployment:
    """Creates the `Deployment` for the servers of `config`; sends no request yet. Only vLLM and SGLang use the other
    arguments. `incumbent`: folder of the drafter that the servers have now, to which a rollback returns. `folders`:
    converts drafters to the engine's format before they are loaded; None loads them unchanged."""
    if config.engine == "paceline":
        return PacelineServer(config)
    return (VllmServers if config.engine == "vllm" else SglangServers)(config, incumbent, folders)


class PacelineServer(Deployment):
    """Deploys drafters on one paceline server through its admin API: loads them, and routes clusters of requests to
    them."""

    traces_rounds = True

    def __init__(self, config: DeployConfig) -> None:
        """`undo`: ["drafter", name, drafter before or None], ["cluster", name, drafter it was routed to or None]."""
        super().__init__(config)
        self._client, self._leaving = self._clients[0], set[str]()

    def members(self) -> dict[str, str]:
        rows = self._listed("drafters")
        for row in rows:
            if row["name"] in self._leaving and row["state"] == "draining" and not row["rows"]:
                self._ask("DELETE", "drafters", row["name"])  # frees its memory
                self._leaving.remove(row["name"])
        ready = [row for row in rows if row["state"] in ("ready", "released") and row["name"] != NONE]
        return {row["name"]: row["drafter"] for row in ready}

    def place_of(self, drafter: str) -> str:
        members = self.members()
        for name, made_from in members.items():
            if drafter == made_from or (Path(drafter).is_dir() and str(Path(drafter).resolve()) == made_from):
                return name
        there = ", ".join(f"{name} ({made_from})" for name, made_from in members.items()) or "none"
        raise RejectedError(
            f"{self._client.url} does not serve with {drafter}, but with {there}: name one with --incumbent"
        )

    def pinned(self, cluster: str) -> str | None:
        for row in self._listed("clusters"):
            if row["label"] == cluster:
                return row["pinned"]
        url = self._client.url
        raise DeployError(f"{url} knows no requests of {cluster!r}: it needs --route auto, and such traffic")

    def load(self, name: str, folder: Path, save_undo: Callable[[], None] = ignore) -> None:
        there = self.members().get(name)
        retried = [change for change in self.undo if change[:2] == ["drafter", name] and change[2] != there]
        if retried and there in (str(folder.absolute()), str(folder.resolve())):
            return  # loaded by the earlier try, whose response was lost
        self._change("drafter", name, there, str(folder.absolute()), save_undo)

    def route(self, cluster: str, name: str, save_undo: Callable[[], None] = ignore) -> None:
        self._change("cluster", cluster, self.pinned(cluster), name, save_undo)

    def _change(self, kind: str, name: str, before: str | None, drafter: str, save_undo: Callable[[], None]) -> None:
        """Record the change in `undo`, then request it: a request whose response was lost may have been executed."""
        is_noted = any(change[:2] == [kind, name] for change in self.undo)  # a retry
        if not is_noted:
            self.undo.append([kind, name, before])
        try:
            save_undo()
            self._ask("POST", f"{kind}s", name, {"drafter": drafter})
        except UnreachableError:
            raise
        except PacelineError:
            if not is_noted:
                self.undo.pop()
            raise

    def loaded_by_hand(self, name: str, before: str | None) -> None:
        self.undo.append(["drafter", name, before])

    def roll_back(self, save_undo: Callable[[], None] = ignore) -> None:
        while self.undo:
            kind, name, before = self.undo[-1]
            assert name is not None
            if kind == "cluster":
                self._release(name, before)
            else:
                self._take_out(name, before)
            self.undo.pop()

    def _release(self, cluster: str, before: str | None) -> None:
        """Restore a cluster's earlier route; a restarted server may no longer know the cluster."""
        try:
            self._ask("POST" if before else "DELETE", "clusters", cluster, {"drafter": before} if before else None)
        except RejectedError as error:
            log.warning("the cluster %s is not sent back: %s", cluster, error)

    def _take_out(self, name: str, before: str | None) -> None:
        """Restore the earlier drafter. If there was none, or it is refused now, remove this one: others get its
        requests."""
        if before is not None:
            if self.members().get(name) == before:
                return  # restored by an earlier try, whose response was lost
            try:
                self._ask("POST", "drafters", name, {"drafter": before})
                return
            except RejectedError as error:
                log.warning("the drafter from before is not taken back under the name %s: %s", name, error)
        if name in self.members():
            self._ask("POST", "drafters", f"{name}/drain", {})
        self._leaving.add(name)

    def _listed(self, kind: str) -> list[dict[str, Any]]:
        rows = ask(self._client, "GET", "/admin/drafters").get(kind)
        keys = {"name", "drafter", "state", "rows"} if kind == "drafters" else {"label", "pinned"}
        if not isinstance(rows, list) or not all(isinstance(row, dict) and keys <= row.keys() for row in rows):
            raise DeployError(
                f"{self._client.url}/admin/drafters lists no {kind}: start a paceline server of this version"
            )
        return rows

    def _ask(self, method: str, kind: str, name: str, body: dict[str, Any] | None = None) -> None:
        ask(self._client, method, f"/admin/{kind}/{quote(name)}", body)

    def drafts(self, name: str) -> float | None:
        return drafts_of(self._client, name)

    def holds(self, name: str, drafter: str) -> bool:
        return self.members().get(name) == drafter
