"""Keeps at most N drafters of a pool in memory (`serve --loaded-drafters N`). The others are released: the pool keeps
their names, and their weights are on disk only.

A request never waits for a drafter. A request that names a released drafter starts at once with the default drafter,
which is never released, and uses it to its end; the text is the same. Meanwhile a separate thread reads and prepares
the named drafter, one drafter at a time. The engine's thread puts it into the pool when the next request is assigned a
drafter; no other thread changes the pool.

Another drafter is released first, to make room: the one that the fewest of the latest requests named; of several, the
least recently used one. A drafter with running requests is never released; if all have some, nothing is loaded until a
request arrives while one is idle. The wanted drafter must be requested more than twice as often as the one that it
replaces: otherwise customers of about equal traffic would replace one another all the time, and loading takes more time
than it saves. If several drafters are wanted, only the latest is loaded; an earlier one is wanted again at its next
request.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from weakref import WeakSet

from paceline.config import EngineConfig
from paceline.draft.base import Drafter, NoDrafter, Stamp
from paceline.draft.pool import Member, Pool, bind, memory_of
from paceline.draft.registry import origin_of
from paceline.errors import MemoryBudgetError, ModelFileError
from paceline.model.target import DEFAULT_MAX_LEN, Target
from paceline.types import LOOKUP, NONE

RETRY_S = 60.0
"""Seconds after which a drafter that could not be loaded is tried again, at its next request."""
RECENT_PER_DRAFTER, MORE_OFTEN = 16, 2
"""Latest requests that are counted, for each drafter in memory; a drafter replaces one that was requested less than 1 /
MORE_OFTEN times as often."""
log = logging.getLogger("paceline.draft")


class ReleasedDrafter(NoDrafter):
    """Placeholder in a pool for a drafter whose weights are on disk only. It drafts nothing."""

    is_released = True

    def __init__(self, source: str, stamp: Stamp) -> None:
        """`source`, `stamp`: name or path of the drafter, and state of its files (`registry.origin_of`)."""
        self.source, self.stamp = source, stamp
        self.failure = ""
        """Error of the latest attempt to load the drafter; empty if it did not fail."""
        self.retry_at = 0.0
        """Time (time.monotonic) from which loading may be tried again."""

    @property
    def is_failed(self) -> bool:
        return time.monotonic() < self.retry_at


class Residency:
    """Keeps at most `most` drafters of a pool in memory: releases others, and loads them again when requests name them.
    Drafters without weights, or that could not be loaded again, do not count (`can_release`). A drafter with running
    requests is never released, so the limit may be exceeded for a while. Only the engine's thread calls it; any thread
    may read its counters."""

    def __init__(self, most: int, target: Target, make: Callable[[str], Drafter], kv_memory: int | None) -> None:
        """`target`: the model that loaded drafters are bound to. `make`: creates a drafter, given its name or path.
        `kv_memory`: limit of all caches in bytes; None: no limit."""
        self.most, self._target, self._make, self._kv_memory = most, target, make, kv_memory
        self.loads, self.releases, self.misses = Counter[str](), Counter[str](), Counter[str]()
        """Drafter -> times it was loaded, times it was released, requests that named it while it was released."""
        self._used: dict[str, None] = {}
        """Names, the one used longest ago first."""
        self._requests = Counter[str]()
        """Number of the latest requests that named a drafter, by its name."""
        self._latest = deque[str]()
        """The latest requests: the names of their drafters."""
        self._kept: WeakSet[Drafter] = WeakSet()
        """Drafters that cannot be released, because their files have changed."""
        self._wanted = ""
        self._loading: tuple[str, ReleasedDrafter, Future[Drafter]] | None = None

    def state_of(self, member: Member) -> str:
        """Returns "ready" (in memory), "draining" (new requests do not get it), "failed" (released, and the latest
        attempt to load it failed) or "released" (also while it is being loaded)."""
        if not member.is_open:
            return "draining"
        if isinstance(released := member.drafter, ReleasedDrafter):
            return "failed" if released.failure else "released"
        return "ready"

    def turn(self, pool: Pool) -> None:
        """Update the pool before a request is assigned a drafter, in this order: put a drafter whose loading has ended
        into the pool, start to load the released drafter that was requested last (if requests for it are frequent
        enough), and release drafters beyond the limit."""
        self.take_in(pool)
        if self._loading is None and (member := pool.members.get(self._wanted)):
            released, often = member.drafter, self._requests[self._wanted]
            if isinstance(released, ReleasedDrafter) and member.is_open and self._make_room(pool, self.most - 1, often):
                self._begin(self._wanted, released, [each.drafter for each in pool.members.values()])
                self._wanted = ""
        self._make_room(pool, self.most - (self._loading is not None))

    def take_in(self, pool: Pool) -> None:
        """If a drafter's loading has ended, put the drafter into the pool in place of its placeholder."""
        if self._loading and self._loading[2].done():
            self._take(pool, *self._loading)
            self._loading = None

    def started(self, pool: Pool, name: str, drafter: str) -> None:
        """Record that a new request named the drafter `name` ("" if it named none) and uses the drafter `drafter`. A
        request whose drafter is not in memory uses another one. The named drafter is then loaded for later requests,
        unless an attempt failed in the last 60 seconds (RETRY_S)."""
        self._touch(drafter)
        member = pool.members.get(name)
        self._count(name if member else drafter)
        if member and member.is_open and isinstance(released := member.drafter, ReleasedDrafter):
            self.misses[name] += 1
            if not released.is_failed:
                self._wanted = name
                self.turn(pool)

    def put(self, pool: Pool, name: str) -> None:
        """Call this when the drafter `name` was just added to the pool. Releases other drafters if too many are now in
        memory."""
        self._touch(name)
        self._count(name)
        self._make_room(pool, self.most - (self._loading is not None), keep=name)

    def _count(self, name: str) -> None:
        self._latest.append(name)
        self._requests[name] += 1
        if len(self._latest) > RECENT_PER_DRAFTER * self.most:
            self._requests[self._latest.popleft()] -= 1

    def _touch(self, name: str) -> None:
        self._used.pop(name, None)
        self._used[name] = None

    def _make_room(self, pool: Pool, most: int, num_requests: float = math.inf, keep: str = "") -> bool:
        """Release idle drafters, but not `keep`, until at most `most` are in memory; returns False if that is not
        possible, or if the next one is requested too often to make room for a drafter with `num_requests` requests."""
        loaded = [member for member in pool.members.values() if can_release(member.drafter)]
        ages = {name: age for age, name in enumerate(self._used)}
        kept = {pool.default.name, keep}
        idle = [member for member in loaded if member.name not in kept and not pool.num_rows(member)]
        idle.sort(key=lambda member: (self._requests[member.name], ages.get(member.name, -1)))
        excess = len(loaded) - most
        for member in idle if excess > 0 else ():
            drafter = member.drafter
            if num_requests <= MORE_OFTEN * self._requests[member.name]:
                break
            if drafter in self._kept:
                continue
            if not drafter.stamp.is_current():
                log.warning("drafter %r stays in memory: its files have changed since it was loaded", member.name)
                self._kept.add(drafter)
                continue
            pool.exchange(member.name, ReleasedDrafter(drafter.source, drafter.stamp))
            self.releases[member.name] += 1
            if (excess := excess - 1) <= 0:
                break
        return excess <= 0

    def _begin(self, name: str, released: ReleasedDrafter, others: list[Drafter]) -> None:
        future: Future[Drafter] = Future()

        def load() -> None:
            try:
                future.set_result(self._load(name, released, others))
            except Exception as error:  # noqa: BLE001  (whatever it is, the engine's thread must learn of it)
                future.set_exception(error)

        self._loading = name, released, future
        threading.Thread(target=load, name="paceline-residency", daemon=True).start()

    def _load(self, name: str, released: ReleasedDrafter, others: list[Drafter]) -> Drafter:
        """Read and prepare a drafter. Raises its errors, and ModelFileError if its files have changed."""
        source, stamp, target = released.source, released.stamp, self._target
        if not stamp.is_current():
            raise ModelFileError(f"{source} has changed or is gone: run paceline drafters load {name}={source}")
        drafter = self._make(str(stamp.path or source))
        drafter.source = source
        bytes_then = target.cache.num_bytes + memory_of([*others, drafter], target).cache_bytes
        if self._kv_memory is not None and bytes_then > self._kv_memory:
            raise MemoryBudgetError(f"caches would take {bytes_then:,} bytes, beyond kv_memory: unload a drafter")
        bind(drafter, target, keeps=True)
        return drafter

    def _take(self, pool: Pool, name: str, released: ReleasedDrafter, future: Future[Drafter]) -> None:
        member = pool.members.get(name)
        if member is None or member.drafter is not released:
            return  # it was removed or replaced meanwhile
        try:
            pool.exchange(name, future.result())
        except Exception as error:  # noqa: BLE001  (a drafter that cannot be read must not end the engine)
            released.failure, released.retry_at = f"{type(error).__name__} {error}", time.monotonic() + RETRY_S
            log.warning("drafter %r cannot be loaded, the default drafts in its place: %s", name, released.failure)
            return
        self.loads[name] += 1
        self._touch(name)


def create(
    specs: Mapping[str, str | Drafter | None], make: Callable[[str | Drafter | None], Drafter], most: int | None
) -> dict[str, Drafter]:
    """Creates drafters with `make`, and returns them by name. `specs`: for each name, a drafter's name or path, a
    Drafter or None. Raises the errors of `make`.

    `most`: maximum number of drafters in memory; None: no limit. Drafters without weights, or that could not be loaded
    again, do not count (`can_release`). Once the limit is reached, each further drafter that is given by name or path
    becomes a placeholder (`ReleasedDrafter`), and is loaded when requests need it. The names "none" and "ngram" never
    become placeholders.
    """
    created: dict[str, Drafter] = {}
    for name, spec in specs.items():
        is_full = most is not None and sum(can_release(drafter) for drafter in created.values()) >= most
        if is_full and isinstance(spec, str) and spec not in (NONE, LOOKUP):
            created[name] = ReleasedDrafter(*origin_of(spec))
        else:
            created[name] = make(spec)
    return created


def can_release(drafter: Drafter) -> bool:
    """True if releasing the drafter would free memory, and it can be loaded again: it is in memory, has weights and was
    created from a name or path."""
    return bool(not drafter.is_released and drafter.weight_bytes and drafter.source)


def fit_budget(config: EngineConfig, target: Target, drafters: list[Drafter]) -> None:
    """Allocate as many cache rows as fit in the memory budget `config.kv_memory`, at most `config.max_batch`; does
    nothing without a budget. `target` must have been loaded with a cache of one row. Raises MemoryBudgetError if not
    even one row fits."""
    if config.kv_memory is None:
        return
    row_bytes = target.cache.num_bytes + memory_of(drafters, target).cache_bytes
    num_rows = min(config.max_batch, config.kv_memory // row_bytes)
    if num_rows < 1:
        raise MemoryBudgetError(
            f"one row of {target.cache.max_len} tokens needs {row_bytes:,} bytes of cache, the budget is "
            f"{config.kv_memory:,}: raise kv_memory or lower max_len"
        )
    target.allocate_cache(num_rows, config.max_len or min(target.max_position, DEFAULT_MAX_LEN))
