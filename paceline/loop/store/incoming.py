"""Answers from where they were written: folders of traces, of `regenerate`, other stores' shards, or single Parquet files."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.answers import SCHEMA, TOP
from paceline.errors import ConfigError, PromptError, needing, reraised
from paceline.model.text.tokenizer import Tokenizer

with needing(ConfigError, "a store is Parquet, which needs pyarrow: pip install 'paceline[evals]'"):
    import pyarrow as pa
    from pyarrow import parquet

Row = dict[str, Any]
TOLD = ("model", "tag", "ended", "sampling", "seed", "cluster")
"""Columns of traces that a store keeps, beside those of answers."""
STORED = pa.schema(
    [
        *SCHEMA,
        *(
            (name, pa.int64() if name == "seed" else pa.timestamp("ms", "UTC") if name == "ended" else pa.string())
            for name in TOLD
        ),
        ("conversation", pa.string()),
        ("prompt", pa.string()),
        ("digest", pa.string()),
        ("version", pa.int32()),
        *TOP,
    ]
)
"""Columns of a shard: those of answers first, so that `paceline train --answers` reads them as they are. `conversation`
names the conversation that a row belongs to, `prompt` is the prompt's text with its special tokens, `digest` names the row by
its tokens, `version` is the first version that has it; `top_ids` and `top_logprobs` are as of `regenerate --top-k`."""


def digest_of(prompt_ids: Iterable[int], answer_ids: Iterable[int]) -> str:
    """Names a row by its tokens."""
    named = hashlib.blake2b(array("i", prompt_ids).tobytes(), digest_size=12)
    named.update(b"|" + array("i", answer_ids).tobytes())
    return named.hexdigest()


def shards_of(source: Path) -> list[Path]:
    """Its Parquet files: of a folder of traces or answers, or of a run of regenerate. Raises PromptError."""
    if source.is_file():
        return [source]
    folder = source / "answers" if (source / "answers").is_dir() else source
    files = sorted([*folder.glob("answers-*.parquet"), *folder.glob("traces-*.parquet")])
    if not files:
        raise PromptError(f"{source} holds no answers: give a folder of traces, of regenerate, or a Parquet file of one")
    return files


def read_shard(file: Path) -> list[Row]:
    """Rows with every column of STORED; what the file does not have is None. Raises PromptError on a damaged or other file."""
    with reraised(PromptError, f"{file} is no file of answers", "give whole files", pa.ArrowException, OSError, ValueError):
        table = parquet.read_table(file)
        missing = [name for name in ("prompt_ids", "answer_ids", "text") if name not in table.column_names]
        if missing:
            raise ValueError(f"it has no column {missing[0]}")
        kept = [name for name in STORED.names if name in table.column_names]
        empty: Row = dict.fromkeys(STORED.names)
        return [empty | row for row in table.select(kept).to_pylist()]


@dataclass(slots=True)
class Incoming:
    """Reads sources for one tokenizer."""

    tokenizer: Tokenizer
    left_out: Counter[str]
    """Rows, by reason."""

    def rows(self, sources: Iterable[Path]) -> Iterator[Row]:
        """Rows that can be used, with their prompts as text and their digests."""
        vocab = self.tokenizer.vocab_size
        for file in (file for source in sources for file in shards_of(source)):
            for row in read_shard(file):
                ids = [*(row["prompt_ids"] or ()), *(row["answer_ids"] or ())]
                reason = (
                    "without a prompt"
                    if not row["prompt_ids"]
                    else "of which the answer's tokens are not known"
                    if not row["answer_ids"]
                    else "of another vocabulary"
                    if min(ids) < 0 or max(ids) >= vocab
                    else None
                )
                if reason:
                    self.left_out[reason] += 1
                    continue
                yield self._whole(row, file)

    def _whole(self, row: Row, file: Path) -> Row:
        made = {
            "prompt": self.tokenizer.decode(row["prompt_ids"], False),
            "digest": digest_of(row["prompt_ids"], row["answer_ids"]),
        }
        usual = {"source": file.stem, "turn": 0, "finish_reason": "unknown", "key": f"{file.stem}/{made['digest']}"}
        return {**row, **{name: value for name, value in usual.items() if row[name] is None}, **made}
