"""Texts that are not UTF-8, in sources, suites and labels of a store: one damaged row or line is one row or line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from pyarrow import parquet
from stores import BYTES, answer, answered, many, store_of

from paceline.errors import PromptError
from paceline.loop.flywheel.pricing import _material
from paceline.loop.store.folder import Store
from paceline.loop.store.forget import forget
from paceline.loop.store.incoming import read_shard, readable_rows

pytestmark = pytest.mark.slow
DAMAGED = b"half a let\xfft"
WORDS = ("letter", "parcel", "lamp", "box")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(Store, "tokenizer", lambda self: BYTES)
    return store_of(tmp_path, *many(12))


def with_damage(folder: Path, column: str, kind: pa.DataType | None = None) -> Path:
    """A file of four answers; one has bytes in `column` that are not UTF-8."""
    rows = [answer(f"{letter * 9} {word}", word) for letter, word in zip("abcd", WORDS, strict=True)]
    (file,) = answered(folder, *rows).glob("*.parquet")
    table = parquet.read_table(file).append_column("tag", pa.array(["acme"] * 4))
    raw = [value.encode() for value in table[column].to_pylist()]
    damaged = pa.array([DAMAGED, *raw[1:]], pa.binary()).view(pa.string())
    place = table.column_names.index(column)
    table = table.set_column(place, column, damaged if kind is None else damaged.cast(kind))
    parquet.write_table(table, file)
    return file


@pytest.mark.parametrize("kind", [None, pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize("column", ["text", "tag"])
def test_a_row_that_is_not_utf8_does_not_keep_others_in_its_file(
    tmp_path: Path, store: Store, column: str, kind: pa.DataType | None
) -> None:
    """`forget` called the whole file unreadable, and left the matching rows in it."""
    file = with_damage(tmp_path / "more", column, kind)
    line = store.add([tmp_path / "more"], BYTES)
    assert line["left_out"]["with text that is not UTF-8"] == 1 and sum(line["added"].values()) == 3
    done = forget(store, "parcel", in_sources=True)
    assert (done.rows, done.source_rows) == (1, 1)
    assert done.sources_with_it == [f"{file} (rows with tokens or text that cannot be read, which may have it: 1)"]
    left = parquet.read_table(file)
    raw = left[column].cast(pa.string()).cast(pa.binary()).to_pylist()
    assert len(raw) == 3 and raw[0] == DAMAGED, "its bytes are as they were"
    done = forget(store, "half a let", in_sources=True)
    assert done.source_rows == 1 and done.sources_with_it == [], "what can be read of it is searched"


def test_a_shard_of_a_store_is_not_read_in_part(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"rows with text that is not UTF-8: 1"):
        read_shard(with_damage(tmp_path / "more", "text"))


def test_a_price_reads_the_rows_that_a_store_takes(tmp_path: Path, store: Store) -> None:
    """`turn --dry-run` refused files that `turn` reads without their damaged rows."""
    file = with_damage(tmp_path / "more", "text")
    assert len(readable_rows(file)) == sum(store.add([tmp_path / "more"], BYTES)["added"].values()) == 3
    recorded = SimpleNamespace(config=None, state=SimpleNamespace(stages={"store": {}}), of=lambda _: {"store": file})
    assert _material(cast(Any, recorded)).rows == 3


def test_lines_of_suites_and_labels_keep_their_bytes(tmp_path: Path, store: Store) -> None:
    """They were rewritten with U+FFFD, and no message named them."""
    suite = tmp_path / "suite.jsonl"
    kept = b'{"id": "2", "text": "' + DAMAGED + b'"}\n{"id": "3", "origin": "a file"}\n'
    suite.write_bytes(b'{"id": "1", "text": "order"}\n' + kept)
    store.note_suite(suite)
    done = forget(store, "order 0|order")
    assert done.cases == 1 and suite.read_bytes() == kept
    assert done.suites_with_it == [f"{suite} (lines that are not UTF-8: 1)"]


def test_a_label_that_is_not_utf8_does_not_stop_forgetting(store: Store) -> None:
    rows = list(store.rows("train"))
    labels = store.path / "labels.jsonl"
    label = json.dumps({"digest": rows[0]["digest"], "score": 1.0}).encode() + b"\n"
    labels.write_bytes(b'{"digest": "' + DAMAGED + b'"}\n' + label)
    done = forget(store, rows[0]["prompt"])
    assert done.rows >= 1 and done.version == 2 and done.labels == 2
