"""Many clients at once, a third of them hanging up, some asking for nonsense: nothing leaks, nothing mixes."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from live_server import Live, asked, serving, talker, wait_until
from small_llm import fake_llm

from paceline import SamplingParams

NUM_REQUESTS, NUM_CLIENTS = 200, 32
ABSURD: list[dict[str, Any]] = [
    {"temperature": -3},
    {"max_tokens": 10**12},
    {"n": 1000},
    {"logit_bias": {"-1": 5}},
    {"top_k": -7},
    {"messages": []},
    {"stop": ["", "x"]},
    {"model": "other"},
]


class Client:
    """Sends requests until there are none left, and notes what came of them."""

    def __init__(self, live: Live, todo: list[int], expected: list[str], seed: int) -> None:
        self._live, self._todo, self._expected = live, todo, expected
        self._random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    def run(self) -> None:
        while self._todo:
            try:
                number = self._todo.pop()
            except IndexError:
                return
            kind = self._random.choice(["whole", "stream", "hang up", "hang up", "absurd", "whole"])
            self.outcomes[f"{kind}: {self._ask(number % len(self._expected), kind)}"] += 1

    def _ask(self, number: int, kind: str) -> str:
        body = asked(f"prompt {number}", max_tokens=30, temperature=0)
        if kind == "absurd":
            status, answer, _ = self._live.post("/v1/chat/completions", body | self._random.choice(ABSURD))
            assert status in (400, 404), answer
            return "refused"
        if kind == "whole":
            status, answer, _ = self._live.post("/v1/chat/completions", body)
            assert status == 200, answer
            text = answer["choices"][0]["message"]["content"]
        elif kind == "stream":
            text = self._streamed(body)
        else:
            connection = self._live.open_stream(body)
            connection.settimeout(self._random.random() * 0.05 + 0.001)
            with contextlib.suppress(TimeoutError):
                connection.recv(self._random.randrange(1, 4096))
            connection.close()
            return "gone"
        assert text == self._expected[number]
        return "right"

    def _streamed(self, body: dict[str, Any]) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._live.port, timeout=60)
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body | {"stream": True}), {"content-type": "application/json"}
        )
        events = connection.getresponse().read().decode().split("\n\n")
        connection.close()
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert chunks[-1]["choices"][0]["finish_reason"]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def num_files() -> int:
    return len(os.listdir(Path("/proc/self/fd")))


def test_soak() -> None:
    texts = [f"prompt {number}" for number in range(10)]
    params = SamplingParams(max_tokens=30)
    expected = [each.text for each in fake_llm().chat([asked(text)["messages"] for text in texts], params)]
    threads_before = threading.active_count()
    with serving(talker(num_rows=4)) as live:
        live.post("/v1/chat/completions", asked(max_tokens=1))
        files_before, threads_served = num_files(), threading.active_count()
        todo = list(range(NUM_REQUESTS))
        clients = [Client(live, todo, expected, seed) for seed in range(NUM_CLIENTS)]
        threads = [threading.Thread(target=client.run) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outcomes = sum((client.outcomes for client in clients), Counter())
        assert outcomes.total() == NUM_REQUESTS
        assert {"whole: right", "stream: right", "hang up: gone", "absurd: refused"} == set(outcomes)
        wait_until(live.is_idle)
        live.llm.engine.check_integrity()
        assert live.seen.num_crashes == 0
        assert not live.worker._live
        wait_until(lambda: not live.server.server_state.connections)
        gc.collect()
        assert num_files() <= files_before + 1
        assert threading.active_count() <= threads_served + 8  # the pool that encodes prompts keeps its threads
    wait_until(lambda: threading.active_count() <= threads_before)
