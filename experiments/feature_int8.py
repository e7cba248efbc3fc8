"""What 8 bits do to a drafter that reads them: teacher-forced figures of the default drafter over the target's own answers,
with hidden states as the model gives them, in 8 bits, and in 8 bits without a scale for each feature.

    python experiments/feature_int8.py gsm8k_test.jsonl mt_bench.jsonl --limit 16
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from paceline.config import EngineConfig
from paceline.draft.checkpoint import read_draft_ids
from paceline.engine.llm import LLM
from paceline.model.backends import load_target, settle
from paceline.prompts import read_prompts
from paceline.train import loop
from paceline.train.config import DrafterShape, LoopConfig
from paceline.train.dataset import Corpus, Document
from paceline.train.features import (
    Features,
    FeatureSource,
    OnlineFeatures,
    ScaledFeatures,
    measure_scale,
    train_in_scaled_units,
)
from paceline.train.packs import DFlashTrainable
from paceline.train.quantised import Int8
from paceline.train.start import head_of, init_folder, network_for
from paceline.types import SamplingParams

MODEL, MAX_LEN, ANCHORS = "smollm2-135m", 640, 64


class Coded:
    """A source's features after they were kept in a form."""

    def __init__(self, source: FeatureSource, form: Int8) -> None:
        self.source, self.form = source, form

    def of(self, number: int) -> Features:
        return self.form.decode(self.form.encode(self.source.of(number)))


def answered(files: list[str], limit: int) -> list[Document]:
    llm = LLM.of(EngineConfig(MODEL, drafter="none", max_batch=8, max_len=MAX_LEN))
    ids = [llm.encode_chat(prompt.messages) for file in files for prompt in read_prompts(file, limit)]
    said = llm.generate_ids(ids, SamplingParams(max_tokens=128))
    tokens = [np.array(prompt + answer.token_ids, dtype=np.int32) for prompt, answer in zip(ids, said, strict=True)]
    return [Document(str(n), each, len(ids[n])) for n, each in enumerate(tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--limit", type=int, default=16)
    options = parser.parse_args()
    documents = answered(options.prompts, options.limit)
    target = load_target(replace(settle(EngineConfig(MODEL)), max_batch=1, max_len=MAX_LEN))
    init = init_folder("default", MODEL)
    assert init is not None
    raw, network = network_for(target, MODEL, DrafterShape(), init, 0)
    taps = network.config.target_layer_ids
    source = OnlineFeatures(target, documents, taps, needs_final=False)
    scale_F, _ = measure_scale(source, documents)
    train_in_scaled_units(network, scale_F)
    embedding_VD = target.matrix_embed(torch.arange(target.vocab_size)).clone()
    head = head_of(target, network.config, read_draft_ids(init))
    drafter, scaled = DFlashTrainable(network, raw), ScaledFeatures(source, scale_F)
    trainer = loop.Trainer(drafter, Corpus(documents, []), scaled, embedding_VD, head, LoopConfig(), folder=Path("unused"))
    loop.HELDOUT_ANCHORS = ANCHORS
    forms = {
        name: Int8(scale, len(taps), target.dtype) for name, scale in (("", scale_F), (", alike", torch.ones_like(scale_F)))
    }
    sources: dict[str, FeatureSource] = {"model": source} | {f"int8{name}": Coded(source, form) for name, form in forms.items()}
    for name, each in sources.items():
        figures = trainer.evaluate(documents, ScaledFeatures(each, scale_F))
        print(name, {key: round(figures[key], 4) for key in ("eal", "loss", "accuracy")}, flush=True)


if __name__ == "__main__":
    main()
