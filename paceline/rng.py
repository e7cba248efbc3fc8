"""Uniform numbers that depend only on (seed, stream, place), never on what else runs.

A counter-based generator: the number for a place is a hash, so a request gets the same numbers alone, in any batch and
after any rollback. Streams keep uses apart. Which place to use is part of exactness:

- `RACE` is keyed by the token's absolute position and the token itself: the numbers by which the target's own token is drawn
  (`model/sampling/race.py`). A drafter may look at them if its drafts are certain (`draft/foresight.py`): which token
  is drawn does not depend on drafts. `SAMPLE` draws where only one number is needed, and among the tokens that do not
  race for themselves.
- `SAMPLE` is keyed by the token's absolute position. A draw at a position whose token was thrown away may be drawn again,
  because nothing that was kept depended on it.
- `DRAFT`, `ACCEPT` and `RESIDUAL` are keyed by (anchor position, slot), which no two rounds share: block verification
  looks at every slot's draw, so a reused one would be biased by what it already decided.

Mixing function: splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

SAMPLE, DRAFT, ACCEPT, RESIDUAL, RACE = range(1, 6)
OTHERS = (1 << 32) - 1
"""In the place of a token: all those together that do not race for themselves."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(state: int) -> int:
    state = (state + _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def uniform(seed: int, stream: int, position: int, slot: int = 0) -> float:
    """A number in [0, 1) with 53 random bits for this seed, stream, position and slot."""
    mixed = _mix(_mix(_mix(seed ^ (stream << 56)) ^ position) ^ (slot << 32))
    return (mixed >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Noise:
    """The numbers by which the target's own token at a position is drawn."""

    seed: int
    position: int
    """Of the token, in prompt + answer."""

    def exponentials(self, tokens: Iterable[int]) -> list[float]:
        """Of each token a number from the exponential distribution with mean 1, above 0."""
        state = _mix(_mix(self.seed ^ (RACE << 56)) ^ self.position)
        return [-math.log1p(-((_mix(state ^ (token << 32)) >> 11) + 0.5) * 2.0**-53) for token in tokens]

    @property
    def of_others(self) -> float:
        """The number of all those together that have none."""
        return self.exponentials([OTHERS])[0]

    @property
    def uniform(self) -> float:
        """Draws among them."""
        return uniform(self.seed, SAMPLE, self.position)
