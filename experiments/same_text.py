"""Does a model in blocks say the same on every instruction set? Greedy answers to the same prompts, compared by token.

    python experiments/same_text.py --prompts gsm8k_test.jsonl --limit 100

Runs under every instruction set that this processor has, and under those it can emulate (matrix tiles, AVX-VNNI); `portable`
keeps its blocks here, which `--weight-format auto` expands. Last line: JSON; the exit status is 1 where an answer differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.model import native_lib
from paceline.prompts import read_prompts
from paceline.runlog import record_of


def answers_under(isa: str, args: argparse.Namespace) -> list[list[int]]:
    native_lib.use(isa)
    llm = LLM(args.model, drafter=args.drafter, dtype="bfloat16", weight_format="blocks", max_batch=args.batch, max_len=2048)
    prompts = [llm.encode_chat(each.messages) for file in args.prompts for each in read_prompts(file)[: args.limit]]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    return [answer.token_ids for answer in llm.generate_ids(prompts, params)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=100, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--isas", default="", help="comma-separated; all when empty")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    isas = args.isas.split(",") if args.isas else native_lib.require().pn_available().decode().split(",")
    first: list[list[int]] = []
    results: list[dict[str, Any]] = []
    for isa in isas:
        began = time.perf_counter()
        answers = answers_under(isa, args)
        first = first or answers
        different = [place for place, (one, other) in enumerate(zip(answers, first, strict=True)) if one != other]
        tokens = sum(map(len, answers))
        results.append({"isa": isa, "prompts": len(answers), "tokens": tokens, "different": different})
        print(f"{isa}: {len(answers)} prompts, {tokens} tokens, {len(different)} differ ({time.perf_counter() - began:.0f} s)")
    record = record_of({"model": args.model, "drafter": args.drafter, "compared_with": isas[0], "results": results})
    if args.out:
        args.out.write_text(json.dumps(record, indent=1))
    print(json.dumps(record))
    sys.exit(any(result["different"] for result in results))


if __name__ == "__main__":
    main()
