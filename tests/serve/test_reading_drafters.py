"""Drafters are read in a thread that holds up neither the event loop nor the end of the process."""

from __future__ import annotations

import asyncio
import threading

import pytest

from paceline.errors import ModelFileError
from paceline.serve.worker.drafters import _in_thread


def test_what_it_returns_and_raises() -> None:
    def refused() -> int:
        raise ModelFileError("no drafter")

    assert asyncio.run(_in_thread(lambda: 5)) == 5
    with pytest.raises(ModelFileError, match="no drafter"):
        asyncio.run(_in_thread(refused))


def test_a_slow_disk_does_not_hold_up_the_end_of_the_process() -> None:
    """Python waits for threads that are no daemons, and for those of its executors; the loop may be gone when it is
    done."""
    gate, is_reading = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def slow() -> None:
        threads.append(threading.current_thread())
        is_reading.set()
        gate.wait(60)

    async def given_up() -> None:
        task = asyncio.create_task(_in_thread(slow))
        await asyncio.to_thread(is_reading.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(given_up())
    (thread,) = threads
    assert thread.daemon and thread.is_alive()
    gate.set()
    thread.join(60)
    assert not thread.is_alive()
