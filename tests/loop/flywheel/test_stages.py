"""Single stages, and the dry run, without a training: stores of one's own, prompts that are yet to be answered, odd
judges."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_teacher import SAID, write_answers, write_untaught

from paceline.errors import ConfigError, JudgeError, PromptError
from paceline.loop.distill.config import FilesConfig, StudentConfig
from paceline.loop.evals.config import JudgeConfig
from paceline.loop.flywheel import checks, pricing, stages
from paceline.loop.flywheel.config import FlywheelConfig, TurnGates
from paceline.loop.flywheel.pricing import price
from paceline.loop.flywheel.run import open_turn
from paceline.loop.flywheel.run import turn as run_turn
from paceline.loop.store.config import SplitConfig
from paceline.loop.store.folder import Store
from paceline.loop.store.forget import forget
from paceline.report.tables import SILENT

pytestmark = pytest.mark.slow
GATES = TurnGates(least_rows=5, least_cases=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_untaught(tmp_path_factory.mktemp("model") / "model.gguf")


def test_a_store_of_ones_own_is_taken_as_it_is_and_must_not_change(tmp_path: Path, model: Path) -> None:
    kept = Store.create(tmp_path / "kept", str(model), SplitConfig(evals_share=0.3))
    kept.add([write_answers(tmp_path / "answers", model, [SAID] * 20)])
    config = FlywheelConfig(str(model), (kept.path,), out=tmp_path / "wheel", gates=GATES)
    turn = open_turn(config, SILENT)
    turn.state.stages["record"] = {"sources": [str(kept.path)]}
    result = stages.store(turn)
    rows = list(kept.rows("train"))
    assert result["store"] == kept.path and result["version"] == 1 and result["rows"] == len(rows) < 20
    assert result["longest_prompt"] == 40 and result["longest"] == 40 + result["longest_answer"]
    assert result["max_tokens"] == result["longest_answer"] + 32
    turn.state.stages["store"] = {**result, "store": str(kept.path)}
    turn.state.write()
    assert open_turn(config, SILENT).number == 1
    kept.add([write_answers(tmp_path / "more", model, [SAID] * 3, first="A")])
    with pytest.raises(ConfigError, match=r"was at version 1 when turn 1 began, and is at 2"):
        open_turn(config, SILENT)
    turn.state.stages["record"] = {"sources": [str(kept.path), str(tmp_path / "answers")]}
    with pytest.raises(ConfigError, match="a store, and more: give it alone"):
        stages.store(turn)
    turn.state.stages["record"] = {"sources": [str(kept.path)]}
    with pytest.raises(ConfigError, match="holds tokens of .*not of another"):
        stages.store(replace(turn, serving=replace(turn.serving, model="another")))


def test_answers_that_were_mended_are_read_anew(tmp_path: Path, model: Path) -> None:
    bad = write_answers(tmp_path / "answers", model, ["ab" * 30] * 20)
    turn = open_turn(FlywheelConfig(str(model), (bad,), out=tmp_path / "wheel", gates=GATES), SILENT)
    turn.state.stages["record"] = {"sources": [str(bad)]}
    with pytest.raises(PromptError, match="of 20 answers 20 that only repeat themselves"):
        stages.store(turn)
    for file in bad.glob("*.parquet"):
        file.unlink()
    write_answers(bad, model, [SAID] * 20)
    assert stages.store(turn)["rows"] > 5 and turn.config.out.exists()


def test_rows_that_were_forgotten_do_not_come_back(tmp_path: Path, model: Path) -> None:
    """A store that was built again, as for an evals stage that failed, had them again."""
    texts = [SAID] * 20
    source = write_answers(tmp_path / "answers", model, texts)
    turn = open_turn(FlywheelConfig(str(model), (source,), out=tmp_path / "wheel", gates=GATES), SILENT)
    turn.state.stages["record"] = {"sources": [str(source)]}
    path = stages.store(turn)["store"]
    first = next(Store.open(path).rows("train"))
    assert forget(Store.open(path), re.escape(first["prompt"])).rows >= 1
    Store.open(path).note_suite(tmp_path / "suite.jsonl")
    kept = {row["digest"] for side in ("train", "evals") for row in Store.open(path).rows(side)}
    result, again = stages.store(turn), Store.open(path)
    assert {row["digest"] for side in ("train", "evals") for row in again.rows(side)} == kept
    assert first["digest"] not in kept and result["version"] == again.version == 1
    assert again.suites == [str(tmp_path / "suite.jsonl")]
    turn.state.stages["store"] = {"store": str(path), "version": 2}
    turn.state.write()
    with pytest.raises(ConfigError, match="delete all in .*turn-1 except store and traces"):
        open_turn(turn.config, SILENT)


def test_answers_have_the_room_that_the_model_leaves(tmp_path: Path, model: Path) -> None:
    """Its context is 128 tokens."""
    source = write_answers(tmp_path / "answers", model, [f"{number} is a number. " * 4 for number in range(10, 30)])
    turn = open_turn(FlywheelConfig(str(model), (source,), out=tmp_path / "wheel", gates=GATES), SILENT)
    turn.state.stages["record"] = {"sources": [str(source)]}
    result = stages.store(turn)
    assert result["max_tokens"] == 128 - result["longest_prompt"] < result["longest_answer"] + 32


def test_a_served_drafter_keeps_its_sizes(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`drafter.shape` is of the student's drafter, too: for this one its sizes count as not given."""
    configs: list[Any] = []
    trained = SimpleNamespace(drafter=tmp_path)
    monkeypatch.setattr(stages, "train", lambda config, progress: configs.append(config) or trained)
    monkeypatch.setattr(stages, "_tried", lambda *_, **more: {})
    kept = Store.create(tmp_path / "kept", str(model), SplitConfig(evals_share=0.3))
    names = ("drafter.shape.num_layers", "drafter.shape.block_size", "drafter.loop.max_steps", "gates")
    turn = open_turn(FlywheelConfig(str(model), (kept.path,), out=tmp_path / "wheel", given=names), SILENT)
    turn.state.stages["store"] = {"store": str(kept.path), "max_tokens": 9, "longest_prompt": 9}
    stages.drafter(turn)
    stages.drafter(replace(turn, serving=replace(turn.serving, drafter="served")))
    assert configs[0].given == ("shape.num_layers", "shape.block_size", "loop.max_steps") and configs[0].init is None
    assert configs[1].given == ("shape.block_size", "loop.max_steps") and configs[1].init == "served"


def test_a_dry_run_over_a_store_and_over_prompts(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Any] = []
    figures = {
        "weights": {"teacher": 200, "student": 100},
        "answers": 10,
        "heldout": 2,
        "minutes": {"train": 3.0, "read": 1.0},
    }
    monkeypatch.setattr(
        pricing, "price_student", lambda config: configs.append(config) or SimpleNamespace(figures=figures)
    )
    kept = Store.create(tmp_path / "kept", str(model), SplitConfig(evals_share=0.3))
    kept.add([write_answers(tmp_path / "answers", model, [SAID] * 20)])
    config = FlywheelConfig(str(model), (kept.path,), out=tmp_path / "wheel", minutes=8, price_per_core_hour=6.0)
    estimate = price(config)
    by_name = {each.stage: each for each in estimate.stages}
    assert configs[0].answers == (kept.path / "train",) and by_name["student"].minutes == 4.0
    assert by_name["record"].minutes == 0 and by_name["drafter"].minutes == pytest.approx(2.0, rel=0.01)
    assert estimate.as_json()["price"] == pytest.approx(estimate.minutes / 60 * estimate.threads * 6.0)
    suite = tmp_path / "suite.jsonl"
    case = {"messages": [{"role": "user", "content": "q"}], "scorer": {"kind": "exact", "answer": "a"}}
    suite.write_text("".join(json.dumps({"id": f"{n}"} | case) + "\n" for n in range(12)))
    own = price(replace(config, suite=suite, evals=replace(config.evals, limit=3)))
    assert own.stages[2].tokens == 12 / 2 * by_name["evals"].tokens, "2 of 20 answers are for evals; the suite is whole"
    configs.pop()
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Say something about number {n}."}) + "\n" for n in range(40)))
    later = price(replace(config, record=(), prompts=(str(file),)))
    assert (
        later.stages[0].stage == "record" and later.stages[0].minutes > 0 and later.stages[0].tokens == 40 * 0.75 * 256
    )
    assert len(configs) == 1 and "priced by its minutes" in later.notes[0] and not config.out.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (10**9,)}, r"layers must be between 1 and the teacher's \d, not 1000"),
        ({"student": StudentConfig(layers=99)}, "layers must be between 1"),
        ({"student": StudentConfig(keep_layers=(0, 99))}, "keep_layers names layer 99, the teacher's are 0 to"),
    ],
)
def test_a_student_of_more_layers_than_its_teacher_is_refused_first(
    tmp_path: Path, model: Path, changes: dict[str, Any], message: str
) -> None:
    """Before prompts are answered, by the dry run and by the turn."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Say something."}\n')
    config = FlywheelConfig(str(model), prompts=(str(file),), out=tmp_path / "wheel", **changes)
    for begin in (price, run_turn):
        with pytest.raises(ConfigError, match=message):
            begin(config)
    assert not [*config.out.glob("turn-*")]


def test_a_format_of_a_file_that_is_not_written_is_refused_first(tmp_path: Path, model: Path) -> None:
    """It ended the turn at the student's stage, behind the evals and the drafter."""
    student, files = StudentConfig(student="smaller"), FilesConfig(embedding_format="q4_1")
    source = write_answers(tmp_path / "answers", model, [SAID] * 20)
    config = FlywheelConfig(str(model), (source,), out=tmp_path / "wheel", student=student, files=files)
    with pytest.raises(ConfigError, match="embedding_format means nothing without a GGUF file"):
        run_turn(config)
    assert not [*config.out.glob("turn-*")]


def test_a_judge_that_prefers_what_is_wrong_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    preferences = [1.0, 0.5, 0.0]
    monkeypatch.setattr("paceline.loop.evals.run.served_name", lambda client, name: "m")
    monkeypatch.setattr("paceline.loop.evals.judge.Judge.prefer", lambda *arguments: preferences.pop(0))
    config = JudgeConfig(url="http://127.0.0.1:9")
    checks.check_judge(config)
    checks.check_judge(config)
    with pytest.raises(JudgeError, match="the judge m prefers a wrong answer to a right one"):
        checks.check_judge(config)
