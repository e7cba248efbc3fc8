"""`--ray`: two workers of a local Ray cluster make the answers, hidden states and drafter of one process, though one
dies.

At every change jobs run on a double of the cluster, within this process, with what Ray's functions accept; on a real
cluster, whose processes take minutes and do not start in time on a busy machine, every night.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
from fake_ray import FakeRay, RayFailed, Rows
from ray_runs import RAY, TARGET, Doubling, Seen, dying, ended, files_of, going_on, training
from regenerated import Heard
from small_llm import tiny_model

from paceline.errors import ConfigError, DownloadError, PromptError
from paceline.train import regenerate, train
from paceline.train import run as train_run
from paceline.train.answers import on_ray as ray_answers
from paceline.train.answers.conversation import Regenerated
from paceline.train.config import (
    AnswerConfig,
    PromptsConfig,
    RegenerateConfig,
    RemoteConfig,
    TrainConfig,
)
from paceline.train.features import on_ray as ray_features
from paceline.train.plan.choices import for_chains
from paceline.train.processes import ray_cluster as on_ray
from paceline.train.processes.ray_cluster import Job, Share, Work, Worker, connected, distributed

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own warnings


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two processors, whatever this machine has; calls with --ray use it and leave it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20, logging_level="ERROR"
    )
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not see this file
    yield ray
    ray.shutdown()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A double of the cluster, which answers and hidden states are made on."""
    fake = FakeRay()
    for module in (ray_answers, ray_features):
        monkeypatch.setattr(module, "connected", lambda where: contextlib.nullcontext(fake))
    return fake


QUESTIONS = [("Hi.", "And then?"), ("Name a colour.",), ("Sing!", "Louder.", "Stop."), ("Count to ten.",), ("Why?",)]


@pytest.fixture(scope="module")
def regenerate_config(tmp_path_factory: pytest.TempPathFactory) -> RegenerateConfig:
    """Conversations of several turns, two of each at a temperature; one prompt is too long."""
    folder = tmp_path_factory.mktemp("asked")
    lines = [{"turns": turns} for turns in [*QUESTIONS, ("too long " * 40,)]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    target = replace(TARGET, model=str(tiny_model(folder / "tiny")))
    answering = AnswerConfig(temperatures=(0.0, 0.9), samples=2, max_tokens=100, max_prompt_tokens=300)
    return RegenerateConfig(folder / "one", target, PromptsConfig((str(folder / "prompts.jsonl"),)), answering)


@pytest.fixture(scope="module")
def one(regenerate_config: RegenerateConfig) -> Regenerated:
    """Answers of one process."""
    return regenerate(regenerate_config)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_that_goes_on_with_answers_of_two_workers_of_which_one_is_killed(
    cluster: Any, regenerate_config: RegenerateConfig, one: Regenerated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on(
        regenerate_config,
        one,
        tmp_path / "two",
        lambda: dying(monkeypatch, ray_answers, "Answering", tmp_path / "died"),
    )
    assert (tmp_path / "died").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_hidden_states_of_a_worker_that_is_killed_and_the_drafter_they_train(
    cluster: Any, regenerate_config: RegenerateConfig, one: Regenerated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = training(regenerate_config, one.answers, tmp_path / "here")
    here = train(config)
    dying(monkeypatch, ray_features, "Reading", tmp_path / "died")
    there = train(replace(config, out=tmp_path / "there", remote=replace(RAY, ray_workers=1)))
    assert (tmp_path / "died").exists(), "a worker was killed"
    read = files_of(here.run, "features")
    assert read and {Path(name).name: each for name, each in read.items()} == {
        Path(name).name: each for name, each in files_of(there.run, "features").items()
    }
    weights = [(each.drafter / "model.safetensors").read_bytes() for each in (here, there)]
    assert weights[0] == weights[1]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_real_cluster_works_and_what_its_worker_refuses_is_raised_here(cluster: Any) -> None:
    with connected(RAY) as ray:
        results = list(distributed(ray, replace(RAY, ray_workers=1), Doubling(), range(6), 4))
        assert sorted(results) == [0, 2, 4, 6, 8, 10]
        with pytest.raises(PromptError, match="no template for -1 with 2 threads"):
            list(distributed(ray, replace(RAY, ray_workers=1), Doubling(), [-1], 4))


@dataclass(frozen=True)
class Deadly:
    def begin(self, num_threads: int | None) -> Work:
        return lambda batch: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[return-value]


@pytest.mark.nightly
@pytest.mark.slow
def test_what_kills_every_worker_comes_to_an_end(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "MOST_DEATHS", 1)
    with connected(RAY) as ray, pytest.raises(DownloadError, match="the Ray cluster failed"):
        list(distributed(ray, replace(RAY, ray_workers=1), Deadly(), ["a"], 4))


class TestOnADouble:
    """The cluster's side: tasks given and results used, with everything pickled in between."""

    @pytest.mark.slow
    def test_a_run_goes_on_with_answers_of_workers(
        self, fake: FakeRay, regenerate_config: RegenerateConfig, one: Regenerated, tmp_path: Path
    ) -> None:
        going_on(regenerate_config, one, tmp_path, lambda: None)
        assert [len(rows.asked) for rows in fake.rows] == [4, 1], (
            "only prompts that lack an answer are sent: one is too long"
        )

    def test_the_bar_counts_conversations_that_are_left_out(
        self, fake: FakeRay, regenerate_config: RegenerateConfig, tmp_path: Path
    ) -> None:
        """Three conversations are too long, three are refused: 6 of 9 never arrive as answers."""
        prompts = tmp_path / "prompts.jsonl"
        rows = {"prompt": "too long " * 40}, {"prompt_ids": [1, 10**6]}, {"prompt": "Sing!"}
        prompts.write_text("".join(json.dumps(each) + "\n" for each in rows))
        prompting, heard = PromptsConfig((str(prompts),)), Heard()
        config = replace(regenerate_config, out=tmp_path / "run", prompting=prompting, remote=RAY)
        done = regenerate(config, progress=heard)
        assert (done.num_answers, done.num_too_long, done.refused.counts.total()) == (3, 3, 3)
        assert heard.totals == [len(heard.texts)] == [9]

    @pytest.mark.slow
    def test_hidden_states_are_those_of_one_process(
        self,
        fake: FakeRay,
        regenerate_config: RegenerateConfig,
        one: Regenerated,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(train_run, "Trainer", ended)
        config = training(regenerate_config, one.answers, tmp_path / "here")
        for each in (config, replace(config, out=tmp_path / "there", remote=RAY)):
            with pytest.raises(Seen):
                train(each)
        here, there = (files_of(tmp_path / name, "features") for name in ("here", "there"))
        assert here and here == there and sum(len(rows.asked) for rows in fake.rows) == len(here)

    def test_each_worker_has_its_share_and_restarts(self, fake: FakeRay) -> None:
        results = list(distributed(cast(Any, fake), RAY, Doubling(), range(20), 64))
        assert sorted(results) == list(range(0, 40, 2))
        (rows,) = fake.rows
        options = rows.options
        assert (options["batch_size"], options["num_cpus"], options["num_gpus"], options["compute"].size) == (
            2,
            1.0,
            0.0,
            2,
        )
        assert options["ray_remote_args_fn"]() == {
            "max_restarts": on_ray.MOST_DEATHS,
            "max_task_retries": on_ray.MOST_DEATHS,
        }

    @pytest.mark.slow
    def test_ray_has_what_the_double_has_and_takes_what_it_takes(self, fake: FakeRay) -> None:
        pytest.importorskip("ray")
        import ray.data
        from ray._common.ray_option_utils import validate_actor_options

        list(distributed(cast(Any, fake), RAY, Doubling(), range(4), 1))
        options = fake.rows[0].options
        inspect.signature(ray.data.Dataset.map_batches).bind(None, Worker, **options)
        validate_actor_options(options["ray_remote_args_fn"](), in_options=True)
        inspect.signature(ray.data.from_items).bind([], override_num_blocks=1)
        inspect.signature(ray.data.ActorPoolStrategy).bind(size=2)
        assert hasattr(ray.data.DataContext.get_current(), "enable_progress_bars")
        assert issubclass(ray.exceptions.RayError, Exception) and hasattr(ray.data.Dataset, "iter_rows")

    def test_a_cluster_that_fails_is_an_error_of_ours(self, fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(rows: Rows) -> Iterator[Any]:
            raise RayFailed("the actor died")

        monkeypatch.setattr(Rows, "iter_rows", fail)
        with pytest.raises(DownloadError, match="the Ray cluster failed.*the actor died"):
            list(distributed(cast(Any, fake), RAY, Doubling(), range(4), 4))

    def test_what_a_worker_refuses_is_raised_here(self, fake: FakeRay) -> None:
        with pytest.raises(PromptError, match="no template for -1 with 1 threads"):
            list(distributed(cast(Any, fake), RAY, Doubling(), [1, -1, 2], 1))


class TestWithoutACluster:
    @pytest.mark.parametrize(
        ("machines", "num_workers", "share"),
        [
            ([{"CPU": 32.0, "GPU": 4.0}, {"CPU": 32.0, "GPU": 4.0}, {"memory": 1e9}], None, Share(8, 1.0, 1.0)),
            ([{"CPU": 32.0, "GPU": 4.0}, {"CPU": 32.0}], 3, Share(3, 1.0, 1.0)),
            ([{"CPU": 16.0}, {"CPU": 12.0}, {"CPU": 0.0}], None, Share(2, 12.0, 0.0)),
            ([{"CPU": 16.0}, {"CPU": 12.0}], 3, Share(3, 6.0, 0.0)),
            ([{"CPU": 2.0}], 4, Share(4, 0.5, 0.0)),
        ],
    )
    def test_shares(self, machines: list[dict[str, float]], num_workers: int | None, share: Share) -> None:
        assert Share.of(machines, num_workers) == share

    @pytest.mark.parametrize(
        ("machines", "message"),
        [([{"CPU": 4.0, "GPU": 2.0}], "the cluster has 2 GPUs"), ([{"CPU": 0.0}], "no machine")],
    )
    def test_too_little(self, machines: list[dict[str, float]], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Share.of(machines, 3)

    def test_an_error_of_ours_is_a_result(self) -> None:
        job: Job = Doubling()
        (result,) = Worker(job, 3)({"asked": [-1]})["made"]
        assert result.error == ("PromptError", "no template for -1 with 3 threads")

    @pytest.mark.slow  # it imports Ray
    def test_no_cluster_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ray = pytest.importorskip("ray")
        monkeypatch.setattr(ray, "is_initialized", lambda: False)

        def init(**options: Any) -> None:
            raise ConnectionError("Could not find any running Ray instance")

        monkeypatch.setattr(ray, "init", init)
        with pytest.raises(DownloadError, match="ray start --head"), connected(RemoteConfig(ray="auto")):
            pass

    def test_without_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(ConfigError, match=r"pip install 'paceline\[ray\]'"), connected(RAY):
            pass

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"ray": "auto", "answers_from": "http://a:1"}, "ray and answers_from"),
            ({"ray": "auto", "features_from": "http://a:1"}, "ray and features_from"),
            ({"ray_workers": 2}, "ray_workers needs ray"),
        ],
    )
    def test_what_does_not_go_together(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            RemoteConfig(**options)

    @pytest.mark.parametrize("changes", [{"features": "streamed"}, {"features": "online"}, {"feature_dtype": "int8"}])
    def test_hidden_states_are_kept(self, changes: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="ray keeps hidden states on disk"):
            for_chains(TrainConfig(remote=RAY, **changes))

    def test_a_training_has_its_answers_from_the_cluster(
        self, regenerate_config: RegenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def shared(config: RegenerateConfig, *arguments: Any) -> None:
            assert config.remote == RAY
            raise Seen

        monkeypatch.setattr(ray_answers, "_shared", shared)
        options: dict[str, Any] = {"plan": "off", "features": "cached", "remote": RAY}
        with pytest.raises(Seen):
            train(
                TrainConfig(
                    tmp_path / "run", regenerate_config.target, prompting=regenerate_config.prompting, **options
                )
            )

    def test_prompts_are_given(self, regenerate_config: RegenerateConfig, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="give prompts"):
            regenerate(replace(regenerate_config, out=tmp_path / "x", prompting=PromptsConfig(), remote=RAY))

    @pytest.mark.slow
    def test_others_of_torchrun_ask_nobody(
        self, regenerate_config: RegenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(on_ray, "connected", None)
        done = regenerate(replace(regenerate_config, out=tmp_path / "x", remote=RAY))
        assert done.num_answers == 0 and not (tmp_path / "x").exists()
