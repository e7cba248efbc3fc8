"""Does a seed give the same text alone and in a batch of eight, and the same as plain decoding?

    .venv/bin/python experiments/seeds.py --prompts gsm8k.jsonl

Temperature 0.8, top-p 0.95, float32. With certain drafts (ngram) the text is also plain decoding's; with sampled drafts only
the distribution is. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json

from lossless_greedy import drafters, log

from paceline import LLM, SamplingParams
from paceline.prompts import read_prompts
from paceline.runlog import record_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    llm = LLM(args.model, drafter="none", dtype="float32", max_batch=8)
    prompts = [llm.encode_chat(list(prompt.messages)) for prompt in read_prompts(args.prompts, limit=8)]
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=100 + index, max_tokens=args.max_tokens)
        for index in range(len(prompts))
    ]
    plain: list[list[int]] = []
    results = []
    for name, make in drafters(llm, []).items():
        llm.use_drafter(make())
        together = [out.token_ids for out in llm.generate_ids(prompts, params)]
        alone = [llm.generate_ids([ids], [own])[0].token_ids for ids, own in zip(prompts, params, strict=True)]
        plain = plain or together
        same = sum(one == other for one, other in zip(together, alone, strict=True))
        as_plain = sum(one == other for one, other in zip(together, plain, strict=True))
        results.append({"drafter": name, "prompts": len(prompts), "alone_as_in_batch": same, "as_plain": as_plain})
        log.print(results[-1])
    print(json.dumps(record_of({"results": results})))


if __name__ == "__main__":
    main()
