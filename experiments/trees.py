"""What chains and trees of several sizes keep, greedy and sampled, with one drafter and the same prompts.

    python experiments/trees.py --prompts gsm8k_test.jsonl --limit 32

Each setting checks the same number of drafts in every round (N the first N of the drafter's); the texts of all must be
the same at the same seed, or the script fails. It counts tokens a round only.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.data.prompts import read_prompts
from paceline.plan.speculate import Speculation
from paceline.report.statistics import Rounds
from paceline.runs.folder import write_results

SPECULATE = "0,3,5,full,tree:4,tree:8,tree:12,tree:16,tree:24,tree:32,tree:64,tree:128"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--skip", type=int, default=0, help="prompts of each file to leave out first")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--speculate", default=SPECULATE)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", default="", help="a JSON file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    llm = LLM(args.model, drafter=args.drafter, dtype=args.dtype, max_batch=args.batch, max_len=1024, speculate="full")
    results: list[dict[str, Any]] = []
    for file in args.prompts:
        prompts = [llm.encode_chat(each.messages) for each in read_prompts(file)[args.skip : args.skip + args.limit]]
        for temperature in map(float, args.temperatures.split(",")):
            expected: list[list[int]] | None = None
            for speculate in args.speculate.split(","):
                llm.engine.planner = Speculation.of(speculate).planner()
                params = [
                    SamplingParams(temperature=temperature, seed=seed, max_tokens=args.max_tokens)
                    for seed in range(len(prompts))
                ]
                answers = llm.generate_ids(prompts, params)
                texts = [answer.token_ids for answer in answers]
                expected = expected or texts
                if texts != expected:
                    raise SystemExit(
                        f"{speculate} at temperature {temperature:g} changes the text of {file}: this must not happen"
                    )
                rounds = Rounds.sum(answer.stats for answer in answers)
                figures = {"tokens_per_round": rounds.tokens_per_round, "num_rounds": rounds.num_rounds}
                results.append({"prompts": file, "temperature": temperature, "speculate": speculate, **figures})
                print(
                    f"{file} temperature {temperature:g} {speculate}: {rounds.tokens_per_round:.3f} tokens a round",
                    file=sys.stderr,
                )
    if args.out:
        write_results(Path(args.out), {"what": "chains and trees", "drafter": args.drafter, "results": results})
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
