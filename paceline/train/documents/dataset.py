"""Turns answers into training documents. Chooses the held-out documents, the order in each epoch, and the anchors: the
positions in a document after which a block is drafted.

Every random choice is drawn from (seed, epoch, document), independent of earlier draws, so a resumed run and a run on
another number of processes use the same blocks.
"""

from __future__ import annotations

import hashlib
import math
import re
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
from paceline.data.tags import Tagged, check_tags
from paceline.errors import ConfigError, PromptError, refuse
from paceline.train.documents.tokenised import is_tokenised, tokenised_answers

NUM_READ_BACK = 8
MIN_HELDOUT, MAX_HELDOUT = 16, 128
"""Fewest and most prompts that a training run holds out, if there are enough prompts."""
AnswerSource = Path | Tagged
MAX_PERIOD = 64
"""Longest repetition period, in tokens, that `loop_start` detects."""


@dataclass(frozen=True, slots=True)
class Document:
    """One answer with its prompt, as token ids to train on."""

    key: str
    tokens: NDArray[np.int32]
    answer_start: int
    """First position of the answer; also the first possible anchor (position after which a block is drafted)."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prompt(self) -> str:
        """Identifier of the document's prompt, the same for all answers to it; see `prompt_of`."""
        return prompt_of(self.key.rsplit("/", 1)[0])

    @property
    def num_anchors(self) -> int:
        """Number of positions that can be anchors: those of the answer that have a next token to draft."""
        return max(0, len(self.tokens) - 1 - self.answer_start)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents to learn from, held-out documents, and counts of answers that were left out or truncated."""

    train: Sequence[Document]
    heldout: list[Document]
    num_too_short: int = 0
    """Answers left out because they have fewer than two tokens."""
    num_prompt_too_long: int = 0
    """Answers left out because the prompt leaves fewer than two tokens of the maximum document length."""
    num_loops_cut: int = 0
    """Answers truncated at an endless repetition."""
    num_cut: int = 0
    """Answers truncated at the maximum document length."""
    num_repeated: int = 0
    """Duplicate answers: the same conversation from two sources, or stored twice."""
    dropped: Dropped = field(default_factory=Dropped)
    """Unusable rows of the sources."""

    @property
    def num_prompts(self) -> int:
        """Number of different prompts to learn from; several answers to a prompt count once."""
        return len({document.prompt for document in self.train})

    @property
    def left_out_text(self) -> str:
        """Text for the user with the numbers of answers that were left out or truncated, by reason; empty if
        there are no such answers."""
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
        """Returns the number of occurrences of each token id in the training answers, [vocab_size]."""
        counts_V = np.zeros(vocab_size, dtype=np.int64)
        for document in self.train:
            np.add.at(counts_V, document.tokens[document.answer_start :], 1)
        return counts_V


def read_corpus(
    sources: Iterable[AnswerSource],
    max_len: int,
    heldout_share: float = 0.02,
    max_heldout: int = 256,
    min_heldout: int = 1,
    strict: bool = False,
) -> Corpus:
    """Reads training documents (prompts with answers) from folders or files of answers, without duplicates. The share
    `heldout_share` of the prompts is held out, at least `min_heldout` and at most `max_heldout`. A hash of the prompt
    decides, so the choice does not depend on the order of the answers.

    Documents are cut at `max_len` tokens, prompt included. An answer that ends in a loop is cut before the third
    repetition: repetitive text makes measured acceptance lengths too optimistic. Documents are ordered by a hash, which
    mixes the sources; the answers of one conversation stay together. Raises PromptError if no document is left for
    training, or with `strict` for an unusable row."""
    documents: list[tuple[str, int, Document]] = []
    counts, dropped = Counter[str](), Dropped()
    for read in read_documents(sources, max_len, counts, None if strict else dropped):
        documents.append((read.answer.key, read.answer.turn, read.document))
        counts.update(num_loops_cut=read.has_loop, num_cut=read.is_cut)
    documents.sort(key=lambda read: (key_hash(read[0]), read[1]))
    chosen = heldout_prompts([key for key, _, _ in documents], heldout_share, max_heldout, min_heldout)
    train = [document for key, _, document in documents if prompt_of(key) not in chosen]
    heldout = [document for key, _, document in documents if prompt_of(key) in chosen]
    corpus = Corpus(train, heldout, **counts, dropped=dropped)
    if not train:
        raise PromptError(nothing_left(corpus))
    return corpus


def key_hash(key: str) -> int:
    """Returns a 63-bit hash of a conversation's key, which decides the order of documents."""
    return int.from_bytes(hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()) >> 1


def nothing_left(corpus: Corpus) -> str:
    """Returns the error message for a corpus without training documents."""
    counts = corpus.left_out_text
    text = "there are no answers to learn from: regenerate more, or raise the longest document (max_len)"
    return f"{text}; {counts}" if counts else text


class ReadDocument(NamedTuple):
    """An answer, its document, and whether the document was cut at a loop or at the maximum length."""

    answer: Answer
    document: Document
    has_loop: bool
    is_cut: bool


def read_documents(
    sources: Iterable[AnswerSource],
    max_len: int,
    counts: Counter[str],
    dropped: Dropped | None = None,
    *,
    once: bool = True,
) -> Iterator[ReadDocument]:
    """Yields each answer with its prompt as a training document, cut at `max_len` tokens (prompt included) and before
    an endless repetition. Skipped answers are counted in `counts`, under num_too_short, num_prompt_too_long and
    num_repeated (duplicates). Unusable rows are counted in `dropped`; if it is None, the first one raises PromptError.
    `once`: True to skip duplicates, which needs memory for one hash per answer."""
    counts.update(num_too_short=0, num_prompt_too_long=0, num_loops_cut=0, num_cut=0, num_repeated=0)
    seen: set[tuple[int, int]] = set()
    for answer in answers_of(sources, dropped):
        if once:
            mark = (key_hash(answer.key), answer.turn)
            if mark in seen:
                counts["num_repeated"] += 1
                continue
            seen.add(mark)
        end = loop_start(answer.answer_ids)
        whole = answer.prompt_ids + answer.answer_ids[:end]
        tokens = np.array(whole[:max_len], dtype=np.int32)
        document = Document(f"{answer.key}/{answer.turn}", tokens, len(answer.prompt_ids))
        if document.num_anchors < 1:
            is_filled = len(answer.prompt_ids) >= max_len - 1 and len(answer.answer_ids) > 1
            counts["num_prompt_too_long" if is_filled else "num_too_short"] += 1
            continue
        yield ReadDocument(answer, document, end < len(answer.answer_ids), len(whole) > max_len)


def answers_of(sources: Iterable[AnswerSource], dropped: Dropped | None = None) -> Iterator[Answer]:
    """Yields the answers in `sources`: folders or files of answers, and files of tokenised data. Of a `Tagged` source,
    only answers with one of its tags are yielded. Unusable rows are counted in `dropped`; if it is None, the first one
    raises PromptError. Raises PromptError for a missing source, ConfigError if a tag does not occur in its source."""
    for each in sources:
        source, tags = (each.path, each.tags) if isinstance(each, Tagged) else (each, ())
        if not source.exists():
            raise PromptError(f"there are no answers at {source}: make them with paceline regenerate")
        check_tags(source, tags)
        if source.is_dir():
            yield from AnswerShards(source).read(dropped, tags)
        elif is_tokenised(source):
            refuse(ConfigError, (bool(tags), f"{source} is tokenised data, which --tag cannot select: leave it out"))
            yield from tokenised_answers(source, dropped)
        else:
            yield from read_answers(source, dropped, tags)


def check_answers(
    sources: Iterable[AnswerSource], decode: Callable[[list[int]], str] | None = None, *, strict: bool = False
) -> None:
    """Reads the first answers (8 at most) of each source. `decode`: token ids -> text, by the target's tokenizer; None
    to leave texts unchecked. Raises PromptError in these cases:
    - a source is missing, or has no usable answer;
    - with `strict`, a row that was read is unusable;
    - none of a source's answers decodes to its stored text, so another tokenizer encoded them."""
    for source in sources:
        dropped = Dropped()
        first = list(islice(answers_of([source], None if strict else dropped), NUM_READ_BACK))
        if not first:
            reasons = f" ({dropped})" if dropped else ""
            raise PromptError(f"there are no answers in {source}{reasons}: make them with paceline regenerate")
        texts = [(decode(answer.answer_ids), answer.text.strip()) for answer in first if decode and answer.text.strip()]
        # A server may truncate the text at a stop string, but not the tokens.
        if texts and not any(decoded.strip().startswith(text) for decoded, text in texts):
            raise PromptError(
                f"the answers in {source} are tokens of another tokenizer than the target's: regenerate them with "
                "this target"
            )


def check_vocabulary(corpus: Corpus, vocab_size: int) -> None:
    """Raises PromptError if a document has a token id that the target does not have, since another model wrote it."""
    for document in (*corpus.train, *corpus.heldout):
        if not has_vocabulary(document, vocab_size):
            low, high = int(document.tokens.min()), int(document.tokens.max())
            raise PromptError(
                f"answer {document.key} holds token {low if low < 0 else high}, the target has {vocab_size} tokens: "
                "another model wrote these answers; regenerate them with this target"
            )


def has_vocabulary(document: Document, vocab_size: int) -> bool:
    """Returns True if the target has every token of the document."""
    return int(document.tokens.min()) >= 0 and int(document.tokens.max()) < vocab_size


def prompt_of(key: str) -> str:
    """Returns the part of a conversation's key that identifies its prompt: the hash of the prompt's text or, in a key
    without a hash, everything before the "@" of the temperature."""
    name = key.rsplit("@", 1)[0]
    return name[-8:] if re.search("#[0-9a-f]{8}$", name) else name


def heldout_prompts(keys: Iterable[str], share: float, most: int, fewest: int = 1) -> set[str]:
    """Returns the identifiers (`prompt_of`) of the prompts to hold out: those with the smallest hashes. `keys`: the
    keys of all conversations. `share`, `most`, `fewest`: see `num_heldout`."""
    prompts = sorted({prompt_of(key) for key in keys}, key=lambda prompt: (zlib.crc32(prompt.encode()), prompt))
    return set(prompts[: num_heldout(len(prompts), share, most, fewest)])


def num_heldout(num_prompts: int, share: float, most: int, fewest: int = 1) -> int:
    """Returns how many of `num_prompts` prompts to hold out: the share `share`, rounded up, but at least `fewest` and
    at most `most`. If `fewest` is more than half of the prompts, half of them is the minimum. Returns 0 for fewer than
    ten prompts, or if `share` is 0."""
    if not share or num_prompts < 10:
        return 0
    return min(most, max(math.ceil(share * num_prompts), min(fewest, num_prompts // 2)))


def loop_start(tokens: list[int]) -> int:
    """Returns how many tokens of a text to keep, so that an endless repetition at its end is cut off. In such a text,
    the last 1 to 64 tokens occur at least three times in a row, and all but the first occurrence together have at least
    12 tokens. Two occurrences are kept, or 12 tokens if that is more. For any other text, returns its full length."""
    array = np.array(tokens)
    for period in range(1, min(MAX_PERIOD, len(array) // 3) + 1):
        differs = np.flatnonzero(array[period:] != array[:-period])
        first_same = int(differs[-1]) + 1 if len(differs) else 0
        repeated = len(array) - period - first_same
        if repeated >= 2 * period and repeated >= 12:
            return first_same + 2 * period + max(0, 12 - 2 * period)
    return len(array)


def epoch_order(num_documents: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the document numbers, [num_documents], in the order in which an epoch uses them. The order is random, but
    the same for the same `seed` and `epoch`."""
    return np.random.default_rng((seed, epoch)).permutation(num_documents)


def draw_anchors(document: Document, number: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Draws up to `number` different anchors in a document's answer; returns them in ascending order. An anchor is a
    position after which a block is drafted. The draw depends on `seed` and `epoch`, so that epochs train on different
    positions (DFlash, section 4.2). If an answer has at most `number` possible anchors, returns all of them."""
    every = np.arange(document.answer_start, len(document) - 1)
    if len(every) <= number:
        return every
    generator = np.random.default_rng((seed, epoch, zlib.crc32(document.key.encode())))
    return np.sort(generator.choice(every, number, replace=False))


def labels_of(
    document: Document, anchors_A: NDArray[np.int64], block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns (labels [A, K], validity [A, K]) of the blocks at A anchors (positions in the document). Labels: the
    token ids at the K = block_size - 1 positions after each anchor. Validity: True for positions inside the document;
    labels at other positions are arbitrary."""
    at_AK = anchors_A[:, None] + np.arange(1, block_size)
    valid_AK = at_AK < len(document)
    return document.tokens[np.minimum(at_AK, len(document) - 1)].astype(np.int64), valid_AK


def num_valid_slots(document: Document, anchors_A: NDArray[np.int64], block_size: int) -> int:
    """Returns the number of draft positions inside the document, summed over the blocks at these anchors."""
    return int(np.minimum(len(document) - 1 - anchors_A, block_size - 1).sum())


@dataclass(frozen=True, slots=True)
class Place:
    """The position in the training data at which a step begins: an epoch, and an index in the order in which this epoch
    uses the documents."""

    epoch: int = 0
    index: int = 0


class StepPlanner:
    """Chooses the documents of each training step, and the anchors (positions after which a block is drafted) in each.
    A step takes documents in the epoch's order, up to `anchors` blocks of each, until it has `blocks_per_step` blocks.
    The plan covers the blocks of all processes, and every process computes the same one."""

    def __init__(
        self, documents: Sequence[Document], *, blocks_per_step: int, anchors: int, block_size: int, seed: int
    ) -> None:
        self.documents = documents
        self._blocks_per_step, self._anchors, self._block_size, self._seed = blocks_per_step, anchors, block_size, seed
        self.steps_per_epoch = max(1.0, self._count_steps())
        """Number of steps that use every document once."""

    def _count_steps(self) -> float:
        num_steps = num_blocks = 0
        for number in epoch_order(len(self.documents), self._seed, 0):
            num_left = self._blocks_per_step - num_blocks
            num_blocks += min(self._anchors, num_left, self.documents[int(number)].num_anchors)
            if num_blocks == self._blocks_per_step:
                num_steps, num_blocks = num_steps + 1, 0
        return num_steps + num_blocks / self._blocks_per_step

    def step(self, place: Place) -> tuple[list[tuple[int, NDArray[np.int64]]], int, Place]:
        """Plans the step that begins at `place`. Returns (blocks, number of draft positions inside documents, place of
        the following step). Blocks: a list of (document number, positions of the anchors in it)."""
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
            most = min(self._anchors, self._blocks_per_step - num_blocks)
            anchors_A = draw_anchors(document, most, self._seed, epoch)
            chosen.append((number, anchors_A))
            num_blocks += len(anchors_A)
            num_slots += num_valid_slots(document, anchors_A, self._block_size)
            index += 1
        return chosen, num_slots, Place(epoch, index)
