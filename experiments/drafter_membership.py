"""Measures whether a drafter shows which texts it was trained on: its loss on trained and on held-out answers.

    python experiments/drafter_membership.py --answers runs/mine/answers --drafter runs/mine/drafter --out result.json

An attacker who has the drafter takes a text's loss, or the acceptance length on it, and calls texts with a low loss (a
long acceptance) trained. AUC is the chance that a trained text looks more like one than a held-out text does: 0.5 shows
nothing, 1 everything. `--answers` and `--max-len` must be those of the training: held-out answers are then the same.
`--heldout` gives other answers of the same kind in their place, `--drafter` several drafters, such as earlier
checkpoints. Works with DFlash drafters. Prints a table; writes JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from paceline import LLM
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.formats.family import network_of
from paceline.draft.registry import read_trained
from paceline.draft.vocabulary import Vocabulary
from paceline.errors import ConfigError
from paceline.model.target import Target
from paceline.runs.folder import record_of, write_whole
from paceline.train.documents.dataset import MAX_HELDOUT, MIN_HELDOUT, Document, read_corpus
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.learn.initial_weights import embedding_matrix, head_of
from paceline.train.learn.packs import Packer, heldout_anchors
from paceline.train.methods.selector import trainable_of

ANCHORS = 16
"""Most blocks of each answer."""
NUM_DRAWS = 1000


@torch.no_grad()
def scores(target: Target, drafter: DFlashDrafter, documents: list[Document]) -> NDArray[np.float64]:
    """Mean loss in nats of each document's drafts, and their acceptance length, [documents, 2], teacher-forced."""
    config = drafter.config
    floats = network_of(config, {name: tensor.float() for name, tensor in drafter.network.state_dict().items()})
    network = trainable_of(floats.to(target.device), config.raw)
    features = OnlineFeatures(target, documents, config.target_layer_ids, needs_final=False)
    packer = Packer(config.block_size, documents, features, target.device)
    head = head_of(target, config, drafter.draft_ids, drafter.head_VD).in_float32()
    embedding_VD = embedding_matrix(target, config, Vocabulary(drafter.draft_ids, drafter.head_VD))
    rows = []
    for chosen in heldout_anchors(documents, ANCHORS):
        pack = packer.pack([chosen])
        hidden_TD = network.hidden(pack, embedding_VD, False)
        labels_T, is_drafted_T = head.local(pack.slots.labels_AK.flatten())
        is_scored_T = is_drafted_T & pack.slots.valid_AK.flatten()
        loss = cross_entropy(head.logits(hidden_TD)[is_scored_T], labels_T[is_scored_T])
        right_AK = network.right(hidden_TD, pack, head, embedding_VD)
        rows.append((float(loss), 1.0 + float(right_AK.long().cumprod(1).sum(1).float().mean())))
    return np.array(rows)


def auc(trained_N: NDArray[np.float64], others_M: NDArray[np.float64]) -> float:
    """Chance that a value of `trained_N` is above one of `others_M`; equal values count half."""
    above_NM = (trained_N[:, None] > others_M).astype(float) + 0.5 * (trained_N[:, None] == others_M)
    return float(above_NM.mean())


def with_interval(trained_N: NDArray[np.float64], others_M: NDArray[np.float64]) -> dict[str, Any]:
    """AUC and its 95% interval over resampled trained and held-out texts."""
    draw = np.random.default_rng(0)
    drawn = [
        auc(draw.choice(trained_N, len(trained_N)), draw.choice(others_M, len(others_M))) for _ in range(NUM_DRAWS)
    ]
    return {"auc": auc(trained_N, others_M), "interval": [float(each) for each in np.quantile(drawn, (0.025, 0.975))]}


def compared(trained_N2: NDArray[np.float64], heldout_M2: NDArray[np.float64]) -> dict[str, Any]:
    """AUC by loss and by acceptance length, with the means behind it."""
    result: dict[str, Any] = {"trained": len(trained_N2), "heldout": len(heldout_M2)}
    for place, (name, sign) in enumerate((("loss", -1.0), ("acceptance_length", 1.0))):
        trained_N, others_M = (rows[:, place][np.isfinite(rows[:, place])] for rows in (trained_N2, heldout_M2))
        means = {"mean_trained": float(trained_N.mean()), "mean_heldout": float(others_M.mean())}
        result[name] = with_interval(sign * trained_N, sign * others_M) | means
    return result


def texts(options: argparse.Namespace) -> tuple[list[Document], list[Document]]:
    """Trained and held-out documents, at most `--limit` each, drawn at random."""
    corpus = read_corpus(options.answers, options.max_len, options.heldout_share, MAX_HELDOUT, MIN_HELDOUT)
    heldout = list(read_corpus(options.heldout, options.max_len, 0.0).train) if options.heldout else corpus.heldout
    known = {document.tokens.tobytes() for document in corpus.train}
    heldout = [document for document in heldout if document.tokens.tobytes() not in known]
    if not heldout:
        raise ConfigError("every held-out answer was trained on: give --heldout answers to other prompts")
    draw = random.Random(0)
    trained = draw.sample([*corpus.train], min(options.limit, len(corpus.train)))
    return trained, draw.sample(heldout, min(options.limit, len(heldout)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", type=Path, action="append", required=True)
    parser.add_argument("--answers", type=Path, action="append", required=True, help="answers of the training")
    parser.add_argument("--heldout", type=Path, action="append", default=[], help="other answers of the same kind")
    parser.add_argument("--heldout-share", type=float, default=0.02, help="that of the training")
    parser.add_argument("--max-len", type=int, default=512, help="that of the training")
    parser.add_argument("--limit", type=int, default=200, help="most answers of each group")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    trained, heldout = texts(options)
    target, results = LLM(options.model, drafter="none", max_len=options.max_len).target, {}
    for folder in options.drafter:
        drafter = read_trained(folder)
        if not isinstance(drafter, DFlashDrafter):
            raise ConfigError(f"{folder} is no DFlash drafter: give one of paceline train")
        results[str(folder)] = compared(*(scores(target, drafter, group) for group in (trained, heldout)))
    record = record_of({"model": options.model, "anchors": ANCHORS, "results": results})
    if options.out:
        write_whole(options.out, json.dumps(record, indent=1) + "\n")
    print("| drafter | trained, held out | AUC by loss | AUC by acceptance length |\n|---|---|---|---|")
    for name, result in results.items():
        shown = ["{auc:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]".format(**result[part]) for part in list(result)[2:]]
        print(f"| {name} | {result['trained']}, {result['heldout']} | {' | '.join(shown)} |")
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
