"""Measures answers to edits with a predicted answer (`prediction` of a request) against the same without one.

    python experiments/predicted_outputs.py --turns 5 --out experiments/results/predicted_outputs_cpu_2026-11-28.json

Each prompt is answered without a prediction, and then with two: the plain answer with a tenth of its lines or clauses
replaced ("nine tenths"), and another prompt's answer ("wrong"). The variants alternate in every turn, each with an
engine and planner of its own; the first turn only warms up. All answers must be the same, or the script fails. Prints
the acceptance length, the ratio of the decode time without a prediction to that with it (median and range over turns),
and the tokens drafted from predictions.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.data.prompts import read_prompts
from paceline.engine.engine import Engine
from paceline.report.statistics import Rounds
from paceline.runs.folder import write_results
from paceline.types import PREDICTION, Round

OTHERS = ("some", "other", "words", "are", "written", "here", "instead", "of", "those")
NONE, VARIANTS = "none", "none,nine tenths,wrong"


def parts_of(text: str) -> list[str]:
    """The lines of a text; of a paragraph its clauses."""
    lines = text.splitlines(keepends=True)
    return lines if len(lines) >= 5 else re.findall(r"[^,.!?\n]*[,.!?\n]+\s*|[^,.!?\n]+$", text)


def replaced(parts: list[str], seed: int) -> str:
    """The text of these parts, a tenth of them (at least one) replaced by as many other words."""
    draw = random.Random(seed)
    for place in draw.sample(range(len(parts)), max(1, round(len(parts) / 10))):
        body = parts[place].rstrip()
        indent, end = body[: len(body) - len(body.lstrip())], parts[place][len(body) :]
        parts[place] = indent + " ".join(draw.choices(OTHERS, k=len(body.split()))) + end
    return "".join(parts)


def predictions_of(answers: list[str]) -> dict[str, list[str]]:
    """Variant -> the prediction for each prompt, made from the plain answers."""
    return {
        NONE: [""] * len(answers),
        "nine tenths": [replaced(parts_of(text), seed) for seed, text in enumerate(answers)],
        "wrong": [*answers[1:], answers[0]],
    }


class Measured:
    """Answers of one variant: rounds of the last turn, and decode seconds of each turn."""

    def __init__(self, llm: LLM, drafter: str) -> None:
        self.engine: Engine = llm.new_engine(llm.make_drafter(drafter))
        self.seconds: list[float] = []
        self.rounds: list[Round] = []

    def figures(self, plain: Measured) -> dict[str, Any]:
        ratios = [own / each for own, each in zip(plain.seconds[1:], self.seconds[1:], strict=True)]
        predicted = Rounds.counted(one for one in self.rounds if one.source == PREDICTION)
        return {
            "tokens_per_round": Rounds.counted(self.rounds).tokens_per_round,
            "num_rounds": len(self.rounds),
            "num_drafted": sum(one.num_drafted for one in self.rounds),
            "sources": dict(Counter(one.source for one in self.rounds)),
            "speed_ratios": ratios,
            "accepted_prediction_tokens": predicted.num_accepted,
            "rejected_prediction_tokens": predicted.num_drafted - predicted.num_accepted,
        }


def measure(llm: LLM, args: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Measured]:
    """Answers all prompts in `args.turns` turns after one to warm up, the variants of a prompt in rotated order."""
    prompts = [llm.encode_chat(each.messages) for each in read_prompts(args.prompts)[: args.limit]]
    plain = llm.generate_ids(prompts, SamplingParams(max_tokens=args.max_tokens))
    predictions = predictions_of([answer.text for answer in plain])
    variants = {name: Measured(llm, args.drafter) for name in args.variants.split(",")}
    for turn in range(1 + args.turns):
        for measured in variants.values():
            measured.seconds.append(0.0)
            measured.rounds = []
        for place, prompt in enumerate(prompts):
            names = list(variants)
            start = (turn + place) % len(names)
            for name in names[start:] + names[:start]:
                llm.engine = variants[name].engine
                params = SamplingParams(max_tokens=args.max_tokens, prediction=predictions[name][place])
                seq = [chunk.sequence for chunk in llm.stream(prompt, params)][-1]
                if seq.output_ids != plain[place].token_ids:
                    raise SystemExit(f"prompt {place}, {name}: the prediction changed the answer: this must not happen")
                variants[name].seconds[-1] += seq.timings.token_s[-1] - seq.timings.first_token_s
                variants[name].rounds += seq.rounds
        progress(f"turn {turn}: " + ", ".join(f"{name} {each.seconds[-1]:.2f} s" for name, each in variants.items()))
    return variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--prompts", default=str(Path(__file__).with_name("prompts_edit.jsonl")))
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--out", default="", help="a JSON file")
    args = parser.parse_args()
    llm = LLM(args.model, drafter=args.drafter, max_batch=1, max_len=1024)
    variants = measure(llm, args, lambda line: print(line, flush=True))
    results = {name: each.figures(variants[NONE]) for name, each in variants.items()}
    print(
        "| prediction | acceptance length | speed, none is 1 | range | accepted | rejected |\n|---|---|---|---|---|---|"
    )
    for name, own in results.items():
        ratios, counts = own["speed_ratios"], (own["accepted_prediction_tokens"], own["rejected_prediction_tokens"])
        spread = f"{statistics.median(ratios):.2f}x | {min(ratios):.2f} to {max(ratios):.2f}"
        print(f"| {name} | {own['tokens_per_round']:.2f} | {spread} | {counts[0]} | {counts[1]} |")
    if args.out:
        write_results(Path(args.out), {"what": "edits with predicted outputs", "model": args.model, "results": results})
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
