"""Where the drafting of a round goes: the default drafter, greedy, one stream, seven drafts each round.

    python experiments/draft_round.py                       # the built-in model and its drafter
    python experiments/draft_round.py --model qwen2.5-coder-0.5b --threads 4

Answers one prompt --turns times and prints medians and minima over all rounds, in milliseconds: drafting as the engine counts
it, and what it consists of. Parts are inside one another where they are indented. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections import defaultdict
from typing import Any

import torch

from paceline.config import EngineConfig
from paceline.draft.dflash import DFlashDrafter
from paceline.draft.dflash2 import DFlash2Drafter
from paceline.draft.dflash2_paths import DFlash2NativePath
from paceline.draft.dflash2_selector import WalkedReading
from paceline.draft.tapped import TappedDrafter
from paceline.engine.llm import LLM
from paceline.model import native_lib
from paceline.types import SamplingParams

PARTS: tuple[tuple[Any, str, str], ...] = (
    (DFlashDrafter, "propose", "drafting"),
    (TappedDrafter, "_inject", "  features to keys and values"),
    (native_lib.Model, "inject", "    the native call for features"),
    (DFlash2Drafter, "_read", "  pass, candidates, scores"),
    (DFlash2NativePath, "read", "    the pass, and what Python does for it"),
    (native_lib.Model, "forward", "      the native call for the pass"),
    (WalkedReading, "certain", "  walk, and how sure it is"),
)
"""What is timed, and its words."""
PROMPT = """Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did
Natalia sell altogether in April and May? Explain step by step."""


class Clock:
    """Seconds of each call by part, while a round drafts."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._drafts = False
        for owner, name, part in PARTS:
            setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, call: Any, part: str) -> Any:
        @functools.wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            if part == "drafting":
                self._drafts = True
            started = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                if self._drafts:
                    self.seconds[part].append(time.perf_counter() - started)
                if part == "drafting":
                    self._drafts = False

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = Clock()
    llm = LLM.of(EngineConfig(args.model, drafter="default", device="cpu", max_batch=1, max_len=1024, plan="fixed"))
    params, answer_s, text = SamplingParams(max_tokens=args.max_tokens, temperature=0.0), [], ""
    for turn in range(1 + args.turns):  # the first warms up
        if turn == 1:
            clock.seconds.clear()
        started = time.perf_counter()
        text = llm.chat([[{"role": "user", "content": PROMPT}]], params)[0].text
        answer_s.append(time.perf_counter() - started)
    medians = {part: 1e3 * statistics.median(clock.seconds[part]) for _, _, part in PARTS}
    print(f"{native_lib.require().pn_in_use().decode()}, {args.threads} threads, {len(clock.seconds['drafting'])} rounds")
    print(f"{'':<44}{'median':>9}{'least':>9}   milliseconds")
    for part, median in medians.items():
        print(f"{part:<44}{median:>9.3f}{1e3 * min(clock.seconds[part]):>9.3f}")
    scored = [read - run for read, run in zip(clock.seconds[PARTS[3][2]], clock.seconds[PARTS[4][2]], strict=True)]
    medians["    candidates and scores"] = 1e3 * statistics.median(scored)
    print(f"{'    candidates and scores':<44}{1e3 * statistics.median(scored):>9.3f}{1e3 * min(scored):>9.3f}")
    told = {part.strip(): round(median, 4) for part, median in medians.items()}
    print(json.dumps({"answer_s": statistics.median(answer_s[1:]), "characters": len(text), **told}))


if __name__ == "__main__":
    main()
