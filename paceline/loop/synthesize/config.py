"""Options and results of `paceline synthesize`; the function that runs it is in `run.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from paceline.bounds import Checked, Share, Streams, within
from paceline.config import EngineConfig
from paceline.train.config import AnswerConfig, PromptsConfig


@dataclass(frozen=True, slots=True)
class SynthesizeConfig(Checked):
    """Options of `paceline synthesize`: model, prompts, and form of the answers. Raises ConfigError if they are
    invalid."""

    out: Path
    """Run folder; the same command resumes an interrupted run."""
    target: EngineConfig = field(default_factory=EngineConfig)
    prompting: PromptsConfig = field(default_factory=PromptsConfig)
    answering: AnswerConfig = field(default_factory=AnswerConfig)
    """How the target answers: lengths, sampling, and the format (a grammar, or calls of tools)."""
    tool_choice: Literal["required", "auto"] = "required"
    """required: every answer is a tool call; auto: the target chooses, and answers without a call are left out."""
    not_in: tuple[Path, ...] = ()
    """Store of production traces, whose prompts are excluded."""
    ood: tuple[str, ...] = ()
    """Sources of out-of-domain prompts for `paceline train --ood`. They are only named in card.json, the description of
    the data."""
    steered: Share = 0.5
    """Share of the prompts whose answer is forced to take a schema value that is rare so far."""
    max_overlap: Annotated[float, within("above 0 and at most 1", above=0, most=1)] = 0.9
    """Similarity to an earlier answer above which an answer is left out; 1 leaves out exact copies only."""
    max_batch: Streams = 32
    """Maximum number of answers generated at the same time."""


@dataclass(slots=True)
class Synthesized:
    """Results of `paceline synthesize`: the folder of the accepted answers, and counts of answers and tokens."""

    answers: Path
    """Folder of the accepted answers."""
    num_answers: int = 0
    num_tokens: int = 0
    num_steered: int = 0
    """Number of accepted answers that were forced to take a rare schema value."""
    parsed: float = 0.0
    """Share of the accepted answers that parse when read back."""
    num_in_store: int = 0
    """Number of prompts left out because they occur in the production traces."""
    num_compared: int = 0
    """Number of production prompts that the prompts were compared with."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> number of answers left out."""
    wall_s: float = 0.0
