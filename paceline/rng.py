"""Counter-based random numbers that depend only on (seed, stream, position), so results are batch-invariant.

The number at a position is a hash, so a request gets the same numbers alone, in any batch and after any rollback. Each
use has its own stream. The key of a stream matters for exactness:

- `RACE` is keyed by the token's absolute position and the token itself: noise of the exponential race that samples the
  target's token (`model/sampling/race.py`). Drafters may use it if their drafts are deterministic
  (`draft/foresight.py`), because the sampled token does not depend on drafts.
- `SAMPLE` is keyed by the token's absolute position. It selects among the tokens that share one noise value (`OTHERS`).
  After a rollback the same number is used again: no kept token depended on it.
- `DRAFT`, `ACCEPT` and `RESIDUAL` are keyed by (anchor position, draft position), which no two rounds share: block
  verification uses the number of every draft position, so a reused one would be biased by its earlier decision.

Mixing function: splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

SAMPLE, DRAFT, ACCEPT, RESIDUAL, RACE = range(1, 6)
OTHERS = (1 << 32) - 1
"""Token id that represents all tokens without noise of their own."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(state: int) -> int:
    state = (state + _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def uniform(seed: int, stream: int, position: int, slot: int = 0) -> float:
    """Return a number in [0, 1) with 53 random bits, a hash of the arguments. `stream`: constant for the number's use
    (SAMPLE, DRAFT, ...). `position`: index of a token in prompt + answer. `slot`: draft position."""
    mixed = _mix(_mix(_mix(seed ^ (stream << 56)) ^ position) ^ (slot << 32))
    return (mixed >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Noise:
    """Deterministic random numbers for the exponential race that samples the target's token at one position. Each
    token's exponentially distributed number is divided by its probability; the smallest result wins."""

    seed: int
    position: int
    """Index of the token in prompt + answer."""

    def exponentials(self, tokens: Iterable[int]) -> list[float]:
        """Return one exponentially distributed number (mean 1, above 0) for each token id."""
        state = _mix(_mix(self.seed ^ (RACE << 56)) ^ self.position)
        return [-math.log1p(-((_mix(state ^ (token << 32)) >> 11) + 0.5) * 2.0**-53) for token in tokens]

    @property
    def of_others(self) -> float:
        """One exponentially distributed number (mean 1), shared by all tokens without a number of their own: those
        outside the target's top tokens (`model/sampling/race.py`). In the race they count as one token, with the sum of
        their probabilities."""
        return self.exponentials([OTHERS])[0]

    @property
    def uniform(self) -> float:
        """A number in [0, 1) that selects one of the tokens that share `of_others`, if they win the race."""
        return uniform(self.seed, SAMPLE, self.position)
