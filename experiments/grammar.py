"""Do answers that keep to a schema stay the same with drafts? All must parse, fit, and equal constrained plain decoding.

    .venv/bin/python experiments/grammar.py --prompts gsm8k.jsonl humaneval.jsonl mt_bench.jsonl --answers 200
    .venv/bin/python experiments/grammar.py --prompts gsm8k.jsonl --answers 200 --drafters default --plan tree:16 --beside 50

Prompts and schemas take turns; requests with different schemas run in one batch. An answer fails that is cut off, is no JSON,
breaks its schema (checked here, not by the grammar library), or has another token than without a drafter. One failure makes
the script exit with 1. With --plan tree:N rows without a grammar check trees; `--beside` puts so many such requests among the
others, in the same batches, and their tokens too must be those without a drafter. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from itertools import cycle
from typing import Any

from lossless_greedy import drafters, log

from paceline import LLM, SamplingParams
from paceline.engine.completion import Completion
from paceline.prompts import read_prompts
from paceline.runlog import record_of
from paceline.types import GrammarSpec


def an_object(**properties: Any) -> dict[str, Any]:
    """All properties required, no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def words(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


SCHEMAS = {
    "verdict": an_object(answer=words(40), is_certain={"type": "boolean"}),
    "number": an_object(
        steps={"type": "array", "items": words(24), "maxItems": 2}, result={"type": "integer", "maximum": 10**6, "minimum": 0}
    ),
    "ticket": an_object(
        customer_name={"type": "string", "pattern": "^[A-Z][a-z]{1,11}$"},
        priority={"enum": ["low", "normal", "high", "urgent"]},
        affected_product=words(20),
    ),
    "tree": an_object(
        title=words(20), parent={"anyOf": [{"type": "null"}, an_object(title=words(20), depth={"enum": [1, 2, 3]})]}
    ),
    "rows": {"type": "array", "items": an_object(id={"enum": [1, 2, 3]}, label=words(12)), "minItems": 1, "maxItems": 3},
}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a parsed answer is what the schema says, for the keywords used above."""
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"] and not isinstance(value, bool)
    if schema["type"] == "object":
        named = isinstance(value, dict) and set(value) == set(schema["properties"])
        return named and all(fits(value[name], each) for name, each in schema["properties"].items())
    if schema["type"] == "array":
        counted = isinstance(value, list) and schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
        return counted and all(fits(item, schema["items"]) for item in value)
    if schema["type"] == "string":
        return (
            isinstance(value, str)
            and len(value) <= schema.get("maxLength", len(value))
            and bool(re.search(schema.get("pattern", ""), value))
        )
    if schema["type"] == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    return value is None if schema["type"] == "null" else isinstance(value, bool)


def is_right(answer: Completion, schema: dict[str, Any] | None) -> bool:
    if schema is None:
        return True
    try:
        return answer.finish_reason == "stop" and fits(json.loads(answer.text), schema)
    except json.JSONDecodeError:
        return False


def requests(llm: LLM, args: argparse.Namespace) -> tuple[list[list[int]], list[SamplingParams], list[dict[str, Any] | None]]:
    """Prompts of the files in turn, each with the next schema; among them, evenly, those that have none."""
    share = -(-args.answers // len(args.prompts))
    conversations = [prompt.messages for path in args.prompts for prompt in read_prompts(path, limit=share)]
    prompts, params = list[list[int]](), list[SamplingParams]()
    schemas: list[dict[str, Any] | None] = []
    for index, schema in zip(range(args.answers), cycle(SCHEMAS.values()), strict=False):
        *before, last = conversations[index % len(conversations)]
        asked = f"{last['content']}\n\nAnswer with JSON of this schema: {json.dumps(schema)}"
        prompts.append(llm.encode_chat([*before, {**last, "content": asked}]))
        grammar = GrammarSpec("json_schema", json.dumps(schema))
        sampled = {"temperature": args.temperature, "seed": index}
        params.append(SamplingParams(max_tokens=args.max_tokens, grammar=grammar, **sampled))
        schemas.append(schema)
    for number in range(args.beside):
        place = (number + 1) * args.answers // args.beside + number
        prompts.insert(place, llm.encode_chat(list(conversations[number % len(conversations)])))
        sampled = {"temperature": args.temperature, "seed": args.answers + number}
        params.insert(place, SamplingParams(max_tokens=args.max_tokens, **sampled))
        schemas.insert(place, None)
    return prompts, params, schemas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--answers", type=int, default=200, help="in all, prompts taken evenly from the files")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0 every answer has a seed of its own")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--plan", default="fixed", help="auto: the drafts that pay; fixed: all; fixed:K; tree:N")
    parser.add_argument("--beside", type=int, default=0, help="requests without a grammar among the others")
    parser.add_argument("--drafters", default="default,ngram", help="comma-separated")
    args = parser.parse_args()
    llm = LLM(args.model, drafter="none", dtype=args.dtype, max_batch=args.batch, plan=args.plan)
    prompts, params, schemas = requests(llm, args)
    plain: list[list[int]] = []
    results = []
    for name, make in {"none": lambda: "none", **drafters(llm, args.drafters.split(","))}.items():
        llm.use_drafter(make())
        started = time.perf_counter()
        answers = llm.generate_ids(prompts, params)
        plain = plain or [answer.token_ids for answer in answers]
        wrong = [index for index, answer in enumerate(answers) if not is_right(answer, schemas[index])]
        different = [index for index, answer in enumerate(answers) if answer.token_ids != plain[index]]
        rounds = sum(answer.stats.num_rounds for answer in answers)
        free = [answer.stats for answer, schema in zip(answers, schemas, strict=True) if schema is None]
        results.append(
            {
                "drafter": name,
                "answers": len(answers) - len(free),
                "beside": len(free),
                "tokens_per_round_beside": round(
                    1 + sum(each.num_accepted for each in free) / max(sum(each.num_rounds for each in free), 1), 3
                ),
                "tokens": sum(len(answer.token_ids) for answer in answers),
                "wrong": wrong,
                "different": different,
                "tokens_per_round": round(1 + sum(answer.stats.num_accepted for answer in answers) / max(rounds, 1), 3),
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
        log.print(results[-1])
        for index in wrong[:5]:
            log.print(f"{index}: {answers[index].finish_reason} {answers[index].text!r}", markup=False)
    figures = {
        "dtype": args.dtype,
        "plan": args.plan,
        "temperature": args.temperature,
        "schemas": list(SCHEMAS),
        "results": results,
    }
    print(json.dumps(record_of(figures)))
    if any(result["wrong"] or result["different"] for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
