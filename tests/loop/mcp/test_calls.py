"""The log of tool calls."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from paceline.errors import CacheError
from paceline.loop.mcp import calls


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def carry_out(log: calls.CallLog, monkeypatch: pytest.MonkeyPatch) -> None:
    with log.call("roll_out", {}) as ending:
        ending.outcome = "ok"
        monkeypatch.setattr(calls, "append_lines", full_disk)


def test_a_call_that_was_carried_out_is_not_reported_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up while the call runs: the agent learns that it must not call again."""
    log = calls.CallLog(tmp_path)
    with pytest.raises(CacheError, match=r"has ended \(ok\)"):
        carry_out(log, monkeypatch)
    assert [call["outcome"] for call in log.calls(9)] == ["running or killed"]
    with pytest.raises(CacheError, match="no call is carried out"):
        carry_out(log, monkeypatch)
