"""Loads and unloads drafters while the server answers.

A drafter is read in a thread, tested on a trial request, and swapped in between two rounds. A rejected drafter changes
nothing. Running requests keep their drafter.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.draft.pool import Memory, bind, memory_alone, memory_of
from paceline.draft.probation import Probation
from paceline.errors import ConfigError, MemoryBudgetError, PacelineError
from paceline.hardware import free_bytes
from paceline.model.sharing import sharing
from paceline.plan.clusters import label
from paceline.serve.http.failures import ApiError, RequestRefused
from paceline.serve.settings import MOST_DRAFTERS, check_name
from paceline.serve.worker.engine import ModelInfo
from paceline.serve.worker.inbox import complete
from paceline.serve.worker.worker import EngineWorker
from paceline.types import CANDIDATE, NONE, SamplingParams

if TYPE_CHECKING:
    from paceline.engine.llm import LLM
    from paceline.plan.routes import Cluster

TRY_SECONDS = 60.0
"""Time limit of a drafter's trial request, including its wait for a row."""
TRY_TEXT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
TRY_PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Call `function` in a daemon thread, which does not delay the end of the process: a slow disk may take minutes."""
    future: Future[Any] = Future()
    threading.Thread(target=complete, args=(future, function), name="paceline-drafter", daemon=True).start()
    return await asyncio.wrap_future(future)


class Drafters:
    """Lists, loads, drains and unloads drafters of the running server, and pins request classes to a drafter. Call its
    methods in the event loop."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self._busy: dict[str, str] = {}
        """Name -> state of drafters that are being loaded."""
        self._since: dict[str, tuple[int, int, float]] = {}
        """Name -> (rounds, tokens, seconds) counted under this name before the current drafter was loaded."""

    async def table(self) -> list[dict[str, Any]]:
        """Return an object per drafter, which has these keys:

        - name;
        - drafter: source it was loaded from; "" while it is being loaded;
        - state: such as ready, loading or draining;
        - rows: number of running requests that use it;
        - tokens_per_round, tokens_per_s: means since it was loaded; None before its first round;
        - weight_bytes, cache_bytes, and memory_bytes, their sum.
        """
        members = await self._call(_rows)
        empty = {"drafter": "", "rows": 0} | NO_MEMORY
        shown = members + [{"name": name, "state": state, **empty} for name, state in self._busy.items()]
        return [row | self._figures(row["name"]) for row in shown]

    async def memory(self) -> dict[str, int]:
        """Return {"weight_bytes", "cache_bytes", "memory_bytes" (their sum)} of all drafters together. Memory that
        several drafters share counts once."""
        return await self._call(lambda model: _sizes(memory_of(model.engine.pool.drafters, model.target)))

    async def clusters(self) -> list[dict[str, Any]]:
        """Return an object per request class (group of similar requests); [] if no router chooses the drafters, as
        without --route auto. The keys are:

        - cluster: name of the class;
        - label: the name, with a client's tag replaced by a hash;
        - pinned: drafter that the class is pinned to (see `pin`), or None;
        - requests: number of requests in the class;
        - gains: drafter -> estimated tokens/s relative to plain decoding;
        - given: drafter -> number of requests routed to it.
        """
        return await self._call(_clusters)

    async def load(self, name: str, drafter: str) -> dict[str, Any]:
        """Load a drafter (folder, hub id or built-in name) and call it `name`; returns its entry in `table`. If a
        drafter already has this name, running requests keep it and new ones get the loaded drafter. Raises ApiError if
        the drafter or its name is invalid, if memory or room in the pool is lacking, if a trial request with the
        drafter fails, and while another drafter is being loaded."""
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
                loaded = await _in_thread(partial(_read, model, drafter))
                if not loaded.is_instant:
                    await self._try(loaded, model.target.vocab_size)
                del model
                await self._worker.call(lambda model: model.put_drafter(name, loaded))
                self._since[name] = self._worker.metrics.drafters.totals(name)
        finally:
            del self._busy[name]
        return await self._changed(name)

    async def drain(self, name: str) -> dict[str, Any]:
        """Give no new requests to the drafter `name`; running ones finish. Returns its entry in `table`. Raises
        ApiError for an unknown name."""
        with _refusing(404):
            await self._call(lambda model: model.drain_drafter(name))
        return await self._changed(name)

    async def unload(self, name: str) -> list[dict[str, Any]]:
        """Remove a drafter from the pool; returns the `table` of the others. Raises ApiError if running requests use
        it, or for an unknown name."""

        def remove(model: LLM) -> int:
            pool = model.engine.pool
            if num_rows := pool.num_rows(pool.member(name)):
                return num_rows
            model.remove_drafter(name)
            return 0

        with _refusing(404):
            if num_rows := await self._call(remove):
                answers = f"{num_rows} answer{' is' if num_rows == 1 else 's are'}"
                message = f"{answers} still made with drafter {name!r}: drain it, and wait until it has no rows"
                raise RequestRefused(message, code="drafter_busy", status=409)
        self._worker.info = await self._worker.call(ModelInfo.of)
        return await self.table()

    async def pin(self, cluster: str, name: str | None) -> dict[str, Any]:
        """Pin a request class to the drafter `name`: new requests of the class get this drafter, unless it is clearly
        slower than plain decoding. None unpins the class. `cluster`: name or label of the class. Returns its entry in
        `clusters`. Raises ApiError for an unknown class or drafter, and if no router chooses the drafters, as without
        --route auto."""

        def pin(model: LLM) -> dict[str, Any]:
            if name not in (None, NONE):
                model.engine.pool.member(name)
            if model.engine.router is None:
                raise ConfigError("this server does not choose drafters by clusters: start it with --route auto")
            return _cluster(*model.engine.router.pin(cluster, name))

        with _refusing(404):
            return await self._call(pin)

    async def _changed(self, name: str) -> dict[str, Any]:
        self._worker.info = await self._worker.call(ModelInfo.of)
        return next(row for row in await self.table() if row["name"] == name)

    async def _call(self, function: Callable[[LLM], Any]) -> Any:
        """Call `function` in the engine's thread. Raises ApiError if the server is not ready."""
        self._worker.serving()
        return await self._worker.call(function)

    async def _try(self, drafter: Any, vocab_size: int) -> None:
        """Run a trial request with the drafter among the running requests. Raises the drafter's error.

        Holds only a weak reference to the engine, so that a crashed one can be freed."""
        trial = Probation(drafter, vocab_size)

        def begin(model: LLM) -> tuple[weakref.ref[Any], int]:
            prompt = model.tokenizer.encode(TRY_TEXT) or [0]
            return weakref.ref(model.engine), model.engine.add(prompt, TRY_PARAMS, trial_drafter=trial)

        def end(model: LLM) -> None:
            if engine() is model.engine:  # a new engine may reuse request ids
                model.engine.abort(request_id)

        engine, request_id = await self._worker.call(begin)
        try:
            await asyncio.wait_for(asyncio.wrap_future(trial.done), TRY_SECONDS)
        except TimeoutError:
            raise ApiError.known("drafter_not_tried", seconds=TRY_SECONDS) from None
        finally:
            await self._worker.call(end)

    def _figures(self, name: str) -> dict[str, float | None]:
        """Return acceptance length and tokens/s since the drafter was loaded."""
        totals, before = self._worker.metrics.drafters.totals(name), self._since.get(name, (0, 0, 0.0))
        num_rounds, num_tokens, seconds = (now - then for now, then in zip(totals, before, strict=True))
        return {
            "tokens_per_round": num_tokens / num_rounds if num_rounds else None,
            "tokens_per_s": num_tokens / seconds if seconds else None,
        }


def _read(model: LLM, name: str) -> Any:
    """Load a drafter and bind it to the target. Raises PacelineError, MemoryBudgetError if there is too little
    memory."""
    try:
        drafter = model.make_drafter(name, num_drafted=model.config.num_drafted)
        with sharing(model.target) as held:
            drafter.keep_weights()
        drafter.held = held
    except PacelineError:
        raise
    except Exception as error:  # any error while reading a folder rejects the drafter
        raise ConfigError(f"drafter {name!r} cannot be read: {type(error).__name__} {error}") from error
    if drafter.name == NONE:
        raise ConfigError("none is always available: give a drafter")
    others = model.engine.pool.drafters
    cache_bytes = memory_of([*others, drafter], model.target).cache_bytes - memory_of(others, model.target).cache_bytes
    free, budget = free_bytes(), model.config.kv_memory
    needed = cache_bytes + 2 * drafter.weight_bytes
    if free is not None and needed > free:
        raise MemoryBudgetError(f"the drafter needs about {needed:,} bytes, {free:,} are free: unload another one")
    if budget is not None and model.cache_bytes + cache_bytes > budget:
        raise MemoryBudgetError(f"the drafter's cache of {cache_bytes:,} bytes is beyond kv_memory: unload another one")
    bind(drafter, model.target)
    return drafter


def _rows(model: LLM) -> list[dict[str, Any]]:
    pool, residency = model.engine.pool, model.residency
    if residency:
        residency.take_in(pool)
    states = residency.state_of if residency else lambda member: "ready" if member.is_open else "draining"
    named = [(states(member), member) for member in pool.members.values()]
    named += [("leaving", member) for member in pool.older if member.name != CANDIDATE]
    shown = [
        {"name": member.name, "drafter": member.drafter.source, "state": state, "rows": pool.num_rows(member)}
        | _sizes(memory_alone(member.drafter, model.target))
        for state, member in named
    ]
    if NONE not in pool.members:
        shown.append({"name": NONE, "drafter": NONE, "state": "ready", "rows": pool.num_plain} | NO_MEMORY)
    return shown


def _sizes(memory: Memory) -> dict[str, int]:
    return memory._asdict() | {"memory_bytes": sum(memory)}


NO_MEMORY = _sizes(Memory(0, 0))


def _clusters(model: LLM) -> list[dict[str, Any]]:
    router = model.engine.router
    return [_cluster(name, cluster) for name, cluster in (router.clusters if router else {}).items()]


def _cluster(name: str, cluster: Cluster) -> dict[str, Any]:
    return {
        "cluster": name,
        "label": label(name),
        "pinned": cluster.pinned,
        "requests": cluster.num_requests,
        "gains": {member: round(arm.gain, 4) for member, arm in cluster.arms.items()},
        "given": {member: arm.num_given for member, arm in cluster.arms.items()},
    }


@contextlib.contextmanager
def _refusing(status: int = 400) -> Iterator[None]:
    """Convert PacelineErrors to ApiErrors. Too little memory has its own code: it is not the drafter's fault."""
    try:
        yield
    except MemoryBudgetError as error:
        raise ApiError.known("no_memory", reason=error) from error
    except PacelineError as error:
        raise RequestRefused(str(error), code="drafter_refused", status=status) from error
