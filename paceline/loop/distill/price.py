"""What a distillation will take, before any of it is done: a training step of the student timed here, with random weights.

    price(config, progress).text

Nothing is written into the run's folder. The student of this shape computes two steps of real answers; the teacher reads four
of them, where the method needs it. What remains are products.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.engine.llm import LLM
from paceline.errors import ConfigError, PromptError, needing
from paceline.hub import resolve
from paceline.loop.distill.config import DistillConfig
from paceline.loop.distill.reading import Reader
from paceline.loop.distill.start import check_layers, check_same_words, num_kept, num_weights
from paceline.model import checkpoint
from paceline.model.gguf.to_folder import config_json_of
from paceline.train.documents.dataset import Document, read_corpus

TIMED, READ = 2, 4
BYTES_A_WEIGHT, BYTES_FROZEN = 16, 4
"""In training: the weight, its gradient and two averages in float32."""


@dataclass(frozen=True, slots=True)
class Price:
    """What was found, and in words."""

    text: str
    figures: dict[str, Any]


def price(config: DistillConfig) -> Price:
    """Raises ConfigError and PromptError as the run would, ConfigError where no answers are there to be timed."""
    if not config.answers:
        raise ConfigError(
            "a dry run times steps on answers: make them first with paceline regenerate, and give --answers FOLDER"
        )
    with needing(ConfigError, "distill trains with Transformers and TRL: pip install 'paceline[distill]'"):
        import transformers
    del transformers
    teaching, teacher = config.teaching, resolve(config.teacher.model)
    corpus = read_corpus(config.answers, teaching.max_len, teaching.heldout_share, teaching.max_heldout, 8)
    if not corpus.heldout:
        raise PromptError("fewer than 10 different prompts: a student needs more answers, and some that it never sees")
    check_layers(config.student, teacher)
    shape = checkpoint.load_config(teacher)
    if config.student.student:
        source = resolve(config.student.student)
        ours, raw = check_same_words(source, teacher), config_json_of(source)
    else:
        layers = num_kept(config.student, shape.num_layers)
        ours, raw = replace(shape, num_layers=layers), config_json_of(teacher) | {"num_hidden_layers": layers}
    step_s = _step_seconds(config, raw, corpus.train)
    read_s = _read_seconds(config, teacher, corpus.train)
    return _told(config, corpus.train, (num_weights(shape), num_weights(ours)), step_s, read_s, len(corpus.heldout))


def _step_seconds(config: DistillConfig, raw: dict[str, Any], documents: Sequence[Document]) -> float:
    """Of one step of the student, of this shape and with random weights, on answers of middling length."""
    import transformers

    teaching = config.teaching
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        shape = transformers.AutoConfig.from_pretrained(scratch)
    model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    if config.student.freeze_embeddings:
        model.get_input_embeddings().weight.requires_grad_(False)
    middling = sorted(documents, key=len)[len(documents) // 2]
    ids_BT = torch.from_numpy(middling.tokens).long().repeat(teaching.together, 1)
    columns = torch.arange(max(1, middling.answer_start) - 1, len(middling) - 1)
    began = 0.0
    for number in range(1 + TIMED):
        began = time.perf_counter() if number == 1 else began  # the first one prepares
        with torch.autocast("cpu", torch.bfloat16, enabled=teaching.autocast):
            logits_BNV = model(ids_BT, logits_to_keep=columns, use_cache=False).logits
        logits_BNV.float().log_softmax(-1)[..., 0].mean().backward()
    return (time.perf_counter() - began) / TIMED * (teaching.batch_size // teaching.together)


def _read_seconds(config: DistillConfig, teacher: Path, documents: Sequence[Document]) -> float:
    """Of the teacher's reading of one answer; the beginnings that answers share are read once."""
    settings = replace(config.teacher, model=str(teacher), drafter="none", max_len=config.teaching.max_len, max_batch=1)
    reader = Reader(LLM.of(settings), config.teaching.top_k)
    reader.read(documents[0])
    began = time.perf_counter()
    for number in range(READ):
        reader.read(documents[(1 + number) % len(documents)])
    return (time.perf_counter() - began) / READ


def _told(
    config: DistillConfig,
    documents: Sequence[Document],
    weights: tuple[tuple[int, int], tuple[int, int]],
    step_s: float,
    read_s: float,
    num_heldout: int,
) -> Price:
    teaching = config.teaching
    by_epochs = max(1, round(teaching.most_epochs * len(documents) / teaching.batch_size))
    whole = min(by_epochs, teaching.max_steps or by_epochs)
    steps = whole if teaching.minutes is None else min(whole, max(1, int(60 * teaching.minutes / step_s)))
    if teaching.method == "gkd":
        step_s *= 1 + sum(weights[0]) / sum(weights[1]) / 3  # the teacher's pass besides, a third of forward and back
    num_read = num_heldout + (len(documents) if teaching.method == "soft" else 0)
    (layers, ends), (own_layers, own_ends) = weights
    share = (own_layers + own_ends) / (layers + ends)
    trained = own_layers + (0 if config.student.freeze_embeddings else own_ends)
    memory = BYTES_A_WEIGHT * trained + BYTES_FROZEN * (own_layers + own_ends - trained)
    minutes = {"train": steps * step_s / 60, "read": num_read * read_s / 60}
    passes = steps * teaching.batch_size / len(documents)
    threads = torch.get_num_threads()
    text = (
        f"student: {own_layers + own_ends:,} weights a pass, {share:.0%} of the teacher's {layers + ends:,}\n"
        f"answers: {len(documents)} to learn from, {num_heldout} held out\n"
        f"teacher: reads {num_read} answers, {1000 * read_s:.0f} ms each: {minutes['read']:.1f} minutes\n"
        f"training: {steps} steps of {teaching.batch_size} answers, {step_s:.2f} s each: {minutes['train']:.1f} minutes, "
        f"{passes:.1f} times through the answers, {memory / 2**20:.0f} MiB for weights and optimiser\n"
        f"together: {sum(minutes.values()):.1f} minutes, {sum(minutes.values()) * threads / 60:.2f} core-hours; "
        "the gates come on top"
    )
    figures = {
        "answers": len(documents),
        "heldout": num_heldout,
        "weights": {"teacher": layers + ends, "student": own_layers + own_ends},
        "steps": steps,
        "step_s": step_s,
        "read_s": read_s,
        "minutes": minutes,
        "core_hours": sum(minutes.values()) * threads / 60,
        "memory_bytes": memory,
    }
    return Price(text, figures)
