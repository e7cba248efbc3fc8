"""Answers as training documents: which there are, which are held out, in which order they come, where blocks are
anchored.

Everything random is drawn from (seed, epoch, document), never from what was drawn before: a resumed run, and a run on
another number of processes, sees the same blocks.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.answers import Answer, AnswerShards, read_answers
from paceline.data.rows import Dropped
from paceline.errors import PromptError
from paceline.train.documents.tokenised import is_tokenised, tokenised_answers

NUM_READ_BACK = 8
COUNTED_AT_ONCE = 1 << 20
"""Tokens."""
MIN_HELDOUT, MAX_HELDOUT = 16, 128
"""Prompts that a training run holds out, at least (where there are enough) and at most."""
MAX_PERIOD = 64
"""Longest loop, in tokens, that `loop_start` looks for."""


@dataclass(frozen=True, slots=True)
class Document:
    """One answer with everything before it."""

    key: str
    tokens: NDArray[np.int32]
    answer_start: int
    """First position of the answer: the first place a block can be anchored."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_anchors(self) -> int:
        """Positions that have a next token to draft."""
        return max(0, len(self.tokens) - 1 - self.answer_start)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents to learn from, and documents to be tested on."""

    train: Sequence[Document]
    heldout: list[Document]
    num_too_short: int = 0
    num_prompt_too_long: int = 0
    """Answers whose prompt alone fills the longest document."""
    num_loops_cut: int = 0
    num_cut: int = 0
    """Answers of which only the beginning fits the longest document."""
    num_repeated: int = 0
    """Answers that were there already: the same conversation, read from two sources or kept twice."""
    dropped: Dropped = field(default_factory=Dropped)
    """Rows of the sources that could not be used."""

    @property
    def num_prompts(self) -> int:
        """Different prompts to learn from: the messages of a conversation and its answers at other temperatures count once."""
        return len({prompt_of(document.key.rsplit("/", 1)[0]) for document in self.train})

    def told(self) -> str:
        """What was left out or cut, for people; empty when nothing was."""
        counts = (
            (self.num_loops_cut, "cut where they repeat themselves"),
            (self.num_cut, "cut at the longest document (max_len)"),
            (self.num_prompt_too_long, "left out: prompt longer than the longest document (max_len)"),
            (self.num_too_short, "too short"),
            (self.num_repeated, "there twice"),
        )
        parts = [f"{number} {what}" for number, what in counts if number]
        return ", ".join(parts + ([str(self.dropped)] if self.dropped else []))

    def token_counts(self, vocab_size: int) -> NDArray[np.int64]:
        """How often each token stands in the training answers, [V]."""
        counts_V, waiting, num_waiting = np.zeros(vocab_size, dtype=np.int64), list[NDArray[np.int32]](), 0
        for document in self.train:
            waiting.append(document.tokens[document.answer_start :])
            num_waiting += len(waiting[-1])
            if num_waiting >= COUNTED_AT_ONCE:
                counts_V += np.bincount(np.concatenate(waiting), minlength=vocab_size)
                waiting, num_waiting = [], 0
        return counts_V + np.bincount(np.concatenate(waiting), minlength=vocab_size) if waiting else counts_V


def read_corpus(
    sources: Iterable[Path],
    max_len: int,
    heldout_share: float = 0.02,
    max_heldout: int = 256,
    min_heldout: int = 1,
    strict: bool = False,
) -> Corpus:
    """Documents of answer folders or files, each once; conversations are held out by a hash of their key's prompt.

    Answers are cut at `max_len` tokens and where they start to repeat themselves for the third time: repeated text
    teaches nothing new and makes every figure look better than it is. Documents come in an order that their keys
    decide (by hash, so that sources are mixed; turns of a conversation together), not the one in which they were
    written. Raises PromptError when nothing is left to learn from; with `strict` at a row that cannot be used."""
    found: list[tuple[str, int, Document]] = []
    counts, dropped = Counter[str](), Dropped()
    for each in read_documents(sources, max_len, counts, None if strict else dropped):
        found.append((each.answer.key, each.answer.turn, each.document))
        counts.update(num_loops_cut=each.has_loop, num_cut=each.is_cut)
    found.sort(key=lambda each: (key_hash(each[0]), each[1]))
    chosen = heldout_prompts([key for key, _, _ in found], heldout_share, max_heldout, min_heldout)
    train = [document for key, _, document in found if prompt_of(key) not in chosen]
    heldout = [document for key, _, document in found if prompt_of(key) in chosen]
    corpus = Corpus(train, heldout, **counts, dropped=dropped)
    if not train:
        raise PromptError(nothing_left(corpus))
    return corpus


def key_hash(key: str) -> int:
    """63 bits: documents stand in the order of their conversations' hashes."""
    return int.from_bytes(hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()) >> 1


def nothing_left(corpus: Corpus) -> str:
    """Message for a corpus without documents to learn from, with the counts of what was left out."""
    counts = corpus.told()
    text = "there are no answers to learn from: regenerate more, or raise the longest document (max_len)"
    return f"{text}; {counts}" if counts else text


class Found(NamedTuple):
    """An answer, the document it becomes, and what was cut off that."""

    answer: Answer
    document: Document
    has_loop: bool
    is_cut: bool


def read_documents(
    sources: Iterable[Path], max_len: int, counts: Counter[str], dropped: Dropped | None = None, *, once: bool = True
) -> Iterator[Found]:
    """Answers as documents; `counts` gets Corpus's num_too_short, num_prompt_too_long and num_repeated. `once`
    remembers all keys, and leaves an answer out that was there before."""
    counts.update(num_too_short=0, num_prompt_too_long=0, num_loops_cut=0, num_cut=0, num_repeated=0)
    seen: set[tuple[int, int]] = set()
    for answer in _answers(sources, dropped):
        if once:
            mark = (key_hash(answer.key), answer.turn)
            if mark in seen:
                counts["num_repeated"] += 1
                continue
            seen.add(mark)
        end = loop_start(answer.answer_ids)
        whole = answer.prompt_ids + answer.answer_ids[:end]
        document = Document(f"{answer.key}/{answer.turn}", np.array(whole[:max_len], dtype=np.int32), len(answer.prompt_ids))
        if document.num_anchors < 1:
            is_filled = len(answer.prompt_ids) >= max_len - 1 and len(answer.answer_ids) > 1
            counts["num_prompt_too_long" if is_filled else "num_too_short"] += 1
            continue
        yield Found(answer, document, end < len(answer.answer_ids), len(whole) > max_len)


def _answers(sources: Iterable[Path], dropped: Dropped | None = None) -> Iterator[Answer]:
    for source in sources:
        if not source.exists():
            raise PromptError(f"there are no answers at {source}: make them with paceline regenerate")
        if source.is_dir():
            yield from AnswerShards(source).read(dropped)
        elif is_tokenised(source):
            yield from tokenised_answers(source, dropped)
        else:
            yield from read_answers(source, dropped)


def check_answers(sources: Iterable[Path], decode: Callable[[list[int]], str] | None = None, *, strict: bool = False) -> None:
    """Raises PromptError when a source is missing or has no answer that can be used, or when none of its first
    answers decodes to its own text; with `strict` at a row that cannot be used."""
    for source in sources:
        dropped = Dropped()
        first = list(islice(_answers([source], None if strict else dropped), NUM_READ_BACK))
        if not first:
            told = f" ({dropped})" if dropped else ""
            raise PromptError(f"there are no answers in {source}{told}: make them with paceline regenerate")
        spoken = [answer for answer in first if answer.text.strip()]
        # A server's text may end before its tokens do, at a stop string.
        if decode and spoken and not any(decode(each.answer_ids).strip().startswith(each.text.strip()) for each in spoken):
            raise PromptError(
                f"the answers in {source} are tokens of another tokenizer than the target's: regenerate them with this target"
            )


def check_vocabulary(corpus: Corpus, vocab_size: int) -> None:
    """Raises PromptError naming a document with a token id that the target does not have."""
    for document in (*corpus.train, *corpus.heldout):
        if not is_within(document, vocab_size):
            low, high = int(document.tokens.min()), int(document.tokens.max())
            raise PromptError(
                f"answer {document.key} holds token {low if low < 0 else high}, the target has {vocab_size} tokens: another "
                "model wrote these answers; regenerate them with this target"
            )


def is_within(document: Document, vocab_size: int) -> bool:
    """True if the target has every token of the document."""
    return int(document.tokens.min()) >= 0 and int(document.tokens.max()) < vocab_size


def prompt_of(key: str) -> str:
    """A conversation's key without its temperature: answers to one prompt stay on one side."""
    return key.rsplit("@", 1)[0]


def heldout_prompts(keys: Iterable[str], share: float, most: int, fewest: int = 1) -> set[str]:
    """The prompts that are held out: this share of all, of ten or more at least `fewest` but no more than half,
    those of the smallest hashes."""
    prompts = sorted({prompt_of(key) for key in keys}, key=lambda prompt: (zlib.crc32(prompt.encode()), prompt))
    return set(prompts[: num_heldout(len(prompts), share, most, fewest)])


def num_heldout(num_prompts: int, share: float, most: int, fewest: int = 1) -> int:
    """How many of so many prompts `heldout_prompts` takes."""
    if not share or num_prompts < 10:
        return 0
    return min(most, max(math.ceil(share * num_prompts), min(fewest, num_prompts // 2)))


def loop_start(tokens: list[int]) -> int:
    """Where a tail that only repeats itself may be cut: two repetitions are kept. The length when there is no loop."""
    array = np.array(tokens)
    for period in range(1, min(MAX_PERIOD, len(array) // 3) + 1):
        differs = np.flatnonzero(array[period:] != array[:-period])
        first_same = int(differs[-1]) + 1 if len(differs) else 0
        repeated = len(array) - period - first_same
        if repeated >= 2 * period and repeated >= 12:
            return first_same + 2 * period + max(0, 12 - 2 * period)
    return len(array)


def epoch_order(num_documents: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of the documents, another one every epoch."""
    return np.random.default_rng((seed, epoch)).permutation(num_documents)


def draw_anchors(document: Document, number: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Up to `number` distinct anchor positions of one document, ascending, redrawn every epoch (DFlash, 4.2)."""
    every = np.arange(document.answer_start, len(document) - 1)
    if len(every) <= number:
        return every
    generator = np.random.default_rng((seed, epoch, zlib.crc32(document.key.encode())))
    return np.sort(generator.choice(every, number, replace=False))


def labels_of(document: Document, anchors_A: NDArray[np.int64], block_size: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Tokens at anchor + 1 .. anchor + block_size - 1, [A, K], and whether they are within the document."""
    at_AK = anchors_A[:, None] + np.arange(1, block_size)
    valid_AK = at_AK < len(document)
    return document.tokens[np.minimum(at_AK, len(document) - 1)].astype(np.int64), valid_AK


def num_valid_slots(document: Document, anchors_A: NDArray[np.int64], block_size: int) -> int:
    """How many slots of these blocks carry a label."""
    return int(np.minimum(len(document) - 1 - anchors_A, block_size - 1).sum())


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the data a run stands: the next step begins at this document of this epoch's order."""

    epoch: int = 0
    index: int = 0


class StepPlanner:
    """Which documents and anchors make up each step, for any number of processes.

    A step takes documents in the epoch's order until it has `blocks_per_step` blocks; every process plans the whole
    step, so that all divide by the same number of slots, and computes its own share."""

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        blocks_per_step: int,
        anchors: int,
        block_size: int,
        seed: int,
    ) -> None:
        self.documents = documents
        self._blocks_per_step, self._anchors, self._block_size, self._seed = blocks_per_step, anchors, block_size, seed
        self.steps_per_epoch = max(1.0, self._count_steps())
        """How many steps see every document once; a document that a step has no room for whole gives fewer blocks."""

    def _count_steps(self) -> float:
        num_steps = num_blocks = 0
        for number in epoch_order(len(self.documents), self._seed, 0):
            num_blocks += min(self._anchors, self._blocks_per_step - num_blocks, self.documents[int(number)].num_anchors)
            if num_blocks == self._blocks_per_step:
                num_steps, num_blocks = num_steps + 1, 0
        return num_steps + num_blocks / self._blocks_per_step

    def step(self, place: Place) -> tuple[list[tuple[int, NDArray[np.int64]]], int, Place]:
        """(document number, its anchors) of one step, the number of valid slots in it, and where the next one begins."""
        chosen: list[tuple[int, NDArray[np.int64]]] = []
        num_blocks = num_slots = 0
        epoch, index = place.epoch, place.index
        order = epoch_order(len(self.documents), self._seed, epoch)
        while num_blocks < self._blocks_per_step:
            if index >= len(order):
                epoch, index = epoch + 1, 0
                order = epoch_order(len(self.documents), self._seed, epoch)
            number = int(order[index])
            document = self.documents[number]
            anchors_A = draw_anchors(document, min(self._anchors, self._blocks_per_step - num_blocks), self._seed, epoch)
            chosen.append((number, anchors_A))
            num_blocks += len(anchors_A)
            num_slots += num_valid_slots(document, anchors_A, self._block_size)
            index += 1
        return chosen, num_slots, Place(epoch, index)
