"""Rounds of several ways to draft through one answer, for refinement.py: what each keeps follows from the text alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


def kept(drafts: Sequence[int], rest: Sequence[int]) -> int:
    """How many drafts stand before the text `rest`."""
    pairs = zip(drafts, rest, strict=False)
    return next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(drafts), len(rest)))


@dataclass(slots=True)
class Walk:
    """One way to draft on its way through an answer."""

    at: int = 0
    """Place of its next anchor in the answer."""
    rounds: int = 0
    tokens: int = 0

    def take(self, stands: int, answer: Sequence[int]) -> None:
        """A round at `at` whose first `stands` drafts stand; it ends with a token of the target, where the answer has one."""
        gained = min(stands + 1, len(answer) - 1 - self.at)
        self.at, self.rounds, self.tokens = self.at + gained, self.rounds + 1, self.tokens + gained


@dataclass(slots=True)
class Tally:
    """Sums of one way to draft over all answers."""

    own: Walk = field(default_factory=Walk)
    """Over its own rounds; `at` means nothing."""
    plain: Walk = field(default_factory=Walk)
    """At the anchors of the plain block's rounds."""

    def add(self, own: Walk, plain: Walk) -> None:
        for total, part in ((self.own, own), (self.plain, plain)):
            total.rounds, total.tokens = total.rounds + part.rounds, total.tokens + part.tokens


def walk_all(answer: Sequence[int], ways: Sequence[str], stands: Callable[[str, int], int]) -> dict[str, tuple[Walk, Walk]]:
    """Every way's own rounds, and its rounds at the first way's anchors; `stands(way, place)` is asked with places that never
    go back."""
    own, at_first = {way: Walk() for way in ways}, {way: Walk() for way in ways}
    last = len(answer) - 1
    while (place := min(walk.at for walk in own.values())) < last:
        is_of_first = own[ways[0]].at == place
        for way in ways:
            is_own = own[way].at == place
            if is_own or is_of_first:
                number = stands(way, place)
                if is_of_first:
                    at_first[way].at = place
                    at_first[way].take(number, answer)
                if is_own:
                    own[way].take(number, answer)
    return {way: (own[way], at_first[way]) for way in ways}
