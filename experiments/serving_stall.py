"""Measures how a long prompt delays running streams: the longest wait for a token, in rounds, while 1,000 tokens are
prefilled.

    python experiments/serving_stall.py --dtype bfloat16 --streams 7

Prints one JSON line; exits with 1 when a stream waited for more than three rounds' time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from paceline import LLM, SamplingParams
from paceline.runs.folder import record_of

PROMPT_TOKENS = 1000
MOST_ROUNDS = 3.0
NUM_ROUNDS = 80
"""Before the prompt comes: about as many as its chunks."""


def measure(llm: LLM, num_streams: int, run: int) -> dict[str, float]:
    """One long prompt beside `num_streams` that decode greedily; times in milliseconds."""
    engine, text = llm.engine, "Tell me about rivers, and about number "
    ids = [engine.add(llm.tokenizer.encode(f"{text}{number}"), _params(1000)) for number in range(num_streams)]
    while engine.scheduler.prefilling:
        engine.step()
    rounds = [_step(llm) for _ in range(NUM_ROUNDS)]
    words = llm.tokenizer.encode(f"Once, {run} years ago, " + "the river went on and on. " * PROMPT_TOKENS)[
        :PROMPT_TOKENS
    ]
    late, added_at = engine.add(words, _params(2)), time.perf_counter()
    gaps, has_begun = [], False
    while not has_begun:
        began = time.perf_counter()
        has_begun = any(chunk.sequence.request_id == late for chunk in engine.step())
        gaps.append(time.perf_counter() - began)
    first_s = time.perf_counter() - added_at
    for number in (*ids, late):
        engine.abort(number)
    round_s = statistics.median(rounds)
    return {
        "round_ms": 1e3 * round_s,
        "longest_round_rounds": max(rounds) / round_s,
        "median_gap_rounds": statistics.median(gaps) / round_s,
        "longest_gap_rounds": max(gaps) / round_s,
        "first_token_ms": 1e3 * first_s,
        "steps": len(gaps),
    }


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def _step(llm: LLM) -> float:
    began = time.perf_counter()
    llm.engine.step()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    llm = LLM(options.model, drafter=options.drafter, dtype=options.dtype, max_batch=options.streams + 1, max_len=2048)
    runs = [measure(llm, options.streams, run) for run in range(options.repeat + 1)][1:]
    figures = {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
    settings = {"streams": options.streams, "dtype": llm.config.dtype}
    print(json.dumps(record_of({**settings, **figures})))
    return int(figures["longest_gap_rounds"] > MOST_ROUNDS)


if __name__ == "__main__":
    sys.exit(main())
