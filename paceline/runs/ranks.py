"""Which of how many processes this is.

Every stage shares its work out by rank, which `torchrun --nproc-per-node 2 -m paceline train ...` tells each process.
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

    def share_of(self, number: int) -> range:
        """This process's part of `number` things: neighbours stay together."""
        return range(number * self.rank // self.world, number * (self.rank + 1) // self.world)
