"""Give a drafter the tokens that a target's answers use most: it then drafts among these alone, with a head of fewer
rows.

    python recipes/draft_vocabulary.py --answers runs/x/answers --drafter runs/x/drafter --size 12288

Reads the Parquet shards of `paceline regenerate` and writes draft_ids.safetensors into the drafter's folder. The text
does not change, whatever is left out: the target's own token stands wherever no draft does. What it costs in tokens per
round and brings in time is measured by `paceline evaluate` and `paceline bench decode`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from paceline.data.answers import AnswerShards
from paceline.draft.formats.family import read_drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--answers", type=Path, required=True, action="append", help="folder of answers; may be repeated"
    )
    parser.add_argument("--drafter", type=Path, required=True, help="checkpoint to add the tokens to")
    parser.add_argument("--size", type=int, default=12288, help="how many tokens")
    args = parser.parse_args()
    drafter = read_drafter(args.drafter)
    if drafter.config.has_own_width:
        parser.error(f"{args.drafter} has another width than its target: its head has rows for its own tokens alone")
    counts = torch.zeros(drafter.config.shape.vocab_size, dtype=torch.long)
    for folder in args.answers:
        for answer in AnswerShards(folder):
            counts += torch.bincount(torch.tensor(answer.answer_ids), minlength=len(counts))
    if not 2 <= args.size <= len(counts):
        parser.error(f"--size must be between 2 and the vocabulary's {len(counts)}")
    order = counts.argsort(descending=True, stable=True)
    drafter.draft_ids = order[: args.size].sort().values
    drafter.save(args.drafter)
    covered = counts[drafter.draft_ids].sum() / counts.sum()
    print(f"{args.size} of {len(counts)} tokens, {covered:.2%} of {counts.sum():,} answered ones: {args.drafter}")


if __name__ == "__main__":
    main()
