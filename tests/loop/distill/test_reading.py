"""A model read along answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_teacher import write_untaught

from paceline.engine.llm import LLM
from paceline.errors import CacheError
from paceline.loop.distill.reading import AT_ONCE, AnswerLogprobs, Reader, Stored
from paceline.model.gguf.to_folder import write_folder
from paceline.report.tables import Progress
from paceline.train.documents.dataset import Document

pytestmark = pytest.mark.slow


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return LLM(str(write_untaught(tmp_path / "model.gguf")), drafter="none", dtype="float32", max_len=64, max_batch=1)


def documents(number: int) -> list[Document]:
    """They begin alike; each answer has seven tokens."""
    rng = np.random.default_rng(0)
    rows = rng.integers(3, 259, (number, 10), dtype=np.int32)
    return [
        Document(f"{place}", np.concatenate([np.arange(5, 20, dtype=np.int32), row]), 18)
        for place, row in enumerate(rows)
    ]


def test_it_says_what_transformers_says(llm: LLM, tmp_path: Path) -> None:
    """Also of the second document, of which only what differs from the first is computed."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        write_folder(tmp_path / "model.gguf", tmp_path / "folder")
    )
    reader = Reader(llm, 5)
    for document in documents(3):
        logprobs, tokens = reader.read(document), torch.from_numpy(document.tokens).long()
        with torch.no_grad():
            expected_NV = model(tokens[None]).logits[0, 17:-1].log_softmax(-1)
        top = expected_NV.topk(5)
        assert np.array_equal(logprobs.ids_NK, top.indices.numpy())
        np.testing.assert_allclose(logprobs.logprobs_NK, top.values, atol=1e-4)
        np.testing.assert_allclose(logprobs.own_N, expected_NV.gather(-1, tokens[18:, None])[:, 0], atol=1e-4)
    reader.close()
    assert llm.target.cache.allocate() is not None


class Counting(Reader):
    """Counts what it reads."""

    num_read = 0

    def read(self, document: Document) -> AnswerLogprobs:
        self.num_read += 1
        return super().read(document)


def test_what_is_on_disk_is_not_read_again(llm: LLM, tmp_path: Path) -> None:
    every, stored, reader = documents(AT_ONCE + 2), Stored(tmp_path / "top-k", "train"), Counting(llm, 4)
    stored.write(reader, every, Progress())
    assert reader.num_read == len(every) and not stored.missing(every)
    (tmp_path / "top-k" / "train-00001.safetensors").unlink()
    stored.write(reader, every, Progress())
    assert reader.num_read == len(every) + 2
    logprobs = stored.load(every)
    np.testing.assert_array_equal(logprobs[-1].ids_NK, reader.read(every[-1]).ids_NK)
    with pytest.raises(CacheError, match="of other answers"):
        stored.load(every[:-1])
