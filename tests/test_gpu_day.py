"""experiments/gpu_day.py: stages that pass, hang, crash or are left out; pieces of files; and the whole day in tiny."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_builtin import write_tiny_gguf

from paceline.data.answers import Answer, AnswerShards
from paceline.errors import ModelFileError
from paceline.model.config.decoder import FAMILIES
from paceline.train.documents.dataset import read_corpus

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
SCRIPT = """
import os, signal, subprocess, sys, time
import gpu_day
from gpu_day import Stage
from gpu_day_stages.visit import Skipped

def good(visit):
    print("a word for the log")
    visit.report("a pass", ms={"median": 1.5, "low": 1.0, "high": 2.0, "runs": 3})
    visit.check("it is right", True)
    visit.goal("fast", 0.5, 0.85)

def hangs(visit):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    visit.report("before it hangs", child=child.pid)
    time.sleep(600)

def raises(visit):
    visit.report("before it raises")
    raise ValueError("a reason")

def wrong(visit):
    visit.check("one", False)
    with visit.part("two"):
        raise OSError("no such thing")
    visit.check("three", True)

def crashes(visit):
    os.kill(os.getpid(), signal.SIGSEGV)

def leaves(visit):
    os._exit(3)

def idle(visit):
    raise Skipped("nothing was brought")

def last(visit):
    with visit.part("a part"):
        raise Skipped("not here")
    visit.check("it sees earlier lines", [line["what"] for line in visit.earlier["hangs"]] == ["before it hangs"])

names = ("good", "hangs", "raises", "wrong", "crashes", "leaves", "idle", "last")
gpu_day.STAGES = tuple(Stage(name, "scripted", 0.6 if name == "hangs" else 60, 1) for name in names)
sys.modules["gpu_day_stages.scripted"] = sys.modules["__main__"]
gpu_day.PRELOADED, gpu_day.GRACE_S = ("json", "no_such_module"), 0.1
sys.exit(gpu_day.main(sys.argv[1:]))
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module("gpu_day")


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(EXPERIMENTS), str(ROOT)]), "OMP_NUM_THREADS": "1"}


def scripted(out: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-c", SCRIPT, "--device", "cpu", "--out", str(out), *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert (out / "day.json").is_file(), done.stderr
    return done.returncode, json.loads((out / "day.json").read_text()), done.stdout


@pytest.mark.slow
def test_each_stage_ends_alone_and_the_day_goes_on(tmp_path: Path) -> None:
    status, day, printed = scripted(tmp_path, "--commit", "abc")
    stages = day["stages"]
    assert status == 1 and {name: record["status"] for name, record in stages.items()} == {
        "good": "passed",
        "hangs": "ended",
        "raises": "raised",
        "wrong": "failed",
        "crashes": "crashed",
        "leaves": "raised",
        "idle": "skipped",
        "last": "passed",
    }
    assert [stages[name]["why"] for name in ("raises", "crashes", "idle")] == [
        "ValueError: a reason",
        "died of SIGSEGV",
        "nothing was brought",
    ]
    assert stages["wrong"]["why"] == "2 checks failed: one, two"
    assert "OSError: no such thing" in stages["wrong"]["lines"][1]["traceback"]
    assert stages["last"]["why"] == "without a part" and stages["leaves"]["why"] == "its process ended with status 3"
    assert stages["hangs"]["seconds"] >= 0.6, "what it had reported stays, and what it started is ended with it"
    (line,) = stages["hangs"]["lines"]
    assert line["what"] == "before it hangs" and is_gone(line["child"])
    assert day["commit"] == "abc" and day["versions"]["python"] and "no_such_module" in day["not_imported"][0]
    assert all(record.keys() >= {"status", "why", "seconds", "lines"} for record in stages.values())
    assert "a word for the log" in (tmp_path / "log.txt").read_text()
    table = (tmp_path / "day.md").read_text()
    assert printed.endswith(table + "\n") and "| a pass | 1.5 |" in table and "| fast | 0.5 | 0.85 | no |" in table


def is_gone(process: int) -> bool:
    """True once it has ended; its new parent may not have collected it yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
def test_stages_that_are_chosen_and_a_day_that_is_too_short(tmp_path: Path) -> None:
    status, day, _ = scripted(tmp_path / "chosen", "--only", "idle, good")
    assert status == 0 and [*day["stages"]] == ["idle", "good"]
    status, day, _ = scripted(tmp_path / "short", "--minutes", "0", "--only", "good,hangs")
    assert status == 0 and [record["status"] for record in day["stages"].values()] == ["skipped"] * 2
    assert day["stages"]["good"]["why"] == "0 s are left of the day, it needs 1"


@pytest.mark.slow
def test_a_signal_ends_the_day_and_its_stage(tmp_path: Path) -> None:
    text = SCRIPT.replace("0.6 if", "600 if")
    command = [sys.executable, "-c", text, "--device", "cpu", "--out", str(tmp_path), "--only", "hangs"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    lines: list[dict[str, Any]] = []
    while not lines and process.poll() is None:
        time.sleep(0.02)
        file = tmp_path / "day.json"
        lines = json.loads(file.read_text())["stages"]["hangs"]["lines"] if file.exists() else []
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM and is_gone(lines[0]["child"])
    assert json.loads((tmp_path / "day.json").read_text())["stages"]["hangs"]["status"] == "running"


def test_the_list_and_a_stage_that_is_none(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [stage.name for stage in script.STAGES] and len(set(names)) == len(names)
    with pytest.raises(SystemExit):
        script.main(["--only", "env,nothing"])
    assert "no stage 'nothing': choose from env, ceilings" in capsys.readouterr().err


def test_files_in_pieces(script: ModuleType, tmp_path: Path) -> None:
    pieces = importlib.import_module("gpu_day_stages.pieces")
    model, draw = tmp_path / "some.gguf", random.Random(0)
    model.write_bytes(draw.randbytes(1001))
    AnswerShards(tmp_path / "answers").write(answers(20))
    pieces.prepare(model, [tmp_path / "answers"], tmp_path / "bring", 2)
    assert pieces.names_below(tmp_path / "bring") == {"some.gguf"}
    assert pieces.join(tmp_path / "bring", "some.gguf", tmp_path / "there").read_bytes() == model.read_bytes()
    sources = tmp_path / "answers", tmp_path / "bring" / "1" / "answers.parquet"
    texts = [[each.tokens.tolist() for each in read_corpus([source], 64).train] for source in sources]
    assert texts[0] == texts[1]
    (second,) = (tmp_path / "bring" / "2").iterdir()
    second.write_bytes(second.read_bytes()[:-1] + b"?")
    with pytest.raises(ModelFileError, match="are damaged: bring them again"):
        pieces.join(tmp_path / "bring", "some.gguf", tmp_path / "there")
    second.unlink()
    with pytest.raises(ModelFileError, match="piece 2 of 2 of some.gguf is not below"):
        pieces.join(tmp_path / "bring", "some.gguf", tmp_path / "there")
    with pytest.raises(ModelFileError, match="holds pieces of 0 files"):
        pieces.join(tmp_path / "bring", "other.gguf", tmp_path / "there")


def answers(number: int) -> list[Answer]:
    draw = random.Random(0)
    tokens = [[draw.randrange(3, 250) for _ in range(26)] for _ in range(number)]
    values = "tests", 0, 0.0
    return [Answer(f"k{place}@0", *values, each[:6], each[6:], "stop", "text") for place, each in enumerate(tokens)]


def test_every_family_has_a_tiny_model(script: ModuleType) -> None:
    """The day in tiny runs four of them."""
    tiny_models, exact = (importlib.import_module(f"gpu_day_stages.{name}") for name in ("tiny_models", "exact"))
    for architecture, defaults in FAMILIES.items():
        config = tiny_models.tiny_config(architecture, defaults)
        assert config.family == defaults["family"] and tiny_models.loud_tensors(config), architecture
    assert {*exact.IN_TINY} < {*FAMILIES}


def test_a_distribution_of_no_samples_is_told(script: ModuleType) -> None:
    exact = importlib.import_module("gpu_day_stages.exact")
    with pytest.raises(ValueError, match="0 samples are too few"):
        exact.p_value(Counter(), {(0,): 0.5, (1,): 0.5})
    assert exact.p_value(Counter({(0,): 20, (1,): 20}), {(0,): 0.5, (1,): 0.5}) == 1.0


def test_kernels_that_overlap_keep_the_card_busy_once(script: ModuleType) -> None:
    covered = importlib.import_module("gpu_day_stages.speed").covered
    assert covered([(0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (8.0, 9.0)]) == 7.0
    assert covered([]) == 0.0


@pytest.mark.slow
def test_the_whole_day_in_tiny(script: ModuleType, tmp_path: Path) -> None:
    pieces = importlib.import_module("gpu_day_stages.pieces")
    write_tiny_gguf(tmp_path / "tiny.gguf", context=256)
    AnswerShards(tmp_path / "answers").write(answers(32))
    pieces.prepare(tmp_path / "tiny.gguf", [tmp_path / "answers"], tmp_path / "bring", 2)
    out = tmp_path / "out"
    words = ["--device", "cpu", "--tiny", "--minutes", "60", "--out", str(out), "--bring", str(tmp_path / "bring")]
    done = subprocess.run(
        [sys.executable, str(EXPERIMENTS / "gpu_day.py"), *words],
        env=environment(), capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    day = json.loads((out / "day.json").read_text())
    failed = [line for record in day["stages"].values() for line in record["lines"] if line.get("passed") is False]
    assert done.returncode == 0 and not failed, (done.stdout, done.stderr, failed)
    assert {name: record["status"] for name, record in day["stages"].items()} == {
        stage.name: "passed" for stage in script.STAGES
    }
    assert day["not_imported"] == [] and json.loads((out / "profile.json").read_text())["kernels"]
    files = [*out.iterdir()]
    assert {file.name for file in files} > {"day.json", "day.md", "log.txt", "profile.json"} and len(files) <= 8
    with tarfile.open(pieces.join(out, "drafters.tar", tmp_path)) as tar:
        assert "drafters/block-8/config.json" in tar.getnames()
