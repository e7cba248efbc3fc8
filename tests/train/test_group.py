"""The roll call between stages: it waits for the slow, and names who failed or went silent. Threads stand for processes
here; tests/train/test_distributed.py has real ones."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from paceline.errors import ConfigError, ProcessesError
from paceline.runs.ranks import Ranks
from paceline.train.config import TrainConfig
from paceline.train.processes.group import Liveness, process_group

BEAT_S, LOST_AFTER_S = 0.02, 1.0


@pytest.fixture
def rolls() -> Iterator[list[Liveness]]:
    """Groups of three processes, each with its own connection."""
    patience = timedelta(seconds=20)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
    stores = [TCPStore("127.0.0.1", server.port, is_master=False, timeout=patience) for _ in range(3)]
    members = [
        Liveness(PrefixStore("run", each), Ranks(rank, 3), BEAT_S, LOST_AFTER_S) for rank, each in enumerate(stores)
    ]
    yield members
    for each in members[1:] + members[:1]:
        each.leave()


def together(*calls: Callable[[], object]) -> list[BaseException | None]:
    """Exceptions of calls that run at the same time."""
    raised: list[BaseException | None] = [None] * len(calls)

    def call(number: int) -> None:
        try:
            calls[number]()
        except Exception as error:  # noqa: BLE001  (returned)
            raised[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.slow
def test_it_waits_for_the_slow_as_long_as_they_live(rolls: list[Liveness]) -> None:
    def slow() -> None:
        time.sleep(1.5 * LOST_AFTER_S)
        rolls[2].wait()

    assert together(rolls[0].wait, rolls[1].wait, slow) == [None] * 3
    assert together(*(roll.wait for roll in rolls)) == [None] * 3


@pytest.mark.slow
def test_who_went_silent_is_named(rolls: list[Liveness]) -> None:
    rolls[1]._is_over.set()
    errors = together(rolls[0].wait, lambda: None, rolls[2].wait)
    assert errors[1] is None
    for each in (errors[0], errors[2]):
        assert isinstance(each, ProcessesError)
        assert "process 1 of 3 (counted from 0) gave no sign of life for" in str(
            each
        ) and "with the same command" in str(each)


def test_who_failed_is_named_with_its_reason_to_victims_of_victims_too(rolls: list[Liveness]) -> None:
    rolls[2].fail(OSError("no space\nleft"))
    (first,) = together(rolls[0].wait)
    assert isinstance(
        first, ProcessesError
    ) and "process 2 of 3 (counted from 0) ended with OSError: no space left" in str(first)
    rolls[0].fail(first)
    (second,) = together(rolls[1].wait)
    assert str(second) == str(first)


def test_a_victim_passes_on_what_it_was_told(rolls: list[Liveness]) -> None:
    rolls[0].fail(ProcessesError("process 2 of 3 gave no sign of life"))
    (error,) = together(rolls[1].wait)
    assert str(error) == "process 2 of 3 gave no sign of life"


@pytest.mark.slow
def test_a_step_without_a_culprit_says_which_limit_it_was(
    rolls: list[Liveness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks finds new signs of life of all, then of all but one."""
    beats, dead = itertools.count(), set[int]()
    monkeypatch.setattr(rolls[0], "num_beats", lambda rank: 7 if rank in dead else next(beats))
    error = rolls[0].blame(RuntimeError("gloo: Timed out waiting 1000ms for recv"))
    assert "process 0 of 3 (counted from 0) waited in vain" in str(error) and "Timed out waiting 1000ms" in str(error)
    assert "--step-timeout-minutes" in str(error)
    dead.add(2)
    assert "process 2 of 3 (counted from 0) gave no sign of life" in str(rolls[0].blame(RuntimeError("gloo: closed")))


def test_a_process_that_torchrun_did_not_start_is_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    message = r"the 2 processes did not find each other .*MASTER_ADDR.*: start all of them"
    with pytest.raises(ProcessesError, match=message), process_group(Ranks(0, 2), "cpu"):
        pass


def test_a_process_without_a_gpu_of_its_own_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.raises(ConfigError, match="3 processes.*2 GPUs.*--nproc-per-node 2"),
        process_group(Ranks(2, 3, 2), "auto"),
    ):
        pass


def test_one_process_alone_waits_for_nobody() -> None:
    with process_group(Ranks(), "cpu") as wait:
        wait()
    with pytest.raises(ConfigError, match="step_timeout_minutes"):
        TrainConfig(step_timeout_minutes=0.0)
