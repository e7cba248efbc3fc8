"""Give a drafter the tokens that a target's answers use most: it then drafts among these alone, with a head of fewer
rows.

    python recipes/draft_vocabulary.py --answers runs/x/answers --drafter runs/x/drafter --size 12288
    python recipes/draft_vocabulary.py --answers runs/x/answers --drafter default --out runs/x/wider --first 16000

Reads the Parquet shards of `paceline regenerate` and writes draft_ids.safetensors into the drafter's folder. The text
does not change, whatever is left out: the target's own token stands wherever no draft does. What it costs in tokens per
round and brings in time is measured by `paceline evaluate` and `paceline bench decode`. With --out the drafter keeps
its tokens, and gets those that the answers use more than once and the first ones of the vocabulary, which are its most
frequent; a folder in 8 bits is written in 16, to be trained further.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from paceline.data.answers import AnswerShards
from paceline.draft.formats.family import read_drafter
from paceline.draft.registry import folder_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--answers", type=Path, required=True, action="append", help="folder of answers; may be repeated"
    )
    parser.add_argument("--drafter", required=True, help="checkpoint to add the tokens to; default: smollm2-135m's")
    parser.add_argument("--size", type=int, default=12288, help="how many tokens")
    parser.add_argument("--out", type=Path, help="write a drafter with more tokens here")
    parser.add_argument("--first", type=int, default=0, help="with --out: also this many first tokens")
    args = parser.parse_args()
    drafter = read_drafter(folder_of(args.drafter, "smollm2-135m"))
    if drafter.config.has_own_width:
        parser.error(f"{args.drafter} has another width than its target: its head has rows for its own tokens alone")
    counts = torch.zeros(drafter.config.shape.vocab_size, dtype=torch.long)
    for folder in args.answers:
        for answer in AnswerShards(folder):
            counts += torch.bincount(torch.tensor(answer.answer_ids), minlength=len(counts))
    if not 2 <= args.size <= len(counts):
        parser.error(f"--size must be between 2 and the vocabulary's {len(counts)}")
    if args.out:
        is_kept = counts > 1
        is_kept[: args.first] = True
        is_kept[slice(None) if drafter.draft_ids is None else drafter.draft_ids] = True
        drafter.draft_ids = is_kept.nonzero()[:, 0]
    else:
        drafter.draft_ids = counts.argsort(descending=True, stable=True)[: args.size].sort().values
    out = args.out or Path(args.drafter)
    drafter.save(out)
    covered = counts[drafter.draft_ids].sum() / counts.sum()
    print(f"{len(drafter.draft_ids)} of {len(counts)} tokens, {covered:.2%} of {counts.sum():,} answered ones: {out}")


if __name__ == "__main__":
    main()
