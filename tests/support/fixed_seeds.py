"""Requests without a seed get one that follows from what they ask: no test depends on chance or on who came first.

from fixed_seeds import fixed_seeds  # an autouse fixture, in a test module
"""

from __future__ import annotations

from collections import Counter
from zlib import crc32

import pytest

from paceline.types import Sequence


@pytest.fixture(autouse=True)
def fixed_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th request of a test for a prompt and parameters has a seed of its own: the answers of all are the same
    ones, whichever of equal requests is first."""
    begin, seen = Sequence.__post_init__, Counter[str]()

    def seeded(self: Sequence) -> None:
        begin(self)
        if self.params.seed is None:
            same = repr((self.tokens[: self.prompt_len], self.params))
            self.seed = crc32(f"{same} {seen[same]}".encode())
            seen[same] += 1

    monkeypatch.setattr(Sequence, "__post_init__", seeded)
