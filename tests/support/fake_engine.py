"""vLLM or SGLang as `paceline serve --engine` sees them: `python fake_engine.py vllm|sglang|dies|deaf|low OPTIONS`.

vllm is our own server in its place, with the drafter of --speculative-config (mtp: the model's own layer) and all
its drafts checked in every round: its completions and counters have the same words. Its command line is left in the
file that WORDS names. low counts rounds in which no draft was accepted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def named(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def low(port: int) -> None:
    from fake_servers import FakeServer, serving

    class Low(FakeServer):
        def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
            self.count(10 * len(self.calls), 0, 10 * len(self.calls))
            return (200, '{"data": [{"id": "m"}]}') if path == "/v1/models" else super().answer(method, path, body)

    with serving(Low(), port):
        time.sleep(600)


def main(kind: str, words: list[str]) -> None:
    if "WORDS" in os.environ:
        Path(os.environ["WORDS"]).write_text(json.dumps(words))
    if kind == "dies":
        sys.exit(3)
    if kind == "deaf":
        time.sleep(600)
    if kind == "low":
        low(int(named(words, "--port")))
    config = json.loads(named(words, "--speculative-config"))
    ours = ["serve", "--model", words[0] if "--model" not in words else named(words, "--model"), "--dtype", "float32"]
    drafter = "mtp" if config["method"] == "mtp" else config["model"]
    ours += ["--port", named(words, "--port"), "--drafter", drafter]
    ours += ["--speculate", str(config["num_speculative_tokens"])]
    os.execv(sys.executable, [sys.executable, "-m", "paceline", *ours])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
