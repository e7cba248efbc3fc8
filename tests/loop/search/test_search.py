"""`paceline search`: trials by successive halving, resumed after a kill, and a winner judged on other prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray_runs import Seen, ended

from paceline.cli import app
from paceline.config import EngineConfig
from paceline.data.answers import Answer, AnswerShards
from paceline.errors import CacheError, ConfigError, PromptError, TrainingError
from paceline.loop.distill import run as distill_run
from paceline.loop.distill.config import DistillConfig
from paceline.loop.search import run as search_run
from paceline.loop.search.config import SearchConfig
from paceline.loop.search.rating import Rated
from paceline.loop.search.run import search, verdict
from paceline.loop.search.space import SOURCES, Space
from paceline.loop.search.trials import Measured, Trials, winner_of
from paceline.report.tables import Progress, ignore
from paceline.runs.folder import RunFolder
from paceline.runs.stopping import Stop
from paceline.train import run as train_run
from paceline.train.config import AnswerConfig, PromptsConfig, TrainConfig
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.tiny import write_tiny_target

SPACE = Space.around(TrainConfig(answers=(Path("a/0"), Path("a/1"))), num_target_layers=4)


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


def speed_of(config: TrainConfig) -> float:
    """The made-up speed-up of a training: fewer layers, more minutes and higher rates are faster."""
    return 2.0 - 0.2 * config.shape.num_layers + 0.01 * (config.loop.max_minutes or 0.0) + config.loop.optim.lr


def trials_in(folder: Path, dies_at: int = 0, speed: Callable[[TrainConfig], float] = speed_of) -> Trials:
    """Trials without PyTorch. The measurement number `dies_at` of this process does not return."""
    config = SearchConfig(out=folder, rungs=3, reduction=3, trial_minutes=9)
    if not (folder / "config.json").exists():
        RunFolder.create("search", {}, folder)
    trained: list[TrainConfig] = []

    def train(number: int, each: TrainConfig) -> Path:
        each.out.mkdir(parents=True, exist_ok=True)
        trained.append(each)
        return each.out

    def rate(number: int, drafter: Path) -> Rated:
        if len(trained) == dies_at:
            raise Killed
        return Rated(speed(trained[-1]), (None, None), 2.0)

    return Trials(config, SPACE, RunFolder.open(folder), train, rate)


def raising(error: BaseException) -> Callable[..., None]:
    def raised(*_: object, **options: object) -> None:
        raise error

    return raised


def run_until(trials: Trials, number: int) -> None:
    while len(trials.measured()) < number:
        trials.run_next()


def test_the_first_trial_is_the_planners_choice_and_is_never_stopped(tmp_path: Path) -> None:
    trials = trials_in(tmp_path / "run", speed=lambda config: 1.0 if config.shape.num_layers == 3 else 5.0)
    measured = [trials.run_next() for _ in range(6)]
    assert measured[0].settings == "the planner's choice" and measured[0].state == "complete"
    assert len(measured[0].speedups) == 3
    assert trials.settings(0) == SPACE.planned


def test_minutes_of_hidden_states_are_not_kept_for_the_next_trial(tmp_path: Path) -> None:
    trials = trials_in(tmp_path / "run")
    trials.run.log(trial=0, rung=0, steps_minutes=1.0, measuring_minutes=0.5, minutes=20.0)
    trials.run.log(trial=0, rung=1, steps_minutes=3.0, measuring_minutes=0.4, minutes=2.4)
    assert trials.minutes == 22.4 and trials.reserve == 9 + 5 * 0.5
    trials.run_next()
    assert all("measuring_minutes" in line for line in trials.run.metrics()) and trials.reserve == 11.5


def test_one_in_three_goes_on_and_stopped_trials_leave_no_files(tmp_path: Path) -> None:
    trials = trials_in(tmp_path / "run")
    measured = [trials.run_next() for _ in range(12)]
    stopped = [trial for trial in measured if trial.state == "pruned"]
    assert len(stopped) >= 3 and all(len(trial.speedups) < 3 for trial in stopped)
    for trial in stopped:
        rung = len(trial.speedups) - 1
        earlier = [other.speedups[rung] for other in measured[: trial.number] if len(other.speedups) > rung]
        assert sum(speed > trial.speedups[rung] for speed in earlier) >= max(1, (len(earlier) + 1) // 3)
    assert not any(trials.folder(trial.number).exists() for trial in stopped)
    best = winner_of(measured)
    assert best is not None and best.speedups[-1] == max(trial.speedups[-1] for trial in measured if trial.number)


def test_a_search_that_is_killed_three_times_has_the_same_trials(tmp_path: Path) -> None:
    whole = trials_in(tmp_path / "whole")
    run_until(whole, 8)
    for dies_at in (2, 3, 1):
        trials = trials_in(tmp_path / "killed", dies_at)
        with pytest.raises(Killed):
            run_until(trials, 8)
    number = len(trials.measured())
    trials = trials_in(tmp_path / "killed")
    trials.run_next()
    assert len(trials.measured()) == number, "the trial that was killed goes on first"
    run_until(trials, 8)
    assert trials.measured() == whole.measured()
    assert len({(line["trial"], line["rung"]) for line in trials.run.metrics()}) == len(trials.run.metrics())


def test_settings_that_cannot_be_trained_end_their_trial_alone(tmp_path: Path) -> None:
    def speed(config: TrainConfig) -> float:
        if config.shape.num_layers != 3:
            raise TrainingError("the loss is not finite")
        return 1.0

    trials = trials_in(tmp_path / "run", speed=speed)
    measured = [trials.run_next() for _ in range(6)]
    failed = [trial for trial in measured if trial.state == "fail"]
    assert failed and all(trial.reason == "the loss is not finite" for trial in failed)
    assert measured[0].state == "complete"
    with pytest.raises(TrainingError):
        trials_in(
            tmp_path / "other", speed=lambda config: speed_of(config) / speed(TrainConfig(shape=_two()))
        ).run_next()


def _two() -> Any:
    from paceline.train.config import DrafterShape

    return DrafterShape(num_layers=2)


def test_a_trial_is_a_training_with_every_field_decided() -> None:
    config = SPACE.config(SPACE.planned | {"shape.num_layers": 1, SOURCES: "without 1"}, Path("t"), 2.5)
    assert (config.shape.num_layers, config.answers, config.loop.max_minutes) == (1, (Path("a/0"),), 2.5)
    assert config.is_given("loop.max_minutes") and config.is_given("shape.num_layers")
    assert SPACE.differences(SPACE.planned | {"shape.num_layers": 1}) == "num_layers 1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 5}, "limit means nothing without prompts to read"),
        ({"prompts": ("p.jsonl",), "tags": ("acme",)}, "tags select prompts, not answers: give answers of these tags"),
    ],
)
def test_settings_that_select_prompts_are_refused_next_to_answers(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        search(SearchConfig(out=tmp_path / "run", answers=(tmp_path,), prompting=PromptsConfig(**options)))


def test_a_search_goes_on_with_more_minutes_and_its_first_length_of_trials(tmp_path: Path) -> None:
    """A tenth of the new minutes was another length, so they were refused."""
    first = SearchConfig(out=tmp_path / "run", minutes=60.0)
    rungs = search_run._Search(first, Progress()).config.rung_minutes
    more = search_run._Search(replace(first, minutes=90.0), Progress()).config
    assert more.minutes == 90.0 and more.rung_minutes == rungs == first.rung_minutes
    with pytest.raises(ConfigError, match="trial_minutes: 6.0 there, 7.0 now"):
        search_run._Search(replace(first, trial_minutes=7.0), Progress())
    (first.out / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="cannot be read"):
        search_run._Search(first, Progress())


@pytest.mark.parametrize(("left_out", "answers", "prompts"), [("0", "b", "p"), ("1", "a", "p"), ("2", "ab", "")])
def test_run_yaml_has_the_sources_of_the_winner_and_held_out_prompts(
    tmp_path: Path, left_out: str, answers: str, prompts: str
) -> None:
    """It had all sources, and no held-out prompts, which are the search's own."""
    config = SearchConfig(out=tmp_path / "run", answers=(Path("a"), Path("b")), prompting=PromptsConfig(("p",)))
    space = Space.around(TrainConfig(answers=tuple(map(Path, ("s/0", "s/1", "s/2"))), heldout_share=0.0), 4)
    trial = space.config(space.planned | {SOURCES: f"without {left_out}"}, config.out, 6.0)
    again = search_run._Search(config, Progress())._again(trial)
    assert again.answers == tuple(map(Path, answers)) and again.prompting.prompts == tuple(prompts)
    assert again.heldout_share == TrainConfig().heldout_share and again.loop == trial.loop


def test_prompts_of_the_target_are_answered_next_to_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were ignored there; `train` uses both."""
    monkeypatch.setattr(search_run, "regenerate", lambda settings, progress: SimpleNamespace(answers=settings.out))
    config = SearchConfig(out=tmp_path / "run", answers=(Path("a"),), prompting=PromptsConfig(self_written=5))
    assert search_run._Search(config, Progress())._answers() == [Path("a"), tmp_path / "run" / "regenerate"]
    teacher = EngineConfig(str(tmp_path))
    config = DistillConfig(tmp_path / "distil", teacher, answers=(Path("a"),), prompting=config.prompting)
    monkeypatch.setattr(distill_run, "regenerate", search_run.regenerate)
    stages = distill_run._Stages(config, (), Progress(), Stop(ignore), None)
    assert stages._answers() == [Path("a"), tmp_path / "distil" / "regenerate" / "answers"]


def test_verdicts() -> None:
    from paceline.loop.search.run import SearchResult

    def result(is_better: bool, ratio: float | None) -> SearchResult:
        trials = (Measured(0, "the planner's choice", "complete", (1.5,)),)
        return SearchResult(Path("d"), Path("r"), "layers 2", is_better, ratio, (1.01, 1.4), trials, 3.0)

    assert "layers 2: 1.20x [1.01, 1.40]" in verdict(result(True, 1.2))
    assert "not faster for certain" in verdict(result(False, 1.2))
    assert "More minutes" in verdict(result(False, None))


@pytest.mark.parametrize("is_better", [True, False])
def test_the_exit_status_says_which_settings_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_better: bool
) -> None:
    result = search_run.SearchResult(tmp_path, tmp_path, "layers 2", is_better, None, (None, None), (), 3.0)
    monkeypatch.setattr("paceline.loop.search.run.search", lambda config, progress: result)
    status = app(["search", "--out", str(tmp_path / "run")], prog_name="paceline", standalone_mode=False)
    assert status == (None if is_better else 3)


@pytest.mark.parametrize(("is_better", "tone"), [(True, "verdict good"), (False, "verdict")])
def test_the_verdict_has_the_colour_of_a_tone(tmp_path: Path, is_better: bool, tone: str) -> None:
    result = search_run.SearchResult(tmp_path, tmp_path, "layers 2", is_better, None, (None, None), (), 3.0)
    search_run.write(result, SearchConfig(out=tmp_path), RunFolder.create("search", {}, tmp_path), Progress())
    assert f'<p class="{tone}">' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("strict", [False, True])
def test_unusable_rows_are_left_out_unless_it_is_strict(tmp_path: Path, strict: bool) -> None:
    """They were an error with and without --strict."""
    answers = [Answer(f"{n}@0", "", 0, 0.0, [n, 7], [*range(n, n + 9)], "stop", "") for n in range(20)]
    AnswerShards(tmp_path / "answers").write([*answers, replace(answers[0], key="-@0", answer_ids=[5, -1])])
    lines = list[str]()
    progress = Progress()
    progress.say = lines.append
    config = SearchConfig(tmp_path / "run", num_prompts=6, prompting=PromptsConfig(strict=strict))
    search = search_run._Search(config, progress)
    if strict:
        with pytest.raises(PromptError, match="row 21: no key, or no token ids"):
            search._split([tmp_path / "answers"])
        return
    folders, heldout = search._split([tmp_path / "answers"])
    assert len(heldout) == 6 and len([*AnswerShards(folders[0])]) == 14
    assert len(lines) == 1 and lines[0].startswith("1 rows left out") and "without token ids" in lines[0]


def test_a_resumed_search_has_the_same_held_out_prompts_when_traces_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were chosen anew from the traces there are: other prompts, of which trials may have learned some. On a full
    disk another --out was advised, as if nothing could be resumed."""

    def traces(numbers: range) -> None:
        shutil.rmtree(tmp_path / "traces", ignore_errors=True)
        answers = (Answer(f"{n}@0", "", 0, 0.0, [n, 7], [*range(n, n + 9)], "stop", "") for n in numbers)
        AnswerShards(tmp_path / "traces").write([*answers])

    def split() -> tuple[list[str], set[str]]:
        search = search_run._Search(SearchConfig(tmp_path / "run", num_prompts=6), Progress())
        (folder,), heldout = search._split([tmp_path / "traces"])
        return [document.prompt for document in heldout], {answer.key for answer in AnswerShards(folder)}

    traces(range(20))
    with monkeypatch.context() as patch:
        patch.setattr(AnswerShards, "write", raising(OSError(28, "No space left on device")))
        with pytest.raises(CacheError, match="No space left.*: free space and run the same command again"):
            split()
    heldout, learned = split()
    assert len(heldout) == 6 and learned == {f"{n}@0" for n in range(20)} - {f"{prompt}@0" for prompt in heldout}
    traces(range(15, 60))
    assert split() == (heldout, learned)


@pytest.mark.slow
def test_a_trial_without_a_source_computes_no_hidden_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_tiny_target(tmp_path / "target")
    for source in range(2):
        answers = (
            Answer(f"{source}-{n}@0", "", 0, 0.0, [source, n, 7], [*range(n, n + 9)], "stop", "") for n in range(20)
        )
        AnswerShards(tmp_path / f"{source}").write([*answers])
    base = TrainConfig(
        target=EngineConfig(model=str(target), dtype="float32", threads=1), plan="off", features="cached",
        heldout_share=0.0, answers=(tmp_path / "0", tmp_path / "1"), shape=_two(),
    )  # fmt: skip
    space, computed, compute = Space.around(base, 4), list[int](), OnlineFeatures._compute
    monkeypatch.setattr(OnlineFeatures, "_compute", lambda self, n: (computed.append(n), compute(self, n))[1])
    monkeypatch.setattr(train_run, "Trainer", ended)
    search = search_run._Search(SearchConfig(out=tmp_path / "run", answers=base.answers), Progress())
    for number, sources in enumerate(("all", "without 1")):
        config = space.config(space.planned | {SOURCES: sources}, tmp_path / "run" / "trials" / f"{number}", 1.0)
        with pytest.raises(Seen):
            search._train(number, config)
        assert len(computed) == 40, "of the first trial alone"
    files = {path.relative_to(tmp_path / "run").parts[0] for path in (tmp_path / "run").rglob("*.safetensors")}
    assert files == {"features", "trials"} and not [*(tmp_path / "run").glob("trials/*/features-*")]


@pytest.mark.slow
def test_a_whole_search_on_a_tiny_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_tiny_target(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "Say {n}."}}\n' for n in range(30)))
    config = SearchConfig(
        out=tmp_path / "run", target=EngineConfig(model=str(target), threads=1), num_prompts=6, repeat=1,
        prompting=PromptsConfig((str(prompts),)), answering=AnswerConfig(max_tokens=24), measured_tokens=16,
        trial_minutes=0.02, rungs=1, most_trials=2, minutes=30,
    )  # fmt: skip
    result = search(config)
    assert len(result.trials) == 2 and (result.drafter / "model.safetensors").is_file()
    learned = {answer.key for answer in AnswerShards(config.out / "learned" / "0")}
    everything = {answer.key for answer in AnswerShards(config.out / "regenerate" / "answers")}
    assert len(everything - learned) == 6
    assert json.loads((config.out / "results.json").read_text())["trials"][0]["speedups"]
    assert {"run.yaml", "report.md", "report.html"} <= {path.name for path in config.out.iterdir()}
    assert [*config.out.glob("features/features-*")] and not [*config.out.glob("trials/*/features-*")]
    weights = (result.drafter / "model.safetensors").read_bytes()
    for error, kind in ((Killed(), Killed), (OSError(28, "No space left on device"), CacheError)):
        monkeypatch.setattr(search_run.shutil, "copytree", raising(error))
        with pytest.raises(kind):
            search(config)
        assert (result.drafter / "model.safetensors").read_bytes() == weights, "until another one is whole"
    monkeypatch.undo()
    again = search(config)
    assert [trial.speedups for trial in again.trials] == [trial.speedups for trial in result.trials]
    with pytest.raises(ConfigError):
        search(SearchConfig(out=config.out, target=config.target, prompting=config.prompting, seed=1))
    with pytest.raises(PromptError, match="--num-prompts"):
        search(SearchConfig(out=tmp_path / "few", target=config.target, answers=(config.out / "learned" / "0",)))
