"""Estimates the time and memory of a distillation; writes nothing to the run folder.

    price(config).text

Extrapolates from a few training steps of a randomly initialised student of the requested shape, and from a few answers
along which the teacher computes log-probabilities.
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
from paceline.errors import ConfigError, needing
from paceline.hub import resolve
from paceline.loop.distill.config import DistillConfig
from paceline.loop.distill.corpus import corpus_of
from paceline.loop.distill.reading import Reader
from paceline.loop.distill.start import check_files, check_layers, check_same_words, kept_layers, num_weights
from paceline.model import checkpoint
from paceline.model.gguf.to_folder import config_json_of
from paceline.train.documents.dataset import Corpus, Document
from paceline.train.unused_settings import check_prompts

TIMED, READ = 2, 4
BYTES_A_WEIGHT, BYTES_FROZEN = 16, 4
"""Bytes of training memory per trained weight (weight, gradient, two Adam moments in float32) and per frozen weight."""


@dataclass(frozen=True, slots=True)
class Price:
    """Estimated time and memory of a distillation."""

    text: str
    """The estimate for people."""
    figures: dict[str, Any]
    """The estimate for programs. "answers" and "heldout" are numbers of answers, "weights" numbers of weights, "step_s"
    seconds of a training step, "read_s" seconds in which the teacher reads one answer."""


def price(config: DistillConfig) -> Price:
    """Estimates time and memory of a distillation by timing a few training steps on its answers.

    Raises ConfigError if no answers are given or the student does not fit the teacher, PromptError if the answers do
    not suffice (see `corpus_of`).
    """
    if not config.answers:
        raise ConfigError(
            "a dry run times steps on answers: make them first with paceline regenerate, and give --answers FOLDER"
        )
    check_prompts(config.prompting, has_answers=True)
    with needing(ConfigError, "distill trains with Transformers and TRL: pip install 'paceline[distill]'"):
        import transformers
    del transformers
    teacher = resolve(config.teacher.model)
    check_layers(config.student, teacher)
    check_files(config.files, config.student, teacher)
    corpus = corpus_of(config, config.answers)
    shape = checkpoint.load_config(teacher)
    if config.student.student:
        source = resolve(config.student.student)
        smaller, raw = check_same_words(source, teacher), config_json_of(source)
    else:
        layers = len(kept_layers(config.student, shape.num_layers))
        smaller, raw = replace(shape, num_layers=layers), config_json_of(teacher) | {"num_hidden_layers": layers}
    step_s = _step_seconds(config, raw, corpus.train)
    read_s = _read_seconds(config, teacher, corpus.train)
    return _estimate(config, corpus, (num_weights(shape), num_weights(smaller)), step_s, read_s)


def _step_seconds(config: DistillConfig, raw: dict[str, Any], documents: Sequence[Document]) -> float:
    """Seconds of one training step of a randomly initialised student, on copies of the answer of median length."""
    import transformers

    teaching = config.teaching
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        shape = transformers.AutoConfig.from_pretrained(scratch)
    model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    if config.student.freeze_embeddings:
        model.get_input_embeddings().weight.requires_grad_(False)
    median = sorted(documents, key=len)[len(documents) // 2]
    ids_BT = torch.from_numpy(median.tokens).long().repeat(teaching.together, 1)
    columns = torch.arange(max(1, median.answer_start) - 1, len(median) - 1)
    began = 0.0
    for number in range(1 + TIMED):
        began = time.perf_counter() if number == 1 else began  # the first step is a warm-up
        with torch.autocast("cpu", torch.bfloat16, enabled=teaching.autocast):
            logits_BNV = model(ids_BT, logits_to_keep=columns, use_cache=False).logits
        logits_BNV.float().log_softmax(-1)[..., 0].mean().backward()
    return (time.perf_counter() - began) / TIMED * (teaching.batch_size // teaching.together)


def _read_seconds(config: DistillConfig, teacher: Path, documents: Sequence[Document]) -> float:
    """Seconds for the teacher to read one answer, without the prefix that answers share."""
    longest = max(map(len, documents))
    settings = replace(config.teacher, model=str(teacher), drafter="none", max_len=longest, max_batch=1)
    reader = Reader(LLM.of(settings), config.teaching.top_k)
    reader.read(documents[0])
    began = time.perf_counter()
    for number in range(READ):
        reader.read(documents[(1 + number) % len(documents)])
    return (time.perf_counter() - began) / READ


def _estimate(
    config: DistillConfig,
    corpus: Corpus,
    weights: tuple[tuple[int, int], tuple[int, int]],
    step_s: float,
    read_s: float,
) -> Price:
    teaching, documents, num_heldout = config.teaching, corpus.train, len(corpus.heldout)
    steps = teaching.num_steps(len(documents))
    if teaching.method == "gkd":
        step_s *= 1 + sum(weights[0]) / sum(weights[1]) / 3  # plus the teacher's pass, a third of forward and backward
    if teaching.minutes is not None:
        steps = min(steps, max(1, int(60 * teaching.minutes / step_s)))
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
        f"training: {steps} steps of {teaching.batch_size} answers, {step_s:.2f} s each: {minutes['train']:.1f} "
        "minutes, "
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
