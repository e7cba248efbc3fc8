"""Deploys drafters to vLLM or SGLang servers. Each has one drafter and does not report it; it is replaced on one server
after the other.

Implements `deploy.Deployment`. Weights are replaced in the running server if possible, else by a restart command.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import DeployError, DownloadError, PacelineError, UnreachableError
from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.servers.counters import Counts, Meters, answer_of, ask, is_up, is_well
from paceline.net.streaming import Client
from paceline.report.tables import ignore

POLL_S = 0.5
NO_INCUMBENT = "give --incumbent the folder of the drafter that these servers have now"
ONLY = "drafter"
"""Name used for the drafter of a server that has only one."""


class _Restarted:
    """Servers with one drafter each; replaces it server by server."""

    traces_rounds = False

    def __init__(self, config: DeployConfig, incumbent: Path | None) -> None:
        self.config, self._serving = config, incumbent
        self.undo = list[list[str | None]]()
        """[folder of the earlier drafter], if known."""
        self._clients = [Client(url, config.admin_key, config.patience_s) for url in config.servers]
        self.meters = Meters({client.url: {} for client in self._clients})

    def serves(self, drafter: str) -> None:
        self._serving = Path(drafter) if Path(drafter).is_dir() else self._serving

    def members(self) -> dict[str, str]:
        return {} if self._serving is None else {ONLY: str(self._serving)}

    def place_of(self, drafter: str) -> str:
        self._serving = self._serving or (Path(drafter) if Path(drafter).is_dir() else None)
        return ONLY

    def pinned(self, cluster: str) -> str | None:
        raise DeployError("these servers have one drafter each, for all of their traffic")

    def route(self, cluster: str, name: str, save_undo: Callable[[], None] = ignore) -> None:
        self.pinned(cluster)

    def load(self, name: str, folder: Path, save_undo: Callable[[], None] = ignore) -> None:
        """Record the change in `undo` before the first server gets it: a request whose response was lost may have been
        executed."""
        if self._serving is None:
            raise DeployError(f"nothing is known to go back to: {NO_INCUMBENT}")
        before = str(self._serving)
        is_noted = [before] in self.undo  # a retry
        if not is_noted:
            self.undo.append([before])
        done = list[Client]()
        try:
            save_undo()
            for client in self._clients:
                done.append(client)
                self._replace(client, folder)
        except UnreachableError:
            raise
        except PacelineError:
            if not is_noted:
                for client in done:
                    self._replace(client, self._serving)
                self.undo.pop()
            raise
        self._serving = folder

    def loaded_by_hand(self, name: str, before: str | None) -> None:
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
        return self.meters.read(self._clients, self.config.served_name)

    def drafts(self, name: str) -> float | None:
        return None

    def holds(self, name: str, drafter: str) -> bool:
        return True  # these servers do not report their drafter

    def is_well(self) -> bool:
        return all(is_well(client) for client in self._clients)

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _replace(self, client: Client, folder: Path) -> None:
        """Deploy the drafter to one server, and wait until it is healthy."""
        assert self.config.restart is not None
        self._command(self.config.restart, client, folder)
        until = time.monotonic() + self.config.patience_s
        while not is_up(client):
            if time.monotonic() > until:
                raise DeployError(
                    f"{client.url} is not well {self.config.patience_s:g} s after its restart with {folder}"
                )
            time.sleep(POLL_S)

    def _command(self, command: str, client: Client, folder: Path) -> None:
        speculative = {
            "method": self.config.method,
            "model": str(folder),
            "num_speculative_tokens": self.config.num_drafted,
        }
        added = {"PACELINE_SERVER": client.url, "PACELINE_DRAFTER": str(folder)}
        added["PACELINE_SPECULATIVE_CONFIG"] = json.dumps(speculative)
        try:
            limit = self.config.patience_s
            done = subprocess.run(
                shlex.split(command), env=os.environ | added, capture_output=True, text=True, timeout=limit
            )
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise DeployError(f"{command!r} did not run for {client.url} ({error}): correct it") from error
        if done.returncode:
            output = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
            raise DeployError(f"{command!r} failed for {client.url} ({output[0]}): correct it")


class VllmServers(_Restarted):
    """vLLM servers, one drafter each: replaces the weights in the running server if the option `publish` gives a
    command that sends them and the server accepts them; otherwise restarts one server after the other."""

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
    """SGLang servers, one drafter each: the running server loads new weights from disk if the option `draft_field`
    gives the request field that marks weights as the drafter's; otherwise restarts one server after the other."""

    def _replace(self, client: Client, folder: Path) -> None:
        if self.config.draft_field is None:
            return super()._replace(client, folder)
        body = {"model_path": str(folder.absolute()), self.config.draft_field: True}
        response = ask(client, "POST", "/update_weights_from_disk", body)
        if not response.get("success", False):
            raise DownloadError(f"{client.url} refused the weights ({response.get('message', 'no reason given')})")
        return None


def _takes_weights(client: Client) -> bool:
    """Begin an update of the draft weights; False if not supported. Raises UnreachableError, also if the server is
    busy."""
    try:
        answer_of(client, "POST", "/start_draft_weight_update")
    except UnreachableError:
        raise
    except DownloadError:
        return False
    return True
