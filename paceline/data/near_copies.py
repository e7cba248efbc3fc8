"""Finds near-duplicate texts by MinHash (Broder 1997) over shingles (runs of 5 tokens) and an LSH index, from
datasketch.

Shingles that occur in more than COMMON of the texts, such as those of a shared system message, are ignored. Otherwise
support tickets with the same page of instructions would count as near-duplicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from paceline.errors import ConfigError, needing

SHINGLE, NUM_HASHES = 5, 128
COMMON, FEW = 0.1, 20
"""A shingle in more than this share of the texts (COMMON) is ignored, if there are at least FEW texts in all."""
ODD = np.uint64(0x9E3779B97F4A7C15)


def pieces_of(token_ids: Sequence[int]) -> np.ndarray:
    """Return a 1-D array of the distinct hashes of a text's shingles, which are its runs of 5 tokens. A text of fewer
    than 5 tokens is a single shingle."""
    ids = np.asarray(token_ids, np.uint64) + np.uint64(1)
    size = min(SHINGLE, len(ids))
    hashes = np.zeros(len(ids) - size + 1, np.uint64)
    for at in range(size):
        hashes = (hashes ^ ids[at : len(ids) - size + 1 + at]) * ODD
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)


def common_pieces(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sorted shingle hashes that occur in more than a tenth (COMMON) of the texts, such as those of a shared
    system message. For fewer than 20 (FEW) texts, the result is empty. `texts`: the shingle hashes of each text, from
    `pieces_of`."""
    if len(texts) < FEW:
        return np.empty(0, np.uint64)
    values, counts = np.unique(np.concatenate(texts), return_counts=True)
    return values[counts > COMMON * len(texts)]


@cache
def bands(threshold: float) -> tuple[int, int]:
    """Return (number of bands, hash values per band) of a locality-sensitive hashing (LSH) index that finds texts with
    a Jaccard similarity above `threshold`. Results are cached, since datasketch needs 0.2 s for one."""
    from datasketch import MinHashLSH

    index = MinHashLSH(threshold=threshold, num_perm=NUM_HASHES)
    return index.b, index.r


class Near:
    """Index of texts that finds near-duplicates of a text. Two texts are near-duplicates if the Jaccard similarity of
    their shingles (number of shared shingles over number of all) is above `overlap`, which cannot be if `overlap` is 1
    or more. Texts are given as shingle hashes (`pieces_of`). `common`: shingle hashes to ignore (`common_pieces`)."""

    def __init__(self, overlap: float, common: np.ndarray) -> None:
        with needing(ConfigError, "near-copies are found with datasketch: pip install 'paceline[evals]'"):
            from datasketch import MinHash, MinHashLSH
        self._overlap, self._common = overlap, common
        self._empty = MinHash(num_perm=NUM_HASHES, hashfunc=lambda data: int.from_bytes(data[:4], "little"))
        # Lower than `overlap`, since the index misses some texts just above its threshold; `like` compares its
        # candidates.
        self._index = MinHashLSH(num_perm=NUM_HASHES, params=bands(0.75 * overlap)) if overlap < 1 else None
        self._pieces: dict[int, np.ndarray] = {}

    def like(self, pieces: np.ndarray) -> Iterator[int]:
        """Yield the numbers of the near-duplicates of a text; these are the numbers that were passed to `add`.
        `pieces`: the text's shingle hashes. Yields nothing if all of them are in `common`."""
        own = np.setdiff1d(pieces, self._common, assume_unique=True)
        if self._index is None or not len(own):
            return
        candidates: list[Any] = self._index.query(self._hash(own))
        for number in sorted(candidates):
            other = self._pieces[number]
            shared = len(np.intersect1d(own, other, assume_unique=True))
            if shared > self._overlap * (len(own) + len(other) - shared):
                yield number

    def add(self, number: int, pieces: np.ndarray) -> None:
        own = np.setdiff1d(pieces, self._common, assume_unique=True)
        if self._index is not None and len(own):
            self._pieces[number] = own
            self._index.insert(number, self._hash(own))

    def _hash(self, own: np.ndarray) -> Any:
        minhash = self._empty.copy()
        minhash.update_batch([piece.tobytes() for piece in own])
        return minhash
