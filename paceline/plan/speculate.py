"""Parses the setting `speculate`, the drafts that each round verifies. It has this name on the command line, in Python,
in settings files and in requests.

    auto      the number of drafts with the most tokens per second, by measured times and acceptance, possibly none
    full      all drafts of the drafter
    off       none: plain decoding, and no drafter is loaded (also written 0)
    N         the drafter's first N drafts, or all if it makes fewer
    tree:N    a tree of the drafter's N most probable drafts
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.bounds import MAX_DRAFTED
from paceline.errors import ConfigError
from paceline.plan.planner import FixedPlanner
from paceline.plan.trees import MOST_NODES

KNOWN = f"auto, full, off, N (drafts in every round, at most {MAX_DRAFTED}) or tree:N (a tree, at most {MOST_NODES})"


@dataclass(frozen=True, slots=True)
class Speculation:
    """Parsed value of the setting `speculate`: which drafts each round verifies."""

    is_auto: bool = False
    num_drafted: int | None = None
    """Drafts of every round; 0 for none; None for "auto", "full" and "tree:N"."""
    num_nodes: int = 0
    """Nodes of the tree of drafts that every round verifies; 0: chains."""

    @classmethod
    def of(cls, text: str) -> Speculation:
        """Parses a value of the setting: "auto", "full", "off", "N" or "tree:N". N is a number of drafts, at most
        1024 (MAX_DRAFTED); for a tree, 1 to 128 (MOST_NODES). Raises ConfigError for any other text."""
        if text in ("auto", "full", "off"):
            return cls(is_auto=text == "auto", num_drafted=0 if text == "off" else None)
        digits = text.removeprefix("tree:")
        if digits.isascii() and digits.isdecimal() and len(digits) < 10:
            if digits == text and int(digits) <= MAX_DRAFTED:
                return cls(num_drafted=int(text))
            if digits != text and 1 <= int(digits) <= MOST_NODES:
                return cls(num_nodes=int(digits))
        raise ConfigError(f"speculate {text!r:.80} is not known: choose {KNOWN}")

    @property
    def is_off(self) -> bool:
        """True for "off" and "0": nothing is drafted."""
        return self.num_drafted == 0

    @property
    def adapts(self) -> bool:
        """True if measured times and acceptance decide the number of drafts: for "auto", and also for "off", where a
        drafter may be added later."""
        return self.is_auto or self.is_off

    def planner(self, most_chunk: int = 256) -> FixedPlanner:
        """Returns a planner for this setting that ignores measured times, with prefill chunks of `most_chunk` tokens.
        With "auto" it therefore verifies all drafts, as with "full"."""
        return FixedPlanner(self.num_drafted, most_chunk, num_nodes=self.num_nodes)
