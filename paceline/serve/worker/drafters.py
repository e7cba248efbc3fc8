"""Drafters that come and go while the server answers: read and bound in a thread, tried on a request of their own, put in
between two rounds.

A drafter that is refused has changed nothing. Requests that run keep the drafter they began with, whatever is done here.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.draft.probation import Probation
from paceline.errors import ConfigError, MemoryBudgetError, PacelineError
from paceline.hardware import free_bytes
from paceline.plan.clusters import label
from paceline.serve.http.failures import ApiError, RequestRefused
from paceline.serve.settings import MOST_DRAFTERS, check_name
from paceline.serve.worker.engine import ModelInfo
from paceline.serve.worker.worker import EngineWorker
from paceline.types import CANDIDATE, NONE, SamplingParams

TRY_SECONDS = 60.0
"""How long the trial of a drafter may take, the wait for a row included."""
TRY_TEXT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
TRY_PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Call it in a thread of its own, which does not hold up the end of this process: a slow disk may take minutes."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = function()
        except Exception as raised:  # noqa: BLE001  (the waiting coroutine raises it)
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="paceline-drafter", daemon=True).start()
    return await future


class Drafters:
    """What the admin API does. Belongs to the event loop."""

    def __init__(self, worker: EngineWorker[Any]) -> None:
        self._worker = worker
        self._busy: dict[str, str] = {}
        """Name -> state of those that are no members yet."""
        self._since: dict[str, tuple[int, int, float]] = {}
        """Name -> what was counted under it before its drafter came."""

    async def table(self) -> list[dict[str, Any]]:
        """A row for each drafter: name, drafter, state, rows, tokens_per_round, tokens_per_s, memory_bytes."""
        members = await self._call(_rows)
        empty = {"drafter": "", "rows": 0, "memory_bytes": 0}
        shown = members + [{"name": name, "state": state, **empty} for name, state in self._busy.items()]
        return [row | self._figures(row["name"]) for row in shown]

    async def clusters(self) -> list[dict[str, Any]]:
        """What the router knows of each kind of request; empty without a router."""
        return await self._call(_clusters)

    async def load(self, name: str, drafter: str) -> dict[str, Any]:
        """Make a drafter a member, in the place of any other of this name; returns its row. Raises ApiError."""
        with _refusing():
            check_name(name)
        if self._busy:
            raise RequestRefused(
                f"drafter {next(iter(self._busy))!r} is being loaded: try again when it is", code="busy", status=409
            )
        self._busy[name] = "loading"
        try:
            with _refusing():
                model, names = await self._call(lambda model: (model, list(model.engine.pool.members)))
                if name not in names and len(names) >= MOST_DRAFTERS:
                    raise ApiError.known("too_many_drafters", number=len(names))
                made = await _in_thread(partial(_read, model, drafter))
                if not made.is_at_hand:
                    await self._try(made, model.target.vocab_size)
                del model
                await self._worker.call(lambda model: model.put_drafter(name, made))
                self._since[name] = self._counted(name)
        finally:
            del self._busy[name]
        return await self._changed(name)

    async def drain(self, name: str) -> dict[str, Any]:
        """Give it to no new request; returns its row. Raises ApiError."""
        with _refusing(404):
            await self._call(lambda model: model.drain_drafter(name))
        return await self._changed(name)

    async def unload(self, name: str) -> list[dict[str, Any]]:
        """Forget a drafter that no request has any more; returns the rows of the others. Raises ApiError."""

        def remove(model: Any) -> int:
            pool = model.engine.pool
            if num_rows := pool.num_rows(pool.member(name)):
                return num_rows
            model.remove_drafter(name)
            return 0

        with _refusing(404):
            if num_rows := await self._call(remove):
                made = f"{num_rows} answer{' is' if num_rows == 1 else 's are'}"
                message = f"{made} still made with drafter {name!r}: drain it, and wait until it has no rows"
                raise RequestRefused(message, code="drafter_busy", status=409)
        self._worker.info = await self._worker.call(ModelInfo.of)
        return await self.table()

    async def pin(self, cluster: str, name: str | None) -> dict[str, Any]:
        """Give requests of a cluster this member, or a chosen one again; returns the cluster's row. Raises ApiError."""

        def pin(model: Any) -> None:
            if name not in (None, NONE):
                model.engine.pool.member(name)
            if model.engine.router is None:
                raise ConfigError("this server does not choose drafters by clusters: start it with --route auto")
            model.engine.router.pin(cluster, name)

        with _refusing(404):
            await self._call(pin)
        return next(row for row in await self.clusters() if cluster in (row["cluster"], row["label"]))

    async def _changed(self, name: str) -> dict[str, Any]:
        self._worker.info = await self._worker.call(ModelInfo.of)
        return next(row for row in await self.table() if row["name"] == name)

    async def _call(self, function: Any) -> Any:
        """As EngineWorker.call. Raises ApiError when requests are not taken now, or the engine has no pool."""
        self._worker.serving()

        def checked(model: Any) -> Any:
            if getattr(model.engine, "pool", None) is None:
                raise ApiError.known("no_pool")
            return function(model)

        return await self._worker.call(checked)

    async def _try(self, drafter: Any, vocab_size: int) -> None:
        """Have it draft after a short text, among the requests that run. Raises what the drafter raised. Keeps no
        engine alive: one that crashes meanwhile must leave the memory."""
        trial = Probation(drafter, vocab_size)

        def begin(model: Any) -> tuple[weakref.ref[Any], int]:
            prompt = model.tokenizer.encode(TRY_TEXT) or [0]
            return weakref.ref(model.engine), model.engine.add(prompt, TRY_PARAMS, guest=trial)

        def end(model: Any) -> None:
            if engine() is model.engine:  # a new engine's numbers may begin anew
                model.engine.abort(request_id)

        engine, request_id = await self._worker.call(begin)
        try:
            await asyncio.wait_for(asyncio.wrap_future(trial.done), TRY_SECONDS)
        except TimeoutError:
            raise ApiError.known("drafter_not_tried", seconds=TRY_SECONDS) from None
        finally:
            await self._worker.call(end)

    def _counted(self, name: str) -> tuple[int, int, float]:
        return self._worker.metrics.drafters.totals(name)

    def _figures(self, name: str) -> dict[str, float | None]:
        num_rounds, num_tokens, seconds = (
            now - before for now, before in zip(self._counted(name), self._since.get(name, (0, 0, 0.0)), strict=True)
        )
        return {
            "tokens_per_round": num_tokens / num_rounds if num_rounds else None,
            "tokens_per_s": num_tokens / seconds if seconds else None,
        }


def _read(model: Any, name: str) -> Any:
    """A drafter that is ready to be put in. Raises what making and binding it raises; MemoryBudgetError without memory."""
    try:
        drafter = model.make_drafter(name, num_drafted=model.config.num_drafted)
        drafter.keep_weights()
    except PacelineError:
        raise
    except Exception as error:  # whatever a folder holds, it is a reason to refuse it
        raise ConfigError(f"drafter {name!r} cannot be read: {type(error).__name__} {error}") from error
    if drafter.name == NONE:
        raise ConfigError("none is a member always: give a drafter")
    cache_bytes, free, budget = drafter.cache_bytes(model.target), free_bytes(), model.config.kv_memory
    needed = cache_bytes + 2 * drafter.weight_bytes
    if free is not None and needed > free:
        raise MemoryBudgetError(f"the drafter needs about {needed:,} bytes, {free:,} are free: unload another one")
    if budget is not None and model.cache_bytes + cache_bytes > budget:
        raise MemoryBudgetError(f"the drafter's cache of {cache_bytes:,} bytes is beyond kv_memory: unload another one")
    drafter.bind(model.target)
    return drafter


def _rows(model: Any) -> list[dict[str, Any]]:
    pool = model.engine.pool
    named = [("ready" if member.is_open else "draining", member) for member in pool.members.values()]
    named += [("leaving", member) for member in pool.older if member.name != CANDIDATE]
    shown = [
        {
            "name": member.name,
            "drafter": member.drafter.source,
            "state": state,
            "rows": pool.num_rows(member),
            "memory_bytes": member.drafter.weight_bytes + member.drafter.cache_bytes(model.target),
        }
        for state, member in named
    ]
    if NONE not in pool.members:
        shown.append({"name": NONE, "drafter": NONE, "state": "ready", "rows": pool.num_plain, "memory_bytes": 0})
    return shown


def _clusters(model: Any) -> list[dict[str, Any]]:
    router = model.engine.router
    return [
        {
            "cluster": name,
            "label": label(name),
            "pinned": cluster.pinned,
            "requests": cluster.num_requests,
            "gains": {member: round(arm.gain, 4) for member, arm in cluster.arms.items()},
            "given": {member: arm.num_given for member, arm in cluster.arms.items()},
        }
        for name, cluster in (router.clusters if router else {}).items()
    ]


class _refusing:
    """Errors of ours become the client's. One of memory says nothing about the drafter, and has a code of its own."""

    def __init__(self, status: int = 400) -> None:
        self._status = status

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, MemoryBudgetError):
            raise ApiError.known("no_memory", reason=error) from error
        if isinstance(error, PacelineError):
            raise RequestRefused(str(error), code="drafter_refused", status=self._status) from error
