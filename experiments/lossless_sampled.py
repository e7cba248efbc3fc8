"""Is sampled decoding drawn from the target's distribution? The mean of (NLL - entropy) must be zero at every position.

    .venv/bin/python experiments/lossless_sampled.py --prompts gsm8k.jsonl --drafters ngram,dflash=random

Samples many short completions at temperature 1, scores each token under the target by teacher forcing, and compares its
negative log-likelihood with the entropy there: for samples of the target the mean difference is 0 within 3 standard errors.
Necessary, not sufficient; the chi-square tests on small vocabularies stand beside it. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json

import torch
from lossless_greedy import drafters, log

from paceline import LLM, SamplingParams
from paceline.model.target import ForwardBatch
from paceline.prompts import read_prompts
from paceline.runlog import record_of


@torch.inference_mode()
def excess(llm: LLM, prompt: list[int], answer: list[int]) -> list[float]:
    """NLL minus entropy of each answer token under the target, by one teacher-forced pass."""
    row = llm.target.cache.allocate()
    assert row is not None
    tokens = prompt + answer
    out = llm.target.forward(ForwardBatch([row], [0], [len(tokens)], tokens))
    llm.target.cache.free(row)
    assert out.logits_TV is not None
    logprobs = out.logits_TV[len(prompt) - 1 : -1].float().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    return (-chosen - entropy).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--completions", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=6)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--drafters", default="ngram,dflash=random")
    parser.add_argument("--rule", default="auto")
    args = parser.parse_args()
    llm = LLM(args.model, drafter="none", dtype=args.dtype, rule=args.rule)
    messages = [prompt.messages for path in args.prompts for prompt in read_prompts(path, limit=32)]
    prompts = [llm.encode_chat(list(messages[index % len(messages)])) for index in range(args.completions)]
    params = [
        SamplingParams(temperature=1.0, max_tokens=args.max_tokens, seed=seed, ignore_eos=True)
        for seed in range(args.completions)
    ]
    results = []
    for name, make in drafters(llm, args.drafters.split(",")).items():
        llm.use_drafter(make())
        answers = llm.generate_ids(prompts, params)
        table = torch.tensor([excess(llm, prompt, out.token_ids) for prompt, out in zip(prompts, answers, strict=True)])
        mean, error = table.mean(0), table.std(0) / len(table) ** 0.5
        accepted = sum(out.stats.num_accepted for out in answers)
        rounds = sum(out.stats.num_rounds for out in answers)
        results.append(
            {
                "drafter": name,
                "mean_excess": [round(value, 4) for value in mean.tolist()],
                "standard_errors_off": [round(value, 2) for value in (mean / error).tolist()],
                "within_3": bool(((mean / error).abs() <= 3).all()),
                "tokens_per_round": round(1 + accepted / max(rounds, 1), 3),
            }
        )
        log.print(results[-1])
    print(json.dumps(record_of({"completions": args.completions, "rule": args.rule, "results": results})))


if __name__ == "__main__":
    main()
