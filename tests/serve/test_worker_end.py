"""The engine's thread at its end: callers that wait get an error, and requests that are done are forgotten."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live_server import PATIENCE_S, Gated, idle_collector, talker
from small_llm import fake_llm

from paceline import SamplingParams
from paceline.errors import ModelNotFoundError
from paceline.serve.admin.metrics import Metrics
from paceline.serve.http.failures import ApiError
from paceline.serve.settings import ServeConfig
from paceline.serve.worker.inbox import Command, Inbox
from paceline.serve.worker.ticket import Job, Ticket
from paceline.serve.worker.worker import EngineWorker


@pytest.fixture(autouse=True)
def idle() -> Iterator[None]:
    with idle_collector():
        yield


def worker_of(factory: Callable[[], Any] | None = None, **settings: Any) -> EngineWorker:
    return EngineWorker(factory or talker(), ServeConfig(**settings), Metrics("test"))


async def result_of(waiting: Any) -> Any:
    return await asyncio.wait_for(waiting, PATIENCE_S)


def job(max_tokens: int) -> Job:
    return Job([3, 4, 5], SamplingParams(max_tokens=max_tokens, ignore_eos=True))


async def read_all(ticket: Ticket) -> int:
    """Tokens of its answers."""
    number = 0
    while events := await ticket.read():
        number += sum(len(event.chunk.token_ids) for event in events)
    return number


def test_a_call_after_the_end_is_refused() -> None:
    async def run() -> None:
        worker = worker_of()
        worker.start()
        await result_of(worker.loaded())
        assert await result_of(worker.call(lambda llm: llm.config.model)) == "fake"
        await result_of(worker.drain(1.0))
        with pytest.raises(ApiError, match="shutting down") as refused:
            await result_of(worker.call(lambda llm: llm.config.model))
        assert refused.value.code == "draining"

    asyncio.run(run())


@pytest.mark.parametrize("error", [ModelNotFoundError("gone"), SystemExit(3)], ids=["refused", "ended"])
def test_a_call_that_waits_for_a_model_that_never_comes_is_refused(error: BaseException) -> None:
    go = threading.Event()

    def never() -> Any:
        go.wait(PATIENCE_S)
        raise error

    async def run() -> None:
        worker = worker_of(never)
        worker.start()
        calls = [asyncio.create_task(worker.call(lambda llm: llm)) for _ in range(3)]
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(ModelNotFoundError if isinstance(error, Exception) else RuntimeError):
            await result_of(worker.loaded())
        for call in calls:
            with pytest.raises(ApiError) as refused:
                await result_of(call)
            assert refused.value.code == "failed"
        assert worker.state == "failed"
        await result_of(worker.drain(1.0))

    asyncio.run(run())


def test_a_drain_while_the_model_loads_answers_everybody() -> None:
    go = threading.Event()

    def slowly() -> Any:
        go.wait(PATIENCE_S)
        raise ModelNotFoundError("gone")

    async def run() -> None:
        worker = worker_of(slowly)
        worker.start()
        call, loaded = (
            asyncio.create_task(worker.call(lambda llm: llm.config.model)),
            asyncio.create_task(worker.loaded()),
        )
        drain = asyncio.create_task(worker.drain(1.0))
        for _ in range(5):
            await asyncio.sleep(0)
        go.set()
        await result_of(drain)
        with pytest.raises(ModelNotFoundError):
            await result_of(loaded)
        with pytest.raises(ApiError):
            await result_of(call)

    asyncio.run(run())


def test_a_thread_that_dies_of_something_unforeseen_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait, calls that wait and whoever waits for the model are told; the state is failed, not ready."""

    def harmed(self: Any, model: Any) -> None:
        raise ZeroDivisionError("a fault of the bookkeeping after a crash")

    def crash(llm: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineWorker, "_crash", harmed)

    async def run() -> None:
        worker = worker_of(deadline=0)
        worker.start()
        await result_of(worker.loaded())
        hold = threading.Event()
        held = asyncio.create_task(worker.call(lambda llm: hold.wait(PATIENCE_S)))
        await asyncio.sleep(0)
        crashing, after = asyncio.create_task(worker.call(crash)), asyncio.create_task(worker.call(lambda llm: llm))
        await asyncio.sleep(0)
        ticket = worker.submit([job(5)])
        hold.set()
        assert await result_of(held)
        for call, code in ((crashing, "engine_crashed"), (after, "failed")):
            with pytest.raises(ApiError) as refused:
                await result_of(call)
            assert refused.value.code == code
        with pytest.raises(ApiError):
            await result_of(ticket.read())
        assert worker.state == "failed" and isinstance(worker.failure, ZeroDivisionError)
        await result_of(worker.drain(1.0))

    asyncio.run(run())


@pytest.mark.parametrize("deadline", [0, 3600.0])
def test_a_request_that_is_done_is_forgotten_while_others_run(deadline: float) -> None:
    target = Gated(num_rows=2, max_len=256)

    async def run() -> None:
        worker = worker_of(lambda: fake_llm(target), deadline=deadline)
        worker.start()
        await result_of(worker.loaded())
        longer, shorter = worker.submit([job(100)]), worker.submit([job(2)])
        gone = weakref.ref(shorter)
        assert await result_of(read_all(shorter)) == 2
        del shorter
        while not target.is_waiting:
            await asyncio.sleep(0.001)
        gc.collect()
        assert longer.num_left == 1 and gone() is None
        target.gate.set()
        assert await result_of(read_all(longer)) == 100
        await result_of(worker.drain(1.0))

    asyncio.run(run())


def test_a_call_that_ran_before_the_end_is_not_failed() -> None:
    """The thread may run it and end as soon as it is queued."""

    class Hasty(deque[Command]):
        def append(self, command: Command) -> None:
            command()
            inbox.close("draining")

    inbox = Inbox()
    inbox._commands = Hasty()
    assert inbox.call(lambda: 3).result(0) == 3 and not inbox._calls
