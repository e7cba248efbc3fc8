"""What `paceline synthesize` is asked, and what came of it: documented field by field. The call is in `run.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from paceline.bounds import Count, Share, check, within
from paceline.config import EngineConfig
from paceline.train.config import AnswerConfig, PromptsConfig


@dataclass(frozen=True, slots=True)
class SynthesizeConfig:
    """An application without its traffic: what it answers, and to which prompts. Raises ConfigError on impossible values."""

    out: Path
    """Run folder; the same command again goes on where it stopped."""
    target: EngineConfig = field(default_factory=EngineConfig)
    asked: PromptsConfig = field(default_factory=PromptsConfig)
    answering: AnswerConfig = field(default_factory=AnswerConfig)
    """Its grammar is that of the application's answers; without, its tools are called."""
    tool_choice: Literal["required", "auto"] = "required"
    """required: every answer is a call; auto: the target writes as it likes, and answers without a call are left out."""
    not_in: tuple[Path, ...] = ()
    """Store of production traces: no prompt that stands in it is used."""
    ood: tuple[str, ...] = ()
    """Prompts of another kind, named in the card for `paceline train --ood`."""
    steered: Share = 0.5
    """Share of the prompts whose answer must take a value of the schema that is rare so far."""
    max_overlap: Annotated[float, within("above 0 and at most 1", above=0, most=1)] = 0.9
    """An answer that shares more of its five-token pieces with an earlier one is left out; 1 keeps all but copies."""
    max_batch: Count = 32
    """Answers written at once."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(slots=True)
class Synthesized:
    """What came of it."""

    answers: Path
    """Folder of the answers that are kept."""
    num_answers: int = 0
    num_tokens: int = 0
    num_steered: int = 0
    """Of these, answers that had to take a rare value."""
    parsed: float = 0.0
    """Share of the answers, read back, that parse."""
    num_in_store: int = 0
    """Prompts left out because production had them."""
    num_compared: int = 0
    """Prompts of production that ours were compared with."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Answers left out, by reason."""
    wall_s: float = 0.0
