"""Documents on disk are those in memory, in a memory that hardly grows with their number."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from paceline.data.answers import Answer, AnswerShards
from paceline.errors import CacheError, PromptError
from paceline.train.documents.dataset import Place, StepPlanner, read_corpus
from paceline.train.documents.store import StoredDocuments, stored_corpus, without


def answers(folder: Path, number: int, length: int = 20) -> Path:
    shards = AnswerShards(folder)
    for first in range(0, number, 200):
        shards.write([one(index, length) for index in range(first, min(number, first + 200))])
    return folder


def one(index: int, length: int = 20) -> Answer:
    """Every third is a conversation's second turn; keys have umlauts."""
    answer = [int(each) for each in np.random.default_rng(index).integers(0, 90, length)]
    return Answer(
        f"frägen/{index - (index % 3 == 2)}#x@0",
        "here",
        int(index % 3 == 2),
        0.0,
        [1, 2, 3 + index % 7],
        answer,
        "stop",
        "",
    )


@pytest.mark.parametrize(("share", "fewest"), [(0.0, 3), (0.1, 1), (1.5 / 40, 1), (0.01, 4)])
def test_the_same_corpus(tmp_path: Path, share: float, fewest: int) -> None:
    folders = [answers(tmp_path / "a", 60), answers(tmp_path / "b", 45)]
    AnswerShards(tmp_path / "b").write([Answer("short@0", "here", 0, 0.0, [1], [2], "stop", "")])
    expected = read_corpus(folders, 18, share, 5, fewest)
    corpus = stored_corpus(tmp_path / "documents", folders, 18, share, 5, fewest)
    for own, theirs in ((corpus.train, expected.train), (corpus.heldout, expected.heldout)):
        assert [each.key for each in own] == [each.key for each in theirs]
        for mine, other in zip(own, theirs, strict=True):
            assert mine.tokens.tolist() == other.tokens.tolist() and mine.tokens.dtype == np.int32
            assert mine.answer_start == other.answer_start
    assert corpus.left_out_text == expected.left_out_text and corpus.num_repeated == 45 and corpus.num_too_short == 1
    assert len(corpus.heldout) == len(expected.heldout) and bool(corpus.heldout) == (share > 0)
    assert corpus.token_counts(100).tolist() == expected.token_counts(100).tolist()
    assert [each.key for each in corpus.train[3:5]] == [corpus.train[3].key, corpus.train[4].key]


def test_documents_that_are_tested_on_are_left_out(tmp_path: Path) -> None:
    folders = [answers(tmp_path / "a", 30)]
    stored, plain = (
        stored_corpus(tmp_path / "documents", folders, 64, 0.0, 0).train,
        read_corpus(folders, 64, 0.0).train,
    )
    keys = {each.key for each in plain[3:7]}
    left = without(stored, lambda each: each.key in keys)
    assert isinstance(left, StoredDocuments) and len(left) == len(plain) - 4
    assert [each.key for each in left] == [each.key for each in plain if each.key not in keys]


def test_turns_of_a_conversation_stand_together(tmp_path: Path) -> None:
    keys = [each.key for each in stored_corpus(tmp_path / "documents", [answers(tmp_path / "a", 30)], 64, 0.0, 0).train]
    assert all(keys.index(f"frägen/{n}#x@0/1") == keys.index(f"frägen/{n}#x@0/0") + 1 for n in range(1, 30, 3))


def test_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no answers to learn from"):
        stored_corpus(tmp_path / "documents", [answers(tmp_path / "a", 3)], 3, 0.0, 0)
    (tmp_path / "documents" / "index.npy").write_bytes(b"half")
    with pytest.raises(CacheError, match="cannot be read"):
        StoredDocuments(tmp_path / "documents")


@pytest.mark.nightly
@pytest.mark.slow
def test_memory_hardly_grows_with_the_number_of_documents(tmp_path: Path) -> None:
    """Reading, sorting and planning: ten times the documents, a few bytes more for each."""

    def peak(number: int) -> tuple[int, int]:
        folder = answers(tmp_path / f"a{number}", number, 400)
        tracemalloc.start()
        corpus = stored_corpus(tmp_path / f"documents{number}", [folder], 512, 0.02, 64)
        planner = StepPlanner(corpus.train, blocks_per_step=64, anchors=8, block_size=8, seed=0)
        planner.step(Place())
        corpus.token_counts(100)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        tokens = sum(len(document) for document in corpus.train)
        return most, 4 * tokens

    (small, _), (large, token_bytes) = peak(200), peak(2000)
    assert token_bytes > 3_000_000
    assert large - small < 300 * 1800, "bytes for each further document"
