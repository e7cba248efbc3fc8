"""`--ray`: two workers of a local Ray cluster make the answers, hidden states and drafter of one process, though one dies."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from small_llm import tiny_model

from paceline.config import EngineConfig
from paceline.errors import ConfigError, DownloadError, PromptError
from paceline.tables import Progress
from paceline.train import on_ray, ray_answers, ray_features, regenerate, train
from paceline.train.answers import AnswerShards
from paceline.train.config import (
    AnswerConfig,
    DrafterShape,
    ElsewhereConfig,
    LoopConfig,
    PromptsConfig,
    RegenerateConfig,
    TrainConfig,
)
from paceline.train.conversation import Regenerated
from paceline.train.on_ray import LOCAL, Job, Share, Work, Worker, connected, shared_out

RAY = ElsewhereConfig(ray=LOCAL, ray_workers=2)
TARGET = EngineConfig(device="cpu", dtype="float32", threads=1)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two processors, whatever this machine has; calls with --ray use it and leave it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20, logging_level="ERROR")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not see this file
    yield ray
    ray.shutdown()


@dataclass(frozen=True)
class Dying:
    """A job whose worker is killed once, with its first batch done and nothing of it sent."""

    job: Any
    died: Path

    def begin(self, num_threads: int | None) -> Work:
        work = self.job.begin(num_threads)

        def made(batch: list[Any]) -> list[Any]:
            found = work(batch)
            try:
                self.died.touch(exist_ok=False)
            except FileExistsError:
                return found
            os.kill(os.getpid(), signal.SIGKILL)
            return found

        return made


def answers_of(folder: Path) -> str:
    """A hash in which their order does not count."""
    lines = sorted(json.dumps(astuple(each)) for each in AnswerShards(folder))
    assert lines and len(lines) == len({*lines})
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def files_of(run: Path, kind: str) -> dict[str, str]:
    found = sorted(run.glob(f"{kind}-*/*.safetensors"))
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


QUESTIONS = [("Hi.", "And then?"), ("Name a colour.",), ("Sing!", "Louder.", "Stop."), ("Count to ten.",), ("Why?",)]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> RegenerateConfig:
    """Conversations of several turns, two of each at a temperature; one prompt is too long."""
    folder = tmp_path_factory.mktemp("asked")
    lines = [{"turns": turns} for turns in [*QUESTIONS, ("too long " * 40,)]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    target = replace(TARGET, model=str(tiny_model(folder / "tiny")))
    answering = AnswerConfig(temperatures=(0.0, 0.9), samples=2, max_tokens=100, max_prompt_tokens=300)
    return RegenerateConfig(folder / "one", target, PromptsConfig((str(folder / "prompts.jsonl"),)), answering)


@pytest.fixture(scope="module")
def one(asked: RegenerateConfig) -> Regenerated:
    """Answers of one process."""
    return regenerate(asked)


def dying(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, died: Path) -> None:
    """Have the first worker of this job die."""
    job = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: Dying(job(*given), died))


def test_a_run_that_goes_on_with_answers_of_two_workers_of_which_one_is_killed(
    cluster: Any, asked: RegenerateConfig, one: Regenerated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = replace(asked, out=tmp_path / "two", asked=replace(asked.asked, limit=2))
    assert regenerate(first).num_answers
    lines: list[str] = []

    class Saying(Progress):
        def say(self, text: str) -> None:
            lines.append(text)

    dying(monkeypatch, ray_answers, "Answering", tmp_path / "died")
    two = regenerate(replace(asked, out=tmp_path / "two", elsewhere=RAY), progress=Saying())
    assert (tmp_path / "died").exists() and answers_of(one.answers) == answers_of(two.answers)
    assert any(answer.turn for answer in AnswerShards(one.answers)), "some conversations went on"
    begun = sum(each.key.split("/")[1].startswith(("0", "1")) for each in AnswerShards(one.answers))
    assert two.num_found == 6 and two.num_answers + begun == one.num_answers
    assert (two.num_too_long, two.num_tokens_too_long) == (one.num_too_long, one.num_tokens_too_long) and two.num_too_long
    assert any("the workers of Ray at local answer" in each for each in lines)
    again = regenerate(replace(asked, out=tmp_path / "two", elsewhere=RAY))
    assert (again.num_found, again.num_answers) == (15, 0)


def test_hidden_states_of_a_worker_that_is_killed_and_the_drafter_they_train(
    cluster: Any, asked: RegenerateConfig, one: Regenerated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = DrafterShape(num_layers=1, block_size=4, num_taps=2)
    loop = LoopConfig(max_steps=2, blocks_per_step=8, anchors=4, autocast=False, serve_share=0.0)
    options: dict[str, Any] = {"plan": "off", "max_len": 256, "shape": shape, "loop": loop, "features": "cached"}
    config = TrainConfig(tmp_path / "here", asked.target, answers=(one.answers,), **options)
    here = train(config)
    dying(monkeypatch, ray_features, "Reading", tmp_path / "died")
    there = train(replace(config, out=tmp_path / "there", elsewhere=replace(RAY, ray_workers=1)))
    assert (tmp_path / "died").exists(), "a worker was killed"
    read = files_of(here.run, "features")
    assert read and {Path(name).name: each for name, each in read.items()} == {
        Path(name).name: each for name, each in files_of(there.run, "features").items()
    }
    weights = [(each.drafter / "model.safetensors").read_bytes() for each in (here, there)]
    assert weights[0] == weights[1]


@dataclass(frozen=True)
class Refusing:
    def begin(self, num_threads: int | None) -> Work:
        def refuse(batch: list[Any]) -> list[Any]:
            raise PromptError(f"no template for {batch[0]} with {num_threads} threads")

        return refuse


def test_what_a_worker_refuses_is_raised_here(cluster: Any) -> None:
    alone = replace(RAY, ray_workers=1)
    with connected(RAY) as ray, pytest.raises(PromptError, match="no template for a with 2 threads"):
        list(shared_out(ray, alone, Refusing(), ["a"], 4))


@dataclass(frozen=True)
class Deadly:
    def begin(self, num_threads: int | None) -> Work:
        return lambda batch: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[return-value]


def test_what_kills_every_worker_comes_to_an_end(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "MOST_DEATHS", 1)
    with connected(RAY) as ray, pytest.raises(DownloadError, match="the Ray cluster failed"):
        list(shared_out(ray, replace(RAY, ray_workers=1), Deadly(), ["a"], 4))


class TestWithoutACluster:
    @pytest.mark.parametrize(
        ("machines", "given", "share"),
        [
            ([{"CPU": 32.0, "GPU": 4.0}, {"CPU": 32.0, "GPU": 4.0}, {"memory": 1e9}], None, Share(8, 1.0, 1.0)),
            ([{"CPU": 32.0, "GPU": 4.0}, {"CPU": 32.0}], 3, Share(3, 1.0, 1.0)),
            ([{"CPU": 16.0}, {"CPU": 12.0}, {"CPU": 0.0}], None, Share(2, 12.0, 0.0)),
            ([{"CPU": 16.0}, {"CPU": 12.0}], 3, Share(3, 6.0, 0.0)),
            ([{"CPU": 2.0}], 4, Share(4, 0.5, 0.0)),
        ],
    )
    def test_shares(self, machines: list[dict[str, float]], given: int | None, share: Share) -> None:
        assert Share.of(machines, given) == share

    @pytest.mark.parametrize(
        ("machines", "said"), [([{"CPU": 4.0, "GPU": 2.0}], "the cluster has 2 GPUs"), ([{"CPU": 0.0}], "no machine")]
    )
    def test_too_little(self, machines: list[dict[str, float]], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            Share.of(machines, 3)

    def test_an_error_of_ours_is_a_result(self) -> None:
        job: Job = Refusing()
        (made,) = Worker(job, 3)({"asked": ["q"]})["made"]
        assert made.error == ("PromptError", "no template for q with 3 threads")

    def test_no_cluster_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ray = pytest.importorskip("ray")
        monkeypatch.setattr(ray, "is_initialized", lambda: False)

        def init(**given: Any) -> None:
            raise ConnectionError("Could not find any running Ray instance")

        monkeypatch.setattr(ray, "init", init)
        with pytest.raises(DownloadError, match="ray start --head"), connected(ElsewhereConfig(ray="auto")):
            pass

    def test_without_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(ConfigError, match=r"pip install 'paceline\[ray\]'"), connected(RAY):
            pass

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"ray": "auto", "answers_from": "http://a:1"}, "ray and answers_from"),
            ({"ray": "auto", "features_from": "http://a:1"}, "ray and features_from"),
            ({"ray_workers": 2}, "ray_workers needs ray"),
        ],
    )
    def test_what_does_not_go_together(self, given: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            ElsewhereConfig(**given)

    @pytest.mark.parametrize("changes", [{"features": "streamed"}, {"features": "online"}, {"feature_dtype": "int8"}])
    def test_hidden_states_are_kept(self, changes: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="ray keeps hidden states on disk"):
            TrainConfig(elsewhere=RAY, **changes)

    def test_a_training_has_its_answers_from_the_cluster(
        self, asked: RegenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Seen(Exception):
            pass

        def shared(config: RegenerateConfig, *given: Any) -> None:
            assert config.elsewhere == RAY
            raise Seen

        monkeypatch.setattr(ray_answers, "_shared", shared)
        options: dict[str, Any] = {"plan": "off", "features": "cached", "elsewhere": RAY}
        with pytest.raises(Seen):
            train(TrainConfig(tmp_path / "run", asked.target, asked=asked.asked, **options))

    def test_prompts_are_given(self, asked: RegenerateConfig, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="give prompts"):
            regenerate(replace(asked, out=tmp_path / "x", asked=PromptsConfig(), elsewhere=RAY))

    def test_others_of_torchrun_ask_nobody(
        self, asked: RegenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(on_ray, "connected", None)
        done = regenerate(replace(asked, out=tmp_path / "x", elsewhere=RAY))
        assert done.num_answers == 0 and not (tmp_path / "x").exists()
