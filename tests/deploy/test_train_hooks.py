"""The training commands of docs/how-to/adapt.md, as `paceline adapt watch` runs them.

Lines and train.sh come from the page itself. torchrun and python only note how they were called, and leave a drafter;
srun and kubectl are programs of the same name that check their own options, and run the command line behind them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from command_lines import parse, section, shell_lines, words_of
from live_server import wait_until
from torch.distributed.run import get_args_parser

from paceline.config import EngineConfig
from paceline.loop.adapt.config import RetrainConfig
from paceline.loop.adapt.gate.retrain import Job, not_trained, train_command

ROOT = Path(__file__).parents[2]
PAGE = section(ROOT / "docs" / "how-to" / "adapt.md", "Train on other machines")
SCRIPT, EXPORT, *LINES = shell_lines(PAGE)
HOOKS = {str(parse(words_of(line))["train_command"]): line for line in LINES}
TRAINER = """
import json, os, pathlib, sys
open("calls", "a").write(json.dumps(sys.argv) + "\\n")
if os.environ.get("FAILS"):
    sys.exit("no GPU is free")
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1], "drafter")
out.mkdir(parents=True)
(out / "config.json").write_text("{}")
"""
SRUN = """
import os, sys
words = sys.argv[1:]
while words and words[0].startswith("--"):
    assert words[0] in ("--nodes", "--ntasks", "--gpus", "--cpus-per-task") and words[1].isdigit(), words
    words = words[2:]
os.execvp(words[0], words)
"""
KUBECTL = """
import json, subprocess, sys, yaml
words = sys.argv[1:]
open("kubectl", "a").write(" ".join(words) + "\\n")
if words[:3] == ["create", "--filename", "-"]:
    job = yaml.safe_load(sys.stdin)
    json.dump(job, open("job.json", "w"))
    (one,) = job["spec"]["template"]["spec"]["containers"]
    with open("log", "w") as log:
        status = subprocess.run([*one["command"], *one["args"]], stderr=log).returncode
    open("ended", "w").write("FailureTarget Failed" if status else "SuccessCriteriaMet Complete")
elif words[0] == "get":
    print(open("ended").read())
elif words[0] == "logs":
    print(open("log").read())
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with train.sh and deploy/, in which torchrun, python, srun and kubectl are ours."""
    (tmp_path / "bin").mkdir()
    for name, text in {"torchrun": TRAINER, "python": TRAINER, "srun": SRUN, "kubectl": KUBECTL}.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!{sys.executable}\n{text}")
        program.chmod(0o755)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    subprocess.run(["sh", "-eu", "-c", SCRIPT], check=True)
    name, _, value = EXPORT.removeprefix("export ").partition("=")
    monkeypatch.setenv(name, value.strip('"'))
    monkeypatch.setenv("POLL_S", "0.05")
    return tmp_path


def job_of(folder: Path, hook: str) -> Job:
    """A training as the daemon starts it."""
    config = RetrainConfig(train_command=hook, general=(folder / "a general one", folder / "another"), minutes=12.0)
    model = EngineConfig("Qwen/Qwen3-8B")
    command = train_command(folder / "window", folder / "run", "a drafter", 3e-4, model, config, draft_vocab=512)
    return Job(command, folder / "jobs" / "one")


def ended(job: Job) -> int:
    wait_until(lambda: job.poll() is not None)
    status = job.poll()
    assert status is not None
    return status


def options_of(words: list[str]) -> dict[str, Any]:
    """Options of `paceline train` in the words of a launcher, whose own are checked."""
    if words[0] == "-m":
        assert words[1] == "paceline"
        return parse(words[2:])
    launched = get_args_parser().parse_args(words)
    assert launched.standalone and launched.nproc_per_node == "8" and launched.module
    assert launched.training_script == "paceline"
    return parse(launched.training_script_args)


def test_the_page_has_one_for_each_way() -> None:
    programs = [hook.split()[0] for hook in HOOKS]
    assert programs == ["sh", "srun", "LAUNCH=python", "deploy/train/kubectl.sh"]


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.split()[0])
def test_the_candidate_is_trained(programs: Path, hook: str) -> None:
    job = job_of(programs, hook)
    assert not_trained(ended(job), job, programs / "run" / "drafter", RetrainConfig(train_command=hook)) is None
    (call,) = [json.loads(line) for line in (programs / "calls").read_text().splitlines()]
    options = options_of(call[1:])
    general = [programs / "a general one", programs / "another"]
    assert sorted(options["answers"]) == sorted([programs / "window", *general])
    assert (options["target.model"] if "target.model" in options else options["target"]) == "Qwen/Qwen3-8B"
    assert options["out"] == programs / "run" and options["ray"] == ("auto" if "--ray" in hook else None)
    assert {"a drafter", 3e-4, 12.0, "best", 512} <= {
        value for value in options.values() if not isinstance(value, list)
    }


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.split()[0])
def test_one_that_fails_says_why(programs: Path, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "1")
    job = job_of(programs, hook)
    why = not_trained(ended(job), job, programs / "run" / "drafter", RetrainConfig(train_command=hook))
    assert why == "its training ended with status 1: no GPU is free"


@pytest.mark.slow
class TestKubernetes:
    def test_its_job(self, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GPUS", "4")
        monkeypatch.setenv("FAILS", "1")  # torchrun's number of processes is another one
        ended(job_of(programs, "deploy/train/kubectl.sh"))
        job = json.loads((programs / "job.json").read_text())
        kubernetes_validate.validate(job, "1.34", strict=True)
        (one,) = job["spec"]["template"]["spec"]["containers"]
        assert one["resources"]["limits"] == {"nvidia.com/gpu": "4"} and one["command"][3] == "4"
        mount = Path(one["volumeMounts"][0]["mountPath"])
        assert programs.is_relative_to(mount) and len(mount.parts) == 2, "paths are the same in the pod"

    def test_it_is_deleted_when_it_has_ended(self, programs: Path) -> None:
        ended(job_of(programs, "deploy/train/kubectl.sh"))
        calls = [line.split()[0] for line in (programs / "kubectl").read_text().splitlines()]
        assert calls == ["delete", "create", "get", "delete"]

    def test_it_is_deleted_when_the_daemon_stops(self, programs: Path) -> None:
        text = (programs / "bin" / "kubectl").read_text()
        (programs / "bin" / "kubectl").write_text(text.replace('print(open("ended").read())', "pass"))
        job = job_of(programs, "deploy/train/kubectl.sh")
        calls = programs / "kubectl"
        wait_until(lambda: calls.exists() and "get" in calls.read_text())
        job.stop()
        wait_until(lambda: calls.read_text().splitlines()[-1].startswith("delete job paceline-train-"))

    def test_a_cluster_that_does_not_answer_is_asked_again(self, programs: Path) -> None:
        text = (programs / "bin" / "kubectl").read_text()
        fails = 'if words[0] == "get" and open("kubectl").read().count("get") < 3:\n    sys.exit("timeout")\nif'
        (programs / "bin" / "kubectl").write_text(text.replace("if", fails, 1))
        assert ended(job_of(programs, "deploy/train/kubectl.sh")) == 0

    def test_a_name_that_yaml_would_read_otherwise_is_refused(self, programs: Path) -> None:
        config = RetrainConfig(train_command="deploy/train/kubectl.sh")
        command = train_command(
            programs / 'a"', programs / "run", "a drafter", 3e-4, EngineConfig("Qwen/Qwen3-8B"), config
        )
        job = Job(command, programs / "jobs" / "one")
        assert ended(job) == 2 and job.last_error.endswith("has a quote or a backslash: rename it")
