"""What a turn of the flywheel is asked for: the fields of flywheel.yaml, part by part. Nothing here needs PyTorch.

    model: smollm2-135m            # the shortest case: what answers now,
    record: [traces]               # what it answered,
    layers: [12, 8]                # how small its students become, turn by turn,
    minutes: 40                    # and how long a turn may train

`read_config` reads the file; unknown names are refused with the nearest one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from paceline.bounds import Amount, Count, Positive, Share, at_least, check
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
"""Shares of a turn's minutes: the student's training, and each of two drafters'."""


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """How drafters are trained, as of `paceline train`: what is not named here is chosen by its plan."""

    of_teacher: bool = True
    """Also train one for the model that answers now, from what it answered: it can serve at once, whatever becomes of the
    student."""
    minutes: Positive | None = None
    """Of each drafter, answers that it learns from included [default: a quarter of a turn's, where `loop` has no length]."""
    plan: Annotated[str, ("auto", "off")] = "auto"
    """auto: what is not asked for is chosen for target, data and machine; off: it is the default."""
    features: Annotated[str, ("auto", "online", "cached", "streamed")] = "auto"
    """Where hidden states are kept."""
    max_len: Annotated[int, at_least(8)] | None = None
    """Longest document, in tokens [default: what the store has, between 1,024 and 4,096]."""
    shape: DrafterShape = field(default_factory=DrafterShape)
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        check(self)

    @property
    def has_length(self) -> bool:
        """Whether `minutes` or `loop` say how long."""
        return self.minutes is not None or self.loop.max_steps is not None or self.loop.max_minutes is not None


@dataclass(frozen=True, slots=True)
class TurnGates:
    """What must hold for a turn to go on."""

    least_rows: Count = 50
    """Fewest answers to learn from."""
    least_cases: Count = 20
    """Fewest cases to judge by."""
    most_bad: Share = 0.2
    """Share of the recorded answers that may be of no use: empty, loops, tokens of another model or that are not the text."""
    most_lost: Share = 0.05
    """Most of the evals' score that a student may lose beside its teacher, and surely so: the low end of the difference's 95%
    interval."""
    most_lost_in_all: Share = 0.1
    """From the second turn on: the same beside the very first model, on the suite of the first turn, so that small losses do
    not add up unseen."""
    least_speedup: Amount = 1.0
    """Least tokens per second with a drafter over those without; one below is not served."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class FlywheelConfig:
    """All of flywheel.yaml."""

    model: str = ""
    """What answers now, the first teacher: a built-in name, a folder, a GGUF file, or a hub id."""
    record: tuple[Path, ...] = ()
    """What it answered: folders of traces (serve --traces, record) or of regenerate, Parquet files, or one store."""
    prompts: tuple[str, ...] = ()
    """Prompts that the model of a turn answers where nothing was recorded: JSON lines, Parquet, a folder of traces."""
    out: Path = Path("runs/flywheel")
    """Folder of the flywheel: turns, ledger, and what serves."""
    layers: tuple[Count, ...] = ()
    """Layers of the students, turn by turn [default, and beyond the last: two of five of the teacher's]."""
    minutes: Positive = 60.0
    """Of training in a turn: half for the student, a quarter for each drafter. Answers, evals and gates come on top."""
    price_per_core_hour: Amount | None = None
    """For the costs of the ledger and of the dry run, in any currency."""
    suite: Path | None = None
    """Evals to judge by [default: made of what was recorded and kept aside]."""
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
    """Names that the file has, as drafter.loop.optim.lr: no plan and no default changes them."""

    def __post_init__(self) -> None:
        check(self)
        layers_elsewhere = self.student.layers is not None or self.student.keep_layers or self.student.student
        refuse(
            ConfigError,
            (not self.model, f"{FILE} needs a model: what answers now, as model: smollm2-135m"),
            (not self.record and not self.prompts, f"{FILE} needs record (what was answered), or prompts to be answered"),
            (bool(self.layers and layers_elsewhere), "layers says it turn by turn: leave it out, or student's own way"),
            (
                list(self.layers) != sorted(self.layers, reverse=True),
                f"layers must not rise, unlike {', '.join(map(str, self.layers))}: the student of a turn teaches the next one",
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
        """What the student of a turn, counted from 1, begins as."""
        return replace(self.student, layers=self.layers[turn - 1]) if turn <= len(self.layers) else self.student

    @property
    def lesson(self) -> TeachingConfig:
        """How the student learns: half of the minutes, where nothing else is said."""
        teaching = self.teaching
        has_length = any(each is not None for each in (teaching.minutes, teaching.max_steps, teaching.epochs))
        return teaching if has_length else replace(teaching, minutes=OF_STUDENT * self.minutes)

    @property
    def drafter_minutes(self) -> float | None:
        """Of each drafter; None where its loop says how long."""
        drafter = self.drafter
        return drafter.minutes if drafter.has_length else OF_DRAFTER * self.minutes


FREE = ("minutes", "price_per_core_hour", "gates", "student_gate", "given")
"""What may change while a turn is under way; so may the length of the student's training."""


def read_config(file: Path) -> FlywheelConfig:
    """Raises ConfigError naming the file where it cannot be read, has an unknown name, or a value that cannot be."""
    tree = read_settings(file, FlywheelConfig, f"give a {FILE}, as docs/how-to/smaller-model.md shows one")
    for name, usual in (("evals", {"limit": 200}), ("sampling", {"at_once": 1})):
        if name in tree:
            tree[name] = usual | tree[name]
    made = settings_of(FlywheelConfig, tree, file, "docs/how-to/smaller-model.md says what it may be")
    return replace(made, given=tuple(leaves(tree)))
