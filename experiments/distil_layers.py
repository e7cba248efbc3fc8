"""Which of a teacher's layers a student should begin with: held-out loss and agreement every ten steps, by choice of layers.

    python experiments/distil_layers.py --teacher FOLDER --answers runs/answers/answers influence even 0,1,2,27,28,29

A plain loop of hard labels over the functions of `paceline distill` (its collator, its logits at the answers), the same order
of answers for each. FOLDER is the teacher as a Transformers folder (experiments/gguf_to_folder.py).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from paceline.distill.influence import influences, most_influential
from paceline.distill.start import spread_layers
from paceline.distill.teach import IGNORED, Collator, answer_logits
from paceline.engine.llm import LLM
from paceline.train.dataset import Corpus, Document, read_corpus


def batch_of(documents: Sequence[Document]) -> dict[str, torch.Tensor]:
    rows = [{"input_ids": each.tokens.tolist(), "answer_start": each.answer_start, "document": 0} for each in documents]
    return Collator(0, False)(rows)


def look(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Loss, and the share of the answers' tokens that are the likeliest."""
    wanted = batch["labels"][:, 1:] != IGNORED
    columns = wanted.any(0).nonzero()[:, 0]
    with torch.autocast("cpu", torch.bfloat16):
        logits = answer_logits(model, batch["input_ids"], batch["attention_mask"], columns).logits[wanted[:, columns]].float()
    labels = batch["labels"][:, 1:][wanted]
    return torch.nn.functional.cross_entropy(logits, labels), float((logits.argmax(-1) == labels).float().mean())


def student_of(folder: Path, layers: Sequence[int]) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.model.layers = torch.nn.ModuleList([model.model.layers[layer] for layer in layers])
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
    model.config.num_hidden_layers = len(layers)
    model.get_input_embeddings().weight.requires_grad_(False)
    return model


def learn(model: Any, corpus: Corpus, steps: int, lr: float, name: str) -> None:
    heldout = batch_of(corpus.heldout)
    optimiser = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr, (0.9, 0.95), weight_decay=0.01
    )
    generator, began = torch.Generator().manual_seed(0), time.time()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 8) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        chosen = torch.randperm(len(corpus.train), generator=generator)[:8].tolist()
        loss, _ = look(model, batch_of([corpus.train[place] for place in chosen]))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 10 == 9:
            with torch.no_grad():
                found, agreement = look(model, heldout)
            print(
                f"{name}: step {step + 1}, {time.time() - began:.0f} s, held out {found:.3f} nats, {agreement:.1%}", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choices", nargs="+", help="influence, even, or layers as 0,1,29")
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-3)
    given = parser.parse_args()
    corpus = read_corpus([given.answers], 1024, 0.1, 16, 8)
    llm = LLM(str(given.teacher), drafter="none", max_len=1024, max_batch=1)
    found = influences(llm, corpus.train)
    known = {"influence": most_influential(found, given.layers), "even": spread_layers(len(found), given.layers)}
    del llm
    for choice in given.choices:
        layers = known.get(choice) or tuple(int(part) for part in choice.split(","))
        print(f"{choice}: {layers}", flush=True)
        learn(student_of(given.teacher, layers), corpus, given.steps, given.lr, choice)


if __name__ == "__main__":
    main()
