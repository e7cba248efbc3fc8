"""Every drafter against no drafter, in turns: is speculation ever slower than plain decoding?

    python experiments/never_below.py --prompts gsm8k_test.jsonl experiments/prompts_edit.jsonl

One LLM, one engine a drafter over the same weights, the planner choosing. In every turn each drafter and plain decoding answer
the same prompts, in an order that changes; a ratio is of one turn. The table has the median of the ratios, their range, and the
share of rounds by the source of their drafts. `noisy` is the default drafter with noise in its weights, which drafts as one
does that is half trained.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import torch

from paceline import LLM, SamplingParams
from paceline.draft.base import Drafter
from paceline.draft.dflash import DFlashDrafter
from paceline.engine.engine import Engine
from paceline.prompts import read_prompts
from paceline.runlog import record_of

Setting = tuple[str, int, float]
"""Prompt file, batch, temperature."""


def noisy(drafter: Drafter, share: float) -> Drafter:
    """A copy whose weights have noise of so many of their own standard deviations."""
    assert isinstance(drafter, DFlashDrafter), "noisy is made of a DFlash drafter"
    generator = torch.Generator().manual_seed(0)
    state = {
        name: weight + (share * weight.float().std() * torch.randn(weight.shape, generator=generator)).to(weight.dtype)
        if weight.ndim == 2
        else weight
        for name, weight in drafter.network.state_dict().items()
    }
    network = type(drafter.network).of(drafter.config, state)
    return DFlashDrafter(network, draft_ids=drafter.draft_ids)


def timed(
    engine: Engine, prompts: list[list[int]], batch: int, temperature: float, max_tokens: int
) -> tuple[float, Counter[str]]:
    """Tokens per second after the prompts were read, batch after batch; rounds by source."""
    tokens, seconds, sources = 0, 0.0, Counter[str]()
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
    for begin in range(0, len(prompts), batch):
        for prompt in prompts[begin : begin + batch]:
            engine.add(prompt, params)
        while engine.scheduler.waiting or engine.scheduler.prefilling:
            engine.step()
        running = list(engine.scheduler.running)
        before, began = sum(seq.num_output for seq in running), time.perf_counter()
        while engine.has_work:
            engine.step()
        seconds += time.perf_counter() - began
        tokens += sum(seq.num_output for seq in running) - before
        sources.update(one.source for seq in running for one in seq.rounds)
    return tokens / seconds, sources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--limit", type=int, default=8, help="prompts of each file")
    parser.add_argument("--drafters", default="default,ngram,random-dflash,noisy", help="comma-separated; folders too")
    parser.add_argument("--noise", type=float, default=0.5)
    parser.add_argument("--batch", default="1,2,4,8")
    parser.add_argument("--temperature", default="0,1")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    batches, temperatures = [int(each) for each in args.batch.split(",")], [float(each) for each in args.temperature.split(",")]
    llm = LLM(args.model, drafter="none", dtype=args.dtype, max_batch=max(batches), max_len=1024)
    drafters: dict[str, Drafter] = {"none": llm.drafter}
    for name in args.drafters.split(","):
        drafters[name] = noisy(llm.make_drafter("default"), args.noise) if name == "noisy" else llm.make_drafter(name)
    sets = {
        file: [llm.encode_chat(prompt.messages) for prompt in read_prompts(file)[args.skip : args.skip + args.limit]]
        for file in args.prompts
    }
    speeds: dict[tuple[Setting, str], list[float]] = {}
    sources: dict[tuple[Setting, str], Counter[str]] = {}
    settings = list(itertools.product(args.prompts, batches, temperatures))
    engines = {name: llm.new_engine(drafter) for name, drafter in drafters.items()}
    for turn, setting in itertools.product(range(-1, args.repeat), settings):
        file, batch, temperature = setting
        names = random.Random(turn).sample(list(engines), len(engines))
        for name in names:
            engine = engines[name]
            llm.target.set_taps(engine.drafter.tap_layers)
            chosen = sets[file][: batch if turn < 0 else None]
            speed, by_source = timed(engine, chosen, batch, temperature, args.max_tokens if turn >= 0 else 32)
            if turn >= 0:
                speeds.setdefault((setting, name), []).append(speed)
                sources.setdefault((setting, name), Counter()).update(by_source)
        print(f"turn {turn}: {file} batch {batch} temperature {temperature}", end="\r", flush=True)
    results = []
    print("\n| prompts | batch | temperature | drafter | over none | range | rounds by source |\n|---|---|---|---|---|---|---|")
    for setting, name in itertools.product(settings, drafters):
        if name == "none":
            continue
        ratios = [one / plain for one, plain in zip(speeds[setting, name], speeds[setting, "none"], strict=True)]
        total = sources[setting, name].total()
        shares = {source: round(count / total, 3) for source, count in sources[setting, name].most_common()}
        file, batch, temperature = setting
        results.append(
            {"prompts": Path(file).name, "batch": batch, "temperature": temperature, "drafter": name, "ratios": ratios}
            | {"median": statistics.median(ratios), "sources": shares, "tokens_per_s": speeds[setting, name]}
        )
        told = ", ".join(f"{source} {share:.0%}" for source, share in shares.items())
        print(
            f"| {Path(file).stem} | {batch} | {temperature:g} | {name} | {statistics.median(ratios):.2f} | "
            f"{min(ratios):.2f} to {max(ratios):.2f} | {told} |"
        )
    least = min(results, key=lambda each: each["median"])
    line = {"least_median": least["median"], "least": [least[key] for key in ("prompts", "batch", "temperature", "drafter")]}
    made = record_of({"dtype": llm.config.dtype, "results": results})
    if args.out:
        Path(args.out).write_text(json.dumps(made | line, indent=1))
    print(json.dumps(line))


if __name__ == "__main__":
    main()
