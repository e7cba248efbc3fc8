"""What a store is asked for: frozen dataclasses, whose fields are the commands' options. Quick to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.bounds import Share, check, within

Overlap = Annotated[float, within("above 0 and at most 1", above=0, most=1)]


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """How conversations are shared out; a store keeps what it was made with."""

    evals_share: Share = 0.1
    """Share of the conversations that are kept for evals, and never trained on."""
    split_seed: int = 0
    """Which ones."""
    max_overlap: Overlap = 0.9
    """An answer that has more than this share of its pieces in common with one of another conversation is a copy and left out;
    1 leaves out exact copies only."""
    related: Overlap = 0.7
    """Conversations whose first prompts have more than this share in common stay on the same side."""

    def __post_init__(self) -> None:
        check(self)
