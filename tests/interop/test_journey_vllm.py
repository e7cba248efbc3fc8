"""The journey of docs/how-to/vllm-sglang.md with a real vLLM's CPU build: the lines of tests/interop/test_journey.py.

    PEERS_VENV=FOLDER PACELINE_NIGHTLY=1 pytest tests/interop/test_journey_vllm.py -s

FOLDER is that of experiments/vllm_serves_export.sh, which installs FOLDER/vllm/bin/python; without it they are skipped.
The target is SmolLM2. Names, addresses, folders and the number of GPUs are replaced, and options added that make a
training short. Canary, rollout and rollback by the daemon, with two replicas under traffic: experiments/fleet_vllm.py.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from journey import MODEL, chat, line_of, recorder, words_of
from real_vllm import IS_MISSING, MISSING, MODULE, PYTHON, SMALL, environment, free_port, serving
from safetensors.torch import load_file, save_file
from tiny_runs import paceline
from trace_files import rows

from paceline.cli import app
from paceline.hub import resolve
from paceline.model.gguf.to_folder import write_folder
from paceline.train.features.remote import vllm_command

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.skipif(IS_MISSING, reason=MISSING)]
ANSWERS, LONGEST, TAPS = 40, 160, (1, 15, 28)
CPU = ("--device", "cpu", "--dtype", "float32")
SHORT = (*CPU, "--plan", "off", "--max-steps", "2", "--blocks-per-step", "8", "--layers", "1", "--block-size", "4")
KEY = "sesame"


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    write_folder(resolve("smollm2-135m"), folder / "target")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        patch.chdir(folder)
        patch.setenv("PACELINE_ADMIN_KEY", KEY)
        yield folder


@pytest.fixture(scope="module")
def traces(home: Path) -> Path:
    """Recorded and judged beside a vLLM that does not draft yet."""
    with serving([str(home / "target"), "--dtype", "float32"], home / "plain.log") as vllm:
        names = {"http://127.0.0.1:8000": vllm, MODEL: home / "target"}
        with recorder(words_of("record", names)) as (url, done):
            chat(url, ANSWERS, max_tokens=32)
        assert (done[0]["num_answers"], done[0]["dropped"]) == (ANSWERS, {})
        advice = words_of("worth it", {"http://127.0.0.1:8000": vllm})
        assert app([*advice, "--json"], prog_name="paceline", standalone_mode=False)["verdict"] == "collect"
    return home / "traces"


@pytest.fixture(scope="module")
def trained(home: Path, traces: Path) -> Path:
    """With hidden states of a vLLM that is started as the training asks for."""
    states = home / "states"
    printed = shlex.split(vllm_command(str(home / "target"), TAPS, LONGEST, states))
    with serving([*printed[2:], "--dtype", "float32"], home / "states.log") as url:
        names = {MODEL: home / "target", "/mnt/states": states, "http://gpu-2:8000": url}
        own = ("--tap-layers", ",".join(map(str, TAPS)), "--max-len", str(LONGEST))
        paceline(*words_of("states from vLLM", names), *SHORT, *own)
        assert [*states.iterdir()] == []
    return home / "runs" / "mine" / "drafter"


def test_record(traces: Path) -> None:
    assert all(row["answer_ids"] and row["temperature"] == 0 for row in rows(traces)) and len(rows(traces)) == ANSWERS


def test_plan(home: Path, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paceline(*words_of("plan", {MODEL: home / "target"}), "--json")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["machine"] == "8 x H100"


def test_serve(home: Path, trained: Path) -> None:
    """vLLM drafts with it as often as we do: the line's own check says so, and would end with status 2."""
    port = free_port()
    names = {MODEL: home / "target", "--port 8000": f"--port {port} --strict --dtype float32 --max-len 512"}
    words = [*words_of("serve", {**names, "--tensor-parallel-size 8": "--tensor-parallel-size 1"}), *SMALL]
    own = environment(home / "cache")
    preload = own.pop("LD_PRELOAD", "")  # of vLLM's process alone
    words[1:1] = ["--engine-command", f"env LD_PRELOAD={preload} {PYTHON} -m {MODULE}"]
    command = [sys.executable, "-m", "paceline", *words]
    output = list[str]()
    with subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        for line in process.stderr:
            output.append(line)
            if line.startswith("ready: "):
                process.send_signal(signal.SIGTERM)
    text = "".join(output)
    assert process.returncode == 0, text[-4000:]
    print(next(line for line in output if line.startswith("checked: vllm brings")))


def test_gate_by_hand(home: Path, traces: Path, following: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*words_of("gate by hand", {MODEL: home / "target"}), *CPU, "--json"]
    assert app(words, prog_name="paceline", standalone_mode=False) in (None, 3)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["is_judged"]


@pytest.fixture(scope="module")
def following(home: Path, trained: Path) -> Path:
    """The next drafter: other weights of the same shapes."""
    folder = home / "runs" / "next" / "drafter"
    shutil.copytree(trained, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: (tensor * 1.5).contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def exported(home: Path, drafter: str, out: Path) -> Path:
    paceline(*words_of("export", {MODEL: home / "target", "runs/next/drafter": drafter, "/data/for-vllm": out}))
    return out


def test_hot_weights(home: Path, following: Path) -> None:
    """Another drafter's weights by hand, and back; vLLM says which it has."""
    old, new = exported(home, "runs/mine/drafter", home / "old"), exported(home, "runs/next/drafter", home / "new")
    names = {
        MODEL: home / "target",
        "/data/for-vllm": old,
        '"num_speculative_tokens": 7': '"num_speculative_tokens": 3',
    }
    words = shlex.split(line_of("vLLM for hot weights", names).replace("\\\n", " "))
    with serving([*words[2:], "--dtype", "float32"], home / "hot.log") as url:
        for folder in (new, old):
            chat(url, 4, max_tokens=8)
            line = line_of("hot weights by hand", {"http://127.0.0.1:8000": url, "/data/next-for-vllm": folder})
            answer = json.loads(shell(line))
            assert answer["folder"] == str(folder)
            state = shell(f'curl --fail --header "Authorization: Bearer {KEY}" {url}/paceline/draft-weights')
            assert json.loads(state) == {"folder": str(folder), "problem": None}


def shell(line: str) -> str:
    ran = subprocess.run(["sh", "-eu", "-c", line], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
