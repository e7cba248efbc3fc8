"""The calculator page's tabs in headless Chromium: speed-up over acceptance length, and two columns of text at predicted
rates.

    pytest tests/simulate/test_page_tabs.py

Skips without playwright or a Chromium; calculator_visit.py says what is checked after every test.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.pages.speedup_chart import chart_of
from paceline.simulate.calculator_page import passage
from paceline.simulate.config import ChartConfig, CostsConfig

pytestmark = pytest.mark.slow

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[dev]")
expect = api.expect
pytest_plugins = ("calculator_visit",)
MOCKED = "#model=Qwen3.5-27B&batch=1&context=6144&overhead=rate&plain_rate=75&drafter=autoregressive&tab=tokens"
WATCH = (
    "#model=Qwen3.5-122B-A10B&weights=float8&experts=float8&batch=1&context=2048&overhead=rate&plain_rate=250&tab=watch"
)
RUN = {
    "model": "mine",
    "results": [
        {"drafter": "none", "batch": 1, "tokens_per_round": 1.0, "speedup": 1.0},
        {"drafter": "d", "batch": 1, "tokens_per_round": 3.0, "speedup": 2.0, "accepted_histogram": [1, 2, 3]},
        {"drafter": "d", "batch": 8, "tokens_per_round": 3.0, "speedup": 1.2, "accepted_histogram": [1, 2, 3]},
    ],
}
SHOTS = os.environ.get("PACELINE_SCREENSHOTS", "")
SIZES = {"wide": {"width": 1360, "height": 900}, "narrow": {"width": 390, "height": 844}}
TABS = """(names) => names.map((name) => { const tab = document.getElementById(`tab-${name}`);
    const panel = document.getElementById(tab.getAttribute('aria-controls'));
    const [isSelected, by] = [tab.getAttribute('aria-selected'), panel.getAttribute('aria-labelledby')];
    return [isSelected, tab.tabIndex, panel.checkVisibility(), by]; })"""
INK = """() => { const canvas = document.querySelector('#tokens-chart canvas'), c = canvas.getContext('2d');
    return new Set(new Uint32Array(c.getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size; }"""


def rows(tab: Any) -> list[list[str]]:
    return [row.locator("th, td").all_text_contents() for row in tab.page.locator("#points tbody tr").all()]


@pytest.mark.nightly
def test_tabs_are_chosen_by_arrow_keys_and_travel_in_the_link(visit: Any) -> None:
    tab = visit()
    names = {name: tab.page.locator(f"#tab-{name}") for name in ("lengths", "tokens", "watch")}
    names["lengths"].focus()
    for key, chosen in (
        ("ArrowRight", "tokens"),
        ("End", "watch"),
        ("ArrowRight", "lengths"),
        ("ArrowLeft", "watch"),
        ("Home", "lengths"),
    ):
        tab.page.keyboard.press(key)
        expect(names[chosen]).to_be_focused()
        tabs = tab.page.evaluate(TABS, list(names))
        assert tabs == [
            [str(name == chosen).lower(), 0 if name == chosen else -1, name == chosen, f"tab-{name}"] for name in names
        ]
    names["tokens"].click()
    link = tab.link()
    assert "tab=tokens" in link
    tab.follow("#batch=2")
    assert tab.page.locator("#tokens-chart").is_hidden()
    tab.follow(link)
    assert tab.page.locator("#tokens-chart").is_visible()


def test_the_curve_is_the_commands(visit: Any) -> None:
    tab = visit(MOCKED)
    chart = chart_of(CostsConfig(model="Qwen3.5-27B", hardware="B200", plain_rate=75.0), ChartConfig(context=6144))
    tab.page.locator("#tokens-chart .plot").focus()
    tab.page.keyboard.press("Home")
    for kept, speedup in chart.curve:
        expect(tab.page.locator("#tokens-chart .where")).to_have_text(f"at an acceptance length of {kept:g}")
        assert tab.page.locator("#tokens-chart output").all_text_contents() == [f"{kept:.2f}×", f"{speedup:.2f}×"]
        tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("Escape")
    expect(tab.page.locator("#tokens-chart .where")).to_contain_text(f"{chart.slopes['roofline']:.2f} for one more")


def test_published_points_stand_beside_the_roofline_within_a_tenth(visit: Any) -> None:
    tab = visit()
    tab.page.locator("#say-mocked").click()
    expect(tab.page.locator("#panel-tokens")).to_be_visible()
    mocked_rows = [row for row in rows(tab) if "mocked" in row[0]]
    assert [row[1:3] for row in mocked_rows] == [["2.00", "1.87×"], ["4.00", "3.57×"], ["8.00", "5.63×"]]
    assert all(abs(int(row[4].replace("−", "-").rstrip("%"))) <= 10 for row in mocked_rows)
    expect(tab.page.locator("#points-note")).to_contain_text("SGLANG_SIMULATE_ACC_LEN")
    expect(tab.page.locator("#slopes")).to_contain_text("mocked 0.69")
    assert tab.page.evaluate(INK) > 20


def test_pasted_runs_are_points_of_their_batch_and_bad_json_is_told(visit: Any) -> None:
    tab = visit(MOCKED)
    before = len(rows(tab))
    tab.set("runs", json.dumps(RUN))
    after = rows(tab)
    assert len(after) == before + 1 and after[-1][:3] == ["1: d (mine)", "3.00", "2.00×"]
    expect(tab.page.locator("#points-note")).to_contain_text("Points at batch 8 are left out")
    broken = json.dumps(RUN)[:-2]
    tab.set("runs", broken)
    expect(tab.page.locator("#results-fault")).to_contain_text("this is not JSON")
    assert tab.page.locator("#runs").input_value() == broken and len(rows(tab)) == before
    tab.set("runs", "")
    expect(tab.page.locator("#results-fault")).to_be_hidden()
    tab.set("drafter", "yours")
    tab.set("recorded", json.dumps(RUN))
    assert rows(tab)[-1][0] == "1: d (mine)", "what was pasted as a drafter is a point too"


def test_built_in_points_are_those_of_the_results_they_name(visit: Any) -> None:
    tab = visit("#tab=tokens&batch=1&measured=own")
    kept = [row for row in rows(tab) if re.match(r"\d+: ", row[0])]
    folder = Path(__file__).parents[2] / "experiments" / "results"
    measured = json.loads((Path(__file__).parents[2] / "paceline" / "simulate" / "measured.json").read_text())
    expected = []
    for name in measured["sources"]:
        for result in json.loads((folder / name).read_text())["results"]:
            for each in result["contenders"] if result["streams"] == 1 else ():
                if each["name"].startswith("paceline/") and each["name"] != "paceline/none":
                    expected.append((each["tokens_per_round"], each["decode_over_plain"]["median"]))
    assert len(kept) == len(expected) >= 8
    for row, (tokens, speedup) in zip(kept, expected, strict=True):
        assert float(row[1]) == pytest.approx(tokens, abs=0.0051) and float(row[2][:-1]) == pytest.approx(
            speedup, abs=0.0051
        )


def watched(tab: Any, side: str) -> int:
    return int(tab.page.locator(f"#watch-{side}").text_content().split()[0])


def comes(tab: Any, count: int) -> None:
    """Waits until the best side has more tokens than that."""
    for _ in range(400):
        if watched(tab, "best") > count:
            return
        tab.page.wait_for_timeout(25)
    raise AssertionError(f"never more than {count} tokens")


def test_two_columns_fill_at_predicted_rates(visit: Any) -> None:
    tab = visit(WATCH)
    tab.page.locator("#watch-speed").select_option("1")
    best, count = tab.figure("speedup"), len(passage())
    expect(tab.page.locator("#watch-note")).to_contain_text(f"250 → {tab.figure('each'):.0f} tokens/s, {best:.2f}×")
    expect(tab.page.locator("#watch-play")).to_have_text("Play")  # it plays by itself, to its end
    for side, rate in (("plain", 250.0), ("best", 250.0 * best)):
        assert watched(tab, side) == count
        match = re.search(r"([\d.]+) s", tab.page.locator(f"#watch-{side}").text_content())
        assert match
        seconds = float(match[1])
        assert count / seconds == pytest.approx(rate, rel=0.05)
        assert tab.page.locator(f"#watch-{side}-text").text_content() == "".join(passage())


@pytest.mark.nightly
def test_it_is_paused_resumed_restarted_and_closed(visit: Any) -> None:
    tab = visit(WATCH)
    play = tab.page.locator("#watch-play")
    tab.page.locator("#watch-speed").select_option("0.1")
    tab.page.locator("#watch-restart").click()
    expect(play).to_have_text("Pause")
    comes(tab, 20)
    play.click()
    stood = watched(tab, "plain"), watched(tab, "best")
    assert 0 < stood[0] < stood[1]
    tab.page.wait_for_timeout(300)
    assert (watched(tab, "plain"), watched(tab, "best")) == stood, "it goes on while paused"
    play.click()
    comes(tab, stood[1])
    play.click()
    tab.page.locator("#watch-restart").click()
    assert watched(tab, "best") < stood[1] + 20
    # nor does a tab that is closed play
    tab.page.locator("#tab-lengths").click()
    stood = watched(tab, "plain"), watched(tab, "best")
    tab.page.wait_for_timeout(300)
    assert (watched(tab, "plain"), watched(tab, "best")) == stood


def test_nothing_plays_by_itself_where_motion_is_unwelcome(visit: Any) -> None:
    tab = visit(WATCH, reduced_motion="reduce")
    expect(tab.page.locator("#watch-play")).to_have_text("Play")
    assert watched(tab, "plain") == watched(tab, "best") == len(passage())
    tab.set("batch", "2")
    assert watched(tab, "plain") == len(passage()) and tab.page.locator("#watch-play").text_content() == "Play"


def test_every_tab_fits_and_is_photographed(visit: Any) -> None:
    tab = visit(reduced_motion="reduce")
    for name, link in (("tokens", f"{MOCKED}&measured=own"), ("watch", WATCH)):
        tab.follow(link)
        for size, viewport in SIZES.items():
            tab.page.set_viewport_size(viewport)
            assert tab.fits(), (name, size)
            for scheme in ("light", "dark") if SHOTS else ():
                tab.page.emulate_media(color_scheme=scheme)
                Path(SHOTS).mkdir(parents=True, exist_ok=True)
                tab.page.screenshot(path=Path(SHOTS) / f"calculator-{name}-{size}-{scheme}.png", full_page=True)


def test_everything_in_a_tab_is_reached_by_keys(visit: Any) -> None:
    tab = visit(reduced_motion="reduce")
    for link, expected in ((MOCKED, {"measured", "runs"}), (WATCH, {"watch-play", "watch-restart", "watch-speed"})):
        tab.follow(link)
        tab.page.locator(f"#tab-{link.rpartition('=')[2]}").focus()
        reached = set()
        for _ in range(6):
            tab.page.keyboard.press("Tab")
            reached.add(tab.page.evaluate("document.activeElement.id"))
        assert expected <= reached
