"""How many drafts stand: one chance, a chance for each place, or what a run recorded.

`conditional[i - 1]` is the chance that draft i stands, given that those before it do; survival_i is the share of rounds whose
first i drafts all stood, the product of the first i. Measured curves rise with depth: one number is a first guess only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import ConfigError
from paceline.figures import survival
from paceline.simulate.files import is_amount

Kind = Literal["constant", "conditional", "survival", "histogram"]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Chances by place; deeper drafts than were given have the last one's. Raises ConfigError outside 0..1."""

    conditional: tuple[float, ...]
    kind: Kind = "conditional"
    """The form in which it was given."""
    num_rounds: int = 0
    """Number of recorded rounds; 0 when it was not recorded."""

    def __post_init__(self) -> None:
        if not self.conditional:
            raise ConfigError("--acceptance is empty: give a chance such as 0.8, or a curve such as 0.8,0.75,0.7")
        for chance in self.conditional:
            if not 0 <= chance <= 1:  # also NaN
                raise ConfigError(f"--acceptance {chance:g} is no chance: it must be between 0 and 1, such as 0.8")

    @property
    def depth(self) -> int:
        """Number of drafts whose chance was given; 0 for a constant, which holds for every draft."""
        return 0 if self.kind == "constant" else len(self.conditional)

    def at(self, place: int) -> float:
        """Chance of draft `place`, counted from 1, given that those before it stand."""
        return self.conditional[min(place, len(self.conditional)) - 1]

    def survival(self, num_drafted: int) -> list[float]:
        """Share of rounds whose first i drafts all stand, for i = 1..num_drafted."""
        kept, found = 1.0, []
        for place in range(1, num_drafted + 1):
            kept *= self.at(place)
            found.append(kept)
        return found


def constant(chance: float) -> Acceptance:
    return Acceptance((chance,), "constant")


def from_conditional(chances: Sequence[float]) -> Acceptance:
    return Acceptance(tuple(chances), "conditional")


def from_survival(shares: Sequence[float]) -> Acceptance:
    """Raises ConfigError when the curve rises: what stood for i + 1 drafts stood for i."""
    before, chances = 1.0, []
    for place, share in enumerate(shares, start=1):
        if not 0 <= share <= before:
            raise ConfigError(
                f"survival at draft {place} is {share:g} after {before:g}: it must fall, between 1 and 0; "
                "chances given that the earlier drafts stand are written without 'survival:'"
            )
        chances.append(share / before if before else 0.0)
        before = share
    return Acceptance(tuple(chances), "survival")


def from_histogram(counts: Sequence[float]) -> Acceptance:
    """`counts[n]`: rounds in which exactly n drafts stood, as bench results and traces record them.

    Rounds that drafted fewer tokens than the longest count as if they had drafted as many, so the tail is a little low.
    Raises ConfigError without rounds or without drafts.
    """
    if not all(map(is_amount, counts)) or len(counts) < 2 or sum(counts) == 0:
        raise ConfigError("the histogram needs counts of rounds with 0, 1, 2, ... accepted drafts, at least two of them")
    shares = survival(counts)
    while len(shares) > 1 and shares[-1] == 0:
        shares.pop()
    return replace(from_survival(shares), kind="histogram", num_rounds=int(sum(counts)))


def tokens_per_round(acceptance: Acceptance, num_drafted: int) -> float:
    """N(g) = 1 + sum over i <= g of survival_i: the bonus token included; (1 - p^(g+1)) / (1 - p) for one chance p."""
    return 1.0 + sum(acceptance.survival(num_drafted))


def shifted(acceptance: Acceptance, points: float) -> Acceptance:
    """Every chance higher by `points` (0.01 is one point), kept within 0 and 1."""
    return replace(acceptance, conditional=tuple(min(max(chance + points, 0.0), 1.0) for chance in acceptance.conditional))
