"""What does a pass cost at each width, and does the loop around it cost anything?

    .venv/bin/python experiments/step_times.py --dtype bfloat16

1. Passes of 1, 8 and 16 positions of one row, and of 8 rows, measured in turns: the price of verifying.
2. A random 3-layer DFlash drafter with mocked acceptance at 4 tokens per round: tokens/s of the engine against what the
   separately measured times of drafting, verifying and observing predict.
3. Plain decoding of eight requests against one.
Text and acceptance are meaningless here, and labelled so. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console

from paceline import LLM, SamplingParams
from paceline.draft.base import Observed
from paceline.draft.dflash import DFlashDrafter
from paceline.engine.judge import MockedJudge
from paceline.model.target import ForwardBatch
from paceline.types import Batch, Sequence
from paceline.verify.mocked import MockedAcceptance

log = Console(stderr=True)


def medians_ms(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median of each, all taken in turns so that a slow spell hits them alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 3):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if turn >= 3:
                times[name].append((time.perf_counter() - started) * 1e3)
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def pass_of(llm: LLM, num_rows: int, count: int, context: int) -> Callable[[], None]:
    rows, cache = list(range(num_rows)), llm.target.cache

    def run() -> None:
        for row in rows:
            cache.lengths[row] = context
        llm.target.forward(ForwardBatch(rows, [context] * num_rows, [count] * num_rows, [5] * (num_rows * count)))

    return run


def pass_times(llm: LLM, context: int, repeats: int) -> dict[str, float]:
    shapes = {"1": (1, 1), "4": (1, 4), "8": (1, 8), "16": (1, 16), "8 rows": (8, 1)}
    runs = {name: pass_of(llm, num_rows, count, context) for name, (num_rows, count) in shapes.items()}
    found = medians_ms(runs, repeats)
    llm.target.cache.lengths[:] = [0] * llm.target.cache.num_rows
    return found


@torch.inference_mode()
def drafter_times(llm: LLM, drafter: DFlashDrafter, context: int, repeats: int) -> dict[str, float]:
    """A round of the drafter outside the engine: propose, and observe of four verified positions."""
    seq = Sequence(0, [5] * (context + 1), context, SamplingParams(max_tokens=1024), row=0, cached_len=context)
    taps = torch.zeros(context, len(drafter.tap_layers) * llm.target.hidden_size, dtype=llm.target.dtype)
    drafter.start(seq)
    drafter.observe([Observed(seq, 0, context, taps)])

    def observe() -> None:
        begin = seq.cached_len
        seq.tokens += [5] * 4
        seq.cached_len += 4
        drafter.observe([Observed(seq, begin, 4, taps[:4])])

    runs = {"propose": lambda: void(drafter.propose(Batch([seq]))), "observe": observe}
    found = medians_ms(runs, repeats)
    drafter.drop(seq)
    return found


def void(_: object) -> None:
    """Drop a result."""


def engine_rate(llm: LLM, num_requests: int, max_tokens: int) -> tuple[float, float]:
    """Decode tokens/s of all requests together after the first token, and tokens per round."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    outs = llm.generate_ids([[5] * 32] * num_requests, params)
    first = max(out.stats.timings.first_token_s for out in outs)
    last = max(out.stats.timings.token_s[-1] for out in outs)
    after = sum(stamp > first for out in outs for stamp in out.stats.timings.token_s)
    rounds = sum(out.stats.num_rounds for out in outs)
    return after / (last - first), 1 + sum(out.stats.num_accepted for out in outs) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--tokens-per-round", type=float, default=4.0)
    args = parser.parse_args()
    llm = LLM(args.model, drafter="none", dtype=args.dtype, max_batch=8)
    passes = pass_times(llm, args.context, args.repeats)
    log.print("pass, ms:", passes)
    drafter = DFlashDrafter.random(llm.target, num_layers=3, block_size=8, seed=0)
    rates: dict[str, list[float]] = {"mocked": [], "one": [], "eight": []}
    predictions, per_round = [], 0.0
    for _ in range(5):
        llm.drafter, llm.engine = drafter, llm.new_engine(drafter, MockedJudge(MockedAcceptance(args.tokens_per_round)))
        rate, per_round = engine_rate(llm, 1, 200)
        rates["mocked"].append(rate)
        verify = medians_ms({"8": pass_of(llm, 1, 8, args.context)}, 15)["8"]
        llm.target.cache.lengths[:] = [0] * llm.target.cache.num_rows
        parts = drafter_times(llm, drafter, args.context, 15)
        predictions.append(1e3 * per_round / (verify + sum(parts.values())))
        llm.use_drafter("none")
        rates["one"].append(engine_rate(llm, 1, 100)[0])
        rates["eight"].append(engine_rate(llm, 8, 100)[0])
    median = {name: statistics.median(values) for name, values in rates.items()}
    predicted = statistics.median(predictions)
    result = {
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "pass_ms": passes,
        "pass_8_over_1": round(passes["8"] / passes["1"], 3),
        "pass_16_over_1": round(passes["16"] / passes["1"], 3),
        "drafter_ms": parts,
        "mocked": {
            "lossless": False,
            "tokens_per_round": round(per_round, 3),
            "predicted_tokens_per_s": round(predicted, 1),
            "tokens_per_s": round(median["mocked"], 1),
            "achieved_share": round(median["mocked"] / predicted, 3),
        },
        "plain_tokens_per_s": {"1": round(median["one"], 1), "8": round(median["eight"], 1)},
        "batch_8_over_1": round(median["eight"] / median["one"], 2),
    }
    log.print(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
