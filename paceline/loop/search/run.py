"""The run of `paceline search`: trials of a training's settings, judged by served tokens/s. A killed run continues.

answers   runs/x/regenerate/     the target answers the prompts, if prompts were given
          runs/x/heldout/        one answer to each held-out prompt
          runs/x/learned/        the answers without held-out prompts, one folder for each source
trials    runs/x/trials/N/       a `paceline train` run each (trials.py); runs/x/features/ hidden states for all of them
judge     runs/x/drafter/        the winner, if held-out prompts that no trial was measured on are served faster with it
                                 than with the planner's choice, else the planner's choice; run.yaml trains it again
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.data.answers import AnswerShards
from paceline.data.rows import Dropped
from paceline.errors import PromptError
from paceline.loop.search.config import SearchConfig
from paceline.loop.search.rating import Rated, rate
from paceline.loop.search.space import Space
from paceline.loop.search.trials import Measured, Trials, winner_of
from paceline.report.pages import Plot, Series, curves, write_report
from paceline.report.statistics import Tone
from paceline.report.tables import SILENT, Column, Progress, Table, flat, with_interval
from paceline.runs.folder import RESUME, RunFolder, plain, whole_folder
from paceline.runs.lock import only_run
from paceline.runs.ranks import Ranks
from paceline.runs.stopping import stopped_by_signal
from paceline.train.answers.on_ray import run as regenerate
from paceline.train.answers.run_identity import opened_run
from paceline.train.config import RegenerateConfig, TrainConfig
from paceline.train.documents.dataset import Document, answers_of, heldout_prompts, prompt_of, read_corpus
from paceline.train.plan.target_facts import read_target
from paceline.train.plan.training_plan import make_plan
from paceline.train.run import run as train
from paceline.train.run_file import RUN_FILE, config_of, read_run_file, with_value, write_run_file
from paceline.train.unused_settings import check_prompts

LENGTH = ("minutes", "most_trials")
"""Fields of SearchConfig that may change when a search is resumed."""
FIXED = {"loop.epochs": 1e6, "loop.keep": "last", "loop.serve_share": 0.0}
"""Fields of a trial's TrainConfig: its minutes end it, and the search alone measures it."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search: the chosen drafter, and a comparison of the best other trial with the planner's choice (the
    settings that `paceline train` plans). `ratio`: tokens/s of that trial divided by those of the planner's choice.
    `interval`: its 95% interval. Both are measured on prompts that were not used to measure trials."""

    drafter: Path
    run: Path
    settings: str
    """Differences of the chosen training from the planner's choice."""
    is_better: bool
    """True if `interval` lies above 1. Then `drafter` is the best other trial's; otherwise it is that of the planner's
    choice."""
    ratio: float | None
    """None if no trial but the planner's choice was completed."""
    interval: tuple[float | None, float | None]
    trials: tuple[Measured, ...]
    minutes: float


def search(config: SearchConfig, *, progress: Progress = SILENT) -> SearchResult:
    """Trains drafters with different settings, measures them on held-out prompts, and chooses the fastest one. If it is
    not clearly faster than the drafter with the planner's choice (the settings that `paceline train` would plan), the
    latter is chosen instead.

    A call with the same `config.out` resumes the search. Raises ConfigError (also if Optuna is missing), PromptError if
    there are too few prompts, CacheError when the disk cannot be written, and ModelNotFoundError, ModelFileError,
    UnsupportedModelError or DownloadError if the target cannot be loaded.
    """
    check_prompts(config.prompting, has_answers=bool(config.answers))
    with only_run(config.out, "searching", Ranks(), progress.say), stopped_by_signal(progress.say):
        return _Search(config, progress).run()


class _OnlyBars(Progress):
    """The progress of a trial's training: its bars, without the lines that every trial would repeat."""

    def __init__(self, progress: Progress) -> None:
        self.bar = progress.bar


class _Search:
    def __init__(self, config: SearchConfig, progress: Progress) -> None:
        self.config = config = _with_trial_minutes(config)
        self.progress, self.folder = progress, _opened(config)

    def run(self) -> SearchResult:
        config, say = self.config, self.progress.say
        sources, heldout = self._split(self._answers())
        third = max(1, len(heldout) // 3)
        self.measured_on, self.judged_on = heldout[:third], heldout[third:]
        space = self._space(sources)
        trials = Trials(config, space, self.folder, self._train, self._rate)
        most = config.most_trials or 10**6
        say(f"trials are measured after {', '.join(f'{each:.3g}' for each in config.rung_minutes)} minutes of steps")
        while not trials.measured() or len(trials.measured()) < most or trials.measured()[-1].state == "running":
            if trials.measured() and trials.minutes + trials.reserve > config.minutes:
                break
            done = trials.run_next()
            shown = ", ".join(f"{each:.2f}x" for each in done.speedups) or done.reason
            say(f"trial {done.number}, {done.settings}: {shown} ({done.state}; {trials.minutes:.1f} minutes spent)")
        return self._judged(trials, space)

    def _answers(self) -> list[Path]:
        config, began = self.config, time.monotonic()
        if config.answers and not (config.prompting.prompts or config.prompting.self_written):
            return list(config.answers)
        settings = RegenerateConfig(config.out / "regenerate", config.target, config.prompting, config.answering)
        answers = regenerate(settings, self.progress).answers
        self.folder.log(stage="answers", minutes=(time.monotonic() - began) / 60)
        return [*config.answers, answers]

    def _split(self, sources: Sequence[Path]) -> tuple[list[Path], list[Document]]:
        """Writes the answers to learn from, one folder for each source; returns these folders and the held-out
        documents, of which no prompt is in the folders. A resumed search reads what it wrote: the sources may be traces
        of a running server, which have changed since."""
        out = self.config.out / "heldout"
        if not out.is_dir():
            keys = self._held_out(sources)
            held_out = [each for each in answers_of(sources, Dropped()) if f"{each.key}/{each.turn}" in keys]
            with whole_folder(out, RESUME) as scratch:
                AnswerShards(scratch).write(held_out)
        heldout = sorted(read_corpus([out], 10**6, 0.0).train, key=lambda document: document.prompt)
        prompts = {document.prompt for document in heldout}
        folders = [self.config.out / "learned" / f"{place}" for place in range(len(sources))]
        for source, folder in zip(sources, folders, strict=True):
            if not folder.is_dir():
                usable = [each for each in answers_of([source], Dropped()) if prompt_of(each.key) not in prompts]
                with whole_folder(folder, RESUME) as scratch:
                    AnswerShards(scratch).write(usable)
        return folders, heldout

    def _held_out(self, sources: Sequence[Path]) -> set[str]:
        """Chooses the prompts to hold out; returns the key of one document of each."""
        number, strict = self.config.num_prompts, self.config.prompting.strict
        corpus = read_corpus(sources, 10**6, 0.0, strict=strict)
        if corpus.dropped:
            self.progress.say(str(corpus.dropped))
        keys = {document.prompt: document.key for document in corpus.train}
        if len(keys) < 2 * number:
            raise PromptError(
                f"{len(keys)} different prompts are too few to hold out {number}: give more prompts or answers, or "
                "lower --num-prompts"
            )
        return {keys[prompt] for prompt in heldout_prompts(keys, 1e-9, number, number)}

    def _space(self, sources: list[Path]) -> Space:
        """Returns the space around the plan that `paceline train` makes for a trial's minutes. A resumed search has the
        stored plan: another one could follow from the machine's speed of the moment."""
        config, minutes, out = self.config, self.config.rung_minutes, self.config.out / "planned"
        if not (out / RUN_FILE).is_file():
            ask = TrainConfig(
                out=out, target=config.target, answers=tuple(sources), heldout_share=0.0, answering=config.answering,
                minutes=minutes[-1],
            )  # fmt: skip
            plan = make_plan(ask)
            self.progress.say(plan.text)
            base = replace(plan.config, plan="off", minutes=None, features="cached")
            for name, value in FIXED.items():
                base = with_value(base, name, value)
            base = with_value(base, "loop.seed", config.seed)
            out.mkdir(parents=True, exist_ok=True)
            write_run_file(with_value(base, "loop.checkpoint_minutes", min(5.0, minutes[0] / 2)))
        return Space.around(config_of(read_run_file(out / RUN_FILE)), read_target(config.target).shape.num_layers)

    def _train(self, number: int, config: TrainConfig) -> Path:
        """Trains a trial on; all trials share the hidden states of their documents."""
        self.progress.say(f"trial {number}: until {config.loop.max_minutes:.3g} minutes of steps")
        return train(replace(config, shared_features=self.folder.path / "features"), _OnlyBars(self.progress)).drafter

    def _rate(self, number: int, drafter: Path) -> Rated:
        with self.progress.bar(f"trial {number}: measuring", 2 * self.config.repeat * len(self.measured_on)) as advance:
            return rate(self.config, drafter, self.measured_on, None, lambda: advance("answers"))

    def _judged(self, trials: Trials, space: Space) -> SearchResult:
        """Compares the winner with the planner's choice, and keeps one of the two."""
        measured, judged = trials.measured(), None
        winner, number = winner_of(measured), 0
        if winner is not None:
            folders = [trials.folder(each) / "drafter" for each in (winner.number, 0)]
            judged = rate(self.config, folders[0], self.judged_on, folders[1])
            number = winner.number if (judged.interval[0] or 0.0) > 1.0 else 0
        with whole_folder(self.folder.path / "drafter", RESUME) as scratch:
            shutil.copytree(trials.folder(number) / "drafter", scratch, dirs_exist_ok=True)
        training = space.config(trials.settings(number), self.folder.path, self.config.rung_minutes[-1])
        write_run_file(self._again(training))
        ratio, interval = (judged.ratio, judged.interval) if judged else (None, (None, None))
        result = SearchResult(
            self.folder.path / "drafter", self.folder.path, measured[number].settings, number > 0, ratio, interval,
            tuple(measured), trials.minutes,
        )  # fmt: skip
        self.folder.results(plain(asdict(result)))
        write(result, self.config, self.folder, self.progress)
        return result

    def _again(self, trial: TrainConfig) -> TrainConfig:
        """Returns the training of a trial on its sources as they were given to the search, of which it holds out
        prompts of its own."""
        config, kept = self.config, {int(folder.name) for folder in trial.answers}
        answers = tuple(source for place, source in enumerate(config.answers) if place in kept)
        prompting = config.prompting
        if len(config.answers) not in kept:  # the last source: answers to the prompts
            prompting = replace(prompting, prompts=(), self_written=0)
        return replace(trial, answers=answers, prompting=prompting, heldout_share=TrainConfig().heldout_share)


def _with_trial_minutes(config: SearchConfig) -> SearchConfig:
    """Returns the config with `trial_minutes` set: to its own value if given, else to that of the search that is
    resumed."""
    stored = None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # a new one, or damaged: `_opened` raises
        stored = json.loads((config.out / "config.json").read_text(encoding="utf-8"))["search"]["trial_minutes"]
    return replace(config, trial_minutes=config.trial_minutes or stored or config.rung_minutes[-1])


def _opened(config: SearchConfig) -> RunFolder:
    settings = plain(asdict(config))
    for name in ("out", *LENGTH):
        settings.pop(name)
    settings["held_out_by"] = "text"  # a search begun when prompts of other rows counted as others cannot go on
    return opened_run(config.out, "search", settings)


def write(result: SearchResult, config: SearchConfig, run: RunFolder, progress: Progress) -> None:
    """Prints the table of trials and the verdict, and writes both to the run folder as report.md and report.html."""
    rungs = [Column(f"after {minutes:.3g} min", lambda trial, place=place: _speedup(trial, place), align="right")
             for place, minutes in enumerate(config.rung_minutes)]  # fmt: skip
    columns = [Column("trial", lambda trial: trial.number, align="right"), Column("settings", lambda t: t.settings)]
    columns += [*rungs, Column("end", lambda trial: trial.reason or trial.state)]
    note = "Times plain decoding on held-out prompts, one request at a time, the planner as in service."
    table = Table(columns, sorted(result.trials, key=_best_first), "Trials, best first", [note])
    progress.table(table)
    progress.say(line := verdict(result))
    points = [(trial.number, trial.speedups[-1]) for trial in result.trials if trial.speedups]

    def draw() -> list[Plot]:
        series = Series("last measurement", [number for number, _ in points], [speed for _, speed in points])
        return [curves("Trials", [series], xlabel="trial", ylabel="times plain decoding")]

    tone: Tone = "good" if result.is_better else ""
    sections: Any = {"Trials": [note, replace(table, title="", notes=())]}
    settings = flat(plain(asdict(config)))
    if notice := write_report(run, draw, "Search", line, sections, tone=tone, explained=[], settings=settings):
        progress.say(notice)


def _best_first(trial: Measured) -> tuple[int, float]:
    return -len(trial.speedups), -max(trial.speedups[-1:], default=0.0)


def _speedup(trial: Measured, rung: int) -> str | None:
    return f"{trial.speedups[rung]:.2f}x" if rung < len(trial.speedups) else None


def verdict(result: SearchResult) -> str:
    """Returns a sentence that names the chosen settings and compares the speed of the best other trial with that of the
    planner's choice (the settings that `paceline train` plans)."""
    if result.ratio is None:
        return "No other trial was as fast as the planner's choice at every rung: that is kept. More minutes try more."
    compared = with_interval(result.ratio, result.interval, "{:.2f}", "x")
    if result.is_better:
        return f"Kept: {result.settings}: {compared} of the planner's choice, on prompts that chose nothing."
    return (
        f"The planner's choice is kept: the best other trial has {compared} of its tokens/s on prompts that chose "
        "nothing, so it is not faster for certain."
    )
