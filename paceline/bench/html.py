"""report.html of a run: one page that needs no network, on a phone as on a desk, in light as in dark.

    paceline report runs/train-20260101-120000

`page` turns a `RunData` into the text of the page; a section without data is left out. The same run gives the same bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.bench.config import BASELINE
from paceline.bench.decode import Result, name_of
from paceline.bench.drafting import sources_table
from paceline.bench.evaluation_file import flat
from paceline.bench.pages import number, render
from paceline.bench.plots import Plot, Series, bars, curves, speedup_bars
from paceline.bench.report import COLUMNS, MEANING, with_interval
from paceline.bench.rundata import KINDS, RunData, numbers, thinned
from paceline.figures import shares
from paceline.model.backends import Form
from paceline.tables import Column, Table


def page(run: RunData) -> str:
    """The whole page. Raises ConfigError when matplotlib is missing."""
    rows = run.results()
    return render(
        "run.html",
        title=_title(run),
        run=run,
        glance=_glance(run),
        training=_training(run),
        served=[_accepted("Accepted drafts a round", [("held out", run.served.get("accepted_histogram") or [])])],
        engine=_engine([(name, result) for name, result in rows if result.drafter != BASELINE]),
        figures=_figures(run, rows),
        meaning=MEANING,
        is_lossless=all(result.lossless is not False for _, result in rows),
        settings=flat(run.config),
        asked=flat(run.evaluation.get("settings", {})),
    )


def _title(run: RunData) -> str:
    if run.evaluation:
        return f"Drafter {run.evaluation['drafter']} for {run.evaluation['model']}"
    return f"{str(run.config.get('what', 'run')).capitalize()}: {run.path.resolve().name}"


def _glance(run: RunData) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if run.steps:
        last = run.steps[-1]
        minutes = number((last.get("seconds") or 0) / 60, 1)
        found.append(("trained", f"{last['step']:,} steps, {number(last.get('blocks'))} blocks, {minutes} minutes"))
    if run.checks:
        for key, name in KINDS.items():
            held = run.checks[-1].get(key)
            if isinstance(held, dict):
                found.append((f"{name}, last", f"loss {number(held.get('loss'), 3)}, eal {number(held.get('eal'))}"))
    if run.served.get("num_rounds"):
        rate, count = number(run.served.get("tokens_per_round")), run.served.get("num_prompts")
        found.append(("tokens per round, served", f"{rate} (batched, greedy, {count} held-out prompts)"))
    if run.evaluation:
        at = run.evaluation
        machine = (at.get("machine") or {}).get("name", at["device"])
        how = Form(at["backend"], at["isa"], at["weight_format"]) if at.get("weight_format") else None
        found.append(("evaluated on", f"{machine} ({at['device']}), {at['dtype']}" + (f" ({how})" if how else "")))
        found.append(("ceiling of plain decoding", f"{number(at['ceiling_tokens_per_s'], 1)} tokens/s at batch 1"))
        for name, value in at.get("heldout", {}).items():
            found.append((f"tokens per round, {name}", f"{number(value)} (batch 1, greedy)"))
    return found


def _training(run: RunData) -> list[Plot]:
    plots = []
    for key, ylabel in (("loss", "loss"), ("eal", "expected tokens per round")):
        series = [Series("training", *thinned(*numbers(run.steps, key)), color=5, is_faint=True)]
        series += [Series(name, *numbers(run.checks, kind, key), color=at) for at, (kind, name) in enumerate(KINDS.items())]
        plots.append(curves(ylabel.capitalize(), series, xlabel="blocks", ylabel=ylabel))
    last = run.checks[-1] if run.checks else {}
    for key, name in (("recall1", "Recall@1"), ("recall16", "Recall@16")):
        groups = [(label, _slots((last.get(kind) or {}).get(key))) for kind, label in KINDS.items()]
        title = f"{name} by slot, last check"
        plots.append(bars(title, groups, xlabel="slot", ylabel=name.lower(), first=1, ylim=(0, 1)))
    seconds, rates = thinned(*numbers(run.steps, "blocks_per_s", over="seconds"))
    pace = [Series("blocks/s", [each / 60 for each in seconds], rates)]
    plots.append(curves("Pace", pace, xlabel="minutes", ylabel="blocks/s", ylim=(0, None)))
    return plots


def _slots(values: Any) -> list[float]:
    return [float(value or 0.0) for value in values] if isinstance(values, list) else []


def _accepted(title: str, histograms: list[tuple[str, list[int]]]) -> Plot:
    groups = [(label, shares(histogram)) for label, histogram in histograms]
    return bars(title, groups, xlabel="accepted drafts", ylabel="share of rounds")


def _engine(rows: list[tuple[str, Result]]) -> list[Plot]:
    """Acceptance at the smallest batch, which in float32 is that of any batch; speed at each."""
    plots = []
    smallest = min((result.batch for _, result in rows), default=0)
    for temperature in sorted({result.temperature for _, result in rows}):
        shown = [(name, each) for name, each in rows if (each.temperature, each.batch) == (temperature, smallest)]
        curved = [
            Series(name, range(1, len(each.survival) + 1), each.survival, color=at) for at, (name, each) in enumerate(shown)
        ]
        title, xlabel = f"Survival, T={temperature:g}", "first i drafts stood"
        plots.append(curves(title, curved, xlabel=xlabel, ylabel="share of rounds", ylim=(0, 1)))
        histograms = [(name, each.accepted_histogram) for name, each in shown]
        plots.append(_accepted(f"Accepted drafts a round, T={temperature:g}", histograms))
    plots.append(speedup_bars("Speed-up, with 95% intervals over prompts", rows))
    return plots


def _figures(run: RunData, rows: list[tuple[str, Result]]) -> list[Table]:
    if not rows:
        return []
    in_sets = [Column("prompts", lambda row: row[0])]
    in_sets += [replace(column, cell=lambda row, column=column: column.cell(row[1])) for column in COLUMNS]
    tables = [Table(in_sets, rows)]
    if any(result.sources for _, result in rows):
        sources = sources_table([(f"{name}: {name_of(result)}", result) for name, result in rows])
        tables.append(replace(sources, title="Rounds by source of drafts"))
    looping = [(name, each) for name, figures in run.sets.items() for each in figures.get("looping", [])]
    if looping:
        tables.append(Table(LOOPING, looping, title="Answers that end in a loop", notes=[LOOPING_MEANING]))
    return tables


LOOPING_MEANING = "The last 32 tokens repeat with a period of at most 8: easy to draft, worth nothing."
LOOPING = (
    Column("prompts", lambda row: row[0]),
    Column("temp", lambda row: row[1]["temperature"], "{:g}", "right"),
    Column("looping", lambda row: f"{row[1]['looping_share']:.0%} of {row[1]['num_answers']}"),
    Column("tokens/round", lambda row: with_interval(row[1]["tokens_per_round"], row[1]["tokens_per_round_interval"])),
    Column("without loops", lambda row: with_interval(row[1]["without_loops"], row[1]["without_loops_interval"])),
)
