"""What two choices at the start of training bring: features in one scale, and first layers copied from the target.

    paceline regenerate --prompts questions.jsonl --limit 400 --out runs/some
    python experiments/feature_scale.py runs/some/answers --steps 300

Trains small drafters of the built-in model from the same documents with each combination and prints held-out eal on the way.
One thread; results depend on the answers given, the order between the combinations hardly.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.config import EngineConfig
from paceline.model.backends import load_target
from paceline.model.target import Target, head_weight
from paceline.train.config import DrafterShape, LoopConfig, LossConfig, OptimConfig
from paceline.train.dataset import Corpus, read_corpus
from paceline.train.features import (
    OnlineFeatures,
    ScaledFeatures,
    begin_without_mean,
    cache_features,
    measure_scale,
    train_in_scaled_units,
)
from paceline.train.loop import Trainer
from paceline.train.losses import Head
from paceline.train.packs import DFlashTrainable
from paceline.train.start import FirstNorm, network_for, scale_first_logits

MODEL = "smollm2-135m"
Start = Literal["random", "target"]
STARTS: tuple[Start, ...] = ("random", "target")


def run(target: Target, corpus: Corpus, folder: Path, given: argparse.Namespace, start: Start, is_scaled: bool) -> list[Any]:
    """(step, held-out eal, held-out loss) of one combination."""
    raw, network = network_for(target, MODEL, DrafterShape(start=start), None, 0)
    taps = network.config.target_layer_ids
    train, heldout = (
        cache_features(folder / name, OnlineFeatures(target, documents, taps, needs_final=False))
        for name, documents in (("train", corpus.train), ("heldout", corpus.heldout))
    )
    if is_scaled:
        scale_F, mean_F = measure_scale(train, corpus.train)
        train_in_scaled_units(network, scale_F)
        if start == "random":
            begin_without_mean(network, mean_F)
        train, heldout = ScaledFeatures(train, scale_F), ScaledFeatures(heldout, scale_F)
    config = LoopConfig(
        max_steps=given.steps,
        blocks_per_step=192,
        anchors=48,
        loss=LossConfig("d-pace", vocab=8192),
        optim=OptimConfig("adamw", given.lr),
        heldout_every=max(1, given.steps // 6),
        checkpoint_minutes=1e9,
    )
    embedding_VD, head = target.matrix_embed(torch.arange(target.vocab_size)).clone(), Head(head_weight(target))
    trainer = Trainer(
        DFlashTrainable(network, raw), corpus, train, embedding_VD, head, config, folder=folder / f"{start}-{is_scaled}"
    )
    trainer.heldout["heldout"] = (corpus.heldout, heldout)
    scale_first_logits(FirstNorm(network.norm.weight), head, *trainer.first_slots())
    curve: list[Any] = []

    def note(figures: dict[str, Any]) -> None:
        if "heldout" in figures:
            seen, number = figures["heldout"], figures["step"]
            curve.append((number, round(seen["eal"], 3), round(seen["loss"], 3)))
            print(
                f"{start:7} scaled={is_scaled!s:5} step {number:4} eal {seen['eal']:.3f} loss {seen['loss']:.3f}",
                flush=True,
            )

    trainer.run(note)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, help="a folder that regenerate wrote")
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=2e-3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    corpus = read_corpus([given.answers], 512, 0.03, 64)
    corpus = Corpus(corpus.train[: given.documents], corpus.heldout)
    target = load_target(EngineConfig(MODEL, dtype="bfloat16", device="cpu", max_len=512))
    with tempfile.TemporaryDirectory() as folder:
        curves = {
            f"{start}, {'scaled' if is_scaled else 'as they are'}": run(target, corpus, Path(folder), given, start, is_scaled)
            for start, is_scaled in product(STARTS, (True, False))
        }
    print(json.dumps({"documents": len(corpus.train), "lr": given.lr, "curves": curves}))


if __name__ == "__main__":
    main()
