"""Writes the run folder of evals: results.json, report.md, report.html."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.loop.evals.compare import Comparison
from paceline.loop.evals.scores import Scores
from paceline.report import pages
from paceline.report.statistics import Tone
from paceline.report.tables import Column, Progress, Table, flat, with_interval
from paceline.runs.folder import RunFolder

SHOWN, LONGEST = 20, 1500
"""Number of answers in report.html, lowest scores first, and characters shown of each."""
FIGURES = (
    Column("who", lambda each: each.name),
    Column("cases", lambda each: len(each.cases), "{:,}", "right"),
    Column("score [95%]", lambda each: with_interval(each.mean, each.interval, "{:.3f}"), align="right", cut=" ["),
    Column("p50 s", lambda each: each.latency.p50, "{:.2f}", "right"),
    Column("p90 s", lambda each: each.latency.p90, "{:.2f}", "right"),
    Column("tokens/s", lambda each: each.num_tokens / each.wall_s if each.wall_s else None, "{:.1f}", "right"),
    Column("core-s for 1,000", lambda each: each.as_line()["core_s_per_1000"], "{:,.0f}", "right"),
    Column("price of 1,000", lambda each: each.price_per_1000, "{:,.4f}", "right"),
    Column("cut", lambda each: each.num_cut, "{:,}", "right"),
)
PAIRS = (
    Column("compared with", lambda each: each.before),
    Column("who", lambda each: each.after),
    Column("difference [95%]", str, cut=" ["),
    Column("by chance", lambda each: each.chance, "{:.2g}", "right"),
    Column("verdict", lambda each: each.verdict),
    Column("gained / lost", lambda each: f"{each.gained} / {each.lost}", align="right"),
    Column("same text", lambda each: f"{each.same_text} of {each.cases}", align="right"),
    Column("would be found", lambda each: each.smallest, "{:.3f}", "right"),
    Column("x p50", lambda each: each.times_p50, "{:.2f}", "right"),
    Column("x price", lambda each: each.price_ratio, "{:.2f}", "right"),
)


def sentence(scores: Scores, comparisons: Sequence[Comparison], refusals: Sequence[str]) -> str:
    """Returns a line or two with the score, the comparisons, and the reasons why the gate failed (`refusals`, empty if
    it passed)."""
    score = with_interval(scores.mean, scores.interval, "{:.3f}")
    text = f"{scores.name} scores {score} on {scores.suite} ({len(scores.cases)} cases)."
    for each in comparisons:
        text += f" Compared with {each.before}: {each.verdict} ({each})."
    return text + (f" REFUSED: {'; '.join(refusals)}." if refusals else "")


def _tone(comparisons: Sequence[Comparison], refusals: Sequence[str]) -> Tone:
    """Returns red if refused; else amber if a comparison is worse, green if one is better."""
    verdicts = {each.verdict for each in comparisons}
    return "bad" if refusals else "cost" if "worse" in verdicts else "good" if "better" in verdicts else ""


def write_report(
    scores: Sequence[Scores],
    comparisons: Sequence[Comparison],
    refusals: Sequence[str],
    settings: dict[str, Any],
    run: RunFolder,
    progress: Progress,
) -> None:
    """Writes results and reports to the folder `run`; prints the tables of scores and comparisons.

    `scores`: of one or more runs; the report's verdict is about the last one. `comparisons`: results of comparing the
    last run with other runs. `refusals`: reasons why the gate failed; empty if it passed. `settings`: shown in the
    report.
    """
    last = scores[-1]
    lines = {"scores": [each.as_line() for each in scores], "comparisons": [each.as_line() for each in comparisons]}
    verdict = sentence(last, comparisons, refusals)
    figures, pairs = Table(FIGURES, list(scores)), Table(PAIRS, list(comparisons))
    compared: list[pages.Block] = [pairs] if comparisons else []
    worst = sorted((case for case in last.cases if case.score < 1), key=lambda case: case.score)[:SHOWN]
    notice = pages.write_report(
        run,
        lambda: _plots(scores, comparisons),
        f"Evals: {last.suite}",
        verdict,
        {"Scores and costs": [figures], "Compared with another run": compared},
        tone=_tone(comparisons, refusals),
        explained=["evals"],
        texts=[(f"{case.id}: {case.score:.2f} {case.why[0]}", case.texts[0][:LONGEST]) for case in worst],
        settings=flat(settings),
    )
    run.results({**lines, "refusals": list(refusals), "passed": not refusals})  # last: then the run is finished
    for table in (figures, pairs) if comparisons else (figures,):
        progress.table(table)
    for text in filter(None, (verdict, notice, f"report: {run.path / 'report.html'}")):
        progress.say(text)


def _plots(scores: Sequence[Scores], comparisons: Sequence[Comparison]) -> list[pages.Plot]:
    rows = [(pages.short(each.name), each.mean, each.interval, number) for number, each in enumerate(scores)]
    plots = [pages.ranges("Score, with 95% intervals over cases", rows, "score")]
    if comparisons:
        rows = [
            (pages.short(f"over {each.before}"), each.difference, each.interval, number)
            for number, each in enumerate(comparisons)
        ]
        title = "Difference, case by case, with 95% intervals"
        plots.append(pages.ranges(title, rows, "difference of scores", mark=0.0))
    return plots
