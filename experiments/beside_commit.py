"""This checkout beside an older one, each a process of its own, one stream, a prompt of each in turns.

    experiments/beside_commit.sh COMMIT --prompts gsm8k_test.jsonl      # checks the commit out and compiles it first

A ratio is tokens per second of this checkout over those of the older one, in one turn over all prompts, their reading
included. Greedy answers go on to their end, sampled ones have the same length. The table has the median of the turns and
their range; how many greedy answers are the same text is said too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from decode_vs_peers_pipe import Prompts, Worker, own_output, serve

from paceline import LLM, SamplingParams

WAYS = ("none", "default")


class Checkout:
    """The worker's end; it runs on whatever checkout PYTHONPATH names."""

    pid = os.getpid()

    def __init__(self, model: str) -> None:
        self._model, self._llms = model, dict[str, LLM]()

    def load(self, way: str) -> dict[str, Any]:
        self._llms[way] = LLM(self._model, drafter=way, max_len=2048)
        return {"dtype": self._llms[way].config.dtype}

    def run(self, way: str, prompts: Prompts, num_tokens: list[int], temperature: float = 0.0) -> dict[str, Any]:
        params = SamplingParams(temperature=temperature, max_tokens=num_tokens[0], ignore_eos=temperature > 0)
        began = time.perf_counter()
        answers = self._llms[way].generate_ids(prompts, params)
        return {"wall_s": time.perf_counter() - began, "token_ids": [answer.token_ids for answer in answers]}

    def close(self) -> None:
        pass


def measure(args: argparse.Namespace, workers: dict[str, Worker], sets: dict[str, Prompts]) -> list[dict[str, Any]]:
    """The ratios of every setting, and how many greedy answers differ."""
    luck, ratios, differ = random.Random(0), defaultdict[Any, list[float]](list), defaultdict[Any, int](int)
    settings = list(itertools.product(sets, WAYS, args.temperatures))
    for turn, (file, way, temperature) in itertools.product(range(-1, args.repeat), settings):
        rates = {name: [0, 0.0] for name in workers}
        for ids in sets[file] if turn >= 0 else sets[file][:1]:
            answers = {}
            for name in luck.sample(list(workers), len(workers)):
                done = workers[name].ask(run=way, prompts=[ids], num_tokens=[args.max_tokens], temperature=temperature)
                answers[name] = done["token_ids"]
                rates[name][0] += len(done["token_ids"][0])
                rates[name][1] += done["wall_s"]
            differ[file, way, temperature] += turn == 0 and answers["old"] != answers["new"]
        if turn >= 0:
            (new, new_s), (old, old_s) = rates["new"], rates["old"]
            ratios[file, way, temperature].append(new / new_s / (old / old_s))
        print(f"turn {turn}: {file}, {way}, temperature {temperature:g}", file=sys.stderr, flush=True)
    return [
        {"prompts": file, "drafter": way, "temperature": temperature, "ratios": found, "median": statistics.median(found)}
        | ({"answers_differ": differ[file, way, temperature]} if temperature == 0 else {})
        for (file, way, temperature), found in ratios.items()
    ]


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(folder.resolve())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="a checkout with its native library compiled")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", nargs="+")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", default="0,1")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help="be one: started by this script")
    args = parser.parse_args()
    if args.worker:
        serve(Checkout(args.model), own_output())
        return
    if not (args.old and args.prompts):
        parser.error("--old and --prompts are needed: experiments/beside_commit.sh gives the first")
    from paceline.prompts import read_prompts  # only this checkout's: the older one may have it elsewhere
    from paceline.runlog import record_of

    args.temperatures = [float(each) for each in args.temperature.split(",")]
    here = Path(__file__).resolve()
    folders = {"old": args.old, "new": here.parents[1]}
    options = ["--worker", "--model", args.model]
    workers = {name: Worker(sys.executable, here, options, environment(folder)) for name, folder in folders.items()}
    dtypes = {name: worker.ask(load=way)["about"]["dtype"] for name, worker in workers.items() for way in WAYS}
    tokenizer = LLM(args.model, drafter="none", max_len=64)
    sets = {
        Path(file).name: [tokenizer.encode_chat(each.messages) for each in read_prompts(file)[: args.limit]]
        for file in args.prompts
    }
    results = measure(args, workers, sets)
    print("| prompts | drafter | temperature | new over old | range | greedy answers that differ |\n|---|---|---|---|---|---|")
    for each in results:
        least, most, differ = min(each["ratios"]), max(each["ratios"]), each.get("answers_differ", "")
        print(
            f"| {each['prompts']} | {each['drafter']} | {each['temperature']:g} | {each['median']:.2f} | "
            f"{least:.2f} to {most:.2f} | {differ} |"
        )
    if args.out:
        made = record_of({"old": str(args.old), "dtypes": dtypes, "results": results})
        args.out.write_text(json.dumps(made, indent=1))
    for worker in workers.values():
        worker.close()


if __name__ == "__main__":
    main()
