"""Which of how many processes this is: every stage shares its work out by rank.

From `torchrun --nproc-per-node 2 -m paceline train ...`, which tells each process in its environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process among `world`."""

    rank: int = 0
    world: int = 1
    local: int = 0
    """Number of this process on its own machine: which GPU it takes."""

    @classmethod
    def here(cls) -> Ranks:
        """From torchrun's environment; one process alone without it."""
        values = [int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))]
        return cls(*values)

    @property
    def is_first(self) -> bool:
        return self.rank == 0
