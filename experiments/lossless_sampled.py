"""Is sampled decoding drawn from the target's distribution? The mean of (NLL - entropy) must be zero at every position.

    .venv/bin/python experiments/lossless_sampled.py --prompts gsm8k.jsonl --drafters ngram,dflash=random
    .venv/bin/python experiments/lossless_sampled.py --prompts gsm8k.jsonl --drafters default \\
        --speculate tree:16 --no-seed

Samples many short completions at temperature 1, scores each token under the target by teacher forcing, and compares its
negative log-likelihood with the entropy there: for samples of the target the mean difference is 0 within 3 standard
errors.

And a chi-square test at each position: put the target's tokens side by side, the likeliest first, each as wide as it is
likely; a random point within the drawn token's part is then equally likely anywhere between 0 and 1, whatever the
context. The test counts points in 20 equal parts. `--speculate tree:N` checks trees; `--top-p`, `--top-k`, `--min-p`
and `--temperature` are applied to the target that is tested against too. The script exits with 1 if a mean is more than
4 standard errors off, or a p-value below 1e-5. Necessary, not sufficient: tests/engine has the proofs on small
vocabularies. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter

import torch
from lossless_greedy import drafters, log
from scipy.stats import chisquare

from paceline import LLM, SamplingParams
from paceline.data.prompts import read_prompts
from paceline.model.sampling.logits import target_probs
from paceline.model.teacher_forcing import ForcedReader
from paceline.report.statistics import Rounds
from paceline.runs.folder import record_of

NUM_PARTS = 20
LEAST_P, MOST_ERRORS = 1e-5, 4.0


@torch.inference_mode()
def scored(
    llm: LLM, prompt: list[int], answer: list[int], params: SamplingParams, luck: random.Random
) -> tuple[list[float], list[float]]:
    """For each answer token, by one teacher-forced pass: NLL minus entropy under the target's distribution as the
    request has it, and its point between 0 and 1."""
    reader = ForcedReader(llm.target)
    try:
        parts = [part_TV.clone() for _, part_TV in reader.logits(prompt + answer, len(prompt))]  # valid until the next
    finally:
        reader.close()
    logits_TV = torch.cat(parts)
    probs = target_probs(logits_TV.float(), params).double()
    probs = probs / probs.sum(-1, keepdim=True)
    entropy = torch.special.entr(probs).sum(-1)
    chosen = probs.gather(-1, torch.tensor(answer, device=probs.device)[:, None])
    likelier = torch.where(probs > chosen, probs, 0.0).sum(-1)
    points = [float(before + luck.random() * own) for before, own in zip(likelier, chosen[:, 0], strict=True)]
    return (-chosen[:, 0].log() - entropy).tolist(), points


def p_value(points: list[float]) -> float:
    """p-value of a chi-square test that they are uniform between 0 and 1."""
    counts = Counter(min(int(NUM_PARTS * point), NUM_PARTS - 1) for point in points)
    return float(chisquare([counts[part] for part in range(NUM_PARTS)]).pvalue)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--completions", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=6)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--drafters", default="ngram,dflash=random")
    parser.add_argument("--rule", default="auto")
    parser.add_argument("--speculate", default="full", help="full, N, tree:N, or auto, which goes by the clock")
    parser.add_argument(
        "--no-seed", action="store_true", help="requests without a seed: drafts of a chain may then be drawn"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    args = parser.parse_args()
    llm = LLM(args.model, drafter="none", dtype=args.dtype, rule=args.rule, speculate=args.speculate)
    messages = [prompt.messages for path in args.prompts for prompt in read_prompts(path, limit=32)]
    prompts = [llm.encode_chat(list(messages[index % len(messages)])) for index in range(args.completions)]
    how = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens")}
    seeds = [None if args.no_seed else seed for seed in range(args.completions)]
    params = [SamplingParams(**how, seed=seed, ignore_eos=True) for seed in seeds]
    results = []
    for name, make in drafters(llm, args.drafters.split(",")).items():
        llm.use_drafter(make())
        answers = llm.generate_ids(prompts, params)
        luck, rows = random.Random(0), zip(prompts, answers, params, strict=True)
        pairs = [scored(llm, prompt, out.token_ids, own, luck) for prompt, out, own in rows]
        table = torch.tensor([excess for excess, _ in pairs])
        by_position = list(zip(*(points for _, points in pairs), strict=True))
        mean, error = table.mean(0), table.std(0) / len(table) ** 0.5
        results.append(
            {
                "drafter": name,
                "mean_excess": [round(value, 4) for value in mean.tolist()],
                "standard_errors_off": [round(value, 2) for value in (mean / error).tolist()],
                "within_3": bool(((mean / error).abs() <= 3).all()),
                "chi_square_p": [round(p_value(list(points)), 4) for points in by_position],
                "chi_square_p_of_all": p_value([point for points in by_position for point in points]),
                "is_right": bool(((mean / error).abs() <= MOST_ERRORS).all())
                and min(p_value(list(points)) for points in by_position) >= LEAST_P,
                "tokens_per_round": round(Rounds.sum(out.stats for out in answers).tokens_per_round, 3),
            }
        )
        log.print(results[-1])
    settings = {
        name: getattr(args, name)
        for name in ("completions", "rule", "speculate", "temperature", "top_p", "top_k", "min_p")
    }
    print(json.dumps(record_of({**settings, "has_seeds": not args.no_seed, "results": results})))
    if not all(result["is_right"] for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
