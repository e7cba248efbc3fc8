"""A store: what goes in once, on which side, what reads it, what is forgotten, and where."""

from __future__ import annotations

import json
from collections.abc import Sequence as Tokens
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from stores import BYTES, answer, answered, many, store_of
from trace_files import sequence, written

from paceline.data.answers import SCHEMA, TOP, Answer, AnswerShards
from paceline.data.prompts import read_prompts
from paceline.data.rows import Dropped
from paceline.errors import ConfigError, PromptError
from paceline.loop.evals import run_suite
from paceline.loop.evals.config import MakeConfig
from paceline.loop.evals.leaks import leaking
from paceline.loop.evals.make import make_suite, without_leaks
from paceline.loop.evals.suite import Case, Suite
from paceline.loop.store.card import card_of
from paceline.loop.store.config import SplitConfig
from paceline.loop.store.folder import Store
from paceline.loop.store.forget import forget
from paceline.loop.store.incoming import STORED
from paceline.loop.store.split import SIDES
from paceline.train.documents.dataset import check_answers


def prompts(store: Store, side: str) -> set[str]:
    return {row["prompt"] for row in store.rows(side)}


def test_traces_and_answers_go_into_one_store_and_training_reads_it(tmp_path: Path) -> None:
    written(tmp_path / "traces", sequence("Say it.", "It."), sequence("Who is it?", "Nobody at all."))
    store = Store.create(tmp_path / "store", "tiny", SplitConfig(evals_share=0.0))
    line = store.add([tmp_path / "traces", answered(tmp_path / "run" / "answers", answer("Why?", "Because."))], BYTES)
    assert line["added"] == {"train": 3, "evals": 0} and line["rows"] == {"train": 3, "evals": 0}
    read = {each.text for each in AnswerShards(store.path / "train")}
    assert read == {"It.", "Nobody at all.", "Because."}
    check_answers([store.path / "train"])
    tags = {row["text"]: row["tag"] for row in store.rows("train")}
    assert tags["It."] == "a tag" and tags["Because."] is None
    assert STORED.names[: len(SCHEMA.names)] == SCHEMA.names
    stored_prompts = read_prompts(store.path / "train")  # as prompts, it asks their very tokens again
    assert {each.token_ids for each in stored_prompts} == {tuple(row["prompt_ids"]) for row in store.rows("train")}


@pytest.mark.slow
def test_the_same_again_changes_nothing_but_the_version(tmp_path: Path) -> None:
    store = store_of(tmp_path, *many(6))
    before = {side: list(store.rows(side)) for side in SIDES}
    line = store.add([tmp_path / "answers"], BYTES)
    assert line["left_out"] == {"there already": 6} and store.version == 2
    assert {side: list(store.rows(side)) for side in SIDES} == before


def test_near_copies_are_left_out_samples_are_not(tmp_path: Path) -> None:
    text = " ".join(f"word{at * 7919 % 997}" for at in range(60))
    almost = answer("Please: " + text, "The same long answer, " + text)
    sample = answer(text, "Another answer, drawn at a temperature")
    store = store_of(tmp_path, answer(text, "The same long answer, " + text), almost, sample)
    kept = {row["text"] for side in SIDES for row in store.rows(side)}
    assert kept == {"The same long answer, " + text, "Another answer, drawn at a temperature"}
    assert card_of(store)["left_out"] == {"near-copy": 1}


@pytest.mark.slow
def test_what_many_share_makes_no_copies(tmp_path: Path) -> None:
    page = "You are the assistant of a shop with many rules, all of which are stated here at great length. " * 5
    rows = many(30)
    together = [answer(page + BYTES.decode(each.prompt_ids), each.text) for each in rows]
    store = store_of(tmp_path, *together)
    assert sum(1 for side in SIDES for _ in store.rows(side)) == 30
    assert all(prompts(store, side) for side in SIDES), "nor one family"


@pytest.mark.slow
def test_nothing_leaks_between_turns_samples_and_near_copies(tmp_path: Path) -> None:
    rows: list[Answer] = []
    for one in many(40):
        first = BYTES.decode(one.prompt_ids)
        rows += [
            one,
            answer(first + one.text + "\nuser: and then?\n", f"then {one.text}"),
            answer(first, f"or {one.text}"),
        ]
    store = store_of(tmp_path, *rows)
    talks = {side: {row["conversation"] for row in store.rows(side)} for side in SIDES}
    assert (
        not talks["train"] & talks["evals"]
        and 8 <= len(talks["evals"]) <= 32
        and len(talks["train"] | talks["evals"]) == 40
    )
    for side, other in (SIDES, SIDES[::-1]):
        assert not any(mine.startswith(theirs) for mine in prompts(store, side) for theirs in prompts(store, other))


@pytest.mark.slow
def test_sides_do_not_depend_on_the_order_and_stay(tmp_path: Path) -> None:
    rows = many(30)
    one = store_of(tmp_path / "one", *rows)
    two = store_of(tmp_path / "two", *rows[:10])
    two.add([answered(tmp_path / "two" / "more", *rows[:9:-1])], BYTES)
    assert prompts(one, "evals") == prompts(two, "evals")
    assert {row["prompt"] for row in two.rows("evals", version=1)} <= prompts(two, "evals")
    assert sum(1 for side in SIDES for _ in two.rows(side, version=1)) == 10


@pytest.mark.slow
def test_a_row_that_ties_both_sides_is_left_out(tmp_path: Path) -> None:
    rows = many(30)
    store = store_of(tmp_path, *rows)
    bridge = [sorted(prompts(store, side))[0] for side in SIDES]
    tie = answer(bridge[0], "fine: it stays with its conversation")
    store.add([answered(tmp_path / "tie", tie)], BYTES)
    assert "fine: it stays with its conversation" in {row["text"] for row in store.rows("train")}
    related = SplitConfig(evals_share=0.5, related=0.3)
    both = Store.create(tmp_path / "both", "tiny", related)
    left, right = "a" * 2 + "".join(f"{at * 7:x}" for at in range(40)), "".join(f"{at * 13:x}" for at in range(50, 90))
    both.add([answered(tmp_path / "ends", answer(left, "1"), answer(right, "2"))], BYTES)
    assert all(prompts(both, side) for side in SIDES), "the hash has them on two sides"
    line = both.add([answered(tmp_path / "middle", answer("zz" + left + right, "3"))], BYTES)
    assert line["left_out"] == {"between training and evals": 1}


def test_what_cannot_be_used_is_counted(tmp_path: Path) -> None:
    bad = [answer("p", "x", answer_ids=[]), answer("q", "x", answer_ids=[9999])]
    store = Store.create(tmp_path / "store", "tiny")
    with pytest.raises(PromptError, match="1 of which the answer's tokens are not known, 1 of another vocabulary"):
        store.add([answered(tmp_path / "bad", *bad)], BYTES)
    with pytest.raises(PromptError, match="holds no answers"):
        store.add([tmp_path / "nothing"], BYTES)
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(PromptError, match="torn.parquet is no file of answers"):
        store.add([tmp_path / "torn.parquet"], BYTES)
    assert store.version == 0 and Store.open(store.path).version == 0


def test_likely_tokens_come_along(tmp_path: Path) -> None:
    top = answer(
        "Why?", "So", top_ids=[[83, 66], [111, 1], [257, 0]], top_logprobs=[[-0.1, -2.0], [-0.2, -3.0], [-0.3, -4.0]]
    )
    store = store_of(tmp_path, top, split=SplitConfig(evals_share=0.0))
    (row,) = store.rows("train")
    assert row["top_ids"] == top.top_ids and row["top_logprobs"][2] == pytest.approx([-0.3, -4.0])
    assert card_of(store)["sides"]["train"]["with_top"] == 1
    assert [name for name, _ in TOP] == STORED.names[-2:]


@pytest.mark.slow
def test_a_killed_change_is_taken_back(tmp_path: Path) -> None:
    store = store_of(tmp_path, *many(4))
    left = store.path / "train" / "answers-v00002-00000.parquet"
    parquet.write_table(pa.Table.from_pylist([], STORED), left)
    with (store.path / "versions.jsonl").open("a") as file:
        file.write(json.dumps({"version": 2, "what": "add", "files": {}, "rows": {}}) + "\n")
    store.add([answered(tmp_path / "more", *many(6, "parcel"))], BYTES)
    reopened = Store.open(store.path)
    assert reopened.version == 2 and [line["version"] for line in reopened.versions()] == [1, 2]
    assert sum(reopened.versions()[-1]["rows"].values()) == 10


@pytest.mark.slow
def test_split_again(tmp_path: Path) -> None:
    store = store_of(tmp_path, *many(30))
    texts = prompts(store, "train") | prompts(store, "evals")
    store.resplit(SplitConfig(evals_share=0.1, split_seed=4))
    assert prompts(store, "train") | prompts(store, "evals") == texts
    assert len(prompts(store, "evals")) < 10 and Store.open(store.path).split.evals_share == 0.1
    assert not prompts(store, "train") & prompts(store, "evals")


def files_with(folder: Path, text: str) -> list[str]:
    """Files in which the text stands, packed or not, or its tokens do."""
    names = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        if file.suffix == ".parquet":
            rows = parquet.read_table(file).to_pylist()
            content = " ".join(
                BYTES.decode([*row["prompt_ids"], *row["answer_ids"]]) + json.dumps(row, default=str) for row in rows
            )
        else:
            content = file.read_text()
        if text in content:
            names.append(str(file.relative_to(folder)))
    return names


class Named:
    """Answers every case once, like `Says`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def answers(self, cases: Tokens[Any], samples: int, advance: Any) -> list[list[Any]]:
        from paceline.loop.evals import Reply

        return [[Reply("It is here.", 0.1)] for _ in cases]


@pytest.mark.slow
def test_forgetting_reaches_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "tokenizer", lambda self: BYTES)
    jane = [
        answer(f"{at} I am jane@example.com, where is parcel {at * 7919:x}?", f"Parcel {at * 31:x} is here.")
        for at in range(8)
    ]
    later = answer(BYTES.decode(jane[0].prompt_ids) + jane[0].text + "\nuser: thanks\n", "You are welcome.")
    before = answer("Where is", "Which parcel?")
    rows = [*many(20), *jane, later, before]
    store = store_of(tmp_path, *rows)
    suite = make_suite(MakeConfig((str(store.path),), scorer="exact"), "suite")
    suite.write(store.path / "suite.jsonl")
    store.note_suite(store.path / "suite.jsonl")
    done = run_suite(suite, Named("one"))
    store.label({"digest": case.id, "score": case.score, "text": case.texts[0]} for case in done.cases)
    assert len(store.labels()) == len(suite) and files_with(store.path, "jane@")
    forgotten = forget(store, r"jane@example\.com")
    assert forgotten.rows == 9 and forgotten.conversations == 8 and forgotten.sources_with_it
    assert files_with(store.path, "jane@") == [] and files_with(store.path, "You are welcome") == []
    assert (
        len(store.labels())
        == len((store.path / "suite.jsonl").read_text().splitlines())
        == len(suite) - forgotten.cases
    )
    assert files_with(tmp_path / "answers", "jane@") == ["answers-r0-00000.parquet"]
    assert store.add([tmp_path / "answers"], BYTES)["left_out"]["forgotten"] == 9, "it does not come back"
    assert files_with(store.path, "jane@") == []
    assert forget(store, r"jane@example\.com", in_sources=True).source_rows == 9
    assert files_with(tmp_path, "jane@") == []
    assert len(parquet.read_table(tmp_path / "answers" / "answers-r0-00000.parquet")) == len(rows) - 9


@pytest.mark.slow
def test_rows_of_the_sources_are_found_by_their_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that the store left out, whose answer's tokens are not known."""
    monkeypatch.setattr(Store, "tokenizer", lambda self: BYTES)
    cut = answer("my password is hunter2", "", answer_ids=[])
    file = answered(tmp_path / "traces", *many(2), cut) / "answers-r0-00000.parquet"
    parquet.write_table(parquet.read_table(file).append_column("tag", pa.array(["other", "acme", "acme"])), file)
    store = Store.create(tmp_path / "store", "tiny", SplitConfig())
    store.add([tmp_path / "traces"], BYTES)
    assert len(forget(store, "^acme$").sources_with_it) == 1
    assert forget(store, "^acme$", in_sources=True).source_rows == 2
    assert parquet.read_table(tmp_path / "traces")["tag"].to_pylist() == ["other"]


@pytest.mark.slow
def test_cases_that_are_trained_on_are_found(tmp_path: Path) -> None:
    page = "Answer the customer in a friendly way and keep to the rules of the shop. "
    questions = [
        f"{page} Parcel {at * 7919:x} for {at * 104729:x}, sent from {at * 15485863:x} to {at * 31:x}, is late"
        for at in range(30)
    ]
    store = store_of(
        tmp_path,
        *(answer(each, f"{at * 7:x}") for at, each in enumerate(questions[:25])),
        split=SplitConfig(evals_share=0.0),
    )
    cases = [
        Case(str(at), {"kind": "exact", "answer": "x"}, ({"role": "user", "content": each},))
        for at, each in enumerate(questions)
    ]
    assert leaking(Suite("s", tuple(cases)), store) == [str(at) for at in range(25)]
    dropped = Dropped()
    assert len(without_leaks(Suite("s", tuple(cases)), store.path, dropped)) == 5 and "25 that store trains on" in str(
        dropped
    )
    with pytest.raises(PromptError, match="holds no case"):
        without_leaks(Suite("s", tuple(cases[:3])), store.path, dropped)


def test_rows_that_cannot_be_scored_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        answer(f"{at * 7919:x}{at * 104729:x}", json.dumps({"n": at}) if at % 2 else "no JSON") for at in range(1, 9)
    ]
    store, dropped = store_of(tmp_path, *rows, split=SplitConfig(evals_share=1.0)), Dropped()
    assert len(make_suite(MakeConfig((str(store.path),), scorer="json"), "s", dropped)) == 4
    assert "4 that cannot be scored" in str(dropped)
    with pytest.raises(PromptError, match="no JSON object"):
        make_suite(MakeConfig((str(store.path),), scorer="json"))


def test_patterns_that_forget_everything_or_nothing_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "tokenizer", lambda self: BYTES)
    store = store_of(tmp_path, *many(4))
    for pattern in ("", "x*", "("):
        with pytest.raises(ConfigError, match="--match"):
            forget(store, pattern)
    assert forget(store, "nobody said that").rows == 0


def test_the_card_says_what_is_in_it(tmp_path: Path) -> None:
    store = store_of(tmp_path, *many(12), answer("Loop", "ab" * 40, answer_ids=list(b"ab" * 40)))
    card = card_of(store)
    assert card["on_both_sides"] == 0 and sum(side["loops"] for side in card["sides"].values()) == 1
    text = (store.path / "card.md").read_text()
    assert "0 conversations are on both sides" in text and "| 1 |" in text
    assert (store.path / "train").stat().st_mode & 0o077 == 0, "for the owner alone"


def test_stores_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="store add"):
        Store.open(tmp_path)
    (tmp_path / "store.json").write_text('{"format": 99}')
    with pytest.raises(ConfigError, match="format 99"):
        Store.open(tmp_path)
    with pytest.raises(ConfigError, match="is a store already"):
        Store.create(tmp_path, "tiny")
