"""What serving costs beside the engine alone: one stream over HTTP and in this process, turn by turn, the same prompts.

    python experiments/serving_overhead.py --dtype bfloat16 --prompts gsm8k_test.jsonl

Prints tokens per second of both, the median of their ratio over pairs of answers, and the server's host time by round: what of
an answer's time, as the client saw it, was neither prefill nor drafting nor verifying. Exits with 1 when the server reaches
less than 95% of the engine, or a round's host time is a millisecond or more. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import socket
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial

from server_process import HOST, server

from paceline import LLM, SamplingParams
from paceline.prompts import Message, read_prompts
from paceline.runlog import record_of

LEAST_SHARE, MOST_HOST_S = 0.95, 1e-3
WARM_UP = 3
"""Pairs of answers that do not count: both engines learn what drafts cost."""
PAUSE_S = 0.05
"""Between turns: longer than the threads of either spin."""
COUNTED = ("prefill_seconds", "draft_seconds", "verify_seconds", "host_seconds", "rounds")


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer."""

    num_tokens: int
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


class Served:
    """The server's client. It only keeps what comes in until the answer is whole: it shares the cores with the server."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, messages: list[Message], max_tokens: int) -> Answer:
        """Streamed, as people read it."""
        body = json.dumps(
            {
                "messages": messages,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        pieces: list[bytes] = []
        began = time.perf_counter()
        with socket.create_connection((HOST, self._port), timeout=600) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while piece := connection.recv(1 << 16):
                pieces.append(piece)
        wall_s = time.perf_counter() - began
        text = b"".join(pieces).decode()
        if "data: [DONE]" not in text:
            raise RuntimeError(text)
        return Answer(int(re.findall(r'"completion_tokens":\s*(\d+)', text)[-1]), wall_s)

    def totals(self) -> dict[str, float]:
        """Of all requests so far, from /metrics."""
        with contextlib.closing(http.client.HTTPConnection(HOST, self._port, timeout=600)) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        return {name: float(re.findall(rf"^paceline:{name}_total\{{.*\}} (\S+)", text, re.MULTILINE)[0]) for name in COUNTED}


def offline(llm: LLM, messages: list[Message], max_tokens: int) -> Answer:
    began = time.perf_counter()
    (result,) = llm.chat([messages], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return Answer(len(result.token_ids), time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", required=True, help="a file as paceline reads them; each prompt is asked once")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--most-rows", type=int, default=8)
    options = parser.parse_args()
    prompts = [prompt.messages for prompt in read_prompts(options.prompts, options.limit)]
    settings = {"drafter": options.drafter, "dtype": options.dtype, "max_len": 2048}
    llm = LLM(options.model, max_batch=options.most_rows, **settings)
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--model", options.model, "--max-batch", str(options.most_rows)]
    with server(words) as (_, port, _):
        client = Served(port)
        pairs: list[tuple[Answer, Answer]] = []
        before = client.totals()
        for index, messages in enumerate(prompts):
            if index == WARM_UP:
                before = client.totals()
            answers: dict[str, Answer] = {}
            for turn in ("served", "offline") if index % 2 else ("offline", "served"):
                ask = client.ask if turn == "served" else partial(offline, llm)
                answers[turn] = ask(messages, options.max_tokens)
                time.sleep(PAUSE_S)
            pairs.append((answers["served"], answers["offline"]))
        spent = {name: total - before[name] for name, total in client.totals().items()}
    pairs = pairs[WARM_UP:]
    share = statistics.median(served.tokens_per_s / alone.tokens_per_s for served, alone in pairs)
    wall_s = sum(served.wall_s for served, _ in pairs)
    elsewhere_s = wall_s - sum(spent[f"{part}_seconds"] for part in ("prefill", "draft", "verify"))
    figures = {
        "dtype": llm.config.dtype,
        "answers": len(pairs),
        "served_tokens_per_s": sum(served.num_tokens for served, _ in pairs) / wall_s,
        "offline_tokens_per_s": sum(alone.num_tokens for _, alone in pairs) / sum(alone.wall_s for _, alone in pairs),
        "share_median": share,
        "share_of_all": sum(alone.wall_s for _, alone in pairs) / wall_s,
        "host_ms_by_round": 1e3 * elsewhere_s / spent["rounds"],
        "engine_host_ms_by_round": 1e3 * spent["host_seconds"] / spent["rounds"],
        "ms_by_round": 1e3 * wall_s / spent["rounds"],
    }
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps(record_of(rounded)))
    return int(share < LEAST_SHARE or elsewhere_s / spent["rounds"] >= MOST_HOST_S)


if __name__ == "__main__":
    sys.exit(main())
