"""Acceptance length of a target's own layers as its drafter, without training, by number of kept layers.

    paceline regenerate --target smollm2-135m --prompts gsm8k_train.jsonl --limit 300 --out runs/texts
    python experiments/self_drafter.py --answers runs/texts

Layers are left out one by one: each time the one without which most of the target's own greedy tokens stay the same, on
`--search` answers. Measured on `--measure` others: 1 + the leading drafts that are the target's tokens, the mean over
all positions of the answers, for the number of drafts that pays best. The speed-up is a ceiling: a draft costs the
share of the weights that it reads (kept layers and head), and nothing else does. The last row is prompt lookup, whose
drafts cost nothing. Intervals are 95%, by bootstrap over answers.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.bench.comparison import transformers_model
from paceline.hardware import this_machine
from paceline.hub import resolve
from paceline.report.statistics import bootstrap, ratio_of_sums
from paceline.report.tables import Column, Table
from paceline.runs.folder import write_results
from paceline.train.documents.dataset import Document, read_corpus

MOST_DRAFTS = 8


@torch.inference_mode()
def is_right(model: Any, documents: list[Document]) -> list[NDArray[np.bool_]]:
    """Returns for each answer a flag per position after the first: is the model's likeliest token the text's?"""
    return [
        (model(torch.from_numpy(each.tokens[None].astype(np.int64))).logits[0, each.answer_start : -1].argmax(-1))
        .eq(torch.from_numpy(each.tokens[each.answer_start + 1 :].astype(np.int64)))
        .numpy()
        for each in documents
    ]


def lookups(documents: list[Document], longest: int = 3) -> list[list[int]]:
    """Returns for each position of each answer the number of right drafts: the tokens that followed the newest earlier
    place of the last three, two or one tokens."""
    lengths = []
    for each in documents:
        tokens, row = each.tokens.tolist(), list[int]()
        for end in range(each.answer_start + 1, len(tokens)):
            row.append(0)
            for size in range(longest, 0, -1):
                starts = (
                    at for at in range(end - size - 1, -1, -1) if tokens[at : at + size] == tokens[end - size : end]
                )
                if (place := next(starts, None)) is not None:
                    drafts = tokens[place + size : min(place + size + MOST_DRAFTS, end)]
                    row[-1] = leading([one == other for one, other in zip(drafts, tokens[end:], strict=False)])
                    break
        lengths.append(row)
    return lengths


def leading(right: list[bool] | NDArray[np.bool_]) -> int:
    return next((place for place, each in enumerate(right) if not each), len(right))


def runs_of(right: list[NDArray[np.bool_]]) -> list[list[int]]:
    """Returns for each position the number of drafts that are right from there on, at most `MOST_DRAFTS`."""
    return [[leading(each[at : at + MOST_DRAFTS]) for at in range(len(each))] for each in right]


def figures(name: str, lengths: list[list[int]], cost: float) -> dict[str, Any]:
    """The number of drafts with the best ceiling, its acceptance length and interval, and that ceiling."""
    best = dict[str, Any]()
    for drafts in range(1, MOST_DRAFTS + 1):
        sums = np.array([sum(1 + min(each, drafts) for each in row) for row in lengths], dtype=np.float64)
        counts = np.array([len(row) for row in lengths])
        length, ceiling = sums.sum() / counts.sum(), sums.sum() / counts.sum() / (1 + drafts * cost)
        if not best or ceiling > best["ceiling"]:
            interval = bootstrap([*zip(sums, counts, strict=True)], ratio_of_sums)
            best = {"drafts": drafts, "length": length, "interval": interval, "ceiling": ceiling}
    return {"name": name, "cost": cost, **best}


def search(model: Any, documents: list[Document], measured: list[Document]) -> list[dict[str, Any]]:
    """Leaves layers out one by one, down to a tenth, and measures at every step."""
    layers, head = list(model.model.layers), model.lm_head.weight.numel()
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    kept, rows = list(range(len(layers))), list[dict[str, Any]]()
    while len(kept) > max(1, len(layers) // 10):
        began, shares = time.monotonic(), dict[int, float]()
        for out in kept:
            model.model.layers = torch.nn.ModuleList(layers[each] for each in kept if each != out)
            shares[out] = float(np.concatenate(is_right(model, documents)).mean())
        kept.remove(max(shares, key=lambda each: shares[each]))
        model.model.layers = torch.nn.ModuleList(layers[each] for each in kept)
        cost = (sum(sizes[each] for each in kept) + head) / (sum(sizes) + head)
        rows.append(figures(f"{len(kept)} layers", runs_of(is_right(model, measured)), cost) | {"kept": list(kept)})
        print(f"{rows[-1]}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="run folder of paceline regenerate, greedy answers")
    parser.add_argument("--target", default="smollm2-135m", help="the model that wrote the answers")
    parser.add_argument("--search", type=int, default=8, help="answers by which layers are left out")
    parser.add_argument("--measure", type=int, default=60, help="answers that are measured")
    parser.add_argument("--out", type=Path, default=Path("runs/self-drafter.json"))
    args = parser.parse_args()
    documents = read_corpus([args.answers / "answers"], 512).train
    if len(documents) < args.search + args.measure:
        parser.error(f"{args.answers} has {len(documents)} answers, not {args.search + args.measure}")
    measured = list(documents[args.search : args.search + args.measure])
    model = transformers_model(resolve(args.target), torch.float32)
    # With its cache Transformers looks for the cache of a layer that is left out.
    model.config.use_cache = False
    rows = search(model, list(documents[: args.search]), measured)
    rows.append(figures("prompt lookup", lookups(measured), 0.0))
    columns = (
        Column("drafter", lambda row: row["name"]),
        Column("a draft costs", lambda row: row["cost"], "{:.2f}", "right"),
        Column("drafts", lambda row: row["drafts"], "{}", "right"),
        Column("acceptance length", lambda row: "{:.2f} [{:.2f}, {:.2f}]".format(row["length"], *row["interval"])),
        Column("speed-up, at most", lambda row: row["ceiling"], "{:.2f}", "right"),
    )
    Table(columns, rows).show(stderr=False)
    about = {"target": args.target, "answers": args.measure, "machine": this_machine("cpu")}
    write_results(args.out, about | {"rows": rows})


if __name__ == "__main__":
    main()
