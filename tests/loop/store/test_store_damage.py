"""Stores whose files are not of the same time, are cut, or were left by a change that was killed: nothing is
deleted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from stores import BYTES, HALF, answered, many, store_of

from paceline.cli import app
from paceline.errors import CacheError, ConfigError
from paceline.loop.evals.suite import Suite
from paceline.loop.store.card import card_of
from paceline.loop.store.config import SplitConfig
from paceline.loop.store.folder import Store
from paceline.loop.store.forget import forget, has, pattern_of
from paceline.loop.store.split import SIDES

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with two versions."""
    monkeypatch.setattr(Store, "tokenizer", lambda self: BYTES)
    one = store_of(tmp_path, *many(12))
    one.add([answered(tmp_path / "more", *many(6, "parcel"))], BYTES)
    return one


def files(store: Store) -> set[str]:
    return {f"{side}/{file.name}" for side in SIDES for file in store.shards(side)}


def lines(store: Store) -> list[str]:
    return (store.path / "versions.jsonl").read_text().splitlines(keepends=True)


@pytest.mark.parametrize("kept", [0, 1])
def test_versions_older_than_the_store_delete_nothing(tmp_path: Path, store: Store, kept: int) -> None:
    """No versions.jsonl, or one of a copy that is one version behind."""
    (store.path / "versions.jsonl").write_text("".join(lines(store)[:kept]))
    before = files(store)
    third = answered(tmp_path / "third", *many(3, "letter"))
    for change in (lambda: store.add([third], BYTES), lambda: store.resplit(HALF), lambda: forget(store, "parcel")):
        with pytest.raises(
            ConfigError, match=rf"at version 2, versions.jsonl ends with {kept}: restore the whole folder"
        ):
            change()
    assert files(store) == before


def test_a_store_older_than_its_versions_deletes_nothing(tmp_path: Path, store: Store) -> None:
    """One version behind, it may as well have been killed there: that version is whole, so it stays. Two are
    refused."""
    header = json.loads((store.path / "store.json").read_text())
    before = {row["digest"] for side in SIDES for row in store.rows(side)}
    (store.path / "store.json").write_text(json.dumps({**header, "version": 1}))
    line = store.add([answered(tmp_path / "third", *many(3, "letter"))], BYTES)
    assert line["version"] == 3 and before < {row["digest"] for side in SIDES for row in store.rows(side)}
    (store.path / "store.json").write_text(json.dumps({**header, "version": 1}))
    with pytest.raises(ConfigError, match="restore the whole folder"):
        store.add([tmp_path / "third"], BYTES)


def test_a_store_without_its_store_json_is_not_begun_anew(store: Store) -> None:
    (store.path / "store.json").unlink()
    with pytest.raises(ConfigError, match=r"without its store.json: restore that"):
        Store.create(store.path, "tiny", HALF)
    (store.path / "versions.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"without its store.json: restore that"):
        Store.create(store.path, "tiny", HALF)
    assert len(files(store)) >= 2


@pytest.mark.parametrize("name", ["versions.jsonl", "labels.jsonl"])
def test_half_a_line_stops_no_command(tmp_path: Path, store: Store, name: str) -> None:
    """A last line as a full disk or a kill leaves it."""
    store.label([{"digest": next(store.rows("train"))["digest"], "score": 1.0}])
    with (store.path / name).open("a") as file:
        file.write('{"version": 3, "what": "add", "file')
    again = Store.open(store.path)
    assert card_of(again)["version"] == 2 and again.labels()
    assert forget(again, "parcel").rows == 6
    line = again.add([answered(tmp_path / "third", *many(3, "letter"))], BYTES)
    assert line["version"] == 4 and card_of(again)["version"] == 4


@pytest.mark.parametrize("name", ["versions.jsonl", "labels.jsonl"])
def test_a_damaged_line_is_one_line(store: Store, name: str) -> None:
    store.label([{"digest": next(store.rows("train"))["digest"], "score": 1.0}])
    file = store.path / name
    file.write_text("{no\n" + file.read_text())
    with pytest.raises(ConfigError, match=rf"{name} is damaged"):
        card_of(store)


def test_a_full_disk_takes_back_half_a_line(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (store.path / "versions.jsonl").read_bytes()
    fsync = os.fsync

    def full(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith("versions.jsonl"):
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    third = answered(tmp_path / "third", *many(3, "letter"))
    with pytest.raises(CacheError, match="No space left"):
        store.add([third], BYTES)
    monkeypatch.setattr(os, "fsync", fsync)
    assert (store.path / "versions.jsonl").read_bytes() == whole
    assert store.add([third], BYTES)["version"] == 3


def test_nothing_keeps_anybody_from_being_forgotten(tmp_path: Path, store: Store) -> None:
    """Damaged lines of a suite, a source that cannot be read."""
    suite = tmp_path / "suite.jsonl"
    suite.write_text('{"id": "1"}\n{half a parcel\n{half\n')
    store.note_suite(suite)
    (tmp_path / "more" / "answers-r0-00000.parquet").write_bytes(b"PAR1")
    done = forget(store, "parcel")
    assert done.rows == 6 and suite.read_text() == '{"id": "1"}\n{half\n'
    assert done.sources_with_it == [f"{tmp_path / 'more' / 'answers-r0-00000.parquet'}, which cannot be read"]


@pytest.mark.parametrize(
    ("ids", "kind"),
    [([2**40], pa.int64()), ([-1], pa.int64()), ([None], pa.int64()), ([1.5], pa.float64()), (["a"], pa.string())],
)
def test_tokens_that_are_no_ids_are_left_out_and_do_not_stop_forgetting(
    tmp_path: Path, store: Store, ids: list[Any], kind: pa.DataType
) -> None:
    """They ended `add` with a TypeError or OverflowError, and `forget` behind the deletion, without a new version. Then
    one such row kept all rows of its file from being deleted."""
    file = tmp_path / "more" / "answers-r0-00001.parquet"
    prompts = pa.array([ids, ids, [1]], pa.list_(kind)) if pa.types.is_integer(kind) else pa.array([ids] * 3)
    rows = {"prompt_ids": prompts, "answer_ids": [[1, 2]] * 3, "text": ["ab", "a parcel", "two parcels"]}
    parquet.write_table(pa.table(rows), file)
    line = store.add([tmp_path / "more"], BYTES)
    assert line["left_out"]["there already"] == 6 and line["left_out"]["of which the tokens are no ids"] >= 2
    done = forget(store, "parcel", in_sources=True)
    assert (done.source_rows, done.version) == (8, 4)
    assert parquet.read_table(file)["text"].to_pylist() == ["ab"]
    assert done.sources_with_it == [f"{file} (rows with tokens or text that cannot be read, which may have it: 1)"]


def test_files_that_were_moved_in_their_source_do_not_stop_forgetting(tmp_path: Path, store: Store) -> None:
    """Without files of answers where they had been, `forget` raised PromptError behind the deletion."""
    moved = tmp_path / "more" / "old" / "answers-r0-00000.parquet"
    moved.parent.mkdir()
    (tmp_path / "more" / moved.name).rename(moved)
    done = forget(store, "parcel", in_sources=True)
    assert (done.rows, done.version, Store.open(store.path).version) == (6, 3, 3)
    assert done.sources_with_it == [f"{moved}, which was not searched"]


def test_a_row_that_is_forgotten_meanwhile_gets_no_label(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows were chosen before the lock was taken, so forgotten ones got a label too."""
    digests = [row["digest"] for side in SIDES for row in store.rows(side)]
    changing = Store.changing

    def late(self: Store, doing: str) -> Any:
        if doing == "labelling":
            forget(Store.open(self.path), "parcel")
        return changing(self, doing)

    monkeypatch.setattr(Store, "changing", late)
    assert len(digests) == 18 and store.label({"digest": digest, "score": 1.0} for digest in digests) == 12


def test_a_suite_is_known_to_its_store_before_it_is_written(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two, `evals make` left a suite of which `store forget` knew nothing."""

    class Killed(BaseException):
        """Stands for SIGKILL."""

    def killed(self: Suite, file: Path) -> None:
        raise Killed

    monkeypatch.setattr(Suite, "write", killed)
    words = ["evals", "make", str(store.path), "--scorer", "exact", "--out", str(tmp_path / "suite.jsonl")]
    with pytest.raises(Killed):
        app(words, prog_name="paceline", standalone_mode=False)
    assert Store.open(store.path).suites == [str(tmp_path / "suite.jsonl")]


def test_rows_of_a_change_that_was_killed_are_not_read(store: Store) -> None:
    before = sorted(row["digest"] for side in SIDES for row in store.rows(side))
    (first, *_) = store.shards("train")
    shutil.copy(first, first.with_name("answers-v00003-00000.parquet"))
    assert sorted(row["digest"] for side in SIDES for row in store.rows(side)) == before


def test_a_split_that_was_killed_behind_its_line_is_finished(tmp_path: Path, store: Store) -> None:
    """Its own settings with it."""
    header = (store.path / "store.json").read_text()
    new_split = SplitConfig(evals_share=0.25, split_seed=3)
    line = store.resplit(new_split)
    (store.path / "store.json").write_text(header)
    again = Store.open(store.path)
    assert again.resplit(new_split) == line and again.split == new_split and again.version == 3


def test_a_store_whose_versions_are_lost_is_not_read_as_empty(store: Store) -> None:
    (store.path / "versions.jsonl").unlink()
    again = Store.open(store.path)
    for read in (lambda: list(again.rows("train")), again.versions, lambda: card_of(again)):
        with pytest.raises(ConfigError, match="at version 2, versions.jsonl ends with 0: restore the whole folder"):
            read()


def rolled_back(store: Store, version: int) -> None:
    """Both files of versions as an older copy has them."""
    header = json.loads((store.path / "store.json").read_text())
    (store.path / "store.json").write_text(json.dumps({**header, "version": version}))
    (store.path / "versions.jsonl").write_text("".join(lines(store)[:version]))


@pytest.mark.parametrize("version", [0, 1])
def test_shards_newer_than_both_files_are_not_deleted(tmp_path: Path, store: Store, version: int) -> None:
    """Two versions behind: refused. One behind looks like a change that was killed: its shards are moved aside."""
    third = answered(tmp_path / "third", *many(3, "letter"))
    store.add([third], BYTES)
    rolled_back(store, version)
    before = files(store)
    with pytest.raises(
        ConfigError, match=rf"at version {version}, but there are shards of version 3: restore the whole folder"
    ):
        store.add([third], BYTES)
    assert files(store) == before


def test_shards_of_a_change_that_was_killed_are_moved_aside(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    shards = {file.read_bytes() for side in SIDES for file in store.shards(side) if "-v00002-" in file.name}
    rolled_back(store, 1)
    store.add([answered(tmp_path / "third", *many(3, "letter"))], BYTES)
    assert {file.read_bytes() for file in store.unfinished()} == shards and "moved to" in caplog.text
    assert sorted(row["prompt"] for side in SIDES for row in store.rows(side) if "parcel" in row["prompt"]) == []
    forget(store, "parcel")
    assert store.unfinished() == [], "what is aside is forgotten, too"


@pytest.mark.parametrize(
    "odd", ["5", "{}", "[]", '{"version": "2", "what": "add", "rows": {}, "files": {}}', "[" * 100_000]
)
def test_a_line_that_is_no_version_is_one_line(store: Store, odd: str) -> None:
    with (store.path / "versions.jsonl").open("a") as file:
        file.write(odd + "\n")
    for read in (lambda: list(store.rows("train")), lambda: store.resplit(HALF)):
        with pytest.raises(ConfigError, match=r"versions.jsonl is damaged .*delete the line"):
            read()


def test_a_label_that_is_no_object_is_one_line(store: Store) -> None:
    (store.path / "labels.jsonl").write_text("5\n")
    with pytest.raises(ConfigError, match=r"labels.jsonl is damaged"):
        card_of(store)


def test_letters_beyond_ascii_are_forgotten_in_suites_and_sampling(tmp_path: Path, store: Store) -> None:
    suite = tmp_path / "suite.jsonl"
    suite.write_text(json.dumps({"id": "1", "said": "Müller"}) + "\n" + '{"id": "2"}\n')
    store.note_suite(suite)
    assert forget(store, "Müller").cases == 1 and suite.read_text() == '{"id": "2"}\n'
    pattern = pattern_of("Müller")
    assert has({"sampling": json.dumps({"stop": ["Müller"]})}, pattern) and not has({"sampling": "{}"}, pattern)
