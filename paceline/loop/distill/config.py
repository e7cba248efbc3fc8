"""What a distillation is asked for: one frozen dataclass per part, checked when it is made. Nothing here needs PyTorch.

The options of `paceline distill` are these fields, and their help is the docstring under each field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from paceline.bounds import Amount, Count, Positive, Rate, Share, Whole, at_least, check
from paceline.config import EngineConfig
from paceline.errors import ConfigError, refuse
from paceline.train.config import AnswerConfig, PromptsConfig

DEFAULT_EPOCHS, MANY_EPOCHS = 3.0, 100.0
SomeSteps = Annotated[int, at_least(1)]


@dataclass(frozen=True, slots=True)
class StudentConfig:
    """What the student is before it has learned anything."""

    layers: Count | None = None
    """Layers it takes over from the teacher, the first and the last among them [default: two of five]."""
    choice: Literal["influence", "even"] = "influence"
    """Which layers: influence, those that change most of what passes through them along the answers; even, spread evenly."""
    keep_layers: tuple[int, ...] = ()
    """Which layers of the teacher it takes over, counted from 0, as 0,3,5."""
    student: str | None = None
    """Begin from this smaller model of the family, not from the teacher's layers: folder, GGUF file, built-in name, hub id."""
    freeze_embeddings: bool = True
    """Leave the embedding (and a head tied to it) as it is: faster, and its stored blocks stay the teacher's."""

    def __post_init__(self) -> None:
        check(self)
        ways = [
            name
            for name, given in (
                ("layers", self.layers is not None),
                ("keep_layers", bool(self.keep_layers)),
                ("student", self.student is not None),
            )
            if given
        ]
        refuse(
            ConfigError,
            (len(ways) > 1, f"{' and '.join(ways)} exclude each other: a student begins in one way, leave the others out"),
            (
                list(self.keep_layers) != sorted(set(self.keep_layers)) or any(layer < 0 for layer in self.keep_layers),
                f"keep_layers must rise from 0 on, unlike {self.keep_layers}",
            ),
        )


@dataclass(frozen=True, slots=True)
class TeachingConfig:
    """How the student learns, and for how long."""

    method: Literal["hard", "soft", "gkd"] = "soft"
    """hard: the tokens of the teacher's answers (TRL's SFTTrainer). soft: the teacher's log-probabilities of its likeliest
    tokens, computed once and kept. gkd: its whole distribution, computed at every step (TRL's GKDTrainer), which takes about
    three times as long."""
    top_k: Annotated[int, at_least(2)] = 32
    """soft: so many of the teacher's likeliest tokens; all others count as one."""
    beta: Share = 0.0
    """gkd: 0 is the forward divergence, 1 the reverse one, between them the generalised Jensen-Shannon divergence."""
    on_policy: Share = 0.0
    """gkd: share of steps that learn from what the student writes itself."""
    minutes: Positive | None = None
    """Train so long, over all resumed parts [default: for the epochs]."""
    max_steps: SomeSteps | None = None
    """Train so many steps at most."""
    epochs: Positive | None = None
    """See every answer so many times at most [default: 3; with minutes or steps as often as they allow]."""
    batch_size: Count = 8
    """Answers a step."""
    micro_batch: Count | None = None
    """Answers computed together: less memory, the same step [default: the batch]."""
    lr: Rate = 1e-3
    """Highest learning rate of AdamW; it rises over the first twentieth and falls to a tenth along a cosine."""
    weight_decay: Amount = 0.01
    """Of AdamW."""
    max_len: Annotated[int, at_least(8)] = 1024
    """Longest prompt and answer together, in tokens; answers are cut there."""
    heldout_share: Share = 0.05
    """Share of the prompts that the student never learns from, and is measured on."""
    max_heldout: Count = 64
    """Most of them."""
    autocast: bool = True
    """Multiply in bfloat16; weights and their optimiser stay float32."""
    checkpoint_minutes: Positive = 5.0
    """Between two checkpoints; SIGTERM writes one, too."""
    seed: Whole = 0
    """Order of the answers."""

    def __post_init__(self) -> None:
        check(self)
        refuse(
            ConfigError,
            (self.method != "gkd" and self.on_policy > 0, "on_policy belongs to method gkd: choose it, or leave this out"),
            (not self.heldout_share, "heldout_share must be above 0: the gate needs answers that the student never saw"),
            (
                self.batch_size % (self.micro_batch or 1) != 0,
                f"micro_batch {self.micro_batch} must divide batch_size {self.batch_size}",
            ),
        )

    @property
    def most_epochs(self) -> float:
        """How often every answer is seen at most."""
        return self.epochs or (MANY_EPOCHS if self.minutes or self.max_steps else DEFAULT_EPOCHS)

    @property
    def together(self) -> int:
        """Answers in one pass forward and back."""
        return self.micro_batch or self.batch_size


@dataclass(frozen=True, slots=True)
class GateConfig:
    """What the student must reach on held-out prompts to be kept."""

    least_agreement: Share = 0.9
    """Share of the teacher's tokens that the student says too, read along the teacher's answers: the lower end of its 95%
    interval over prompts must reach this."""
    least_fields: Share = 0.98
    """Where the teacher answers with JSON objects: share of their fields that are the same in the student's own answers."""
    num_answers: Whole = 40
    """Held-out prompts that the student answers itself, in the engine; 0 for none."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class FilesConfig:
    """In which forms the student is kept."""

    save_dtype: Annotated[str, ("bfloat16", "float32")] = "bfloat16"
    """Of the Transformers folder."""
    gguf: Annotated[str, ("auto", "none", "q8_0", "q4_1", "bf16", "f32")] = "auto"
    """Also a GGUF file with matrices in these blocks, of which the gate then judges; it needs a teacher in a GGUF file, whose
    tokenizer it copies. For q4_1 it learns with its matrices rounded so. auto: q4_1 for such a teacher, else none."""
    embedding_format: Annotated[str, ("same", "q8_0", "q4_1", "bf16", "f32")] = "same"
    """Of the embedding and the head in the GGUF file: same keeps the teacher's stored blocks where they are frozen."""


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """What `distill` does: a teacher's answers become a student in a folder."""

    out: Path
    """Run folder; the same command again goes on where it stopped."""
    teacher: EngineConfig = field(default_factory=EngineConfig)
    """The model that is to be made smaller."""
    answers: tuple[Path, ...] = ()
    """The teacher's answers, or traces: a folder or file of regenerate, serve --traces or record."""
    asked: PromptsConfig = field(default_factory=PromptsConfig)
    answering: AnswerConfig = field(default_factory=AnswerConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    teaching: TeachingConfig = field(default_factory=TeachingConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    files: FilesConfig = field(default_factory=FilesConfig)

    def require_answers(self) -> None:
        """Raises ConfigError where there is nothing to learn from."""
        refuse(
            ConfigError,
            (
                not self.answers and not self.asked.prompts,
                "a student learns from its teacher's answers: give --answers FOLDER, or --prompts FILE to be answered",
            ),
        )
