"""PyTorch on one thread while an engine steps: for the thread that steps, during the step, and for nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from doubles import ByteTokenizer, ScriptedDrafter
from engine_runs import byte_target, run

from paceline.engine import threads
from paceline.engine.engine import Engine
from paceline.engine.threads import limit_threads, restore_threads
from paceline.types import SamplingParams

needs_openmp = pytest.mark.skipif(not threads._SETTERS, reason="this PyTorch is built without OpenMP")


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def elsewhere(function: Callable[[], object]) -> object:
    """Runs the function in a thread that has not computed before."""
    results = list[object]()
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@needs_openmp
def test_other_threads_keep_theirs_while_an_engine_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, target = set[tuple[int, object]](), byte_target()
    target.has_own_threads, forward = True, target.forward

    def watched(batch: object) -> object:
        seen.add((torch.get_num_threads(), elsewhere(torch.get_num_threads)))
        return forward(batch)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(target, "forward", watched)
    run(Engine(target, ByteTokenizer(), ScriptedDrafter(target)), [[1, 2, 3]], SamplingParams(max_tokens=9))
    assert seen == {(1, 3)} and torch.get_num_threads() == 3


@needs_openmp
def test_a_thread_that_has_not_computed_yet() -> None:
    def limited() -> tuple[int, int]:
        before = limit_threads()
        torch.ones(2) + 1
        within = torch.get_num_threads()
        restore_threads(before)
        return within, torch.get_num_threads()

    assert elsewhere(limited) == (1, 3)


def test_a_step_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: object) -> None:
        raise ZeroDivisionError

    target = byte_target()
    target.has_own_threads = True
    monkeypatch.setattr(target, "forward", fail)
    with pytest.raises(ZeroDivisionError):
        run(Engine(target, ByteTokenizer(), ScriptedDrafter(target)), [[1, 2, 3]], SamplingParams(max_tokens=9))
    assert torch.get_num_threads() == 3


def test_what_mkl_had_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[tuple[str, int]]()

    def setter(name: str, before: int) -> threads.SetThreads:
        return lambda number: calls.append((name, number)) or before

    monkeypatch.setattr(threads, "_SETTERS", (setter("openmp", 0), setter("mkl", 5)))
    restore_threads(limit_threads())
    assert calls == [("openmp", 1), ("mkl", 1), ("openmp", 3), ("mkl", 5)]


def test_a_build_without_openmp_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_SETTERS", None)
    before = limit_threads()
    assert before is None and torch.get_num_threads() == 3
    restore_threads(before)
