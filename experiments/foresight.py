"""Fits the two numbers by which a DFlash 2 drafter guesses the target's draws (paceline/draft/foresight.py).

    python experiments/foresight.py --prompts gsm8k_train.jsonl --skip 7000 --limit 24

Answers are written at temperature 1 with certain drafts; at each slot of a round, behind the target's own tokens, it is noted
what the drafter said of its candidates, which numbers they raced with, and which one the target drew. Scale and spread are
those with the largest mean log-likelihood. Give prompts that are no test, and none that the drafter learned from. The pair goes
into the drafter's config.json: "paceline": {"foresight": {"scale": 0.8, "spread": 1.4}}.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.draft.dflash2_selector import WalkedReading, log_softmax
from paceline.prompts import read_prompts
from paceline.rng import Noise
from paceline.types import Sequence

SCALES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)
SPREADS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)


class Slot(NamedTuple):
    """What was known of one slot, and what became of it."""

    logprobs_M: list[float]
    times_M: list[float]
    said: int
    """Which candidate the target drew."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="default", help="a DFlash 2 drafter")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=128)
    return parser.parse_args()


def collected(args: argparse.Namespace) -> tuple[list[Slot], int]:
    """Slots whose token is among the candidates, and how many others there were."""
    rounds: list[tuple[Sequence, int, list[list[list[float]]], list[list[int]]]] = []
    told = WalkedReading.candidates

    def noting(reading: WalkedReading, slot: int, limit: int, seq: Sequence, *rest: Any) -> Any:
        rounds.append((seq, len(seq.tokens), reading._scores_of(slot)[:limit], reading._tokens_BKM[slot]))
        return told(reading, slot, limit, seq, *rest)

    WalkedReading.candidates = noting
    llm = LLM(args.model, drafter=args.drafter, max_batch=8, max_len=1024, plan="fixed")
    prompts = [llm.encode_chat(each.messages) for each in read_prompts(args.prompts)[args.skip : args.skip + args.limit]]
    llm.generate_ids(prompts, SamplingParams(temperature=1.0, max_tokens=args.max_tokens))
    slots, missed = list[Slot](), 0
    for seq, first, scores_KPM, tokens_KM in rounds:
        before = 0
        for position, scores_PM, tokens_M in zip(range(first, len(seq.tokens)), scores_KPM, tokens_KM, strict=False):
            if seq.tokens[position] not in tokens_M:
                missed += 1
                break
            said, times_M = tokens_M.index(seq.tokens[position]), Noise(seq.seed, position).exponentials(tokens_M)
            slots.append(Slot(log_softmax(scores_PM[before], 1.0), times_M, said))
            before = said
    return slots, missed


def fitted(slots: list[Slot]) -> dict[str, float]:
    """The best of the grid, and how often each way of ranking has the target's token first and among the first four."""
    logprobs_SM = torch.tensor([each.logprobs_M for each in slots], dtype=torch.float64)
    gumbel_SM = -torch.tensor([each.times_M for each in slots], dtype=torch.float64).log()
    said_S1 = torch.tensor([each.said for each in slots])[:, None]
    found = []
    for scale in SCALES:
        for spread in SPREADS:
            chances_SM = torch.log_softmax((scale * logprobs_SM + gumbel_SM) / spread, dim=-1)
            found.append((float(chances_SM.gather(1, said_S1).mean()), scale, spread))
    best, scale, spread = max(found)
    ranked = {"likeliest": logprobs_SM, "guessed": scale * logprobs_SM + gumbel_SM}
    return {
        "scale": scale,
        "spread": spread,
        "log_likelihood": best,
        **{f"{name}, first {count}": among(scores, said_S1, count) for name, scores in ranked.items() for count in (1, 4)},
    }


def among(scores_SM: Tensor, said_S1: Tensor, count: int) -> float:
    """Share of slots whose token is among the `count` with the largest scores."""
    return float((scores_SM.topk(count, dim=-1).indices == said_S1).any(-1).double().mean())


def main() -> None:
    slots, missed = collected(arguments())
    print(json.dumps({"slots": len(slots), "not among the candidates": missed, **fitted(slots)}, indent=1))


if __name__ == "__main__":
    main()
