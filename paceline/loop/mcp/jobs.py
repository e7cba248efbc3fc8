"""Background jobs of an MCP server: trainings, gates and measurements, as child processes that outlive the server.

    jobs/train-3f2a9c1b04.json    tool, arguments, command and, of a gate that has ended, the verdict
    jobs/train-3f2a9c1b04.out     last line: the result as JSON

The id follows from tool and arguments, so the same call finds its job again, and starts it again if it was killed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.loop.adapt.gate.retrain import Job, Output
from paceline.runs.folder import RunFolder


@dataclass(slots=True)
class Jobs:
    """Starts and observes the background jobs whose files are in `folder`. Only one job runs at a time, so that no
    training overwrites a drafter while a gate (its comparison with the serving drafter) reads it."""

    folder: Path
    start: Callable[[list[str], Path], Job] = Job
    _started: dict[str, Job] = field(default_factory=dict)

    def begin(self, tool: str, arguments: dict[str, Any], command: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Starts a background job, or starts it again if it has failed. A job is identified by `tool` and `arguments`;
        if it is running or done, it is not started. Returns its status, as `status` does. Raises ConfigError while
        another job runs.

        `command`: function that is called only if the job has never been started before. It returns further fields of
        the job's record, among them "command", the command line to run.
        """
        given = json.dumps([tool, arguments], sort_keys=True)
        name = f"{tool}-{hashlib.sha256(given.encode()).hexdigest()[:10]}"
        file = self.folder / f"{name}.json"
        if file.exists() and self.status(name)["state"] in ("running", "done"):
            return self.status(name)
        if running := [other for other in self.names() if self._runs(other)]:
            raise ConfigError(f"the job {running[0]} runs: wait until its status is done")
        record = self.record(name) if file.exists() else {"tool": tool, "arguments": arguments, **command()}
        RunFolder(self.folder).write_json(file.name, record)
        self._started[name] = self.start(record["command"], self.folder / name)
        return self.status(name)

    def names(self) -> list[str]:
        """Returns the ids of all jobs, sorted."""
        return sorted(file.stem for file in self.folder.glob("*.json"))

    def record(self, name: str) -> dict[str, Any]:
        """Returns the stored record of the job with the id `name`. Raises ConfigError if there is no such job."""
        if name not in self.names():
            raise ConfigError(f"there is no job {name!r}: take an id that train, score or gate returned")
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))

    def update(self, name: str, **figures: Any) -> None:
        RunFolder(self.folder).write_json(f"{name}.json", {**self.record(name), **figures})

    def output(self, name: str) -> Output:
        return Output(self.folder / name)

    def status(self, name: str) -> dict[str, Any]:
        """Returns a dict with the job's "id", "tool", "arguments", "state" ("running", "done" or "failed"), "progress"
        (last line of its stderr), and "result" (None unless done)."""
        record, output = self.record(name), self.output(name)
        result = None if self._runs(name) else _result(output)
        state = "running" if self._runs(name) else "failed" if result is None else "done"
        shown = {key: value for key, value in record.items() if key not in ("command", "verdict")}
        return {"id": name, **shown, "state": state, "progress": output.last_error, "result": result}

    def _runs(self, name: str) -> bool:
        job = self._started.get(name)
        if job is not None and not job.is_waiting:
            return job.poll() is None
        return self.output(name).is_locked


def _result(output: Output) -> dict[str, Any] | None:
    """Returns the JSON object that a command printed last; None if it printed none, or an error."""
    try:
        result = json.loads(output.last_line)
    except ValueError:
        return None
    return result if isinstance(result, dict) and "error" not in result else None
