"""What the recording proxy adds: streamed answers with it and without, turn by turn, byte for byte and chunk by chunk.

    python experiments/record_proxy.py --answers 500 --model smollm2-135m

A server of its own process says a number of chunks, each at its time after the request's arrival; `paceline record` stands in
front of it. Each answer is asked twice, directly and through the proxy, in turns that alternate. The times of the chunks are
compared in pairs, so that the schedule drops out. Exits with 1 when a byte differs, a trace is missing, the key that every
request carries is found in a file, or the median chunk comes 2 ms later or more. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.runlog import record_of
from paceline.train.answers import AnswerShards

HOST, PATH, MOST_S = "127.0.0.1", "/v1/chat/completions", 2e-3
KEY = "sk-found-nowhere-4711"
WORDS = [
    "The",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "brew",
    "a",
    "bitter",
    "potion",
    "behind",
    "the",
    "old",
    "mill",
]


def serve(port: int, num_chunks: int, interval_s: float) -> None:
    """The server: request n is answered by words from the n-th on."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    async def answer(request: Request) -> StreamingResponse:
        began = time.perf_counter()
        first = int((await request.json())["messages"][0]["content"].split()[-1])

        async def said() -> AsyncIterator[bytes]:
            for place in range(num_chunks):
                await asyncio.sleep(began + place * interval_s - time.perf_counter())
                word = ("" if place == 0 else " ") + WORDS[(first + place) % len(WORDS)]
                reason = "stop" if place == num_chunks - 1 else None
                choice = {"index": 0, "delta": {"content": word}, "finish_reason": reason}
                yield f"data: {json.dumps({'id': f'chatcmpl-{first}', 'model': 'm', 'choices': [choice]})}\n\n".encode()
            yield b"data: [DONE]\n\n"

        return StreamingResponse(said(), media_type="text/event-stream")

    app = Starlette(routes=[Route(PATH, answer, methods=["POST"])])
    uvicorn.run(app, host=HOST, port=port, log_level="error", timeout_keep_alive=60)


@contextlib.contextmanager
def running(words: list[str], port: int) -> Iterator[int]:
    """A process that listens on a port; its id."""
    process = subprocess.Popen([sys.executable, *words])
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
                break
            assert process.poll() is None and time.monotonic() < deadline, "it does not start"
            time.sleep(0.1)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def ask(connection: http.client.HTTPConnection, number: int) -> tuple[bytes, list[float]]:
    """An answer's bytes, and when each of its events had come, in seconds from the request."""
    body = json.dumps({"messages": [{"role": "user", "content": f"Say it {number}"}], "stream": True})
    began = time.perf_counter()
    connection.request("POST", PATH, body, {"content-type": "application/json", "authorization": f"Bearer {KEY}"})
    answer = connection.getresponse()
    data, times = b"", list[float]()
    while piece := answer.read1(65536):
        data += piece
        times += [time.perf_counter() - began] * (data.count(b"\n\n") - len(times))
    return data, times


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.create_server((HOST, 0)) as bound:
        return bound.getsockname()[1]


def measure(args: argparse.Namespace, upstream: int, proxy: int) -> dict[str, Any]:
    direct, through = (http.client.HTTPConnection(HOST, port, timeout=60) for port in (upstream, proxy))
    added, num_equal = list[np.ndarray](), 0
    for number in range(-args.warm_up, args.answers):
        pair = {each: ask(each, abs(number)) for each in ((direct, through) if number % 2 else (through, direct))}
        if number < 0:
            continue
        num_equal += pair[direct][0] == pair[through][0]
        added.append(np.array(pair[through][1]) - np.array(pair[direct][1]))
        time.sleep(0.002)
    every = 1e3 * np.stack(added)
    shown = {"first_chunk_ms": every[:, 0], "chunk_ms": every.ravel(), "last_chunk_ms": every[:, -1]}
    percentiles = {name: {f"p{at}": float(np.percentile(each, at)) for at in (5, 50, 95, 99)} for name, each in shown.items()}
    return {"answers": args.answers, "equal": num_equal, "chunks": every.shape[1], "added": percentiles}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--answers", type=int, default=500)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--interval", type=float, default=0.005, help="seconds between chunks")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--model", default="smollm2-135m", help="for the tokenizer")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.chunks, args.interval)
        return
    upstream, proxy = free_port(), free_port()
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        server = [__file__, "--serve", str(upstream), "--chunks", str(args.chunks), "--interval", str(args.interval)]
        recorder = ["-m", "paceline", "record", "--upstream", f"http://{HOST}:{upstream}", "--port", str(proxy)]
        recorder += ["--model", args.model, "--out", str(store)]
        with running(server, upstream), running(recorder, proxy) as pid:
            before = cpu_s(pid)
            found = measure(args, upstream, proxy)
            found["cpu_ms_per_answer"] = 1e3 * (cpu_s(pid) - before) / (args.answers + args.warm_up)
        found["traces"] = sum(answer.finish_reason == "stop" for answer in AnswerShards(store))
        found["files_with_the_key"] = sum(KEY.encode() in file.read_bytes() for file in store.rglob("*") if file.is_file())
    print(json.dumps(record_of(found), indent=1))
    is_good = found["equal"] == args.answers and found["traces"] == args.answers + args.warm_up
    is_good = is_good and not found["files_with_the_key"] and found["added"]["chunk_ms"]["p50"] < 1e3 * MOST_S
    sys.exit(os.EX_OK if is_good else 1)


if __name__ == "__main__":
    main()
