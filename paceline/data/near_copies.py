"""What is nearly the same: MinHash (Broder 1997) over pieces of five tokens, and LSH to find candidates, by datasketch.

What many have in common, a system message or a worked example, says nothing about two of them: pieces that stand in more than
COMMON of all are left out. So tickets that share a page of instructions are told apart by their own words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from paceline.errors import ConfigError, needing

SHINGLE, NUM_HASHES = 5, 128
COMMON, FEW = 0.1, 20
"""Share of all texts in which a piece is a form, not a text; in fewer than FEW texts nothing is taken for one."""
ODD = np.uint64(0x9E3779B97F4A7C15)


def pieces_of(token_ids: Sequence[int]) -> np.ndarray:
    """Hashes [pieces] of all runs of SHINGLE tokens, each once; of a shorter text of all of it."""
    ids = np.asarray(token_ids, np.uint64) + np.uint64(1)
    size = min(SHINGLE, len(ids))
    hashes = np.zeros(len(ids) - size + 1, np.uint64)
    for at in range(size):
        hashes = (hashes ^ ids[at : len(ids) - size + 1 + at]) * ODD
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)


def common_pieces(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Those that stand in more than COMMON of the texts, sorted."""
    if len(texts) < FEW:
        return np.empty(0, np.uint64)
    values, counts = np.unique(np.concatenate(texts), return_counts=True)
    return values[counts > COMMON * len(texts)]


@cache
def bands(threshold: float) -> tuple[int, int]:
    """Bands and rows of each band that suit an index of this threshold: datasketch looks for them for 0.2 s."""
    from datasketch import MinHashLSH

    index = MinHashLSH(threshold=threshold, num_perm=NUM_HASHES)
    return index.b, index.r


class Near:
    """Remembers texts by name; finds those that have more than `overlap` of their pieces in common (Jaccard's share)."""

    def __init__(self, overlap: float, common: np.ndarray) -> None:
        with needing(ConfigError, "near-copies are found with datasketch: pip install 'paceline[evals]'"):
            from datasketch import MinHash, MinHashLSH
        self._overlap, self._common = overlap, common
        self._empty = MinHash(num_perm=NUM_HASHES, hashfunc=lambda data: int.from_bytes(data[:4], "little"))
        # A low threshold, since the index misses some of what is just above it: what it finds is compared.
        self._index = MinHashLSH(num_perm=NUM_HASHES, params=bands(0.75 * overlap)) if overlap < 1 else None
        self._pieces: dict[int, np.ndarray] = {}

    def like(self, pieces: np.ndarray) -> Iterator[int]:
        """Yield the numbers of the texts kept that are nearly the same as the one with these pieces.

        Pieces that most texts have do not count: a text of nothing else has no near-copy.
        """
        own = np.setdiff1d(pieces, self._common, assume_unique=True)
        if self._index is None or not len(own):
            return
        found: list[Any] = self._index.query(self._hash(own))
        for name in sorted(found):
            other = self._pieces[name]
            shared = len(np.intersect1d(own, other, assume_unique=True))
            if shared > self._overlap * (len(own) + len(other) - shared):
                yield name

    def add(self, name: int, pieces: np.ndarray) -> None:
        own = np.setdiff1d(pieces, self._common, assume_unique=True)
        if self._index is not None and len(own):
            self._pieces[name] = own
            self._index.insert(name, self._hash(own))

    def _hash(self, own: np.ndarray) -> Any:
        made = self._empty.copy()
        made.update_batch([each.tobytes() for each in own])
        return made
