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
from paceline.bench.markup import Section, document, pair_table, plot_grid
from paceline.bench.plots import Series, bars, curves, speedup_bars
from paceline.bench.report import COLUMNS, MEANING, with_interval
from paceline.bench.rundata import KINDS, Line, RunData, numbers, thinned
from paceline.figures import shares
from paceline.model.backends import Form
from paceline.tables import Column, Table, escaped


def sections(run: RunData) -> list[Section]:
    """What the page shows, in order. Raises ConfigError when matplotlib is missing."""
    rows = run.results()
    drafted = [(name, result) for name, result in rows if result.drafter != BASELINE]
    made = [
        Section("At a glance", pair_table(_glance(run))),
        Section("Training", _training(run)),
        Section("Held-out prompts, served", _served(run.served)),
        Section("In the real engine", _engine(drafted)),
        Section("Figures", _figures(run, rows)),
        Section("Texts", _texts(run)),
        Section("Settings", _settings(run)),
    ]
    return [section for section in made if section.body]


def page(run: RunData) -> str:
    """The whole page."""
    return document(_title(run), sections(run))


def _title(run: RunData) -> str:
    if run.evaluation:
        return f"Drafter {run.evaluation['drafter']} for {run.evaluation['model']}"
    return f"{str(run.config.get('what', 'run')).capitalize()}: {run.path.resolve().name}"


def _glance(run: RunData) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if run.steps:
        last = run.steps[-1]
        minutes = _number((last.get("seconds") or 0) / 60, 1)
        found.append(("trained", f"{last['step']:,} steps, {_number(last.get('blocks'))} blocks, {minutes} minutes"))
    if run.checks:
        for key, name in KINDS.items():
            held = run.checks[-1].get(key)
            if isinstance(held, dict):
                found.append((f"{name}, last", f"loss {_number(held.get('loss'), 3)}, eal {_number(held.get('eal'))}"))
    if run.served.get("num_rounds"):
        rate, count = _number(run.served.get("tokens_per_round")), run.served.get("num_prompts")
        found.append(("tokens per round, served", f"{rate} (batched, greedy, {count} held-out prompts)"))
    if run.evaluation:
        at = run.evaluation
        machine = (at.get("machine") or {}).get("name", at["device"])
        how = Form(at["backend"], at["isa"], at["weight_format"]) if at.get("weight_format") else None
        found.append(("evaluated on", f"{machine} ({at['device']}), {at['dtype']}" + (f" ({how})" if how else "")))
        found.append(("ceiling of plain decoding", f"{_number(at['ceiling_tokens_per_s'], 1)} tokens/s at batch 1"))
        for name, value in at.get("heldout", {}).items():
            found.append((f"tokens per round, {name}", f"{_number(value)} (batch 1, greedy)"))
    return found


def _training(run: RunData) -> str:
    plots = []
    for key, ylabel in (("loss", "loss"), ("eal", "expected tokens per round")):
        series = [Series("training", *thinned(*numbers(run.steps, key)), color=5, is_faint=True)]
        series += [Series(name, *numbers(run.checks, kind, key), color=at) for at, (kind, name) in enumerate(KINDS.items())]
        plots.append((ylabel.capitalize(), curves(key, series, xlabel="blocks", ylabel=ylabel)))
    for key, name in (("recall1", "Recall@1"), ("recall16", "Recall@16")):
        last = run.checks[-1] if run.checks else {}
        groups = [(label, _slots((last.get(kind) or {}).get(key))) for kind, label in KINDS.items()]
        count = max((len(values) for _, values in groups), default=0)
        ticks = [str(slot + 1) for slot in range(count)]
        plots.append(
            (f"{name} by slot, last check", bars(name, groups, xlabel="slot", ylabel=name.lower(), ticks=ticks, ylim=(0, 1)))
        )
    seconds, rates = thinned(*numbers(run.steps, "blocks_per_s", over="seconds"))
    pace = [Series("blocks/s", [each / 60 for each in seconds], rates)]
    plots.append(("Pace", curves("blocks per second", pace, xlabel="minutes", ylabel="blocks/s", ylim=(0, None))))
    return plot_grid(plots)


def _number(value: Any, digits: int = 2) -> str:
    """A dash for what is none."""
    return "-" if not isinstance(value, int | float) else f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def _slots(values: Any) -> list[float]:
    return [float(value or 0.0) for value in values] if isinstance(values, list) else []


def _served(served: Line) -> str:
    groups = [("held out", shares(served.get("accepted_histogram") or []))]
    title = "Accepted drafts a round"
    drawn = plot_grid([(title, bars(title, groups, xlabel="accepted drafts", ylabel="share of rounds"))])
    return "\n".join([drawn, *(f"<pre>{escaped(text)}</pre>" for text in served.get("texts") or [])]).strip()


def _engine(rows: list[tuple[str, Result]]) -> str:
    """Acceptance at the smallest batch, which in float32 is that of any batch; speed at each."""
    if not rows:
        return ""
    plots = []
    smallest = min(result.batch for _, result in rows)
    for temperature in sorted({result.temperature for _, result in rows}):
        shown = [(name, each) for name, each in rows if (each.temperature, each.batch) == (temperature, smallest)]
        curved = [
            Series(name, range(1, len(each.survival) + 1), each.survival, color=at) for at, (name, each) in enumerate(shown)
        ]
        title = f"Survival, T={temperature:g}"
        label = "share of rounds"
        plots.append((title, curves(title, curved, xlabel="first i drafts stood", ylabel=label, ylim=(0, 1))))
        counted = [(name, shares(each.accepted_histogram)) for name, each in shown]
        title = f"Accepted drafts a round, T={temperature:g}"
        plots.append((title, bars(title, counted, xlabel="accepted drafts", ylabel=label)))
    plots.append(("Speed-up, with 95% intervals over prompts", speedup_bars("speed-up", rows)))
    return plot_grid(plots)


def _figures(run: RunData, rows: list[tuple[str, Result]]) -> str:
    if not rows:
        return ""
    in_sets = [Column("prompts", lambda row: row[0])]
    in_sets += [replace(column, cell=lambda row, column=column: column.cell(row[1])) for column in COLUMNS]
    parts = [f'<p class="note">{escaped(MEANING)}</p>', Table(in_sets, rows).html()]
    if any(result.lossless is False for _, result in rows):
        parts.insert(
            0, '<p><strong class="bad">NOT LOSSLESS: acceptance was mocked or lossy; quote nothing of this.</strong></p>'
        )
    if any(result.sources for _, result in rows):
        sources = sources_table([(f"{name}: {name_of(result)}", result) for name, result in rows])
        parts.append(replace(sources, title="Rounds by source of drafts").html())
    looping = [(name, each) for name, figures in run.sets.items() for each in figures.get("looping", [])]
    if looping:
        parts.append(Table(LOOPING, looping, title="Answers that end in a loop", notes=[LOOPING_MEANING]).html())
    return "\n".join(parts)


LOOPING_MEANING = "The last 32 tokens repeat with a period of at most 8: easy to draft, worth nothing."
LOOPING = (
    Column("prompts", lambda row: row[0]),
    Column("temp", lambda row: row[1]["temperature"], "{:g}", "right"),
    Column("looping", lambda row: f"{row[1]['looping_share']:.0%} of {row[1]['num_answers']}"),
    Column("tokens/round", lambda row: with_interval(row[1]["tokens_per_round"], row[1]["tokens_per_round_interval"])),
    Column("without loops", lambda row: with_interval(row[1]["without_loops"], row[1]["without_loops_interval"])),
)


def _texts(run: RunData) -> str:
    parts = []
    for name, figures in run.sets.items():
        for each in figures.get("texts", []):
            about = f"{each['num_tokens']} tokens, {_number(each['tokens_per_round'])} per round, T={each['temperature']:g}"
            about += ", ends in a loop" if each["is_loop"] else ""
            parts.append(
                f"<article>\n<h3>{escaped(name)}: {escaped(each['request'])}</h3>\n"
                f'<p class="note">{escaped(about)}</p>\n<details><summary>Prompt</summary><pre>{escaped(each["prompt"])}</pre>'
                f"</details>\n<pre>{escaped(each['text'])}</pre>\n</article>"
            )
    return "\n".join(parts)


def _settings(run: RunData) -> str:
    parts = [f"<pre>{escaped(run.command)}</pre>"] if run.command else []
    config = pair_table(flat(run.config))
    asked = pair_table(flat(run.evaluation.get("settings", {})))
    parts += [config] if config else []
    parts += ["<h3>Evaluation</h3>", asked] if asked else []
    return "\n".join(parts)
