"""Stores documents on disk: a corpus of any size needs only a few bytes of memory per document.

    runs/x/documents/tokens.bin     int32 token ids of all documents, one after the other
    runs/x/documents/keys.bin       their keys, UTF-8
    runs/x/documents/index.npy      int64 [N, 9]: see COLUMNS; memory-mapped

`stored_corpus` replaces `dataset.read_corpus` for a corpus that does not fit in memory, with the same documents in the
same order. Only the held-out documents, a bounded number, are in memory.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from paceline.data.rows import Dropped
from paceline.errors import CacheError, PromptError, reraised
from paceline.train.documents.dataset import (
    AnswerSource,
    Corpus,
    Document,
    check_vocabulary,
    has_vocabulary,
    key_hash,
    nothing_left,
    num_heldout,
    prompt_of,
    read_documents,
)

COLUMNS = ("first_token", "end_token", "answer_start", "first_key", "end_key", "hash", "turn", "has_loop", "is_cut")
MOST_UNKNOWN = 0.1
"""Largest share of documents with tokens unknown to the target; above it, another model wrote the answers."""
REMEDY = "free space or choose another --out"


class StoredDocuments(Sequence[Document]):
    """A sequence of documents that are stored in files of `folder`; each is read from disk on access. `rows`: indices
    of the folder's documents that form this sequence, in order; None for all."""

    def __init__(self, folder: Path, rows: NDArray[np.int64] | None = None) -> None:
        """Raises CacheError if the folder is not one of `write_documents`."""
        remedy = "delete it to have it made again"
        with reraised(CacheError, f"{folder} cannot be read", remedy, OSError, ValueError):
            self.table: NDArray[np.int64] = np.load(folder / "index.npy", mmap_mode="r")
            self._tokens, self._keys = _Bytes(folder / "tokens.bin"), _Bytes(folder / "keys.bin")
        self.folder, self.rows = folder, np.arange(len(self.table)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> Document: ...
    @overload
    def __getitem__(self, place: slice) -> list[Document]: ...
    def __getitem__(self, place: int | slice) -> Document | list[Document]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        first, end, answer_start, _, _, _, turn, _, _ = (int(number) for number in self.table[self.rows[place]])
        tokens = np.frombuffer(self._tokens[4 * first : 4 * end], dtype=np.int32)
        return Document(f"{self.key(place)}/{turn}", tokens, answer_start)

    def __iter__(self) -> Iterator[Document]:
        return (self[place] for place in range(len(self)))

    def key(self, place: int) -> str:
        """Returns the key of the conversation from which document number `place` is. A conversation can have several
        documents, one for each answer; `Document.key` also has the answer's number."""
        first, end = (int(number) for number in self.table[self.rows[place], 3:5])
        return self._keys[first:end].decode(errors="surrogatepass")


class _Bytes:
    """Reads slices of a file. It is not memory-mapped, since mapped pages count as this process's memory."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __getitem__(self, part: slice) -> bytes:
        return os.pread(self._file, part.stop - part.start, part.start)


def without(documents: Sequence[Document], is_out: Callable[[Document], bool]) -> Sequence[Document]:
    """Returns the documents without those for which `is_out`, given by the caller, returns True. Stored documents are
    not loaded into memory."""
    if not isinstance(documents, StoredDocuments):
        return [document for document in documents if not is_out(document)]
    is_kept = [not is_out(document) for document in documents]
    return StoredDocuments(documents.folder, documents.rows[np.array(is_kept, dtype=bool)])


def write_documents(
    folder: Path, sources: Iterable[AnswerSource], max_len: int, counts: Counter[str], dropped: Dropped | None
) -> StoredDocuments:
    """Writes the answers in `sources` as documents to files in `folder`; returns the stored documents, still unsorted
    and with duplicates. `read_documents` explains the other arguments. Raises CacheError for disk errors."""
    num_tokens = num_bytes = 0
    with reraised(CacheError, f"cannot write {folder}", REMEDY, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with (
            (folder / "tokens.bin").open("wb") as tokens,
            (folder / "keys.bin").open("wb") as keys,
            (folder / "index.part").open("wb") as index,
        ):
            for answer, document, has_loop, is_cut in read_documents(sources, max_len, counts, dropped, once=False):
                key = answer.key.encode(errors="surrogatepass")
                row = [num_tokens, num_tokens + len(document), document.answer_start]
                row += [num_bytes, num_bytes + len(key), key_hash(answer.key), answer.turn, has_loop, is_cut]
                num_tokens, num_bytes = row[1], row[4]
                tokens.write(document.tokens.tobytes())
                keys.write(key)
                index.write(np.array(row, dtype=np.int64).tobytes())
        part = folder / "index.part"
        table = np.memmap(part, np.int64, "r") if part.stat().st_size else np.empty(0, np.int64)
        np.save(folder / "index.npy", table.reshape(-1, len(COLUMNS)))
        part.unlink()
    return StoredDocuments(folder)


def stored_corpus(
    folder: Path,
    sources: Iterable[AnswerSource],
    max_len: int,
    heldout_share: float,
    max_heldout: int,
    min_heldout: int = 1,
    strict: bool = False,
) -> Corpus:
    """Returns the same corpus as `dataset.read_corpus`, but stores the documents as files in `folder`. Training
    documents are read from disk on access. Also raises CacheError for disk errors."""
    counts, dropped = Counter[str](), Dropped()
    every = write_documents(folder, sources, max_len, counts, None if strict else dropped)
    order, counts["num_repeated"] = _sorted_once(every)
    every.rows = order
    counts["num_loops_cut"], counts["num_cut"] = (int(number) for number in every.table[order, 7:9].sum(0))
    chosen = np.zeros(len(order), dtype=bool)
    prompts = _prompt_hashes(every)
    for prompt in _heldout(every, prompts, heldout_share, max_heldout, min_heldout):
        chosen |= prompts[:, 1] == key_hash(prompt)
    train, heldout = StoredDocuments(folder, order[~chosen]), StoredDocuments(folder, order[chosen])
    corpus = Corpus(train, list(heldout), **counts, dropped=dropped)
    if not train:
        raise PromptError(nothing_left(corpus))
    return corpus


def known_only(corpus: Corpus, vocab_size: int, strict: bool = False) -> Corpus:
    """Returns the corpus without documents that contain token ids unknown to the target; `corpus.dropped` counts them.
    Raises PromptError if more than 10% of the documents contain such tokens, or with `strict` if one does."""
    documents = chain(corpus.train, corpus.heldout)  # iterated, as stored documents may not fit in memory
    foreign = {document.key for document in documents if not has_vocabulary(document, vocab_size)}
    if not foreign:
        return corpus
    if strict or len(foreign) > MOST_UNKNOWN * (len(corpus.train) + len(corpus.heldout)):
        check_vocabulary(corpus, vocab_size)
    corpus.dropped.add("with tokens that the target does not have", f"answer {min(foreign)}", len(foreign))
    heldout = [document for document in corpus.heldout if document.key not in foreign]
    return replace(corpus, train=without(corpus.train, lambda document: document.key in foreign), heldout=heldout)


def _sorted_once(every: StoredDocuments) -> tuple[NDArray[np.int64], int]:
    """Returns the rows ordered by (key hash, turn) without duplicates, and the number of duplicates."""
    hashes, turns = every.table[:, 5], every.table[:, 6]
    order = np.lexsort((turns, hashes))
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (np.diff(hashes[order]) != 0) | (np.diff(turns[order]) != 0)
    return order[is_first], int((~is_first).sum())


def _prompt_hashes(every: StoredDocuments) -> NDArray[np.int64]:
    """Returns the crc32 and the hash of each document's prompt, [N, 2]."""
    hashes = np.empty((len(every), 2), dtype=np.int64)
    for place in range(len(every)):
        prompt = prompt_of(every.key(place))
        hashes[place] = zlib.crc32(prompt.encode(errors="surrogatepass")), key_hash(prompt)
    return hashes


def _heldout(every: StoredDocuments, prompts: NDArray[np.int64], share: float, most: int, fewest: int) -> list[str]:
    """Chooses like `dataset.heldout_prompts`, without holding all prompts in memory."""
    _, firsts = np.unique(prompts[:, 1], return_index=True)
    number = num_heldout(len(firsts), share, most, fewest)
    if not number:
        return []
    crcs = prompts[firsts, 0]
    candidates = firsts[crcs <= np.sort(crcs)[number - 1]]
    named = sorted((int(prompts[place, 0]), prompt_of(every.key(int(place)))) for place in candidates)
    return [prompt for _, prompt in named[:number]]
