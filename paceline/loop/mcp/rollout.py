"""Loads a drafter that passed the gate on a paceline server, and restores the one before.

rollout.json: {"serving": "...", "before": "...", "undo": [["drafter", "general", "default"]], "loading": null}"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, UnreachableError, refuse
from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.servers.deploy import PacelineServer
from paceline.runs.folder import RunFolder

FILE = "rollout.json"


@dataclass(frozen=True, slots=True)
class Rollout:
    """Replaces the drafter of a paceline server, and can undo the latest replacement. The state is in the file
    rollout.json of `folder`, which is read again at every call."""

    folder: Path
    deploy: DeployConfig
    incumbent: str
    """Drafter that serves before the first roll-out."""

    @property
    def serving(self) -> str:
        return self._read()["serving"]

    def load(self, drafter: Path) -> dict[str, Any]:
        """Loads `drafter` on the server in place of the serving one, after storing the steps to undo it.

        Keys of the result: "serving" and "before" (folders of the new and the replaced drafter), "server" (address),
        "name" (the drafter's name on the server). Raises ConfigError if no server is configured, or if an earlier
        request to load another drafter was never answered; DownloadError if the server does not answer or refuses.
        """
        state = self._read()
        refuse(
            ConfigError,
            (not self.deploy.servers, "no server was named: start paceline mcp with --server"),
            (
                state["loading"] not in (None, str(drafter)),
                f"the roll-out of {state['loading']} got no answer: call roll_back first",
            ),
        )
        with contextlib.closing(PacelineServer(self.deploy)) as server:
            is_retry = state["loading"] is not None
            server.undo = state["undo"] if is_retry else []
            name = str(server.undo[0][1]) if server.undo else server.place_of(state["serving"])
            try:
                server.load(name, drafter, lambda: self._write({**state, "undo": server.undo, "loading": str(drafter)}))
            except UnreachableError:
                raise
            except Exception:
                self._write(state)  # the server refused it and is unchanged
                raise
            done = {"serving": str(drafter), "before": state["serving"]}
            self._write({**done, "undo": server.undo, "loading": None})
        return {**done, "server": self.deploy.servers[0], "name": name}

    def undo(self) -> str:
        """Restores the drafter that served before the latest roll-out; returns the removed drafter. Also undoes a
        roll-out that the server never answered. Raises ConfigError without a roll-out to undo, DownloadError if the
        server does not answer or refuses."""
        state = self._read()
        refuse(ConfigError, (not state["undo"], "nothing was rolled out since the latest roll-back"))
        with contextlib.closing(PacelineServer(self.deploy)) as server:
            server.undo = state["undo"]
            server.roll_back()
        before = state["serving"] if state["loading"] else state["before"]
        self._write({"serving": before, "before": None, "undo": [], "loading": None})
        return state["loading"] or state["serving"]

    def _read(self) -> dict[str, Any]:
        file = self.folder / FILE
        if not file.exists():
            return {"serving": self.incumbent, "before": None, "undo": [], "loading": None}
        return json.loads(file.read_text(encoding="utf-8"))

    def _write(self, state: dict[str, Any]) -> None:
        RunFolder(self.folder).write_json(FILE, state)
