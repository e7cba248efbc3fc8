"""One table, three renderings; one percentile; one histogram."""

from __future__ import annotations

import io
import random
import statistics
from pathlib import Path

import pytest
from rich.console import Console

from paceline.errors import ConfigError
from paceline.report.pages import Block, Plot, markdown, render, write_report
from paceline.report.statistics import Rounds, Spread, add_histograms, quantile, shares, survival
from paceline.report.tables import Column, Table, block
from paceline.runs.folder import RunFolder

COLUMNS = (
    Column("drafter", lambda each: each["name"]),
    Column("speed-up", lambda each: each.get("speedup"), align="right", cut=" ["),
)
ROWS = [{"name": "ngram", "speedup": "1.50 [1.40, 1.60]"}, {"name": "a|<b>[/x]"}]


def printed(table: Table, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table.rich(width))
    return out.getvalue()


def test_markdown_has_alignment_and_escapes_bars() -> None:
    figures = Table(COLUMNS, ROWS, title="Speed", notes=["Medians."])
    text = markdown("Speeds", figures, [])
    assert "\n## Speed\n\n| drafter | speed-up |\n| --- | ---: |\n| ngram | 1.50 [1.40, 1.60] |\n" in text
    assert "\n| a\\|<b>[/x] | - |\n\nMedians.\n\nNone.\n" in text


def test_a_page_escapes_every_cell() -> None:
    figures = Table(COLUMNS, ROWS, title="<t>", notes=["<n>\x00\ud800"])
    page = render(
        "report.html", title="", verdict="", explained=[], sections={"Figures": [figures]}, drawn=[], settings=[]
    )
    assert "<td>a|&lt;b&gt;[/x]</td>" in page and "<h3>&lt;t&gt;</h3>" in page
    assert '<p class="note">&lt;n&gt;\ufffd\ufffd</p>' in page
    assert '<td class="number">1.50 [1.40, 1.60]</td>' in page


def test_without_plots_the_page_is_written_and_answers_are_escaped_on_it_alone(tmp_path: Path) -> None:
    def draw() -> list[Plot]:
        raise ConfigError("drawing needs matplotlib")

    sections: dict[str, list[Block]] = {"Figures": [Table(COLUMNS, ROWS)], "None": []}
    texts = [("<i>: 0.00 wrong", "</pre><script>")]
    notice = write_report(RunFolder(tmp_path), draw, "T", "V", sections, explained=["evals"], settings=[], texts=texts)
    assert notice == "no plots in report.html: drawing needs matplotlib"
    page, text = ((tmp_path / name).read_text() for name in ("report.html", "report.md"))
    assert "<summary>&lt;i&gt;: 0.00 wrong</summary>\n<pre>&lt;/pre&gt;&lt;script&gt;</pre>" in page
    assert "Answers that score lowest" in page and "script" not in text and "## Figures" in text
    assert "None</h2>" not in page and "## None" not in text


def test_a_narrow_terminal_leaves_intervals_out_and_reads_no_markup_in_cells() -> None:
    table = Table(COLUMNS, ROWS, width=120)
    wide, narrow = printed(table, 120), printed(table, 60)
    assert "[1.40, 1.60]" in wide and "[1.40" not in narrow and "1.50" in narrow
    assert "a|<b>[/x]" in wide and "a|<b>[/x]" in narrow


def test_percentiles_are_linear_between_neighbours() -> None:
    assert Spread.of([]) == Spread(None, None, None, None)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 3.0)
    assert Spread.of([float(value) for value in range(100, -1, -1)]) == Spread(50.0, 50.0, 90.0, 99.0)
    draw = random.Random(0)
    values = [draw.random() for _ in range(37)]
    expected = statistics.quantiles(values, n=100, method="inclusive")
    assert [quantile(values, share / 100) for share in range(1, 100)] == pytest.approx(expected)


def test_a_histogram_of_accepted_drafts() -> None:
    histogram = add_histograms([[5, 3], [0, 0, 2]])
    assert histogram == [5, 3, 2]
    rounds = Rounds(10, 0, tuple(histogram))
    assert rounds.tokens_per_round == pytest.approx(1.7)
    assert shares(histogram) == [0.5, 0.3, 0.2]
    assert survival(histogram) == [0.5, 0.2]
    assert survival(histogram, num_drafted=4) == [0.5, 0.2, 0.0, 0.0]
    assert survival([]) == []
    assert rounds.tokens_per_round == pytest.approx(1 + sum(survival(histogram)))
    assert Rounds().tokens_per_round == 1.0 and shares([0, 0]) == []


def terminal(table: Table, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Output of `show` on a terminal of this width."""
    out = io.StringIO()
    monkeypatch.setattr(
        "rich.console.Console", lambda **_: Console(file=out, width=width, force_terminal=True, no_color=True)
    )
    table.show()
    return out.getvalue()


def test_a_table_too_wide_for_a_terminal_drops_columns_and_then_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"name{number}" for number in range(9)]
    columns = [Column(name, lambda each, name=name: each[name]) for name in names]
    spare = Column("bar", lambda each: "#" * 40, is_spare=True)
    rows = [dict.fromkeys(names, "12345678")]
    narrow = terminal(Table([*columns[:4], spare], rows), 60, monkeypatch)
    assert "12345678" in narrow and "#" not in narrow and "name3" in narrow
    stacked = terminal(Table(columns, rows, title="Loads"), 60, monkeypatch)
    assert "Loads" in stacked and "name8: 12345678" in stacked.replace("\n", " ") and "…" not in stacked
    wide = terminal(Table([*columns, spare], rows), 200, monkeypatch)
    assert "#" * 40 in wide and "name8:" not in wide


def test_bars_are_ascii_where_the_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, expected in (("ascii", "#"), ("utf-8", "█"), ("no-such", "#")):
        monkeypatch.setattr("sys.stdout", type("Out", (), {"encoding": encoding})())
        assert block() == expected
