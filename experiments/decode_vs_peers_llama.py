"""llama.cpp for `decode_vs_peers.py`: its own server, built by `peers.sh` for this processor, on the GGUF file as it
is.

A way is a server of its own with the flags of WAYS; the rest of llama.cpp's docs/speculative.md needs drafters that
there are none of here. Sampling is the cheapest it has, the one most likely token. Its tokens are counted by its own
timings.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from decode_vs_peers_pipe import Prompts, arguments, own_output, serve
from server_process import HOST, free_port

from paceline.loop.adapt.servers.counters import ask, is_up
from paceline.net.streaming import Client

SHORT = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8")
WAYS: dict[str, tuple[str, ...]] = {
    "none": (),
    "ngram-simple": ("--spec-type", "ngram-simple", "--spec-draft-n-max", "64"),  # as its documentation has it
    "ngram-short": SHORT,
    "ngram-cache": ("--spec-type", "ngram-cache"),
    "ngram-mod": ("--spec-default",),
    "draft": ("--spec-type", "draft-simple", "--spec-draft-model", "{draft}"),
}
START_S = 300


class Llama:
    """The server of one way."""

    def __init__(self, args: Any) -> None:
        self._args = args
        (way,) = args.ways
        port, rows, threads = free_port(), str(args.streams), str(args.threads)
        self._client = Client(f"http://{HOST}:{port}")
        common = ["--host", HOST, "--port", str(port), "-m", args.model, "-t", threads, "-tb", threads]
        common += ["-np", rows, "-c", str(-(-args.max_len // 256) * 256 * args.streams)]
        common += ["--cache-ram", "0", "--offline"]
        self._flags = [*common, *(word.format(draft=args.draft) for word in WAYS[way])]
        self._server = subprocess.Popen([args.form, *self._flags], stdin=subprocess.DEVNULL, stdout=sys.stderr)
        self.pid = self._server.pid
        self._threads = ThreadPoolExecutor(args.streams)

    def load(self, way: str) -> dict[str, Any]:
        ends = time.monotonic() + START_S
        while time.monotonic() < ends:
            if self._server.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._server.returncode}")
            if is_up(self._client):
                build = ask(self._client, "GET", "/props").get("build_info")
                return {"flags": self._flags, "build": build, "built_with": built_with(Path(self._args.form))}
            time.sleep(0.05)
        raise RuntimeError(f"llama-server was not ready after {START_S} s")

    def run(self, way: str, prompts: Prompts, num_tokens: list[int]) -> dict[str, Any]:
        began = time.perf_counter()
        answers = list(self._threads.map(self._complete, prompts, num_tokens))
        wall_s = time.perf_counter() - began
        timings = [answer["timings"] for answer in answers]
        kept = sum(each.get("draft_n_accepted", 0) for each in timings)
        prefill = {"prefill_s": timings[0]["prompt_ms"] / 1e3} if len(prompts) == 1 else {}
        token_ids = [answer["tokens"] for answer in answers]
        num_generated = sum(map(len, token_ids))
        drafted = sum(each.get("draft_n", 0) for each in timings)
        rounds = {
            "tokens_per_round": num_generated / max(num_generated - kept, 1),
            "num_drafted": drafted,
            "num_accepted": kept,
        }
        return {"token_ids": token_ids, "wall_s": wall_s, **prefill, **rounds}

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        self._server.terminate()
        self._server.wait(timeout=30)

    def _complete(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        greedy = {"temperature": 0, "top_k": 1, "samplers": ["top_k"]}
        body = {
            "prompt": prompt,
            "n_predict": num_tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        return ask(self._client, "POST", "/completion", {**body, **greedy})


def built_with(server: Path) -> list[str]:
    """Features compiled into the server: instruction sets, OpenMP, repacking."""
    lines = (server.parents[1] / "CMakeCache.txt").read_text(encoding="utf-8").splitlines()
    return [line.partition(":")[0] for line in lines if line.startswith("GGML_") and line.endswith(":BOOL=ON")]


if __name__ == "__main__":
    os.environ.pop("LD_PRELOAD", None)
    serve(Llama(arguments(tuple(WAYS))), own_output())
