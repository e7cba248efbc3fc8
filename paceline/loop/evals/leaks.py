"""Finds contaminated eval cases: a model trained on them can answer from memory.

leaking(suite, Store.open("store"))          # ids of cases that nearly equal a prompt of the training split
"""

from __future__ import annotations

import re
import zlib

import numpy as np

from paceline.data.near_copies import Near, common_pieces, pieces_of
from paceline.loop.evals.suite import Suite
from paceline.loop.store.folder import Store

WORD = re.compile(r"\w+|[^\w\s]")


def leaking(suite: Suite, store: Store) -> list[str]:
    """Returns the ids of the cases whose questions nearly equal a prompt in the store's training split.

    Two texts nearly equal each other if the Jaccard similarity of their 5-word n-grams exceeds the store's setting
    `split.related`. N-grams that occur in more than a tenth of all texts are ignored as boilerplate.
    """
    prompts = [_words(row["prompt"]) for row in store.rows("train")]
    cases = [_words(case.question) for case in suite]
    near = Near(store.split.related, common_pieces(prompts + cases))
    for number, pieces in enumerate(prompts):
        near.add(number, pieces)
    return [case.id for case, pieces in zip(suite, cases, strict=True) if any(True for _ in near.like(pieces))]


def _words(text: str) -> np.ndarray:
    hashes = [zlib.crc32(word.encode()) for word in WORD.findall(text.lower())]
    return pieces_of(hashes or [0])
