"""A server under clients that behave badly: hang up, ask for nonsense, all at once. Every answer is right or a clean error.

    python experiments/serving_soak.py --requests 1000 --clients 64   # the built-in model in float32, as a process of its own

A third of the requests are hung up on, before the first token or in the middle; some ask for the impossible. Greedy answers
must equal those of an engine in this process without drafts. Afterwards nothing may be left: no open request, no row, no
thread, and the second half of the requests must not have grown the process. Then SIGTERM under load: what is under way is
answered, what comes then is refused. Prints a table, and exits with 1 when anything was not so.

With `--swap-s 2` something happens to the server's drafters every two seconds: `--other` is loaded as a second member, takes
the place of the first, `--drafter` comes back, and the second is drained and unloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from server_process import CHAT, HOST, TIMEOUT_S, Process, server

from paceline.runlog import record_of

GONE = ("gone before the first token", "gone in the middle")
KINDS = ["whole", "whole", "streamed", "streamed", "absurd", "absurd", *GONE, *GONE[1:]]
ABSURD: list[tuple[dict[str, Any] | bytes, set[int]]] = [
    ({"max_tokens": 10**9}, {400}),
    ({"temperature": -1}, {400}),
    ({"temperature": math.nan}, {400}),
    ({"top_p": math.inf}, {400}),
    ({"n": 1000}, {400}),
    ({"messages": [{"role": "user", "content": "spam " * 200_000}]}, {400}),
    ({"messages": [{"role": "user", "content": "x" * 5_000_000}]}, {413}),
    ({"messages": []}, {400}),
    ({"messages": "hello"}, {400}),
    ({"messages": [{"role": 5}]}, {400}),
    ({"max_tokens": "many"}, {400}),
    ({"stream": {"yes": 1}}, {400}),
    ({"stop": ["", "x"]}, {400}),
    ({"logit_bias": {"-1": 5}}, {400}),
    ({"top_k": -7}, {400}),
    ({"guided_regex": "([a"}, {400}),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}}, {400}),
    ({"model": "other"}, {404}),
    (b"{", {400}),
    (b"\xff\xfe", {400}),
]
LONGER = 8
"""So many times as many tokens are asked for by those who will leave."""
UNKNOWN = {"user": "five", "store": False}
"""Fields without effect here."""


@dataclass
class Soak:
    """Requests to one server, and what became of them."""

    port: int
    expected: dict[str, str]
    """Prompt -> the greedy answer that is right."""
    max_tokens: int = 30
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def run(self, num_requests: int, num_clients: int, seed: int = 0) -> None:
        """All of them, so many at once; returns when each has its answer or has left."""
        kinds = [KINDS[number % len(KINDS)] for number in range(num_requests)]
        random.Random(seed).shuffle(kinds)
        clients = [threading.Thread(target=self._client, args=(kinds, seed + number)) for number in range(num_clients)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def _client(self, kinds: list[str], seed: int) -> None:
        luck = random.Random(seed)
        while True:
            try:
                kind = kinds.pop()
            except IndexError:
                return
            try:
                outcome = self._ask(kind, luck)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is counted and told)
                self.wrong.append(f"{kind}: {type(error).__name__} {error}")
                outcome = "WRONG"
            self.outcomes[f"{kind}: {outcome}"] += 1

    def _ask(self, kind: str, luck: random.Random) -> str:
        prompt = luck.choice(list(self.expected))
        body = asked(prompt, self.max_tokens) | (UNKNOWN if luck.random() < 0.2 else {})
        if kind == "absurd":
            return self._absurd(body, *luck.choice(ABSURD))
        if kind in GONE:
            return self._hang_up(body, kind, luck)
        text = self.streamed(body) if kind == "streamed" else self.whole(body)
        assert text == self.expected[prompt], f"{text!r} instead of {self.expected[prompt]!r}"
        return "right"

    def whole(self, body: dict[str, Any]) -> str:
        status, answer = self.post(json.dumps(body).encode())
        assert status == 200, answer
        (choice,) = answer["choices"]
        assert choice["finish_reason"] in ("stop", "length"), choice
        return choice["message"]["content"]

    def streamed(self, body: dict[str, Any]) -> str:
        status, text = self.request(json.dumps(body | {"stream": True}).encode())
        assert status == 200, text
        events = text.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], events[-2:]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length"), chunks[-1]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    def _absurd(self, body: dict[str, Any], change: dict[str, Any] | bytes, statuses: set[int]) -> str:
        data = change if isinstance(change, bytes) else json.dumps(body | change).encode()
        try:
            status, answer = self.post(data)
        except (BrokenPipeError, ConnectionResetError):
            assert 413 in statuses  # hung up on in the middle of a body that is too long
            return "refused"
        assert status in statuses, f"{status} for {data[:80]!r}: {answer}"
        check_error(answer)
        return "refused"

    def _hang_up(self, body: dict[str, Any], kind: str, luck: random.Random) -> str:
        """At a random moment: while the answer is waited for, or after some of its events. More tokens are asked for than are
        waited for, so that a fast server is still writing when its client leaves."""
        longer = {"max_tokens": LONGER * self.max_tokens, "ignore_eos": True}
        data = json.dumps(body | longer | {"stream": kind != GONE[0] or luck.random() < 0.5}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection((HOST, self.port), timeout=TIMEOUT_S) as connection:
            connection.sendall(head.encode() + data)
            if kind == GONE[0]:
                time.sleep(luck.choice([0.0, 0.001, 0.01, 0.05]))
                return "left"
            num_wanted, text = luck.randrange(1, self.max_tokens), b""
            while text.count(b"data: ") < num_wanted and b"[DONE]" not in text:
                piece = connection.recv(4096)
                assert piece, f"the server hung up: {text!r}"
                text += piece
            assert text.startswith(b"HTTP/1.1 200 "), text
        return "left"

    def post(self, data: bytes) -> tuple[int, Any]:
        status, text = self.request(data)
        return status, json.loads(text)

    def request(self, data: bytes, method: str = "POST", path: str = CHAT) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(method, path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()


def asked(prompt: str, max_tokens: int) -> dict[str, Any]:
    """A greedy chat request."""
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0}


def check_error(answer: dict[str, Any]) -> None:
    """OpenAI's shape, and nothing about the inside of the server."""
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}, answer
    text = json.dumps(answer)
    assert answer["error"]["message"] and "Traceback" not in text and "/site-packages/" not in text, answer


class Swaps:
    """Loads, drains and unloads drafters of a server every few seconds, until told to stop: then all is as it was."""

    def __init__(self, soak: Soak, drafter: str, other: str, seconds: float) -> None:
        self._soak, self._drafter, self._other, self._seconds = soak, drafter, other, seconds
        self.done: Counter[str] = Counter()
        """What was done, and how often of it while answers were made."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _run(self, stop: threading.Event) -> None:
        steps = [
            ("load", "POST", "second", {"drafter": self._other}),
            ("replace", "POST", "main", {"drafter": self._other}),
            ("replace", "POST", "main", {"drafter": self._drafter}),
            ("drain", "POST", "second/drain", {}),
            ("unload", "DELETE", "second", None),
        ]
        at = 0
        while not stop.wait(self._seconds) or at:
            what, method, path, body = steps[at]
            began = time.monotonic()
            try:
                status, text = self._soak.request(json.dumps(body or {}).encode(), method, f"/admin/drafters/{path}")
            except OSError as error:
                status, text = 0, str(error).encode()
            if what == "unload" and status == 409:
                continue  # its last answers are under way
            if status != 200:
                self._soak.wrong.append(f"{what}: {status} {text[:200]!r}")
            running = sum(row["rows"] for row in json.loads(self._soak.request(b"", "GET", "/admin/drafters")[1])["drafters"])
            self.done[f"{what}, under load" if running else what] += 1
            self.done["seconds"] += round(time.monotonic() - began)
            at = (at + 1) % len(steps)


def stop_under_load(process: subprocess.Popen[bytes], soak: Soak, num_clients: int) -> dict[str, int]:
    """SIGTERM while `num_clients` wait for answers: how many came whole, what others were told, and the exit status."""
    told = Counter[str]()

    def ask(number: int) -> None:
        prompt = list(soak.expected)[number % len(soak.expected)]
        try:
            told["whole" if soak.streamed(asked(prompt, soak.max_tokens)) == soak.expected[prompt] else "wrong"] += 1
        except (AssertionError, OSError) as error:
            told["refused" if "draining" in str(error) else f"lost: {error}"] += 1

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(num_clients)]
    for client in clients:
        client.start()
    watched = Process(process.pid, soak.port)
    while watched.figures()["waiting"] < num_clients / 2 and not told:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    late = Counter[str]()
    while process.poll() is None:
        try:
            status, answer = soak.post(json.dumps(asked("late", 5)).encode())
            late["refused" if status == 503 and answer["error"]["code"] == "draining" else f"{status} {answer}"] += 1
        except OSError:
            late["refused"] += 1
        time.sleep(0.05)
    for client in clients:
        client.join()
    soak.wrong += [f"at SIGTERM: {each}" for each in (*told, *late) if each not in ("whole", "refused")]
    return {
        "answers under way that came whole": told["whole"],
        "answers under way lost or wrong": num_clients - told["whole"] - told["refused"],
        "later ones refused": told["refused"] + late["refused"],
        "later ones not refused": late.total() - late["refused"],
        "exit status": process.wait(),
    }


def expected_answers(model: str, dtype: str, num_prompts: int, max_tokens: int) -> dict[str, str]:
    """From an engine of this process, without drafts and one at a time."""
    from paceline import LLM, SamplingParams

    llm = LLM(model, drafter="none", dtype=dtype, max_batch=1, max_len=512)
    prompts = [f"Tell me something about the number {number}." for number in range(num_prompts)]
    params = SamplingParams(max_tokens=max_tokens)
    return {prompt: llm.chat([[{"role": "user", "content": prompt}]], params)[0].text for prompt in prompts}


def show(title: str, figures: dict[str, Any]) -> None:
    print(title)
    for name, value in figures.items():
        print(f"  {name:<44} {value:g}" if isinstance(value, float) else f"  {name:<44} {value}")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-growth", type=float, default=24.0, help="MB by which the second half may grow the process")
    parser.add_argument("--swap-s", type=float, default=None, help="load, replace or unload a drafter this often")
    parser.add_argument("--other", default="random-dflash", help="the other drafter")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    expected = expected_answers(options.model, options.dtype, 16, options.max_tokens)
    words = ["--model", options.model, "--drafter", f"main={options.drafter}", "--dtype", options.dtype]
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", *words, "--max-len", "512", "--drain-seconds", "300"]
    with server(command) as (process, port, started_s):
        soak, watched = Soak(port, expected, options.max_tokens), Process(process.pid, port)
        half = options.requests // 2
        swaps = Swaps(soak, options.drafter, options.other, options.swap_s or 0.0)
        meanwhile = swaps.running if options.swap_s else contextlib.nullcontext
        with meanwhile():
            soak.run(options.clients, options.clients, options.seed - 1)
        soak.outcomes.clear()
        fresh = watched.settled()
        began = time.monotonic()
        with meanwhile():
            soak.run(half, options.clients, options.seed)
        middle = watched.settled()
        with meanwhile():
            soak.run(options.requests - half, options.clients, options.seed + 1000)
        end = watched.settled()
        show(f"{options.requests} requests from {options.clients} clients in {time.monotonic() - began:.0f} s", soak.outcomes)
        for name, figures in (("before", fresh), ("after one half", middle), ("after the other", end)):
            show(name, figures)
        stopped = stop_under_load(process, soak, options.clients)
        show("SIGTERM under load", stopped)
    num_under_load = sum(count for what, count in swaps.done.items() if "under load" in what)
    if options.swap_s:
        show("drafters", dict(swaps.done))
    for line in soak.wrong[:20]:
        print(f"WRONG {line}")
    checks = {
        "every answer right or a clean error": not soak.wrong,
        "every request accounted for": soak.outcomes.total() == options.requests,
        "nothing running, waiting or cached": not (end["running"] or end["waiting"] or end["cache in use"]),
        "no thread more": end["threads"] <= middle["threads"],
        "no file more": end["files"] <= fresh["files"] + 1,
        "no memory more": end["memory MB"] - middle["memory MB"] <= options.most_growth,
        "what was under way at SIGTERM was answered": stopped["answers under way that came whole"] > 0
        and not stopped["answers under way lost or wrong"],
        "what came then was refused": not stopped["later ones not refused"],
        "ended with status 0": stopped["exit status"] == 0,
    }
    if options.swap_s:
        checks["drafters were swapped while answers were made"] = num_under_load >= 3
    show("checks", {name: "ok" if is_right else "FAILED" for name, is_right in checks.items()})
    figures = {"passed": all(checks.values()), "started_s": round(started_s, 2), "swaps": dict(swaps.done), "checks": checks}
    print(json.dumps(record_of(figures)))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
