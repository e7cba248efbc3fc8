"""Two whole turns of a tiny flywheel: killed and resumed, refused, priced, written into the ledger; and bad input.

Nothing here depends on how much a student learns: the teacher's answer survives the loss of layers (small_teacher.py),
and a student that is to be refused has only a layer that adds nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyarrow import parquet
from shown import Shown
from small_teacher import SAID, prompt_of, write_answers, write_teacher

pytest.importorskip("trl", reason="needs paceline[distill]")

from paceline.data.answers import read_answers
from paceline.errors import ConfigError, JudgeError, PromptError, TrainingError
from paceline.loop.distill import teach as teaching
from paceline.loop.distill.config import GateConfig
from paceline.loop.distill.gate import Finding, GateInputs
from paceline.loop.flywheel import ledger, stages
from paceline.loop.flywheel.config import FlywheelConfig, read_config
from paceline.loop.flywheel.pricing import price
from paceline.loop.flywheel.run import turn
from paceline.loop.flywheel.state import TurnState, traces_of

pytestmark = pytest.mark.slow
SETTINGS: dict[str, Any] = {
    "layers": [3, 2],
    "minutes": 1,
    "price_per_core_hour": 3.6,
    "engine": {"dtype": "float32", "threads": 1},
    "split": {"evals_share": 0.3},
    "teaching": {
        "max_steps": 8, "batch_size": 4, "lr": 5e-3, "heldout_share": 0.2, "top_k": 8, "autocast": False, "max_len": 64,
    },
    "student": {"choice": "even"},
    "student_gate": {"num_answers": 4, "least_agreement": 0.5, "least_fields": 0.2},
    "drafter": {
        "plan": "off", "max_len": 64, "shape": {"num_layers": 1, "block_size": 4, "num_taps": 2},
        "loop": {"max_steps": 2, "blocks_per_step": 8, "anchors": 4, "autocast": False, "serve_share": 0},
    },
    "gates": {"least_rows": 10, "least_cases": 3, "least_speedup": 0, "most_lost": 0.8, "most_lost_in_all": 0.8},
}  # fmt: skip


def written(folder: Path, teacher: tuple[Path, Path], **changes: Any) -> Path:
    """A flywheel.yaml in a folder."""
    tree: dict[str, Any] = {"model": str(teacher[0]), "record": [str(teacher[1])], "out": str(folder / "wheel")}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "flywheel.yaml"
    tree = {name: value for name, value in {**tree, **SETTINGS, **changes}.items() if value is not None}
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


def flywheel_config(folder: Path, teacher: tuple[Path, Path], **changes: Any) -> FlywheelConfig:
    return read_config(written(folder, teacher, **changes))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The teacher's file and the folder of its answers."""
    return write_teacher(tmp_path_factory.mktemp("teacher"), 30)


def serve(command: str, prompts: list[str]) -> None:
    """Run the command that a turn ended with, on a free port, ask it these, and end it as SIGTERM does."""
    words = [sys.executable, "-m", *shlex.split(command), "--port", "0", "--threads", "1", "--dtype", "float32"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            lines = [process.stderr.readline() for _ in range(4)]  # the last of them when it is ready
            port = int(re.findall(r"http://127.0.0.1:(\d+)", lines[0])[0])
            for prompt in prompts:
                client = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
                body = json.dumps({"prompt": prompt, "max_tokens": 40, "temperature": 0})
                with contextlib.closing(client):
                    client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
                    answer = client.getresponse()
                    assert answer.status == 200 and answer.read()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def killed(config: FlywheelConfig) -> int | str | None:
    """A turn that SIGTERM ends while its student learns; its exit status."""
    on_step_end = teaching.Watch.on_step_end

    def ended(watch: Any, *arguments: Any, **named: Any) -> None:
        on_step_end(watch, *arguments, **named)
        if watch.clock.step == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teaching.Watch, "on_step_end", ended)
        with pytest.raises(SystemExit) as stopped:
            turn(config)
    return stopped.value.code


def passing(config: GateConfig, inputs: GateInputs) -> Finding:
    """Distill's gate as this file needs it: whether a student learned enough is not asked (distill/test_gate.py)."""
    return Finding("agreement", len(inputs.student) == len(inputs.documents) > 0, "whatever it learned")


class Turned:
    """A flywheel after one turn, which was killed while its student learned, and after two."""

    def __init__(self, folder: Path, teacher: tuple[Path, Path]) -> None:
        self.config, self.told = flywheel_config(folder, teacher), Shown()
        self.killed_with = killed(self.config)
        self.after_kill = TurnState.read(self.config.out / "turn-1")
        self.first = turn(self.config, progress=self.told)
        assert self.first.passed, self.first.reason
        shutil.copytree(self.config.out, folder / "once" / "wheel")
        self.once = folder / "once"
        shutil.copytree(teacher[1], traces_of(self.config, 2))
        self.second = turn(self.config)
        assert self.second.passed, self.second.reason
        self.lines = ledger.read(self.config.out)


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory, teacher: tuple[Path, Path]) -> Turned:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.loop.distill.run.agreement", passing)
        return Turned(tmp_path_factory.mktemp("flywheel"), teacher)


def serving(out: Path) -> dict[str, Any]:
    return json.loads((out / "serving.json").read_text())


def test_a_killed_turn_goes_on_at_its_stage(turned: Turned) -> None:
    assert turned.killed_with == 143
    assert [*turned.after_kill.stages] == ["record", "store", "evals", "drafter"]
    finished = [line for line in turned.told.lines if line.endswith("finished before")]
    assert finished == [f"{name}: finished before" for name in turned.after_kill.stages]
    state = TurnState.read(turned.config.out / "turn-1")
    for name, result in turned.after_kill.stages.items():
        assert state.stages[name] == result and state.spent[name] == turned.after_kill.spent[name]
    assert state.stages["student"]["steps"] == 8
    steps = [json.loads(line) for line in (turned.config.out / "turn-1/student/metrics.jsonl").read_text().splitlines()]
    assert state.spent["student"]["core_s"] > turned.after_kill.spent["student"]["core_s"] and steps


def test_a_turn_ends_with_what_serves_next(turned: Turned) -> None:
    first, out = turned.first, turned.config.out
    assert first.passed and first.turn == 1 and first.price == pytest.approx(first.core_s / 1000)
    assert first.model == str(out / "turn-1" / "student" / "student.gguf") and Path(first.model).is_file()
    assert first.drafter == str(out / "turn-1" / "student-drafter" / "drafter") and Path(first.drafter).is_dir()
    before = serving(turned.once / "wheel")
    assert (before["model"], before["drafter"], before["turn"]) == (first.model, first.drafter, 1)
    assert f"--model {first.model} --drafter {first.drafter} --traces {traces_of(turned.config, 2)}" in first.command


def test_the_second_turn_starts_from_the_students_own_traces(turned: Turned) -> None:
    second, state = turned.second, TurnState.read(turned.config.out / "turn-2")
    assert second.passed and second.turn == 2 and serving(turned.config.out)["first_model"] == turned.config.model
    assert state.stages["record"]["sources"] == [str(traces_of(turned.config, 2))]
    assert (
        len(state.stages["student"]["layers"]) == 2
        and len(TurnState.read(turned.config.out / "turn-1").stages["student"]["layers"]) == 3
    )
    drafters = json.loads((turned.config.out / "lineage.json").read_text())["drafters"]
    assert drafters[2]["target"] == turned.first.model and drafters[2]["parents"] == [turned.first.drafter]


@pytest.mark.nightly  # traces of a server are answers to learn from: serve/test_traces_training.py
def test_what_the_first_student_served_begins_the_second_turn(
    turned: Turned, tmp_path: Path, teacher: tuple[Path, Path]
) -> None:
    """By the command that the first turn ended with, its folder apart."""
    config = flywheel_config(tmp_path, teacher)
    shutil.copytree(turned.once / "wheel", config.out)
    traces = traces_of(config, 2)
    command = turned.first.command.replace(str(traces_of(turned.config, 2)), str(traces))
    serve(command, [prompt_of(chr(97 + number)) for number in range(30)])
    served = parquet.read_table(traces)
    assert served.num_rows == 30 and set(served.column("model").to_pylist()) == {"student.gguf"}
    assert killed(config) == 143
    state = TurnState.read(config.out / "turn-2")
    assert state.stages["record"]["sources"] == [str(traces)]
    served_answers = {tuple(row) for row in served.column("answer_ids").to_pylist()}
    files = Path(state.stages["store"]["store"], "train").glob("*.parquet")
    learned = [answer for file in files for answer in read_answers(file)]
    assert len(learned) >= 10 and {tuple(answer.answer_ids) for answer in learned} <= served_answers


def test_the_ledger_has_a_line_for_every_model(turned: Turned) -> None:
    whats = ["model", "drafter", "student", "student + drafter", "turn"]
    assert [(line["turn"], line["what"]) for line in turned.lines] == [
        (number, what) for number in (1, 2) for what in whats
    ]
    for line in turned.lines:
        if line["what"] == "turn":
            assert line["core_s"] > 0 and line["price"] > 0
            continue
        low, high = line["interval"]
        assert low <= line["score"] <= high and line["p50_s"] > 0 and line["tokens_per_s"] > 0 and line["cases"] >= 3
        assert line["price_per_1000"] == pytest.approx(line["core_s_per_1000"] / 1000)
    assert {line["score"] for line in turned.lines if line["what"] != "turn"} == {1.0}
    assert turned.lines[7]["first_score"] == 1.0 and "first_score" not in turned.lines[2]
    texts = ledger.table(turned.lines).texts()
    assert texts[2][:3] == ["1", "student", "kept"] and texts[2][3].startswith(f"{turned.lines[2]['score']:.3f} [")


def again(turned: Turned, tmp_path: Path, teacher: tuple[Path, Path], **changes: Any) -> FlywheelConfig:
    """The flywheel as it was after its first turn, its paths included, with traces for the second."""
    config = flywheel_config(tmp_path, teacher, **changes)
    shutil.copytree(turned.once / "wheel", config.out)
    shutil.copytree(teacher[1], traces_of(config, 2))
    return config


def test_a_refused_student_leaves_what_served(
    turned: Turned, tmp_path: Path, teacher: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """By distill's gates, and one that passed these by the evals; the same command then goes on, and may pass."""
    from paceline.cli import app

    hardly = SETTINGS["teaching"] | {"max_steps": 1, "lr": 1e-4}
    without = SETTINGS["drafter"] | {"of_teacher": False}
    nothing = {"keep_layers": [2]}  # that layer adds nothing
    changes: dict[str, Any] = {"layers": None, "student": nothing, "drafter": without}
    config = again(turned, tmp_path, teacher, teaching=hardly, **changes)
    before, model = (config.out / "serving.json").read_bytes(), Path(turned.first.model).read_bytes()
    words = ["turn", "--config", str(tmp_path / "flywheel.yaml"), "--json"]
    assert app(words, prog_name="paceline", standalone_mode=False) == 3
    done = json.loads(capsys.readouterr().out)
    assert not done["passed"] and done["reason"] and done["model"] == turned.first.model
    lenient = {"least_agreement": 0.0, "least_fields": 0.0, "num_answers": 0}
    patched = flywheel_config(tmp_path, teacher, teaching=hardly | {"max_steps": 2}, student_gate=lenient, **changes)
    result = turn(patched)
    assert not result.passed and "evals: a loss of more than 0.8 compared with model is not ruled out" in result.reason
    assert (config.out / "serving.json").read_bytes() == before and Path(turned.first.model).read_bytes() == model
    refused = [line for line in ledger.read(config.out) if line["state"] == "refused"]
    assert [line["why"] for line in refused] == [done["reason"], result.reason] and refused[1]["score"] == 0
    assert "student" not in TurnState.read(config.out / "turn-2").stages


def test_a_dry_run_prices_all_stages_and_writes_nothing(
    turned: Turned, tmp_path: Path, teacher: tuple[Path, Path]
) -> None:
    config = flywheel_config(tmp_path, teacher)
    estimate = price(config)
    assert not config.out.exists()
    report = estimate.as_json()
    assert [each["stage"] for each in report["stages"]] == [*stages.STAGES]
    student = report["stages"][4]
    assert student["minutes"] > 0 and student["tokens"] > 0 and student["disk_bytes"] > 0
    assert report["price"] == pytest.approx(report["core_hours"] * 3.6) and report["core_hours"] == pytest.approx(
        report["minutes"] / 60
    )
    assert estimate.table().texts()[-1][0] == "all"


def test_settings_and_stores_of_a_turn_under_way_do_not_change(
    turned: Turned, tmp_path: Path, teacher: tuple[Path, Path]
) -> None:
    config = flywheel_config(tmp_path, teacher)
    shutil.copytree(turned.once / "wheel", config.out)
    with pytest.raises(ConfigError, match=r"turn 2 begins with what .*student.gguf answers.*--traces"):
        turn(config)
    (config.out / "serving.json").unlink()
    with pytest.raises(ConfigError, match=r"other settings \(layers: \[3, 2\] there, \[4\] now\)"):
        turn(flywheel_config(tmp_path, teacher, layers=[4]))
    shutil.copy(turned.once / "wheel" / "serving.json", config.out)
    other = flywheel_config(tmp_path, (tmp_path / "other.gguf", teacher[1]))
    with pytest.raises(ConfigError, match="is the flywheel of"):
        turn(other)


def test_a_poisoned_or_empty_store_stops_before_anything_is_trained(tmp_path: Path, teacher: tuple[Path, Path]) -> None:
    bad = write_answers(tmp_path / "bad", teacher[0], [SAID] * 20 + ["ab" * 40] * 10)
    cases = [
        (bad, "of 30 answers 10 that only repeat themselves"),
        (write_answers(tmp_path / "few", teacher[0], [SAID] * 6), "answers to learn from: record more, 10 are needed"),
        (write_answers(tmp_path / "other", teacher[0], [SAID] * 24, [5, 6, 7]), "24 whose tokens are not their text"),
        (
            write_answers(tmp_path / "unknown", teacher[0], [SAID] * 24, [9999]),
            "can be used: left out: 24 of another vocabulary",
        ),
    ]
    for number, (source, message) in enumerate(cases):
        config = flywheel_config(tmp_path / f"{number}", (teacher[0], source))
        with pytest.raises(PromptError, match=message):
            turn(config)
        assert [(line["what"], line["state"]) for line in ledger.read(config.out)] == [("store", "stopped")]
        assert not (config.out / "serving.json").exists() and not (config.out / "turn-1" / "drafter").exists()


def test_evals_that_leak_are_refused(tmp_path: Path, teacher: tuple[Path, Path]) -> None:
    suite = tmp_path / "suite.jsonl"
    scorer = {"kind": "json", "fields": {"verb": "pay"}}
    rows = [
        {
            "id": chr(each),
            "messages": [{"role": "user", "content": prompt_of(chr(each))}],
            "scorer": scorer,
        }
        for each in range(97, 107)
    ]
    suite.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = flywheel_config(tmp_path, teacher, suite=str(suite))
    with pytest.raises(PromptError, match=r"of 10 cases of .*suite.jsonl are what is trained on.*--apart-from"):
        turn(config)
    few = flywheel_config(tmp_path / "few", teacher, gates=SETTINGS["gates"] | {"least_cases": 20})
    with pytest.raises(PromptError, match=r"cases are too few .* 20 are needed"):
        turn(few)
    assert [*TurnState.read(few.out / "turn-1").stages] == ["record"], "more may be recorded before the next start"


def test_a_judge_that_is_down_stops_at_once(tmp_path: Path, teacher: tuple[Path, Path]) -> None:
    config = flywheel_config(tmp_path, teacher, evals={"scorer": "judge"}, judge={"url": "http://127.0.0.1:9"})
    with pytest.raises(JudgeError, match="the judge cannot be asked"):
        turn(config)
    assert not (config.out / "turn-1").exists()
    with pytest.raises(ConfigError, match="needs a judge"):
        flywheel_config(tmp_path, teacher, evals={"scorer": "judge"})


def test_a_student_that_diverges_is_a_line_of_the_ledger(
    turned: Turned, tmp_path: Path, teacher: tuple[Path, Path]
) -> None:
    drafter = SETTINGS["drafter"] | {"of_teacher": False}
    config = again(turned, tmp_path, teacher, teaching=SETTINGS["teaching"] | {"lr": 1e30}, drafter=drafter)
    before = (config.out / "serving.json").read_bytes()
    with pytest.raises(TrainingError, match="lower"):
        turn(config)
    last = ledger.read(config.out)[-1]
    assert (last["turn"], last["what"], last["state"]) == (2, "student", "stopped") and "lower" in last["why"]
    assert (config.out / "serving.json").read_bytes() == before
