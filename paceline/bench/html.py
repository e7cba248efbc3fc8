"""report.html of a run: one page that needs no network, on a phone as on a desk, in light as in dark.

    paceline report runs/train-20260101-120000

`page` turns a `RunData` into the text of the page; a section without data is left out. The same run gives the same bytes.
Whatever a model or a user wrote is escaped, and a content security policy forbids scripts and loading anything.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.decode import BASELINE, Result
from paceline.bench.plots import Series, bars, curves, speedup_bars
from paceline.bench.report import COLUMNS, row
from paceline.bench.rundata import KINDS, Line, RunData, numbers, printable, thinned
from paceline.model.load import Form

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; color: CanvasText; background: Canvas; margin: 0 auto; padding: 1rem;
  max-width: 75rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; border-bottom: 1px solid GrayText; padding-bottom: .25rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
.plots { display: grid; gap: 1.25rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr));
  align-items: start; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: .9rem; font-weight: 600; margin-bottom: .25rem; }
svg { display: block; width: 100%; max-width: 32rem; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid color-mix(in srgb, CanvasText 15%, Canvas);
  vertical-align: top; }
.figures th, .figures td { white-space: nowrap; }
pre { white-space: pre-wrap; margin: .25rem 0 0; padding: .75rem; font: .85rem/1.45 ui-monospace, monospace;
  background: color-mix(in srgb, CanvasText 6%, Canvas); border-radius: .375rem; }
p.note { font-size: .9rem; margin: .25rem 0; }
strong.bad { color: #d55e00; }
""".strip()
HEAD = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
    f"<title>{{title}}</title>\n<style>\n{STYLE.replace('{', '{{').replace('}', '}}')}\n</style>\n</head>\n<body>\n"
)


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what stands below it, as HTML; an empty body is left out."""

    title: str
    body: str


def sections(run: RunData) -> list[Section]:
    """What the page shows, in order. Raises ConfigError when matplotlib is missing."""
    rows = run.results()
    drafted = [(name, result) for name, result in rows if result.drafter != BASELINE]
    made = [
        Section("At a glance", _pairs(_glance(run))),
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
    title = _title(run)
    parts = [f"<section>\n<h2>{_text(each.title)}</h2>\n{each.body}\n</section>" for each in sections(run)]
    body = f"<h1>{_text(title)}</h1>\n" + "\n".join(parts)
    return HEAD.format(title=_text(title)) + body + "\n</body>\n</html>\n"


def _title(run: RunData) -> str:
    if run.evaluation:
        return f"Drafter {run.evaluation['drafter']} for {run.evaluation['model']}"
    return f"{str(run.config.get('what', 'run')).capitalize()}: {run.path.resolve().name}"


def _text(value: Any) -> str:
    return html.escape(printable(str(value)))


def _number(value: Any, digits: int = 2) -> str:
    return "-" if not isinstance(value, int | float) else f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def _estimate(value: Any, interval: Sequence[float | None] | None) -> str:
    low, high = interval or (None, None)
    return _number(value) + ("" if low is None or high is None else f" [{low:.2f}, {high:.2f}]")


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
    return _plots(plots)


def _slots(values: Any) -> list[float]:
    return [float(value or 0.0) for value in values] if isinstance(values, list) else []


def _served(served: Line) -> str:
    histogram = served.get("accepted_histogram") or []
    shares = [rounds / sum(histogram) for rounds in histogram] if sum(histogram) else []
    title = "Accepted drafts a round"
    drawn = _plots([(title, bars(title, [("held out", shares)], xlabel="accepted drafts", ylabel="share of rounds"))])
    return "\n".join([drawn, *(f"<pre>{_text(text)}</pre>" for text in served.get("texts") or [])]).strip()


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
        counted = [
            (name, [rounds / sum(each.accepted_histogram) for rounds in each.accepted_histogram]) for name, each in shown
        ]
        title = f"Accepted drafts a round, T={temperature:g}"
        plots.append((title, bars(title, counted, xlabel="accepted drafts", ylabel=label)))
    plots.append(("Speed-up, with 95% intervals over prompts", speedup_bars("speed-up", rows)))
    return _plots(plots)


def _plots(plots: Iterable[tuple[str, str]]) -> str:
    drawn = [f"<figure><figcaption>{_text(title)}</figcaption>\n{svg}\n</figure>" for title, svg in plots if svg]
    return '<div class="plots">\n' + "\n".join(drawn) + "\n</div>" if drawn else ""


def _figures(run: RunData, rows: list[tuple[str, Result]]) -> str:
    if not rows:
        return ""
    parts = [
        '<p class="note">Speed-up is over plain decoding (none), same batch and process. identical: greedy answers that '
        "equal plain decoding's, token for token. repeats: share of 8-grams that stood before in the same answer. Brackets: "
        "95% bootstrap intervals over prompts.</p>",
        _table(("prompts", *COLUMNS), [(name, *row(result)) for name, result in rows]),
    ]
    if any(result.lossless is False for _, result in rows):
        parts.insert(
            0, '<p><strong class="bad">NOT LOSSLESS: acceptance was mocked or lossy; quote nothing of this.</strong></p>'
        )
    looping = [
        (
            name,
            f"{each['temperature']:g}",
            f"{each['looping_share']:.0%} of {each['num_answers']}",
            _estimate(each["tokens_per_round"], each["tokens_per_round_interval"]),
            _estimate(each["without_loops"], each["without_loops_interval"]),
        )
        for name, figures in run.sets.items()
        for each in figures.get("looping", [])
    ]
    if looping:
        parts.append("<h3>Answers that end in a loop</h3>")
        parts.append('<p class="note">The last 32 tokens repeat with a period of at most 8: easy to draft, worth nothing.</p>')
        parts.append(_table(("prompts", "temp", "looping", "tokens/round", "without loops"), looping))
    return "\n".join(parts)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>" for cells in rows)
    return (
        f'<div class="wide" tabindex="0"><table class="figures">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _pairs(pairs: Sequence[tuple[str, Any]]) -> str:
    lines = [f'<tr><th scope="row">{_text(name)}</th><td>{_text(value)}</td></tr>' for name, value in pairs]
    return "<table>\n" + "\n".join(lines) + "\n</table>" if lines else ""


def _texts(run: RunData) -> str:
    parts = []
    for name, figures in run.sets.items():
        for each in figures.get("texts", []):
            about = f"{each['num_tokens']} tokens, {each['tokens_per_round']:.2f} per round, T={each['temperature']:g}"
            about += ", ends in a loop" if each["is_loop"] else ""
            parts.append(
                f"<article>\n<h3>{_text(name)}: {_text(each['request'])}</h3>\n"
                f'<p class="note">{_text(about)}</p>\n<details><summary>Prompt</summary><pre>{_text(each["prompt"])}</pre>'
                f"</details>\n<pre>{_text(each['text'])}</pre>\n</article>"
            )
    return "\n".join(parts)


def _settings(run: RunData) -> str:
    parts = [f"<pre>{_text(run.command)}</pre>"] if run.command else []
    config = _pairs(_flat(run.config))
    asked = _pairs(_flat(run.evaluation.get("settings", {})))
    parts += [config] if config else []
    parts += ["<h3>Evaluation</h3>", asked] if asked else []
    return "\n".join(parts)


def _flat(settings: Line, prefix: str = "") -> list[tuple[str, Any]]:
    """{"bench": {"seed": 0}} -> [("bench.seed", 0)]"""
    flat: list[tuple[str, Any]] = []
    for key, value in settings.items():
        flat += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return flat
