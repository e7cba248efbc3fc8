"""Deploys drafters to vLLM or SGLang servers. Each has one drafter and does not report it; it is replaced on one server
(the canary), and later on the others, one after the other.

Weights are replaced in the running server if possible, else by a restart command.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from paceline.draft.eagle3.checkpoint import is_eagle3
from paceline.errors import (
    CacheError,
    ConfigError,
    DeployError,
    DownloadError,
    ModelFileError,
    PacelineError,
    RejectedError,
    UnreachableError,
)
from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.servers.counters import Counts, answer_of, ask, is_up, is_well
from paceline.loop.adapt.servers.deployment import Deployment
from paceline.loop.adapt.servers.vllm_sglang.commands import end_command, run_command
from paceline.loop.adapt.servers.vllm_sglang.engine_folders import EngineFolders, check_length
from paceline.model.checkpoint import read_json
from paceline.net.streaming import Client
from paceline.report.tables import ignore
from paceline.runs.masking import masked

log = logging.getLogger("paceline.loop.adapt")
POLL_S = 0.5
WEIGHTS_PATH = "/paceline/draft-weights"
"""Route that `paceline.interop.draft_weights` adds to vLLM."""
START, FINISH = "/start_draft_weight_update", "/finish_weight_update"
"""Routes of vLLM before and after `publish`. An update that was begun must be finished before the next one."""
FINISH_TRIES = 3
HOT_SWAP = (
    "start vLLM with --worker-extension-cls paceline.interop.draft_weights.DraftWeights and --middleware "
    "paceline.interop.draft_weights.DraftWeightsRoute, or give --restart in place of --hot-swap"
)
NO_INCUMBENT = "give --incumbent the folder of the drafter that these servers have now"
ONLY = "drafter"
"""Name used for the drafter of a server that has only one."""


class _Restarted(Deployment):
    """Servers with one drafter each; replaces it server by server, on the first one before the others."""

    def __init__(self, config: DeployConfig, incumbent: Path | None, folders: EngineFolders | None = None) -> None:
        """`undo`: ["server", address, folder that this server read before]; while a command runs for this server, with
        the command's identity (`commands.identity`)."""
        super().__init__(config)
        self._save_undo: Callable[[], None] = ignore
        self._incumbent, self._folders = incumbent, folders
        self._loaded: Path | None = None
        """Drafter that was loaded after the incumbent and is not accepted yet."""

    def serves(self, drafter: str) -> None:
        self._incumbent = Path(drafter) if Path(drafter).is_dir() else self._incumbent

    def members(self) -> dict[str, str]:
        serving = self._loaded or self._incumbent
        return {} if serving is None else {ONLY: str(serving)}

    def place_of(self, drafter: str) -> str:
        self._incumbent = self._incumbent or (Path(drafter) if Path(drafter).is_dir() else None)
        return ONLY

    def pinned(self, cluster: str) -> str | None:
        raise DeployError("these servers have one drafter each, for all of their traffic")

    def route(self, cluster: str, name: str, save_undo: Callable[[], None] = ignore) -> None:
        self.pinned(cluster)

    def load(self, name: str, folder: Path, save_undo: Callable[[], None] = ignore) -> None:
        self._load(self._clients[:1], folder, save_undo)

    def load_others(self, name: str, folder: Path, save_undo: Callable[[], None] = ignore) -> None:
        self._load(self._clients[1:], folder, save_undo)

    def _load(self, clients: list[Client], folder: Path, save_undo: Callable[[], None]) -> None:
        """Load the drafter on these servers, one after the other. Records each change in `undo` before the server gets
        it: a request whose response was lost may have been executed. Servers that have it from an earlier call are left
        alone, except the last one, which that call may not have finished."""
        if self._incumbent is None:
            raise DeployError(f"nothing is known to go back to: {NO_INCUMBENT}")
        self._save_undo = save_undo
        old, new, expected = self._incumbent, folder, None
        if self._folders:
            old, given = self._folders.given(old).folder, self._folders.given(new)
            new, expected = given.folder, self._folders.expected(given) if self.config.check_length else None
        changed = [url for _, url, *_ in self.undo]
        for client in clients:
            if client.url in changed[:-1]:
                continue
            is_first_try = client.url not in changed
            if is_first_try:
                self.undo.append(["server", client.url, str(old)])
            try:
                save_undo()
            except PacelineError:  # a full disk: the server is unchanged
                if is_first_try:
                    self.undo.pop()
                raise
            try:
                self._replace(client, new)
                if expected is not None:
                    check_length(self.config.engine, client, expected)
            except UnreachableError:
                raise
            except PacelineError:
                if is_first_try:
                    self._replace(client, old)
                    self.undo.pop()
                raise
        self._loaded = folder

    def keep(self) -> None:
        super().keep()
        self._incumbent, self._loaded = self._loaded or self._incumbent, None

    def resume(self, undo: list[list[str | None]]) -> None:
        """Take over the changes of an earlier daemon. If it was killed (SIGKILL) during a command, the command goes on
        and would act after a rollback: it is ended."""
        super().resume(undo)
        for change in undo:
            for command in filter(None, change[3:]):
                end_command(command)
            del change[3:]

    def roll_back(self, save_undo: Callable[[], None] = ignore) -> None:
        self._save_undo = save_undo
        clients = {client.url: client for client in self._clients}
        while self.undo:
            _, url, before, *_ = self.undo[-1]
            assert url is not None and before is not None
            if url in clients:
                self._replace(clients[url], Path(before))
            self.undo.pop()
        self._loaded = None

    def counts_apart(self) -> tuple[Counts, Counts] | None:
        on_trial = {str(url) for _, url, *_ in self.undo} or {self._clients[0].url}
        others = {client.url for client in self._clients} - on_trial
        if not others:
            return None
        first, second = (sum(map(self.meters.total, sorted(urls)), Counts()) for urls in (on_trial, others))
        return first, second

    def _needed(self) -> list[Client]:
        """Servers that must answer: the only one with the drafter on trial, which another server's failure says nothing
        about; else all."""
        on_trial = [client for client in self._clients if client.url in [url for _, url, *_ in self.undo]]
        return on_trial if len(on_trial) == 1 else self._clients

    def _replace(self, client: Client, folder: Path) -> None:
        """Deploy the drafter to one server, and wait until it is healthy."""
        assert self.config.restart is not None
        self._command(self.config.restart, client, folder)
        until = time.monotonic() + self.config.patience_s
        while not is_up(client):
            if time.monotonic() > until:
                waited = f"{self.config.patience_s:g} s after its restart with {folder}"
                raise DeployError(f"{client.url} is not well {waited}")
            time.sleep(POLL_S)

    def _command(self, command: str, client: Client, folder: Path) -> None:
        speculative = {"method": self._method_of(folder), "model": str(folder)}
        speculative |= {"num_speculative_tokens": self.config.num_drafted}
        added = {"PACELINE_SERVER": client.url, "PACELINE_DRAFTER": str(folder)}
        added["PACELINE_SPECULATIVE_CONFIG"] = json.dumps(speculative)
        limit, shown = self.config.patience_s, repr(masked(command))
        try:
            done = run_command(shlex.split(command), os.environ | added, limit, self._begun)
        except subprocess.TimeoutExpired as error:  # its text has the whole command
            raise DeployError(f"{shown} did not end within {limit:g} s for {client.url}: correct it") from error
        except (OSError, ValueError) as error:
            raise DeployError(f"{shown} did not run for {client.url} ({masked(str(error))}): correct it") from error
        finally:
            del self.undo[-1][3:]
        if done.returncode:
            output = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
            raise DeployError(f"{shown} failed for {client.url} ({masked(output[0])}): correct it")

    def _begun(self, command: str | None) -> None:
        """Save the identity of the command that runs for the server of the latest change."""
        self.undo[-1][3:] = [] if command is None else [command]
        try:
            self._save_undo()
        except CacheError as error:  # a full disk does not stop the command
            log.warning("a restarted daemon would not end the command for %s: %s", self.undo[-1][1], error)

    def _method_of(self, folder: Path) -> str:
        """Method for vLLM's speculative config: after a rollback it may differ from that of the drafter before."""
        try:
            return "eagle3" if is_eagle3(read_json(folder / "config.json")) else self.config.method
        except ModelFileError:  # the engine reports a folder that it cannot read
            return self.config.method


class VllmServers(_Restarted):
    """vLLM servers with one drafter each. Three options choose how a server gets a new drafter:
    - `hot_swap`: the running server loads the draft weights from a folder.
    - `publish`: a command sends the draft weights to the running server.
    - `restart`: a command restarts the server with the new drafter. Together with `hot_swap` or `publish`, it is used
      only for servers that do not accept the weights while they run.

    With `hot_swap` each server reports its drafter. A drafter that a user loaded by hand is then detected, and listed
    under its server's address."""

    def __init__(self, config: DeployConfig, incumbent: Path | None, folders: EngineFolders | None = None) -> None:
        super().__init__(config, incumbent, folders)
        self._reported = dict[str, str]()
        """Address -> folder that the server reported last."""
        self._engine_folders = dict[Path, Path]()
        """Drafter -> its folder in vLLM's format."""
        self._updating = set[str]()
        """Addresses of servers with an update that was begun and is not known to be finished."""

    def members(self) -> dict[str, str]:
        members = super().members()
        if not self.config.hot_swap or not members:
            return members
        ours = {os.path.realpath(self._engine_folder(each)) for each in (self._incumbent, self._loaded) if each}
        for client in self._clients:
            try:
                reported = ask(client, "GET", WEIGHTS_PATH).get("folder")
            except UnreachableError:
                continue  # its counters are missed, too; until it answers, it has what it reported last
            except RejectedError:
                reported = None  # restarted without the route
            self._reported[client.url] = reported if isinstance(reported, str) else ""
        by_hand = {url: folder for url, folder in self._reported.items() if os.path.realpath(folder) not in ours}
        return {**{url: folder for url, folder in by_hand.items() if folder}, **members}

    def resume(self, undo: list[list[str | None]]) -> None:
        """Take over the changes of an earlier daemon. If that daemon was killed during `publish`, vLLM waits for the
        end of this weight update and refuses a new one. The next update therefore ends the earlier one first."""
        super().resume(undo)
        self._updating = {str(url) for _, url, *_ in undo}

    def keep(self) -> None:
        super().keep()
        self._updating.clear()  # the drafter has served since

    def loaded_by_hand(self, name: str, before: str | None) -> None:
        if name in self.meters.of and self._incumbent is not None:
            self.undo.append(["server", name, before or str(self._engine_folder(self._incumbent))])

    def _engine_folder(self, drafter: Path) -> Path:
        if drafter not in self._engine_folders:
            self._engine_folders[drafter] = self._folders.given(drafter).folder if self._folders else drafter
        return self._engine_folders[drafter]

    def check_start(self) -> None:
        """With `hot_swap`, raises ConfigError if a server cannot replace draft weights while it runs; servers that do
        not answer are skipped."""
        for client in self._clients if self.config.hot_swap else ():
            try:
                state = ask(client, "GET", WEIGHTS_PATH)
            except UnreachableError as error:
                log.warning("%s: not checked yet", error)
                continue
            except RejectedError as error:
                raise ConfigError(f"{error}: {HOT_SWAP}") from error
            if problem := state.get("problem", HOT_SWAP):
                raise ConfigError(f"{client.url} cannot load draft weights: {problem}")

    def _replace(self, client: Client, folder: Path) -> None:
        if not self._takes_weights(client, folder):
            super()._replace(client, folder)
            return
        if self.config.publish is not None:
            try:
                self._command(self.config.publish, client, folder)
            except BaseException:  # also if the daemon is stopped: else the server refuses every later update
                with contextlib.suppress(DownloadError):  # the first error says more
                    self._finish(client)
                raise
            self._finish(client)
        if not is_well(client):
            raise DeployError(f"{client.url} is not well with the weights of {folder}")

    def _finish(self, client: Client) -> None:
        """Finish an update of the draft weights. A request without an answer is repeated: if the server refuses the
        repetition, the first request has finished the update."""
        for number in range(1, FINISH_TRIES + 1):
            try:
                answer_of(client, "POST", FINISH)
                break
            except UnreachableError:
                if number == FINISH_TRIES:
                    raise
                time.sleep(POLL_S)
            except RejectedError:
                if number == 1:
                    raise
                break
        self._updating.discard(client.url)

    def holds(self, name: str, drafter: str) -> bool:
        if not self.config.hot_swap:
            return super().holds(name, drafter)
        if name in self.meters.of:
            return all(_has(client, Path(drafter)) for client in self._clients if client.url == name)
        folder = self._folders.given(Path(drafter)).folder if self._folders else Path(drafter)
        changed = [client for client in self._clients if client.url in [url for _, url, *_ in self.undo]]
        return all(_has(client, folder) for client in changed)

    def _takes_weights(self, client: Client, folder: Path) -> bool:
        """Load the weights into the running server (`hot_swap`), or begin an update of its draft weights (`publish`).
        Returns False if it shall be restarted: without these options, or if it refuses. Raises UnreachableError, also
        if the server is busy."""
        if not self.config.hot_swap and self.config.publish is None:
            return False
        try:
            if self.config.hot_swap:
                ask(client, "POST", WEIGHTS_PATH, {"folder": str(folder.absolute())})
            else:
                if client.url in self._updating:
                    with contextlib.suppress(DownloadError):  # refused if it was finished, and its answer lost
                        answer_of(client, "POST", FINISH)
                self._updating.add(client.url)
                answer_of(client, "POST", START)
        except RejectedError as error:  # the server has compared shapes, not judged the drafter
            self._updating.discard(client.url)
            if self.config.restart is None:
                raise DeployError(f"{error}; --restart would start the server again with it") from error
            log.warning("%s: it is restarted", error)
            return False
        return True


class SglangServers(_Restarted):
    """SGLang servers with one drafter each. With the option `draft_field`, a running server loads new draft weights
    from disk. The option names the request field by which SGLang recognises that the weights are for the drafter, not
    the target. Without the option, a command restarts the server to give it a new drafter."""

    def _replace(self, client: Client, folder: Path) -> None:
        if self.config.draft_field is None:
            return super()._replace(client, folder)
        body = {"model_path": str(folder.absolute()), self.config.draft_field: True}
        response = ask(client, "POST", "/update_weights_from_disk", body)
        if not response.get("success", False):
            raise RejectedError(f"{client.url} refused the weights ({response.get('message', 'no reason given')})")
        return None


def _has(client: Client, folder: Path) -> bool:
    """False if vLLM reports that it drafts with another folder. After a restart it reports the path in its command
    line, which may be a link; one that was started without paceline's route reports nothing."""
    try:
        reported = ask(client, "GET", WEIGHTS_PATH).get("folder")
    except DeployError:
        return True
    return isinstance(reported, str) and os.path.realpath(reported) == os.path.realpath(folder)
