"""Computes a model's top-k log-probabilities along the teacher's answers, and stores them.

    top-k/train-00003.safetensors     one file for 128 documents, with N answer tokens in all:
        ids, logprobs [N, K]    top-k tokens and their log-probabilities
        own [N]                 log-probability of the answer's own token
        counts [128]            answer tokens per document

`Reader(llm, k).read(document)` runs the engine's own forward pass, so a quantised teacher is read as it is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from paceline.engine.llm import LLM
from paceline.errors import CacheError, NumericsError, reraised
from paceline.model.teacher_forcing import ForcedReader
from paceline.report.tables import Progress
from paceline.runs.folder import whole_file
from paceline.train.documents.dataset import Document

AT_ONCE = 128
"""Number of documents per file."""


@dataclass(frozen=True, slots=True)
class AnswerLogprobs:
    """A model's top-k log-probabilities, in nats, at the N tokens of an answer."""

    ids_NK: NDArray[np.int32]
    """The K most probable tokens at each position, most probable first."""
    logprobs_NK: NDArray[np.float32]
    own_N: NDArray[np.float32]
    """Log-probability of the answer's own token at each position."""


class Reader(ForcedReader):
    """Computes a model's top-k log-probabilities at the answer tokens of documents (prompt and answer).

    Occupies one row of the model's KV cache until `close`. Until then, the `LLM` that contains the model must not
    generate.
    """

    def __init__(self, llm: LLM, top_k: int) -> None:
        super().__init__(llm.target)
        self._top_k = min(top_k, llm.target.vocab_size)

    @torch.inference_mode()
    def read(self, document: Document) -> AnswerLogprobs:
        """Computes the log-probabilities at the tokens of a document's answer. Raises NumericsError if an answer
        token's log-probability is not finite."""
        chunks = []
        for ids, logits_TV in self.logits(document.tokens.tolist(), max(1, document.answer_start)):
            logprobs_TV = logits_TV.float().log_softmax(-1)
            own_T1 = logprobs_TV.gather(-1, torch.tensor(ids, device=logprobs_TV.device)[:, None])
            top = logprobs_TV.topk(self._top_k, dim=-1)
            chunks.append((top.indices.int().cpu().numpy(), top.values.cpu().numpy(), own_T1[:, 0].cpu().numpy()))
        logprobs = AnswerLogprobs(*(np.concatenate(arrays) for arrays in zip(*chunks, strict=True)))
        if not np.isfinite(logprobs.own_N).all():
            raise NumericsError(f"the model's numbers are not finite at {document.key}: use another checkpoint")
        return logprobs


def read_all(reader: Reader, documents: Sequence[Document], advance: Callable[[str], object]) -> list[AnswerLogprobs]:
    """Computes the log-probabilities at the tokens of each document's answer, in order; calls `advance("reading")`
    after each document."""
    logprobs: list[AnswerLogprobs] = []
    for document in documents:
        logprobs.append(reader.read(document))
        advance("reading")
    return logprobs


class Stored:
    """Files with a teacher's top-k log-probabilities at the answer tokens of documents. They are computed only once,
    and are read again when a training is resumed. Each file covers 128 (AT_ONCE) consecutive documents."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def missing(self, documents: Sequence[Document]) -> list[int]:
        """Finds the files that do not exist yet. Returns for each of them the index in `documents` of the first
        document that it covers."""
        return [start for start in range(0, len(documents), AT_ONCE) if not self._file(start).is_file()]

    def write(self, reader: Reader, documents: Sequence[Document], progress: Progress) -> None:
        """Writes the files that do not exist yet, with log-probabilities that `reader` computes. Raises CacheError when
        the disk cannot be written."""
        starts = self.missing(documents)
        total = sum(len(documents[start : start + AT_ONCE]) for start in starts)
        with progress.bar("the teacher reads its answers", total) as advance:
            for start in starts:
                logprobs = read_all(reader, documents[start : start + AT_ONCE], advance)
                arrays = {
                    "ids": np.concatenate([each.ids_NK for each in logprobs]),
                    "logprobs": np.concatenate([each.logprobs_NK for each in logprobs]),
                    "own": np.concatenate([each.own_N for each in logprobs]),
                    "counts": np.array([len(each.own_N) for each in logprobs], dtype=np.int64),
                }
                with whole_file(self._file(start), "free space, then run the same command") as scratch:
                    save_file(arrays, scratch)

    def load(self, documents: Sequence[Document]) -> list[AnswerLogprobs]:
        """Loads the log-probabilities of every document, in order. Raises CacheError if a file is missing, damaged, or
        belongs to other documents."""
        logprobs: list[AnswerLogprobs] = []
        caught, remedy = (OSError, SafetensorError, KeyError), "delete it, then run the same command"
        for start in range(0, len(documents), AT_ONCE):
            file = self._file(start)
            with reraised(CacheError, f"{file} cannot be read", remedy, *caught):
                arrays = load_file(file)
                ends = np.cumsum(arrays["counts"])
            expected = [len(each) - max(1, each.answer_start) for each in documents[start : start + AT_ONCE]]
            if arrays["counts"].tolist() != expected:
                raise CacheError(f"{file} is of other answers: delete {self._folder}, then run the same command")
            for first, end in zip([0, *ends[:-1]], ends, strict=True):
                logprobs.append(AnswerLogprobs(*(arrays[name][first:end] for name in ("ids", "logprobs", "own"))))
        return logprobs

    def _file(self, start: int) -> Path:
        return self._folder / f"{self._name}-{start // AT_ONCE:05d}.safetensors"
