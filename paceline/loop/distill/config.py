"""Settings of a distillation: frozen dataclasses, validated on creation. Imports no PyTorch.

The fields are the options of `paceline distill`, and their docstrings are the help texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from paceline.bounds import (
    MAX_CONTEXT,
    Amount,
    Checked,
    Count,
    Positive,
    Rate,
    Share,
    Whole,
    at_least,
    at_most,
    check,
    refuse_unused,
)
from paceline.config import EngineConfig
from paceline.errors import ConfigError, refuse
from paceline.train.config import AnswerConfig, PromptsConfig

DEFAULT_EPOCHS, MANY_EPOCHS = 3.0, 100.0
LEAST_HELDOUT = 6
"""Minimum number of held-out prompts: fewer may all agree by chance. At most half of the prompts are held out by
default, so a distillation needs twice as many."""


@dataclass(frozen=True, slots=True)
class StudentConfig:
    """Initialisation of the student: copies of some of the teacher's layers, or another, smaller model."""

    layers: Count | None = None
    """Number of the teacher's layers to copy, including the first and the last [default: 40% of them]."""
    choice: Literal["influence", "even"] = "influence"
    """Selection of the layers. influence: those that change the hidden states most along the answers; even: evenly
    spaced."""
    keep_layers: tuple[int, ...] = ()
    """Indices of the teacher's layers to copy, counted from 0, as 0,3,5."""
    student: str | None = None
    """Start from a smaller model of the teacher's family, instead of from the teacher's layers: folder, GGUF file,
    built-in name, hub id."""
    freeze_embeddings: bool = True
    """Do not train the embedding (and a head tied to it). This is faster, and a GGUF file can keep the original
    quantised embedding unchanged."""

    def __post_init__(self) -> None:
        check(self)
        ways = [name for name in ("layers", "keep_layers", "student") if getattr(self, name)]
        refuse(
            ConfigError,
            (
                len(ways) > 1,
                f"{' and '.join(ways)} exclude each other: a student begins in one way, leave the others out",
            ),
            (
                list(self.keep_layers) != sorted(set(self.keep_layers)) or any(layer < 0 for layer in self.keep_layers),
                f"keep_layers must rise from 0 on, unlike {self.keep_layers}",
            ),
        )
        is_chosen = not (self.keep_layers or self.student)
        refuse_unused(self, is_chosen, "next to keep_layers or student", "choice")


@dataclass(frozen=True, slots=True)
class TeachingConfig:
    """Training of the student: loss, duration, optimiser."""

    method: Literal["hard", "soft", "gkd"] = "soft"
    """Output of the teacher that the student learns to reproduce. hard: the tokens of its answers (TRL's SFTTrainer).
    soft: its top-k log-probabilities, computed once and stored. gkd: its whole distribution, computed at every step
    (TRL's GKDTrainer), which takes about three times as long."""
    top_k: Annotated[int, at_least(2)] = 32
    """soft: number of the teacher's top tokens; all others count as one."""
    beta: Share = 0.0
    """gkd: 0 is the forward KL divergence, 1 the reverse one, between them the generalised Jensen-Shannon
    divergence."""
    on_policy: Share = 0.0
    """gkd: share of steps that train on answers sampled from the student."""
    minutes: Positive | None = None
    """Minutes of training, over all resumed parts [default: no limit; `epochs` ends the training]."""
    max_steps: Count | None = None
    """Maximum number of steps."""
    epochs: Positive | None = None
    """Maximum number of epochs [default: 3; 100 if `minutes` or `max_steps` is set]."""
    batch_size: Count = 8
    """Answers per step."""
    micro_batch: Count | None = None
    """Answers per forward pass; fewer need less memory, and each step still uses `batch_size` answers [default: the
    whole batch]."""
    lr: Rate = 1e-3
    """Peak learning rate of AdamW; linear warmup over 5% of the training, then cosine decay to a tenth."""
    weight_decay: Amount = 0.01
    """Weight decay of AdamW."""
    max_len: Annotated[int, at_least(8), at_most(MAX_CONTEXT)] = 1024
    """Longest prompt plus answer, in tokens; longer answers are truncated."""
    heldout_share: Share = 0.05
    """Share of the prompts held out of training to measure the student."""
    max_heldout: Annotated[int, at_least(LEAST_HELDOUT)] = 64
    """Maximum number of held-out prompts; at least 6, as fewer may all agree by chance."""
    autocast: bool = True
    """Multiply in bfloat16; weights and optimiser state stay float32."""
    checkpoint_minutes: Positive = 5.0
    """Minutes between two checkpoints; SIGTERM also writes one."""
    seed: Whole = 0
    """Seed of the order of the answers."""

    def __post_init__(self) -> None:
        check(self)
        refuse(
            ConfigError,
            (
                not self.heldout_share,
                "heldout_share must be above 0: the gate needs answers that the student never saw",
            ),
            (
                self.batch_size % (self.micro_batch or 1) != 0,
                f"micro_batch {self.micro_batch} must divide batch_size {self.batch_size}",
            ),
        )
        refuse_unused(self, self.method == "gkd", f"for method {self.method}", "beta", "on_policy")

    def num_steps(self, num_answers: int) -> int:
        """Returns the maximum number of training steps for this number of answers, from `epochs` and `max_steps`. The
        time limit `minutes` may end the training earlier."""
        epochs = self.epochs or (MANY_EPOCHS if self.minutes or self.max_steps else DEFAULT_EPOCHS)
        by_epochs = max(1, math.ceil(epochs * num_answers / self.batch_size))
        return min(by_epochs, self.max_steps or by_epochs)

    @property
    def together(self) -> int:
        """Number of answers per forward and backward pass: the micro-batch or, if it is not set, the batch."""
        return self.micro_batch or self.batch_size


@dataclass(frozen=True, slots=True)
class GateConfig(Checked):
    """Settings of the gates, which compare the student with its teacher on held-out prompts."""

    least_agreement: Share = 0.9
    """Minimum share of positions along the teacher's answers at which the student's top token is the teacher's; the low
    end of the 95% interval over prompts must reach it."""
    least_fields: Share = 0.98
    """If the teacher answers with JSON objects: minimum share of their fields that are equal in the student's own
    answers."""
    num_answers: Whole = 40
    """Held-out prompts that the student answers by itself; 0 for none."""


@dataclass(frozen=True, slots=True)
class FilesConfig:
    """Output formats of the student. Raises ConfigError if `embedding_format` is set without a GGUF file."""

    save_dtype: Annotated[str, ("bfloat16", "float32")] = "bfloat16"
    """Dtype of the Transformers folder."""
    gguf: Annotated[str, ("auto", "none", "q8_0", "q4_1", "bf16", "f32")] = "auto"
    """Also write a GGUF file with matrices in this format, which the gates then test; needs a teacher in a GGUF file,
    whose tokenizer is copied. q4_1 uses quantisation-aware training. auto: q4_1 for such a teacher, else none."""
    embedding_format: Annotated[str, ("same", "q8_0", "q4_1", "bf16", "f32")] = "same"
    """Format of the embedding and the head in the GGUF file. same: that of the other matrices, but an embedding
    that was not trained is copied unchanged from the GGUF file from which the student started."""

    def __post_init__(self) -> None:
        check(self)
        refuse_unused(self, self.gguf != "none", "without a GGUF file", "embedding_format")


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """All settings of a distillation, in groups."""

    out: Path
    """Run folder; the same command resumes a stopped run."""
    teacher: EngineConfig = field(default_factory=EngineConfig)
    """The model to distil into the student, with its engine's settings."""
    answers: tuple[Path, ...] = ()
    """The teacher's answers, or traces: a folder or file of regenerate, serve --traces or record."""
    prompting: PromptsConfig = field(default_factory=PromptsConfig)
    answering: AnswerConfig = field(default_factory=AnswerConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    teaching: TeachingConfig = field(default_factory=TeachingConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    files: FilesConfig = field(default_factory=FilesConfig)
