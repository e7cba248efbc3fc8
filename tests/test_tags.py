"""`--tag`: train, evaluate, store and adapt gate read one customer's rows of traces, and refuse an unknown tag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapt_requests import keyed, store
from stores import BYTES, answer, answered
from tiny_builtin import raising
from tiny_runs import TINY, paceline
from typer.testing import CliRunner

from paceline.bench.evaluate import read_sets
from paceline.cli import app
from paceline.data.answers import AnswerShards
from paceline.data.prompts import read_prompts
from paceline.data.tags import UNTAGGED, Tagged, check_tags, refuse_unknown
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.loop.adapt.config import CandidateConfig
from paceline.loop.adapt.gate import examine as gate
from paceline.loop.store.card import card_of
from paceline.loop.store.folder import Store
from paceline.loop.store.split import SIDES
from paceline.runs.ranks import Ranks
from paceline.train.answers.run_identity import identity
from paceline.train.config import PromptsConfig, RegenerateConfig
from paceline.train.documents.dataset import answers_of

NUMBERS = {"acme": 30, "globex": 12, None: 7}
KNOWN = r"has no request with --tag other: its tags are \(no tag\), acme, globex"


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    tags = [tag for tag, number in NUMBERS.items() for _ in range(number)]
    rows = [
        keyed(n, tag=tag, prompt_ids=[65 + n % 50, 66, 67], answer_ids=draw.integers(70, 120, 19).tolist())
        for n, tag in enumerate(tags)
    ]
    return store(tmp_path / "traces", rows)


@pytest.fixture
def untagged(tmp_path: Path) -> Path:
    """Answers of `regenerate`, which have no column `tag`."""
    return answered(tmp_path / "answers", answer("Why?", "Because."))


def test_rows_are_selected_as_prompts_and_as_answers(traces: Path, untagged: Path) -> None:
    for tags, number in ((("acme",), 30), (("acme", "globex"), 42), ((UNTAGGED,), 7), ((), 49)):
        assert len(read_prompts(traces, tags=tags)) == number
        assert len(list(answers_of([Tagged(traces, tags)]))) == number
        assert len(list(answers_of([Tagged(traces, tags), untagged]))) == number + 1
    assert len(read_prompts(traces, 5, tags=("globex",))) == 5


def test_a_folder_with_files_of_both_kinds_counts_those_without_the_column_as_untagged(
    traces: Path, untagged: Path
) -> None:
    answered(traces, answer("Why?", "Because."))
    assert len(list(AnswerShards(traces).read(tags=(UNTAGGED,)))) == 8
    (traces / "traces-9.parquet").write_bytes(b"PAR1")
    check_tags(traces, ("acme",))
    with pytest.raises(ConfigError, match="answers has no column tag: give traces, or a store's side"):
        check_tags(untagged, ("acme",))


def test_a_store_is_refused_where_nothing_would_be_read(tmp_path: Path, traces: Path) -> None:
    """Training reads one of its sides."""
    traces.rename(tmp_path / "train")
    assert len(list(answers_of([Tagged(tmp_path / "train", ("acme",))]))) == 30
    with pytest.raises(ConfigError, match="give traces, or a store's side such as STORE/train"):
        list(answers_of([Tagged(tmp_path, ("acme",))]))


def test_the_list_of_known_tags_is_bounded() -> None:
    with pytest.raises(ConfigError, match=r"its tags are t00, .*, t19 and 80 more$"):
        refuse_unknown("here", ["other"], [f"t{n:02}" for n in range(100)])
    with pytest.raises(ConfigError, match=r"is not here, and so has no column tag"):
        check_tags("org/name", ["other"])


def test_tokenised_data_cannot_be_selected(tmp_path: Path, traces: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pa.table({"input_ids": [[1, 2]], "labels": [[-100, 2]], "tag": ["acme"]}), tmp_path / "t.parquet"
    )
    with pytest.raises(ConfigError, match="tokenised data, which --tag cannot select"):
        list(answers_of([Tagged(tmp_path / "t.parquet", ("acme",))]))


def dry_run(folder: Path, *words: object) -> str:
    config = ["train", *TINY[3:], "--out", folder, "--dry-run", *words]
    result = CliRunner().invoke(app, [str(word) for word in config], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_train_plans_with_the_rows_of_a_tag(tmp_path: Path, traces: Path, untagged: Path) -> None:
    run = tmp_path / "run"
    assert "answers that exist already: 30 documents" in dry_run(run, "--answers", traces, "--tag", "acme")
    assert "42 documents" in dry_run(run, "--answers", traces, "--tag", "acme", "--tag", "globex")
    for source in ("--answers", "--prompts"):
        with pytest.raises(ConfigError, match=KNOWN):
            paceline(*TINY, "--out", run, source, traces, "--tag", "other")
        with pytest.raises(ConfigError, match="has no column tag"):
            paceline(*TINY, "--out", run, source, untagged, "--tag", "acme")
    with pytest.raises(ConfigError, match="--tag means nothing without prompts or answers of traces"):
        paceline("train", "--dry-run", "--tag", "acme")


@pytest.mark.slow
def test_a_run_is_one_of_its_tag(tmp_path: Path, traces: Path) -> None:
    run = tmp_path / "run"
    words = (*TINY, "--answers", traces, "--prompts", traces, "--out", run, "--max-steps", 1, "--max-tokens", 4)
    paceline(*words, "--tag", "globex")
    assert "tags:\n  - globex" in (run / "run.yaml").read_text()
    assert json.loads((run / "trained.json").read_text())["prompts"] < 24
    assert len({each.prompt_ids[0] for each in AnswerShards(run / "regenerate" / "answers")}) == 12
    for other, now in ((("--tag", "acme"), "acme"), ((), "none")):
        with pytest.raises(ConfigError, match=f"was begun with --tag globex, not {now}: choose another --out"):
            paceline(*words, *other)


def test_answers_without_tags_are_those_of_earlier_versions() -> None:
    config = RegenerateConfig(Path("x"), prompting=PromptsConfig(("traces",)))
    assert "tags" not in identity(config, config.target, Ranks())
    tagged = RegenerateConfig(Path("x"), prompting=PromptsConfig(("traces",), tags=("acme",)))
    assert identity(tagged, tagged.target, Ranks())["tags"] == ["acme"]


def test_evaluate_measures_the_requests_of_a_tag(traces: Path) -> None:
    (prompts,) = read_sets((str(traces),), None, ("globex",))
    assert len(prompts.prompts) == 12
    with pytest.raises(ConfigError, match=KNOWN):
        paceline("evaluate", "ngram", "--prompts", traces, "--tag", "other")
    with pytest.raises(ConfigError, match="--tag selects among traces: give them with --prompts"):
        paceline("evaluate", "ngram", "--tag", "acme")


def test_a_store_takes_and_counts_the_rows_of_a_tag(
    tmp_path: Path, traces: Path, untagged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Store, "tokenizer", lambda self: BYTES)
    own = tmp_path / "store"
    paceline("store", "add", own, traces, "--model", "tiny", "--tag", "globex", "--tag", "acme", "--json")
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["left_out"]["with other tags"], line["tags"]) == (7, ["globex", "acme"])
    opened = Store.open(own)
    assert sum(card_of(opened)["tags"].values()) == sum(line["added"].values())
    paceline("store", "show", own, "--tag", "globex", "--json")
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    number = sum(row["tag"] == "globex" for side in SIDES for row in opened.rows(side))
    assert shown["tags"] == {"globex": number} and sum(shown["sides"][side]["rows"] for side in SIDES) == number > 0
    paceline("store", "show", own, "--tag", "globex")
    assert f"tags: globex {number}\n" in capsys.readouterr().out and "acme" in (own / "card.md").read_text()
    with pytest.raises(ConfigError, match=KNOWN):
        paceline("store", "add", own, traces, "--tag", "other")
    with pytest.raises(ConfigError, match="has no request with --tag other: its tags are acme, globex"):
        paceline("store", "show", own, "--tag", "other")
    with pytest.raises(ConfigError, match="has no column tag"):
        paceline("store", "add", own, untagged, "--tag", "acme")
    assert Store.open(own).version == 1


def test_a_stopped_command_with_a_tag_is_not_finished_by_one_without(tmp_path: Path, traces: Path) -> None:
    own = Store.create(tmp_path / "store", "tiny")
    header = (own.path / "store.json").read_text()
    own.add([traces], BYTES, tags=tuple(tag or UNTAGGED for tag in NUMBERS))
    (own.path / "store.json").write_text(header)
    assert Store.open(own.path).add([traces], BYTES)["version"] == 2


def test_the_gate_judges_by_the_requests_of_a_tag(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(LLM, "of", raising(AssertionError("a model was loaded")))
    monkeypatch.setattr(gate, "too_few", lambda number, config: heard.append(number) or gate.Verdict(False, "few"))
    words = ("adapt", "gate", "ngram", "--traces", traces, "--temperature", "0")
    monkeypatch.setattr("paceline.commands.adapt.starting", lambda model: None)
    for tags in (("globex",), ("globex", "acme")):
        paceline(*words, *(word for tag in tags for word in ("--tag", tag)))
    assert heard == [12, 42], "as one set, whatever their clusters"
    with pytest.raises(ConfigError, match=KNOWN):
        paceline(*words, "--tag", "other")
    with pytest.raises(ConfigError, match="--tag and --cluster both choose requests"):
        CandidateConfig(clusters=("tickets",), tags=("acme",))
