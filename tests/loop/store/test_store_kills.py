"""A store's commands are killed at every change of a file, and have every one refused: run again, they end as they
would have.

The number of changes that were tried is printed with `pytest -s`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fault_files import copied, emptied, every_fault
from stores import BYTES, answered, many

from paceline.loop.store.config import SplitConfig
from paceline.loop.store.folder import Store
from paceline.loop.store.forget import forget
from paceline.loop.store.split import SIDES

pytestmark = pytest.mark.slow


class TestStore:
    @pytest.fixture
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A folder with a store of two versions, labels and a suite, and sources."""
        monkeypatch.setattr(Store, "tokenizer", lambda self: BYTES)
        home = tmp_path / "home"
        first = answered(home / "first", *many(8))
        answered(home / "third", *many(5, "letter"))
        store = Store.create(home / "store", "tiny", SplitConfig(evals_share=0.5))
        store.add([first], BYTES)
        store.add([answered(home / "second", *many(4, "parcel"))], BYTES)
        rows = [row for side in SIDES for row in store.rows(side)]
        store.label({"digest": row["digest"], "score": 1.0} for row in rows)
        cases = [{"id": str(place), "origin": {"digest": row["digest"]}} for place, row in enumerate(rows)]
        cases += [{"id": "with", "text": "parcel"}, {"id": "without", "text": "letter"}]
        (home / "suite.jsonl").write_text("".join(f"{json.dumps(case)}\n" for case in cases))
        store.note_suite(home / "suite.jsonl")
        return home

    @staticmethod
    def seen(home: Path) -> dict[str, Any]:
        store = Store.open(home / "store")
        store.tokenizer()
        named = set(store.versions()[-1]["files"])
        return {
            "rows": {side: sorted((row["digest"], row["prompt"]) for row in store.rows(side)) for side in SIDES},
            "files": named == {f"{side}/{file.name}" for side in SIDES for file in store.shards(side)},
            "labels": store.labels(),
            "forgotten": sorted(store.forgotten),
            "split": store.split,
            "suite": (home / "suite.jsonl").read_text(),
            "suites": store.suites,
            "sources": sorted(len(rows_of.read_bytes()) for rows_of in home.glob("*/answers-r0-*.parquet")),
        }

    COMMANDS: ClassVar[dict[str, Callable[[Path], object]]] = {
        "add": lambda home: Store.open(home / "store").add([home / "third"], BYTES),
        "split": lambda home: Store.open(home / "store").resplit(SplitConfig(evals_share=0.3, split_seed=5)),
        "label": lambda home: Store.open(home / "store").label(
            [{"digest": next(Store.open(home / "store").rows("train"))["digest"], "score": 0.5}]
        ),
        "forget": lambda home: forget(Store.open(home / "store"), "parcel", in_sources=True),
        "note a suite": lambda home: Store.open(home / "store").note_suite(home / "other.jsonl"),
    }

    @pytest.mark.parametrize("name", COMMANDS)
    def test_a_store(self, tmp_path: Path, home: Path, name: str) -> None:
        command, template = self.COMMANDS[name], tmp_path / "template"
        shutil.copytree(home, template)
        command(home)
        expected, version = self.seen(home), Store.open(home / "store").version
        for fault in every_fault(home, lambda: command(home), copied(template, home)):
            Store.open(home / "store").versions()
            command(home)
            contents = self.seen(home)
            if name == "label":  # it was written before the kill, and again: the same score twice
                contents["labels"] = [*{json.dumps(each): each for each in contents["labels"]}.values()]
            assert contents == expected, str(fault)
            # One more where it was killed behind its end: the same again changes nothing but the version.
            assert Store.open(home / "store").version in (version, version + 1), str(fault)

    def test_a_first_store(self, tmp_path: Path) -> None:
        home = tmp_path / "home"

        def command() -> None:
            store = home / "store"
            opened = Store.open(store) if (store / "store.json").is_file() else Store.create(store, "tiny")
            opened.add([source], BYTES)

        source = answered(tmp_path / "source", *many(6))
        prepare = emptied(home)
        prepare()
        command()
        expected = {side: sorted(row["digest"] for row in Store.open(home / "store").rows(side)) for side in SIDES}
        for fault in every_fault(home, command, prepare):
            command()
            store = Store.open(home / "store")
            assert {side: sorted(row["digest"] for row in store.rows(side)) for side in SIDES} == expected, str(fault)
            assert store.version in (1, 2), str(fault)
