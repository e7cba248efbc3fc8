"""Hundreds of requests from 32 clients at once, a third of them hanging up, some absurd: nothing leaks, nothing
mixes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import threading
from pathlib import Path

import pytest
from live_server import Live, chat_body, serving, wait_until
from small_llm import tiny_model
from soak_clients import GONE, Soak, check_error

from paceline import LLM, SamplingParams
from paceline.serve.worker.worker import COMPILERS

pytestmark = pytest.mark.slow

NUM_REQUESTS = 480 if os.environ.get("PACELINE_NIGHTLY") else 128
NUM_CLIENTS, MAX_TOKENS = 32, 24
MOST_GROWTH_MB, MOST_NEW_OBJECTS = 24, 500
"""In the second half. Five megabytes of nonsense leave holes in the allocator's arenas; objects are counted exactly."""


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory_mb() -> float:
    """Memory of this process, after the allocator has returned its free pages."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def num_threads() -> int:
    """Without those of pools, which make one more whenever all they have are busy, up to their limit."""
    return sum(not thread.name.startswith(("asyncio_", "paceline-grammar")) for thread in threading.enumerate())


def num_tasks(live: Live) -> int:
    """Tasks of the event loop, except the one that counts."""

    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    assert live._loop
    return asyncio.run_coroutine_threadsafe(count(), live._loop).result(60)


def settle(live: Live) -> None:
    """Everybody has left, and the server has noticed: first nobody is there who could ask, then nothing is answered any
    more. The other way round, a request that came at the last moment would be found under way."""
    wait_until(lambda: not live.server.server_state.connections and not live.server.server_state.tasks)
    wait_until(lambda: live.is_idle() and not live.worker._inbox)


def test_requests_of_which_many_are_bad(tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path / "tiny"))
    settings = {"dtype": "float32", "device": "cpu", "max_len": 256, "threads": 1}
    offline = LLM(folder, drafter="none", max_batch=1, **settings)
    prompts = [f"About {number}." for number in range(12)]
    params = SamplingParams(max_tokens=MAX_TOKENS)
    expected = {prompt: offline.chat([chat_body(prompt)["messages"]], params)[0].text for prompt in prompts}
    assert len(set(expected.values())) > 6, "the test needs answers that differ"
    threads_before = threading.active_count()
    with serving(lambda: LLM(folder, drafter="ngram", max_batch=4, **settings)) as live:
        soak = Soak(live.port, expected, MAX_TOKENS)
        soak.run(NUM_CLIENTS, NUM_CLIENTS, seed=-1)  # pools of threads, caches
        settle(live)
        soak.outcomes.clear()
        files_before, tasks_before = num_files(), num_tasks(live)
        soak.run(NUM_REQUESTS // 2, NUM_CLIENTS)
        settle(live)
        memory_between, objects_between, threads_between = memory_mb(), len(gc.get_objects()), num_threads()
        soak.run(NUM_REQUESTS // 2, NUM_CLIENTS, seed=1000)
        settle(live)
        assert soak.wrong == []
        expected_outcomes = {"whole: right", "streamed: right", "absurd: refused"} | {f"{kind}: left" for kind in GONE}
        assert set(soak.outcomes) == expected_outcomes and soak.outcomes.total() == NUM_REQUESTS
        assert sum(count for outcome, count in soak.outcomes.items() if outcome.endswith("left")) >= 0.3 * NUM_REQUESTS
        assert live.seen.num_crashes == 0 and live.llm.engine.prefix is not None
        assert "abort" in live.seen.outcomes, "no client was missed while its answer was written"
        assert {"stop", "length", "abort"} >= set(live.seen.outcomes)
        live.llm.engine.check_integrity()
        assert not live.worker._live and not live.worker._open and not live.worker._inbox
        assert not live.llm.engine._requests
        assert num_tasks(live) == tasks_before
        assert num_files() <= files_before + 1
        assert num_threads() == threads_between
        assert threading.active_count() - num_threads() <= COMPILERS + min(32, (os.cpu_count() or 1) + 4), (
            "pools have limits"
        )
        del live.seen.outcomes[:], live.seen.refusals[:], live.seen.tags[:], soak.wrong[:]
        grown = memory_mb() - memory_between, len(gc.get_objects()) - objects_between
        for seed in (2000, 3000, 4000):  # a leak grows with every half, what a busy machine piled up does not
            if grown[0] < MOST_GROWTH_MB and grown[1] < MOST_NEW_OBJECTS:
                break
            memory_between, objects_between = memory_mb(), len(gc.get_objects())
            soak.run(NUM_REQUESTS // 2, NUM_CLIENTS, seed=seed)
            settle(live)
            del live.seen.outcomes[:], live.seen.refusals[:], live.seen.tags[:], soak.wrong[:]
            grown = memory_mb() - memory_between, len(gc.get_objects()) - objects_between
        assert grown[0] < MOST_GROWTH_MB and grown[1] < MOST_NEW_OBJECTS
    wait_until(lambda: threading.active_count() <= threads_before)


def test_the_soak_notices_what_is_wrong(tmp_path: Path) -> None:
    """Its own checks: another text than the offline one, an error in another shape."""
    with serving() as live:
        soak = Soak(live.port, {"hello": "never said"}, 5)
        soak.run(18, 2)
        assert soak.outcomes["whole: WRONG"] == 4 and soak.outcomes["streamed: WRONG"] == 4
        assert len(soak.wrong) == 8 and all("never said" in line for line in soak.wrong)
    with pytest.raises(AssertionError):
        check_error({"detail": "Not Found"})
    with pytest.raises(AssertionError):
        check_error({"error": {"message": "Traceback", "type": "", "param": None, "code": None}})
