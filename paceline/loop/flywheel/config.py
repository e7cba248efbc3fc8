"""Settings of an iteration (turn) of the flywheel: the fields of flywheel.yaml. Imports no PyTorch.

    model: smollm2-135m            # minimal example: the model that serves now,
    record: [traces]               # its recorded answers,
    layers: [12, 8]                # the students' layers, turn by turn,
    minutes: 40                    # training time per turn

`read_config` reads the file; unknown names are rejected with a suggestion.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from paceline.bounds import MAX_CONTEXT, Amount, Checked, Count, Positive, Share, at_least, at_most, check
from paceline.config import EngineConfig
from paceline.errors import ConfigError, refuse
from paceline.loop.distill.config import FilesConfig, StudentConfig, TeachingConfig
from paceline.loop.distill.config import GateConfig as StudentGate
from paceline.loop.evals.config import EvalSampling, JudgeConfig, MakeConfig
from paceline.loop.store.config import SplitConfig
from paceline.train.config import AnswerConfig, DrafterShape, LoopConfig
from paceline.train.run_file import leaves, read_settings, settings_of

FILE = "flywheel.yaml"
OF_STUDENT, OF_DRAFTER = 0.5, 0.25
"""Shares of the training minutes of an iteration (turn): for the student, and for each of two drafters."""


@dataclass(frozen=True, slots=True)
class DrafterConfig(Checked):
    """Training settings of the two drafters of an iteration (turn): for the served model, and for the student."""

    of_teacher: bool = True
    """Also train a drafter for the model that serves now, which can be served even if the student is refused."""
    minutes: Positive | None = None
    """Minutes per drafter, including generating its training answers [default: a quarter of the turn's minutes, or no
    limit if `loop` sets a number of steps or minutes]."""
    plan: Annotated[str, ("auto", "off")] = "auto"
    """auto: settings not given are chosen for target, data and machine; off: they keep their defaults."""
    features: Annotated[str, ("auto", "online", "cached", "streamed")] = "auto"
    """When the target's hidden states, the drafter's inputs, are computed: on demand (online), once and stored on disk
    (cached), or ahead of training into a buffer (streamed); auto chooses one."""
    max_len: Annotated[int, at_least(8), at_most(MAX_CONTEXT)] | None = None
    """Longest document (prompt plus answer), in tokens [default: long enough for 99% of the documents, if memory and
    context allow]."""
    shape: DrafterShape = field(default_factory=DrafterShape)
    loop: LoopConfig = field(default_factory=LoopConfig)

    @property
    def has_length(self) -> bool:
        """True if the duration of the training is set: by `minutes`, `loop.max_steps` or `loop.max_minutes`."""
        return self.minutes is not None or self.loop.max_steps is not None or self.loop.max_minutes is not None


@dataclass(frozen=True, slots=True)
class TurnGates(Checked):
    """Conditions under which an iteration (turn) of the flywheel continues."""

    least_rows: Count = 50
    """Minimum number of answers to train on."""
    least_cases: Count = 20
    """Minimum number of eval cases."""
    most_bad: Share = 0.2
    """Maximum share of bad recorded answers: empty, repetitive, of another tokenizer, or tokens that differ from the
    text."""
    most_lost: Share = 0.05
    """Maximum loss of evals score against the teacher, by the low end of the difference's 95% interval. If
    both score the same, 72 cases suffice to rule out a loss of 0.05."""
    most_lost_in_all: Share = 0.1
    """From the second turn on: maximum loss against the very first model, on the first turn's suite, so that small
    losses do not accumulate."""
    least_speedup: Amount = 1.0
    """Minimum tokens/s with a drafter divided by tokens/s without; a slower drafter is not served."""


@dataclass(frozen=True, slots=True)
class FlywheelConfig:
    """All settings of the flywheel: the top level of flywheel.yaml. Each iteration (turn) of the flywheel distils the
    served model (the teacher) into a smaller one (the student), which is then served in its place if it is as good."""

    model: str = ""
    """The model that serves now, the first teacher: a built-in name, a folder, a GGUF file, or a hub id."""
    record: tuple[Path, ...] = ()
    """Its recorded answers: folders of traces (serve --traces, record) or of regenerate, Parquet files, or one
    store."""
    prompts: tuple[str, ...] = ()
    """Prompts that the model answers in turns without recorded answers: JSON lines, Parquet, a folder of traces."""
    out: Path = Path("runs/flywheel")
    """Folder of the flywheel: a subfolder for each turn, ledger.jsonl (costs and quality of all models), and
    serving.json (the served model)."""
    layers: tuple[Count, ...] = ()
    """Number of layers of the students, turn by turn. Turns without an entry follow `student`, by default 40%
    of the teacher's layers."""
    minutes: Positive = 60.0
    """Minutes of training per turn: half for the student, a quarter per drafter. Answers, evals and gates are extra."""
    price_per_core_hour: Amount | None = None
    """Price of an hour of one CPU core, in any currency; used in the ledger and the dry run."""
    suite: Path | None = None
    """Suite of evals [default: made of held-out recorded answers]."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    answering: AnswerConfig = field(default_factory=AnswerConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    evals: MakeConfig = field(default_factory=lambda: MakeConfig(limit=200))
    sampling: EvalSampling = field(default_factory=lambda: EvalSampling(at_once=1))
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    teaching: TeachingConfig = field(default_factory=TeachingConfig)
    files: FilesConfig = field(default_factory=FilesConfig)
    student_gate: StudentGate = field(default_factory=StudentGate)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    gates: TurnGates = field(default_factory=TurnGates)
    given: tuple[str, ...] = ()
    """Names of the settings that the file sets, such as drafter.loop.optim.lr. No plan or default changes them."""

    def __post_init__(self) -> None:
        check(self)
        student_has_layers = self.student.layers is not None or self.student.keep_layers or self.student.student
        refuse(
            ConfigError,
            (not self.model, f"{FILE} needs a model: what answers now, as model: smollm2-135m"),
            (
                not self.record and not self.prompts,
                f"{FILE} needs record (what was answered), or prompts to be answered",
            ),
            (
                bool(self.layers and student_has_layers),
                "layers says it turn by turn: leave it out, or student's own way",
            ),
            (
                list(self.layers) != sorted(self.layers, reverse=True),
                f"layers must not rise, unlike {', '.join(map(str, self.layers))}: the student of a turn teaches the "
                "next one",
            ),
            (self.engine.model != EngineConfig().model, "engine.model: the model is named by model"),
            (self.engine.drafter != EngineConfig().drafter, "engine.drafter: the flywheel makes its own, leave it out"),
            (bool(self.evals.sources), "evals.sources: cases are made of the store; name a suite of your own by suite"),
            (
                self.evals.scorer == "judge" and self.suite is None and self.judge.url is None,
                "evals.scorer judge needs a judge: give judge: {url: http://HOST:PORT}",
            ),
        )

    def is_given(self, name: str) -> bool:
        return name in self.given

    def student_of(self, turn: int) -> StudentConfig:
        """Returns the settings of the student that is trained in iteration (turn) `turn`, counted from 1. Its number of
        layers is the entry of `layers` for this iteration, if there is one."""
        return replace(self.student, layers=self.layers[turn - 1]) if turn <= len(self.layers) else self.student

    @property
    def student_teaching(self) -> TeachingConfig:
        """Settings of the student's training. They are `teaching`; if it sets no duration (minutes, steps or epochs),
        the student is trained for half of the flywheel's `minutes`."""
        teaching = self.teaching
        has_length = (teaching.minutes, teaching.max_steps, teaching.epochs) != (None, None, None)
        return teaching if has_length else replace(teaching, minutes=OF_STUDENT * self.minutes)

    @property
    def drafter_minutes(self) -> float | None:
        """Minutes for each drafter, including the generation of its training answers. This is `drafter.minutes` if it
        is set. It is None (no limit of minutes) if only `drafter.loop` sets a duration. If neither is set, it is a
        quarter of the flywheel's `minutes`."""
        drafter = self.drafter
        return drafter.minutes if drafter.has_length else OF_DRAFTER * self.minutes


FREE = ("minutes", "price_per_core_hour", "gates", "student_gate", "given")
"""Settings that may change while an iteration (turn) is in progress, as may the length of the student's training."""


def read_config(file: Path) -> FlywheelConfig:
    """Reads flywheel.yaml. Raises ConfigError if it is unreadable or has an unknown name or invalid value."""
    tree = read_settings(file, FlywheelConfig, f"give a {FILE}, as docs/how-to/smaller-model.md shows one")
    for name, usual in (("evals", {"limit": 200}), ("sampling", {"at_once": 1})):
        if name in tree:
            tree[name] = usual | tree[name]
    config = settings_of(FlywheelConfig, tree, file, "docs/how-to/smaller-model.md says what it may be")
    return replace(config, given=tuple(leaves(tree)))
