"""Trainings that the user's own command starts, with the window and the folders in its environment."""

from __future__ import annotations

import fcntl
import shutil
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fake_servers import FakeServer
from played import NOW, PASSED, Deciding, Played, events, ticked, traffic, watcher
from stored_drafters import raw_2, written

from paceline.config import EngineConfig
from paceline.data.answers import AnswerShards
from paceline.errors import ConfigError
from paceline.loop.adapt.config import CandidateConfig, RetrainConfig
from paceline.loop.adapt.decide.decide import Decision
from paceline.loop.adapt.gate.retrain import Job, train_command
from paceline.loop.adapt.servers.counted_hours import ALL

DRAFTER = 'mkdir -p "$PACELINE_OUT/drafter" && echo "{}" > "$PACELINE_OUT/drafter/config.json"'


class Trained(Played):
    """Runs trainings for real, and waits for them; gates are played."""

    def __call__(self, command: list[str], log: Path) -> Job:
        if "-training-" not in log.name:
            return super().__call__(command, log)
        self.commands.append(command)
        job = Job(command, log)
        assert job._process is not None
        job._process.wait()
        return job


def test_the_command_trains_from_the_window_into_the_folder(tmp_path: Path, server: FakeServer) -> None:
    traffic(tmp_path)
    command = f'env > "{tmp_path}/seen" && {DRAFTER}'
    retrain = RetrainConfig(
        train_command=command, learning_rates=(3e-4,), minutes=12.0, general=(tmp_path / "general",)
    )
    one = watcher(tmp_path, server, Trained((0, PASSED)), retrain=retrain)
    ticked(one, 0, 5)
    assert events(one) == ["training", "swapped"]
    seen = dict(
        line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if line.startswith("PACELINE")
    )
    assert len([*AnswerShards(Path(seen["PACELINE_WINDOW"]))]) > 50
    assert server.members == {"general": f"{seen['PACELINE_OUT']}/drafter"}
    assert (seen["PACELINE_INCUMBENT"], seen["PACELINE_MODEL"]) == ("default", EngineConfig().model)
    assert (seen["PACELINE_LEARNING_RATE"], seen["PACELINE_MINUTES"]) == ("0.0003", "12")
    assert seen["PACELINE_GENERAL"] == str(tmp_path / "general")
    assert all(Path(seen[f"PACELINE_{name}"]).is_absolute() for name in ("WINDOW", "OUT"))


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (f"{DRAFTER}; echo 'no node is free' >&2; exit 7", "its training ended with status 7: no node is free"),
        ("true", "train_command ended with status 0 and left no drafter in "),
        ("no-such-program", "its training ended with status 127: "),
    ],
)
def test_a_command_that_fails_is_a_line_of_the_log(tmp_path: Path, server: FakeServer, command: str, why: str) -> None:
    traffic(tmp_path)
    one = watcher(tmp_path, server, Trained(), retrain=RetrainConfig(train_command=command))
    ticked(one, 0, 5)
    assert events(one) == ["training", "refused"] and server.members == {"general": "default"}
    [entry] = one.lineage.entries()
    assert entry["state"] == "not judged" and entry["reason"].startswith(why)
    assert one.log.lines()[-1]["why"].startswith(why) and one.stage is None


def test_a_training_that_used_its_budget_is_stopped(tmp_path: Path, server: FakeServer) -> None:
    traffic(tmp_path)
    retrain = RetrainConfig(train_command="sleep 600", train_units=8.0, train_hours_budget=16.0)
    running = list[Job]()
    one = watcher(
        tmp_path,
        server,
        cast(Any, lambda command, log: running.append(Job(command, log)) or running[-1]),
        retrain=retrain,
    )
    one.tick(NOW)
    one.tick(NOW + 60)
    one.tick(NOW + 60 + 3600)
    assert events(one) == ["training"]
    one.tick(NOW + 60 + 7200)
    assert events(one) == ["training", "refused"] and running[0].poll() is not None
    line = one.log.lines()[-1]
    assert "stopped after 16 hours" in line["why"] and line["cost_hours"] == pytest.approx(16, abs=0.2)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_the_budget_of_a_training_outlasts_the_daemon(tmp_path: Path, server: FakeServer, is_stopped: bool) -> None:
    """A stopped daemon stops the training, and the hours until the next one are not counted; the training of a killed
    one goes on, and they are."""
    traffic(tmp_path)
    retrain = RetrainConfig(train_command="sleep 600", train_units=8.0, train_hours_budget=16.0)
    one = watcher(tmp_path, server, cast(Any, Job), retrain=retrain)
    one.tick(NOW)
    if is_stopped:
        one.stop(NOW + 3600)
    two = watcher(tmp_path, server, cast(Any, Job), retrain=retrain)
    begun = NOW + (10 * 3600 if is_stopped else 3600)
    two.tick(begun)
    two.tick(begun + 3000)
    assert events(two) == ["training"]
    two.tick(begun + 3600)
    assert events(two) == ["training", "refused"]
    assert two.log.lines()[-1]["cost_hours"] == pytest.approx(16, abs=0.2)
    if one._job is not None:
        one._job.stop()


def test_a_stopped_command_leaves_no_child_behind(tmp_path: Path) -> None:
    """A child that goes on holds the lock, and the next daemon would wait for it."""
    job = Job(["sh", "-c", f'sleep 600 & echo > "{tmp_path}/begun"; wait'], tmp_path / "job")
    while not (tmp_path / "begun").exists():
        assert job.poll() is None
    job.stop()
    with (tmp_path / "job.lock").open("a+") as lock:
        taken = threading.Thread(target=fcntl.flock, args=(lock, fcntl.LOCK_EX), daemon=True)
        taken.start()
        taken.join(30)
        assert not taken.is_alive()


def test_a_training_takes_hidden_states_of_a_server(tmp_path: Path) -> None:
    config = RetrainConfig(features_from="http://gpu-2:8000", features_folder=Path("/mnt/states"))
    words = train_command(tmp_path, tmp_path / "out", "default", 2e-4, EngineConfig(), config)
    assert words[words.index("--features-from") + 1] == "http://gpu-2:8000"
    assert words[words.index("--features-folder") + 1] == "/mnt/states"
    plain = train_command(tmp_path, tmp_path / "out", "default", 2e-4, EngineConfig(), RetrainConfig())
    assert not {"--features-from", "--features-folder", "--max-len"} & {*plain}, "lengths come from the window"


@pytest.mark.parametrize("train_command", [None, "true"])
def test_a_running_vllm_gets_a_drafter_of_the_size_that_it_has(
    tmp_path: Path, server: FakeServer, train_command: str | None
) -> None:
    """A continued drafter also drafts the tokens of its new answers: a running vLLM refuses its larger head."""
    folder, ids = written(tmp_path / "old", raw_2(), torch.tensor([1, 3, 7])), []
    traffic(tmp_path)
    for hot_swap in (True, False):
        deploy = {"engine": "vllm", "hot_swap": hot_swap, "restart": "true"}
        jobs = Played((1, ""))
        shutil.rmtree(tmp_path / "state", ignore_errors=True)
        one = watcher(
            tmp_path,
            server,
            jobs,
            deploy=deploy,
            candidate=CandidateConfig(str(folder)),
            retrain=RetrainConfig(train_command=train_command),
            policy=Deciding(Decision("retrain", (ALL,), why="it fell")),
        )
        one.tick(NOW)
        [words] = jobs.commands
        ids.append(next((word for word in words if word.startswith("PACELINE_DRAFT_VOCAB=")), None))
        if train_command is None:
            ids[-1] = words[words.index("--draft-vocab") + 1] if "--draft-vocab" in words else None
    assert ids == (["3", None] if train_command is None else ["PACELINE_DRAFT_VOCAB=3", "PACELINE_DRAFT_VOCAB="])


def test_the_command_is_run_by_a_shell_at_low_priority(tmp_path: Path) -> None:
    config = RetrainConfig(train_command='torchrun --out "$PACELINE_OUT"')
    words = train_command(tmp_path / "a window", tmp_path / "out", "a=b", 2e-4, EngineConfig(), config)
    at = words.index("env")
    assert words[:at] in (["nice", "-n", "19"], []) and words[-3:] == ["sh", "-c", 'torchrun --out "$PACELINE_OUT"']
    assert f"PACELINE_WINDOW={tmp_path}/a window" in words[at:] and "PACELINE_INCUMBENT=a=b" in words[at:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_command": " "}, "train_command is empty"),
        ({"train_command": "x", "features_from": "http://a:1"}, "train_command starts the training itself"),
        ({"features_folder": Path("a")}, "features_folder needs features_from"),
        ({"train_units": 0.0}, "train_units must be above 0"),
        ({"train_hours_budget": -1.0}, "train_hours_budget must be above 0"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RetrainConfig(**options)
