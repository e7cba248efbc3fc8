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
    """The drafter that serves, and what undoes its roll-out; every call reads the file in `folder` again."""

    folder: Path
    deploy: DeployConfig
    incumbent: str
    """Drafter that serves before the first roll-out."""

    @property
    def serving(self) -> str:
        return self._read()["serving"]

    def load(self, drafter: Path) -> dict[str, Any]:
        """Load the drafter in place of the serving one; returns both. The way back is on disk before the server gets
        the request. Raises ConfigError without a server, or while another roll-out is unresolved, and DownloadError."""
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
        """Undo the latest roll-out; returns the drafter that no longer serves. Raises ConfigError if no roll-out is
        left to undo, and DownloadError."""
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
