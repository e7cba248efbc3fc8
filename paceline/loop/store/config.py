"""Options of a dataset store, as frozen dataclasses: every field is an option. Quick to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.bounds import Checked, Share, within

Overlap = Annotated[float, within("above 0 and at most 1", above=0, most=1)]


@dataclass(frozen=True, slots=True)
class SplitConfig(Checked):
    """Options that decide which conversations of a dataset store are for training and which are for evals. The store
    also applies them to answers added later, until it is split again with other options."""

    evals_share: Share = 0.1
    """Share of the conversations that is reserved for evals and never trained on."""
    split_seed: int = 0
    """Seed that selects the conversations for evals."""
    max_overlap: Overlap = 0.9
    """Similarity above which an answer with its prompt counts as a copy of one in another conversation and is left out;
    1 leaves out exact copies only."""
    related: Overlap = 0.7
    """Similarity of first prompts above which conversations are kept together, for training or for evals."""
