"""Rank and world size of this process, from torchrun's environment. Stages divide their work by rank."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranks:
    """Number of this process (`rank`, from 0) among the `world` processes that torchrun started."""

    rank: int = 0
    world: int = 1
    local: int = 0
    """Rank within this machine; selects the GPU."""

    @classmethod
    def here(cls) -> Ranks:
        """Return this process's ranks from torchrun's environment variables. Without torchrun, there is one process
        with rank 0."""
        defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
        return cls(*(int(os.environ.get(name, default)) for name, default in defaults.items()))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share_of(self, number: int) -> range:
        """Divide `number` items among all processes, and return the range of item indices that this process must
        handle."""
        return range(number * self.rank // self.world, number * (self.rank + 1) // self.world)
