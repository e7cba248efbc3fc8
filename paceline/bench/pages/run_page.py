"""Writes report.html of a run: one self-contained page for phone and desktop, in light and dark mode.

    paceline report runs/train-20260101-120000

`read_run` reads the run folder: settings, command, training metrics, and the results of `evaluate` or `bench decode`.
metrics.jsonl has one line per training step. Results of checks on held-out prompts ("heldout") and out-of-domain
prompts ("ood") are in these lines or in lines of their own. A resumed run repeats steps; the last value of a step is
used. `page` returns the HTML; sections without data are left out. Equal input gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.bench.comparison import PEERS
from paceline.bench.config import BASELINE
from paceline.bench.decode import Result
from paceline.bench.drafting import sources_table
from paceline.errors import ConfigError
from paceline.model.backends import Form
from paceline.report.pages import Plot, Series, bars, curves, ranges, render, short
from paceline.report.statistics import Tone, doubt, possible_speedup, shares, tone_of
from paceline.report.tables import Column, Table, flat, printable, with_interval
from paceline.runs.folder import RunFolder
from paceline.simulate.files import read_json

Line = dict[str, Any]
GOOD_TRAINING = 2.5
"""Tokens per round on held-out prompts in the real engine from which a training is rated good."""
KINDS = {"heldout": "held out", "ood": "out of domain"}
"""Metrics key of a check during training -> its label."""


def speedup_cell(result: Result) -> str | None:
    """Return the text of a table cell: the speed-up with its interval, or "busy: repeat" if the measured value exceeds
    the acceptance length, which means that the machine was busy. None if no speed-up was measured."""
    return with_interval(result.speedup, result.speedup_interval, unit="x") or (result.doubt and "busy: repeat")


DECODING_NOTE = (
    "Speed-up is over plain decoding (none), same batch and process. identical: greedy answers that equal plain "
    "decoding's, token for token. repeats: share of 8-grams that occurred before in the same answer; looping text is "
    "easy to draft. Brackets: 95% bootstrap intervals over prompts."
)
"""Explanation of the columns of `table`, for the reports."""
COLUMNS = (
    Column("drafter", lambda result: result.drafter),
    Column("batch", lambda result: result.batch, align="right"),
    Column("temp", lambda result: result.temperature, "{:g}", "right"),
    Column("tokens/s", lambda result: result.tokens_per_s, "{:.1f}", "right"),
    Column("decode/s", lambda result: result.decode_tokens_per_s, "{:.1f}", "right"),
    Column("speed-up", lambda result: speedup_cell(result), cut=" ["),
    Column(
        "tokens/round",
        lambda result: with_interval(result.tokens_per_round, result.tokens_per_round_interval),
        cut=" [",
    ),
    Column("identical", lambda result: result.identical, "{:.0%}", "right"),
    Column("lossless", lambda result: {None: None, True: "yes", False: "NO"}[result.lossless]),
    Column("repeats", lambda result: result.repetition, "{:.0%}", "right"),
)
LOOPING_COLUMNS = (
    Column("prompts", lambda entry: entry["prompts"]),
    Column("temp", lambda entry: entry["temperature"], "{:g}"),
    Column("looping", lambda entry: f"{entry['looping_share']:.0%} of {entry['num_answers']}"),
    Column("tokens/round", lambda entry: with_interval(entry["tokens_per_round"], entry["tokens_per_round_interval"])),
    Column("without loops", lambda entry: with_interval(entry["without_loops"], entry["without_loops_interval"])),
)


def table(results: list[Result]) -> Table:
    """Return a table of decoding results with one row per setting (drafter, temperature, batch size). A narrow terminal
    shows it without the intervals."""
    return Table(COLUMNS, results, width=140)


@dataclass(frozen=True, slots=True)
class RunData:
    """Content of a run folder: settings, training metrics, and results of decoding. A `Line` is the dict of one JSON
    object."""

    path: Path
    config: Line = field(default_factory=dict)
    command: str = ""
    steps: list[Line] = field(default_factory=list)
    """Training metrics sorted by step, one line per step."""
    checks: list[Line] = field(default_factory=list)
    """Metrics of checks on held-out and out-of-domain prompts, sorted by step, one line per step."""
    plan: Line = field(default_factory=dict)
    """Expected results of a training, written before it (plan.json)."""
    served: Line = field(default_factory=dict)
    """Results on held-out prompts in the real engine, measured after the training (heldout.json)."""
    evaluation: Line = field(default_factory=dict)
    """Content of evaluation.json, or of results.json of `bench decode`; {} without either."""

    @property
    def is_evaluation(self) -> bool:
        """True for `evaluate` (one drafter, several prompt sets); False for `bench decode` (several drafters, one
        set)."""
        return "sets" in self.evaluation

    @property
    def sets(self) -> dict[str, Line]:
        """Name of a prompt set -> its figures, as `bench.decode.set_figures` returns them."""
        bench = {str(self.config.get("prompts", "prompts")): self.evaluation} if self.evaluation else {}
        return self.evaluation.get("sets", bench)

    def results(self) -> list[tuple[str, Result]]:
        """Return (label, result) pairs for plots. The label is the prompt set; for `bench decode` it is the drafter."""
        known = {item.name for item in fields(Result)}
        return [
            (
                printable(name if self.is_evaluation else row["drafter"]),
                Result(**{key: row[key] for key in known & row.keys()}),
            )
            for name, figures in self.sets.items()
            for row in figures["results"]
        ]


def read_run(folder: Path) -> RunData:
    """Read the run folder of a training, an evaluation or a decoding benchmark. Raises ConfigError if it has no results
    of these, or a damaged file."""
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
            f"{folder} holds neither training metrics (metrics.jsonl) nor an evaluation (evaluation.json) nor figures "
            "of decoding (results.json): give the folder of paceline train, evaluate or bench decode"
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
    """Return a curve from a training log as (x values, y values). `lines`: entries of the log; each gives one point.
    `over`: key of the x value, by default the number of blocks trained on so far. `key`: key of the y value. Entries
    without one of the two values are left out.

    `kind`: "heldout" or "ood" if the y value is in the entry's dict of this name (results on held-out or out-of-domain
    prompts); "" if it is in the entry itself."""
    pairs = [(line.get(over), ((line.get(kind) or {}) if kind else line).get(key)) for line in lines]
    known = [(float(x), float(y)) for x, y in pairs if isinstance(x, int | float) and isinstance(y, int | float)]
    return [x for x, _ in known], [y for _, y in known]


def thinned(x: list[float], y: list[float], most: int = 300) -> tuple[list[float], list[float]]:
    """Return the curve (x, y) with at most `most` points, each the mean of several neighbouring points."""
    size = -(-len(x) // most)
    if size <= 1:
        return x, y
    groups = [slice(first, first + size) for first in range(0, len(x), size)]
    return [fmean(x[group]) for group in groups], [fmean(y[group]) for group in groups]


def page(run: RunData) -> str:
    """Return the HTML page of a run, with verdict, charts, figures and settings. Raises ConfigError if matplotlib is
    missing."""
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
        figures=_figures(rows, run),
        note=DECODING_NOTE,
        is_lossless=all(result.lossless is not False for _, result in rows),
        settings=flat(run.config),
        evaluation_settings=flat(run.evaluation.get("settings", {})),
    )


def run_tone(run: RunData) -> Tone:
    """Return the colour of the run's verdict: "good" (green: a gain), "cost" (amber: slower than plain decoding, or
    worse than the default drafter), "bad" (red: not lossless), or "" (grey: no clear gain, or no reliable result)."""
    drafted = _drafted([result for _, result in run.results()])
    if any(result.lossless is False for result in drafted):
        return "bad"
    if not drafted:
        return (
            "cost" if is_worse(run) else "good" if (run.served.get("tokens_per_round") or 0.0) >= GOOD_TRAINING else ""
        )
    known = [result for result in drafted if result.doubt is None and result.speedup is not None]
    if not known:
        return ""
    best = min(known, key=lambda result: (result.temperature, result.batch, -(result.speedup or 0.0)))
    low, high = best.speedup_interval
    is_chance = low is not None and high is not None and low <= 1 <= high
    return "" if is_chance else tone_of([best.speedup or 0.0])


def _drafted(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.drafter != BASELINE and result.drafter not in PEERS]


def is_worse(run: RunData) -> bool:
    """Return True if the trained drafter has a lower acceptance length than paceline's default drafter for this target,
    on the same held-out prompts. False if one of the two was not measured."""
    shipped = (run.served.get("default_drafter") or {}).get("tokens_per_round")
    own = run.served.get("tokens_per_round")
    return shipped is not None and own is not None and own < shipped


def verdict_on(results: Sequence[Result], looping: Sequence[Line] = ()) -> str:
    """Return the verdict on decoding results as text, with the next step to take. `looping`: statistics of answers that
    end in a repetition ("looping" of `set_figures`)."""
    return render("verdict.txt", results=_drafted(results), looping=looping).strip()


def verdict_of(run: RunData) -> str:
    """Return the verdict on the run's decoding results, or on its training if there are no such results."""
    results = [result for _, result in run.results()]
    looping = [entry for figures in run.sets.values() for entry in figures.get("looping", [])]
    return verdict_on(results, looping) if results else training_verdict(run)


def training_verdict(run: RunData) -> str:
    """Return the verdict on a training run as text: the drafter's acceptance length, how it compares with the plan's
    prediction, and the next step to take. The acceptance length is the one measured in the engine, or else the estimate
    on held-out answers."""
    served, speedup = run.served.get("tokens_per_round"), run.served.get("speedup")
    values = {"served": served, "speedup": possible_speedup(speedup, served), "is_worse": is_worse(run)}
    values["doubt"] = run.served.get("doubt") or doubt(speedup, served, None)
    shape = run.config.get("shape") or {}
    is_new = run.config.get("init") is None and shape.get("start", "random") == "random"
    is_block = shape.get("kind", "dflash") not in ("eagle3", "mtp")
    values["can_copy"] = is_new and is_block and run.plan.get("is_copyable", False)
    return render(
        "train_verdict.txt", run=run, expected=run.plan.get("expected") or {}, good=GOOD_TRAINING, **values
    ).strip()


def _training(run: RunData) -> list[Plot]:
    plots = []
    for key, ylabel in (("loss", "loss"), ("eal", "expected tokens per round")):
        series = [Series("training", *thinned(*numbers(run.steps, key)), color=5, is_faint=True)]
        series += [
            Series(name, *numbers(run.checks, key, kind), color=at) for at, (kind, name) in enumerate(KINDS.items())
        ]
        plots.append(curves(ylabel.capitalize(), series, xlabel="blocks", ylabel=ylabel))
    last = run.checks[-1] if run.checks else {}
    for key, name in (("recall1", "Recall@1"), ("recall16", "Recall@16")):
        checked = [(label, (last.get(kind) or {}).get(key) or []) for kind, label in KINDS.items()]
        groups = [(label, [value or 0.0 for value in values]) for label, values in checked]
        title = f"{name} by slot, last check"
        plots.append(bars(title, groups, xlabel="slot", ylabel=name.lower(), first=1, ylim=(0, 1)))
    seconds, rates = thinned(*numbers(run.steps, "blocks_per_s", over="seconds"))
    pace = [Series("blocks/s", [second / 60 for second in seconds], rates)]
    plots.append(curves("Pace", pace, xlabel="minutes", ylabel="blocks/s", ylim=(0, None)))
    return plots


def _accepted(title: str, histograms: list[tuple[str, list[int]]]) -> Plot:
    groups = [(label, shares(histogram)) for label, histogram in histograms]
    return bars(title, groups, xlabel="accepted drafts", ylabel="share of rounds")


def _depth(survival: Sequence[float]) -> int:
    """Return the number of draft positions to plot: those accepted in some round, and one more, where the line reaches
    0."""
    return min(len(survival), 1 + sum(share > 0 for share in survival))


def _engine(rows: list[tuple[str, Result]]) -> list[Plot]:
    """Plot acceptance at the smallest batch (in float32 it is equal at every batch), and speed-ups of all settings."""
    plots = []
    smallest = min((result.batch for _, result in rows), default=0)
    for temperature in sorted({result.temperature for _, result in rows}):
        shown = [
            (name, result) for name, result in rows if (result.temperature, result.batch) == (temperature, smallest)
        ]
        curved = [
            Series(name, range(1, _depth(result.survival) + 1), result.survival[: _depth(result.survival)], color=at)
            for at, (name, result) in enumerate(shown)
        ]
        title, xlabel = f"Survival, T={temperature:g}", "first i drafts accepted"
        plots.append(curves(title, curved, xlabel=xlabel, ylabel="share of rounds", ylim=(0, 1)))
        histograms = [(name, result.accepted_histogram) for name, result in shown]
        plots.append(_accepted(f"Accepted drafts a round, T={temperature:g}", histograms))
    sets = list(dict.fromkeys(name for name, _ in rows))
    bars_of = [
        (
            f"{short(name)}, b{result.batch}, T={result.temperature:g}",
            result.speedup,
            result.speedup_interval,
            sets.index(name),
        )
        for name, result in rows
        if result.speedup is not None
    ]
    plots.append(ranges("Speed-up, with 95% intervals over prompts", bars_of, "speed-up over plain decoding", mark=1))
    return plots


def _figures(rows: list[tuple[str, Result]], run: RunData) -> list[Table]:
    """Return the tables of results, of rounds by source of drafts, and of looping answers, as far as there are data."""
    if not rows:
        return []
    columns = [Column("prompts", lambda row: row[0])] if run.is_evaluation else []
    columns += [replace(column, cell=lambda row, column=column: column.cell(row[1])) for column in COLUMNS]
    tables = [Table(columns, rows)]
    if any(result.sources for _, result in rows):
        named = [
            (f"{name}: {result.setting}" if run.is_evaluation else result.setting, result) for name, result in rows
        ]
        tables.append(replace(sources_table(named), title="Rounds by source of drafts"))
    looping = [{"prompts": name, **entry} for name, figures in run.sets.items() for entry in figures.get("looping", [])]
    if looping:
        note = "The last 32 tokens repeat with a period of at most 8: easy to draft, worth nothing."
        tables.append(Table(LOOPING_COLUMNS, looping, title="Answers that end in a loop", notes=[note]))
    return tables
