"""report.html of a run: one page that needs no network, on a phone as on a desk, in light as in dark.

    paceline report runs/train-20260101-120000

`read_run` reads what the folder holds: settings, command, training metrics, an evaluation or a `bench decode`. Training
writes a line a step; now and then one holds "heldout" and "ood" too, or these come on a line of their own. The last value of a
step wins, for a resumed run repeats steps. `page` makes the text of the page; a section without data is left out. The same run
gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.bench.beside import PEERS
from paceline.bench.config import BASELINE
from paceline.bench.decode import Result, sources_table
from paceline.errors import ConfigError
from paceline.model.backends import Form
from paceline.report.pages import Plot, Series, bars, curves, ranges, render, short
from paceline.report.statistics import Tone, doubt, possible_speedup, shares, tone_of
from paceline.report.tables import Column, Table, flat, printable
from paceline.runs.folder import RunFolder
from paceline.simulate.files import read_json

Line = dict[str, Any]
GOOD_TRAINING = 2.5
"""Tokens a round, served, from which a training is called good."""
KINDS = {"heldout": "held out", "ood": "out of domain"}


def with_interval(value: float | None, interval: Sequence[float | None] | None, unit: str = "") -> str | None:
    """A figure with its interval, where there is one: "1.50x [1.40, 1.60]"."""
    if value is None:
        return None
    low, high = interval or (None, None)
    return f"{value:.2f}{unit}" + ("" if low is None or high is None else f" [{low:.2f}, {high:.2f}]")


def speedup_cell(each: Result) -> str | None:
    """The speed-up with its interval, or that the machine was busy."""
    return with_interval(each.speedup, each.speedup_interval, "x") or (each.doubt and "busy: repeat")


COLUMNS = (
    Column("drafter", lambda each: each.drafter),
    Column("batch", lambda each: each.batch, align="right"),
    Column("temp", lambda each: each.temperature, "{:g}", "right"),
    Column("tokens/s", lambda each: each.tokens_per_s, "{:.1f}", "right"),
    Column("decode/s", lambda each: each.decode_tokens_per_s, "{:.1f}", "right"),
    Column("speed-up", lambda each: speedup_cell(each), cut=" ["),
    Column("tokens/round", lambda each: with_interval(each.tokens_per_round, each.tokens_per_round_interval), cut=" ["),
    Column("identical", lambda each: each.identical, "{:.0%}", "right"),
    Column("lossless", lambda each: {None: None, True: "yes", False: "NO"}[each.lossless]),
    Column("repeats", lambda each: each.repetition, "{:.0%}", "right"),
)


def table(results: list[Result]) -> Table:
    """A line for each setting; a narrow terminal leaves the intervals to the report."""
    return Table(COLUMNS, results, width=140)


@dataclass(frozen=True, slots=True)
class RunData:
    path: Path
    config: Line = field(default_factory=dict)
    command: str = ""
    steps: list[Line] = field(default_factory=list)
    """Training metrics in the order of their steps, each step once."""
    checks: list[Line] = field(default_factory=list)
    """Held-out and out-of-domain metrics, the same way."""
    plan: Line = field(default_factory=dict)
    """What a training expected (plan.json)."""
    served: Line = field(default_factory=dict)
    """Held-out prompts answered in the real engine after training (heldout.json)."""
    evaluation: Line = field(default_factory=dict)
    """Of `evaluate` (evaluation.json), else of `bench decode` (results.json)."""

    @property
    def is_evaluation(self) -> bool:
        """Whether one drafter answered several prompt sets; `bench decode` has several drafters and one set."""
        return "sets" in self.evaluation

    @property
    def sets(self) -> dict[str, Line]:
        """Prompt set -> its figures, as of `bench.decode.set_figures`."""
        bench = {str(self.config.get("prompts", "prompts")): self.evaluation} if self.evaluation else {}
        return self.evaluation.get("sets", bench)

    def results(self) -> list[tuple[str, Result]]:
        """Each with what its curves are called: its prompt set, or its drafter."""
        known = {each.name for each in fields(Result)}
        return [
            (printable(name if self.is_evaluation else row["drafter"]), Result(**{key: row[key] for key in known & row.keys()}))
            for name, figures in self.sets.items()
            for row in figures["results"]
        ]


def read_run(folder: Path) -> RunData:
    """Raises ConfigError when the folder has neither training metrics nor an evaluation, or when a file of it is damaged."""
    if not folder.is_dir():
        raise ConfigError(f"there is no run folder {folder}: check the path")
    lines, command, decoded = RunFolder(folder).metrics(), folder / "command.txt", _object(folder / "results.json")
    run = RunData(
        path=folder,
        config=_object(folder / "config.json"),
        command=command.read_text(encoding="utf-8", errors="replace").strip() if command.exists() else "",
        steps=_by_step([line for line in lines if "loss" in line]),
        checks=_by_step([line for line in lines if any(isinstance(line.get(kind), dict) for kind in KINDS)]),
        plan=_object(folder / "plan.json"),
        served=_object(folder / "heldout.json"),
        evaluation=_object(folder / "evaluation.json") or (decoded if "looping" in decoded else {}),
    )
    if not (run.steps or run.checks or run.sets):
        raise ConfigError(
            f"{folder} holds neither training metrics (metrics.jsonl) nor an evaluation (evaluation.json) nor figures of "
            "decoding (results.json): give the folder of paceline train, evaluate or bench decode"
        )
    return run


def _by_step(lines: list[Line]) -> list[Line]:
    last = {line["step"]: line for line in lines if isinstance(line.get("step"), int)}
    return [last[step] for step in sorted(last)]


def _object(path: Path) -> Line:
    remedy = "make it again, or move it away"
    value = read_json(path, remedy) if path.exists() else {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object: {remedy}")
    return value


def numbers(lines: list[Line], key: str, kind: str = "", over: str = "blocks") -> tuple[list[float], list[float]]:
    """The values under `over` (blocks trained on so far) and under `key`, of lines that have both; `kind`: of such a check."""
    pairs = [(line.get(over), ((line.get(kind) or {}) if kind else line).get(key)) for line in lines]
    known = [(float(x), float(y)) for x, y in pairs if isinstance(x, int | float) and isinstance(y, int | float)]
    return [x for x, _ in known], [y for _, y in known]


def thinned(x: list[float], y: list[float], most: int = 300) -> tuple[list[float], list[float]]:
    """At most `most` points, each the mean of neighbours: a long run's page stays small, and its noise too."""
    size = -(-len(x) // most)
    if size <= 1:
        return x, y
    groups = [slice(first, first + size) for first in range(0, len(x), size)]
    return [fmean(x[group]) for group in groups], [fmean(y[group]) for group in groups]


def page(run: RunData) -> str:
    """The whole page. Raises ConfigError when matplotlib is missing."""
    rows, at = run.results(), run.evaluation
    return render(
        "run.html",
        run=run,
        kinds=KINDS,
        verdict=verdict_of(run),
        tone=run_tone(run),
        form=Form(at["backend"], at["isa"], at["weight_format"]) if at.get("weight_format") else None,
        training=_training(run),
        served=[_accepted("Accepted drafts a round", [("held out", run.served.get("accepted_histogram") or [])])],
        engine=_engine([(name, result) for name, result in rows if result.drafter != BASELINE]),
        figures=_figures(rows, run.is_evaluation),
        looping=[(name, each) for name, figures in run.sets.items() for each in figures.get("looping", [])],
        with_interval=with_interval,
        is_lossless=all(result.lossless is not False for _, result in rows),
        settings=flat(run.config),
        asked=flat(run.evaluation.get("settings", {})),
    )


def run_tone(run: RunData) -> Tone:
    """Return the colour of `verdict_of`: without a sure figure grey, of a speed-up whose interval holds 1 too."""
    drafted = _drafted([result for _, result in run.results()])
    if any(each.lossless is False for each in drafted):
        return "bad"
    if not drafted:
        return "cost" if is_worse(run) else "good" if (run.served.get("tokens_per_round") or 0.0) >= GOOD_TRAINING else ""
    known = [each for each in drafted if each.doubt is None and each.speedup is not None]
    if not known:
        return ""
    best = min(known, key=lambda each: (each.temperature, each.batch, -(each.speedup or 0.0)))
    low, high = best.speedup_interval
    is_chance = low is not None and high is not None and low <= 1 <= high
    return "" if is_chance else tone_of([best.speedup or 0.0])


def _drafted(results: Sequence[Result]) -> list[Result]:
    return [each for each in results if each.drafter != BASELINE and each.drafter not in PEERS]


def is_worse(run: RunData) -> bool:
    """Whether the trained drafter keeps fewer tokens than the one that ships for its target, on the same prompts."""
    shipped = (run.served.get("default_drafter") or {}).get("tokens_per_round")
    own = run.served.get("tokens_per_round")
    return shipped is not None and own is not None and own < shipped


def verdict_on(results: Sequence[Result], looping: Sequence[Line] = ()) -> str:
    """What figures of decoding mean, and what to do next; `looping` as of `set_figures`."""
    return render("verdict.txt", results=_drafted(results), looping=looping).strip()


def verdict_of(run: RunData) -> str:
    """On figures of the engine, which are what counts; of a run that has none, on its training."""
    results = [result for _, result in run.results()]
    looping = [each for figures in run.sets.values() for each in figures.get("looping", [])]
    return verdict_on(results, looping) if results else training_verdict(run)


def training_verdict(run: RunData) -> str:
    """What a training has shown, expected and got side by side, and what to do next."""
    served, speedup = run.served.get("tokens_per_round"), run.served.get("speedup")
    told = {"served": served, "speedup": possible_speedup(speedup, served), "is_worse": is_worse(run)}
    told["doubt"] = run.served.get("doubt") or doubt(speedup, served, None)
    told["is_copied"] = (run.config.get("shape") or {}).get("start") == "copied"
    return render("train_verdict.txt", run=run, expected=run.plan.get("expected") or {}, good=GOOD_TRAINING, **told).strip()


def _training(run: RunData) -> list[Plot]:
    plots = []
    for key, ylabel in (("loss", "loss"), ("eal", "expected tokens per round")):
        series = [Series("training", *thinned(*numbers(run.steps, key)), color=5, is_faint=True)]
        series += [Series(name, *numbers(run.checks, key, kind), color=at) for at, (kind, name) in enumerate(KINDS.items())]
        plots.append(curves(ylabel.capitalize(), series, xlabel="blocks", ylabel=ylabel))
    last = run.checks[-1] if run.checks else {}
    for key, name in (("recall1", "Recall@1"), ("recall16", "Recall@16")):
        checked = [(label, (last.get(kind) or {}).get(key) or []) for kind, label in KINDS.items()]
        groups = [(label, [value or 0.0 for value in values]) for label, values in checked]
        title = f"{name} by slot, last check"
        plots.append(bars(title, groups, xlabel="slot", ylabel=name.lower(), first=1, ylim=(0, 1)))
    seconds, rates = thinned(*numbers(run.steps, "blocks_per_s", over="seconds"))
    pace = [Series("blocks/s", [each / 60 for each in seconds], rates)]
    plots.append(curves("Pace", pace, xlabel="minutes", ylabel="blocks/s", ylim=(0, None)))
    return plots


def _accepted(title: str, histograms: list[tuple[str, list[int]]]) -> Plot:
    groups = [(label, shares(histogram)) for label, histogram in histograms]
    return bars(title, groups, xlabel="accepted drafts", ylabel="share of rounds")


def _depth(survival: Sequence[float]) -> int:
    """Drafts that are drawn: those that were accepted in some round, and one more, where the line meets the axis."""
    return min(len(survival), 1 + sum(share > 0 for share in survival))


def _engine(rows: list[tuple[str, Result]]) -> list[Plot]:
    """Acceptance at the smallest batch, which in float32 is that of any batch; speed at each."""
    plots = []
    smallest = min((result.batch for _, result in rows), default=0)
    for temperature in sorted({result.temperature for _, result in rows}):
        shown = [(name, each) for name, each in rows if (each.temperature, each.batch) == (temperature, smallest)]
        curved = [
            Series(name, range(1, _depth(each.survival) + 1), each.survival[: _depth(each.survival)], color=at)
            for at, (name, each) in enumerate(shown)
        ]
        title, xlabel = f"Survival, T={temperature:g}", "first i drafts stood"
        plots.append(curves(title, curved, xlabel=xlabel, ylabel="share of rounds", ylim=(0, 1)))
        histograms = [(name, each.accepted_histogram) for name, each in shown]
        plots.append(_accepted(f"Accepted drafts a round, T={temperature:g}", histograms))
    sets = list(dict.fromkeys(name for name, _ in rows))
    bars_of = [
        (f"{short(name)}, b{each.batch}, T={each.temperature:g}", each.speedup, each.speedup_interval, sets.index(name))
        for name, each in rows
        if each.speedup is not None
    ]
    plots.append(ranges("Speed-up, with 95% intervals over prompts", bars_of, "speed-up over plain decoding", mark=1))
    return plots


def _figures(rows: list[tuple[str, Result]], in_sets: bool) -> list[Table]:
    if not rows:
        return []
    columns = [Column("prompts", lambda row: row[0])] if in_sets else []
    columns += [replace(column, cell=lambda row, column=column: column.cell(row[1])) for column in COLUMNS]
    tables = [Table(columns, rows)]
    if any(result.sources for _, result in rows):
        sources = sources_table([(f"{name}: {result.setting}" if in_sets else result.setting, result) for name, result in rows])
        tables.append(replace(sources, title="Rounds by source of drafts"))
    return tables
