"""Log of the calls of an MCP server: JSON Lines, append-only. Two lines per call, written before and after its work:

{"call": "5f0c...", "time": "...", "tool": "gate", "arguments": {...}}
{"call": "5f0c...", "time": "...", "outcome": "ok", "why": ""}
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CacheError, PacelineError, reraised
from paceline.runs.folder import RunFolder, append_lines, plain

FILE = "calls.jsonl"


@dataclass(slots=True)
class Ending:
    """Outcome of a tool call: "ok", "refused", "failed" (an unexpected exception), or "interrupted" (stopped before it
    ended)."""

    outcome: str = "interrupted"
    why: str = ""


@dataclass(frozen=True, slots=True)
class CallLog:
    """Log of tool calls: the file calls.jsonl in `folder`. A call has two lines, one from its start and one from its
    end."""

    folder: Path

    @contextmanager
    def call(self, tool: str | None, arguments: Any) -> Iterator[Ending]:
        """Context manager that logs one call: a line before the `with` block, and one with its outcome after it.

        Yields the call's `Ending`, in which the block sets the outcome. If the block raises, the outcome is "refused"
        for a PacelineError, and "failed" for another exception. `tool`: None for a request without the server's key.
        Raises CacheError if the log cannot be written: before the block is run, or after it.
        """
        number, ending = uuid.uuid4().hex[:12], Ending()
        line = {"call": number, "time": _now(), "tool": tool, "arguments": plain(arguments)}
        self._append(line, "free space: without its log no call is carried out")
        try:
            yield ending
        except PacelineError as error:
            ending.outcome, ending.why = "refused", str(error)
            raise
        except Exception as error:
            ending.outcome, ending.why = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            line = {"call": number, "time": _now(), "outcome": ending.outcome, "why": ending.why}
            self._append(line, f"free space; the call has ended ({ending.outcome}), only its outcome is not logged")

    def calls(self, most: int) -> list[dict[str, Any]]:
        """Returns the latest `most` calls, oldest first, each as a dict with the keys of both lines of the log. If the
        line from the call's end is missing, "outcome" is "running or killed"."""
        calls: dict[str, dict[str, Any]] = {}
        for line in RunFolder(self.folder).lines(FILE):
            begun = calls.setdefault(line.get("call", ""), {"outcome": "running or killed"})
            begun.update({**line, "time": begun.get("time", line.get("time"))})
        return list(calls.values())[-most:]

    def _append(self, line: dict[str, Any], remedy: str) -> None:
        file = self.folder / FILE
        with reraised(CacheError, f"cannot write {file}", remedy, OSError):
            append_lines(file, [line], is_synced=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
