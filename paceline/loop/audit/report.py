"""Writes the folder of an audit: results.json, report.md and report.html, with the verdict first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.loop.audit.checks import Finding, Verdict
from paceline.loop.audit.evidence import Group, Trial
from paceline.report import pages
from paceline.report.statistics import Tone
from paceline.report.tables import Column, Progress, Table, flat
from paceline.runs.folder import RunFolder

SENTENCES = {
    "honest": "No fault found: {url} answers as {model} would, as far as these checks see.",
    "faulty": "FAULT: {url} does not answer as {model} would.",
    "unsure": "Not decided: what {url} tells is not enough to judge whether it answers as {model} would.",
}
TONES: dict[Verdict, Tone] = {"honest": "good", "faulty": "bad", "unsure": ""}
FINDINGS = (
    Column("check", lambda finding: finding.check),
    Column("outcome", lambda finding: finding.outcome.upper() if finding.outcome == "fault" else finding.outcome),
    Column("what was seen", lambda finding: finding.text),
)
TESTS = (
    Column("asked", lambda test: test.group),
    Column("statistic", lambda test: test.statistic),
    Column("positions", lambda test: test.positions),
    Column("tokens", lambda test: test.num_tokens, "{:,}", "right"),
    Column("expected", lambda test: test.expected, "{:.4f}", "right"),
    Column("seen", lambda test: test.seen, "{:.4f}", "right"),
    Column("difference [95%]", lambda test: f"{test.difference:+.4f} [{test.low:+.4f}, {test.high:+.4f}]", cut=" ["),
    Column("chance if honest, at most", lambda test: test.chance, "{:.2g}", "right"),
    Column("", lambda test: "FAULT" if test.is_fault else ""),
)


def write_report(
    verdict: Verdict,
    findings: Sequence[Finding],
    groups: Sequence[Group],
    tests: Sequence[Trial],
    settings: dict[str, Any],
    out: str | Path | None,
    progress: Progress,
) -> RunFolder:
    """Writes a run folder with the results of an audit and its report, and returns it; prints the findings.

    `settings`: values shown in the report and written to config.json, among them "url" (the server) and "model" (which
    it should run); `out`: the run folder [default: a new one]."""
    run = RunFolder.create("audit", settings, out)
    groups_json = {
        group.name: {"answers": len(group.draws), "tokens": group.num_tokens, "lost": group.num_lost}
        for group in groups
    }
    tests_json = [asdict(test) | {"difference": test.difference, "chance": test.chance} for test in tests]
    run.write_json(
        "results.json", {"verdict": verdict, "findings": findings, "asked": groups_json, "tests": tests_json}
    )
    sentence, table = SENTENCES[verdict].format(**settings), Table(FINDINGS, list(findings))
    listed: list[pages.Block] = [Table(TESTS, list(tests))] if tests else []
    notice = pages.write_report(
        run,
        lambda: [_plot(group, tests) for group in groups],
        "Audit",
        sentence,
        {"What was found": [table], "Every test of the sampled answers": listed},
        tone=TONES[verdict],
        explained=["auditing"],
        settings=flat(settings),
    )
    progress.table(table)
    for text in filter(None, (sentence, notice, f"report: {run.path / 'report.html'}")):
        progress.say(text)
    return run


def _plot(group: Group, tests: Sequence[Trial]) -> pages.Plot:
    own = [test for test in tests if test.group == group.name and test.statistic == "surprisal"]
    rows = [(test.positions, test.difference, (test.low, test.high), int(test.is_fault)) for test in own]
    return pages.ranges(f"{group.name}: surprisal minus entropy, by position", rows, "nats", mark=0.0)
