"""The calculator page in headless Chromium: curve editor, keyboard, small screens, what a redraw does, screenshots.

    PACELINE_SCREENSHOTS=shots pytest tests/simulate/test_page_use.py

Skips without playwright or a Chromium; calculator_visit.py says what is checked after every test.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[dev]")
expect = api.expect
pytest_plugins = ("calculator_visit",)
SEEN = """() => {
    const at = document.activeElement.getBoundingClientRect();
    const bar = document.getElementById('headline').getBoundingClientRect();
    return at.top >= bar.bottom - 1 || at.bottom <= bar.top;
}"""
SWATCHES = """(all) => all.map((canvas) => {
    const c = canvas.getContext('2d'), { data } = c.getImageData(0, 0, canvas.width, canvas.height);
    const pixels = [...new Uint32Array(data.buffer)], first = pixels.find((one) => one >>> 24);
    return pixels.map((one) => Number(one === first)).join('');
})"""
WIDE, NARROW, TABLET = {"width": 1360, "height": 900}, {"width": 390, "height": 844}, {"width": 820, "height": 1100}
NUM_REDRAWS = 4
SHOTS = os.environ.get("PACELINE_SCREENSHOTS", "")
CURVE = "#block.acceptance=curve&block.curve=0.8,0.7,0.8"
FOCUSED = """() => { const at = document.activeElement;
    return [at.id || at.className.baseVal || at.className || at.tagName, getComputedStyle(at).outlineStyle !== 'none']; }"""
ENDS = "(all) => all.map((each) => each.getBoundingClientRect().right)"
REDRAWS = """async (values) => {
    const slider = document.getElementById('chance-slider'), spent = [], drawn = [];
    const clear = CanvasRenderingContext2D.prototype.clearRect;
    CanvasRenderingContext2D.prototype.clearRect = function (...box) { drawn.push(this); clear.apply(this, box); };
    for (const value of values) {
        slider.value = value;
        const began = performance.now();
        slider.dispatchEvent(new Event('input', { bubbles: true }));
        for (let turn = 0; turn < 5; turn += 1) await Promise.resolve();
        document.body.getBoundingClientRect();
        spent.push(performance.now() - began);
        await new Promise((done) => requestAnimationFrame(done));
    }
    CanvasRenderingContext2D.prototype.clearRect = clear;
    return [drawn.length, spent];
}"""


def points(tab: Any) -> Any:
    return tab.page.locator(".editor .point")


def curve(tab: Any) -> list[float]:
    return [float(each) for each in tab.page.locator("#curve").input_value().split(",")]


@pytest.mark.nightly
def test_a_point_is_dragged(visit: Any) -> None:
    tab = visit(CURVE)
    shown, box = tab.shown(), points(tab).nth(1).locator(".dot").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    tab.page.mouse.move(x, y)
    tab.page.mouse.down()
    tab.page.mouse.move(x + 3, y + 40, steps=4)
    tab.page.mouse.up()
    moved = curve(tab)
    assert moved[0] == 0.8 and moved[2] == 0.8 and 0.2 < moved[1] < 0.6
    assert tab.shown() != shown
    tab.page.mouse.move(x, y - 40)
    assert curve(tab) == moved, "a point that was let go moves on"


@pytest.mark.nightly
def test_points_move_by_keys_come_and_go(visit: Any) -> None:
    tab = visit(CURVE)
    points(tab).first.focus()
    for key, expected in (
        ("ArrowUp", [0.81, 0.7, 0.8]),
        ("PageDown", [0.71, 0.7, 0.8]),
        ("Home", [0.0, 0.7, 0.8]),
        ("ArrowDown", [0.0, 0.7, 0.8]),
        ("End", [1.0, 0.7, 0.8]),
    ):
        tab.page.keyboard.press(key)
        assert curve(tab) == expected, key
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("PageUp")
    assert curve(tab) == [1.0, 0.7, 0.9]
    point = points(tab).nth(2)
    assert point.evaluate("(each) => each === document.activeElement")
    assert (point.get_attribute("aria-valuenow"), point.get_attribute("aria-label")) == ("0.9", "Chance of draft 3")
    moved = tab.figure("speedup")
    tab.follow(CURVE)
    assert tab.figure("speedup") != moved
    # places come and go
    tab.page.get_by_role("button", name="Add a place").click()
    assert curve(tab) == [0.8, 0.7, 0.8, 0.8] and points(tab).count() == 4
    for _ in range(5):
        tab.page.get_by_role("button", name="Remove the last").click()
    assert curve(tab) == [0.8] and points(tab).count() == 1
    # what was recorded can be edited further
    tab.follow("#block.acceptance=recorded&block.recorded=survival:.5,.4,.2&max_draft=3")
    shown = tab.shown()
    assert points(tab).first.get_attribute("tabindex") is None
    tab.page.get_by_role("button", name="Edit as a curve").click()
    assert curve(tab) == [0.5, 0.8, 0.5] and tab.shown() == shown
    expect(tab.page.locator("#acceptance")).to_have_value("curve")


def test_charts_are_read_out_by_keys_and_by_the_pointer(visit: Any) -> None:
    tab = visit()
    chart = tab.page.locator("#length-chart .plot")
    where = tab.page.locator("#length-chart .where")
    chart.focus()
    tab.page.keyboard.press("Home")
    expect(where).to_have_text("at 0 drafts")
    assert tab.page.locator("#length-chart output").all_text_contents() == ["1.00×"] * 3 + ["–"]
    tab.page.keyboard.press("ArrowRight")
    expect(where).to_have_text("at 1 draft")
    tab.page.keyboard.press("Escape")
    expect(where).to_have_text("at the best of each")
    tab.page.locator("#time-chart").scroll_into_view_if_needed()
    box = tab.page.locator("#time-chart .u-over").bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(tab.page.locator("#time-chart .where")).to_contain_text("8 drafts")
    tab.page.mouse.move(0, 0)
    # shares of time add up
    tab.follow("#model=DeepSeek-V4-Pro&gpus=8&batch=64&overhead=ms&overhead_ms=3")
    shares = [each.partition("%")[0] for each in tab.page.locator("#time-chart output").all_text_contents()]
    assert sum(map(float, shares)) == pytest.approx(100.0, abs=0.3)


def test_everything_is_reached_by_tab_and_is_seen_to_be(visit: Any) -> None:
    tab = visit(CURVE)
    tab.page.evaluate("document.querySelector('details').open = true")
    reached = []
    for _ in range(90):
        tab.page.keyboard.press("Tab")
        at, is_outlined = tab.page.evaluate(FOCUSED)
        if at == "BODY" or (reached and at == reached[0]):
            break
        assert is_outlined, at
        reached.append(at)
    controls = tab.page.eval_on_selector_all(  # of radios and tabs Tab reaches the chosen one, arrow keys the others
        "input:not([type=radio]:not(:checked)), select, textarea, button:not([tabindex='-1'])",
        "(all) => all.filter((each) => each.checkVisibility()).map((each) => each.id)",
    )
    assert set(filter(None, controls)) <= set(reached)
    assert reached.count("plot") == 3 and reached.count("point") == 1
    assert len(reached) > 40


def test_what_has_the_focus_is_not_under_the_headline(visit: Any) -> None:
    tab = visit(viewport=NARROW)
    tab.page.locator("#reset").focus()
    for _ in range(25):
        tab.page.keyboard.press("Tab")
    for _ in range(20):
        tab.page.keyboard.press("Shift+Tab")
        assert tab.page.evaluate(SEEN), tab.page.evaluate(FOCUSED)


def test_lines_and_parts_differ_by_more_than_colour(visit: Any) -> None:
    tab = visit()
    shapes = tab.page.eval_on_selector_all(".swatch", SWATCHES)
    assert len(shapes) == 20
    assert (
        len({*shapes[:4]}) == 4
        and shapes[4:8] == shapes[8:12]
        and len({*shapes[12:18]}) == 6
        and len({*shapes[18:]}) == 2
    )
    assert tab.page.locator(".chosen").evaluate_all(
        "(all) => all.every((each) => getComputedStyle(each).fontWeight > 600)"
    )


def test_a_step_of_a_slider_draws_each_chart_once(visit: Any) -> None:
    """How long that takes, to figures, charts and layout, depends on the machine; it is printed."""
    tab = visit()
    values = [round(0.5 + 0.013 * place, 3) for place in range(NUM_REDRAWS)]
    for link in ("#batch=32", "#model=DeepSeek-V4-Pro&gpus=8&max_draft=32"):
        tab.follow(link)
        drawn, spent_ms = tab.page.evaluate(REDRAWS, values)
        print(f"redraw {link}: median of {NUM_REDRAWS}: {statistics.median(spent_ms):.1f} ms")
        assert len(spent_ms) == NUM_REDRAWS and drawn == 3 * NUM_REDRAWS


def test_nothing_moves_where_motion_is_unwelcome(visit: Any) -> None:
    tab = visit(reduced_motion="reduce")
    tab.set("batch", "5")
    assert tab.page.evaluate("document.getAnimations().length") == 0


SCENES = {
    "opens": "#batch=32",
    "curve": "#model=Qwen3.5-27B&hardware=H100&batch=4&drafter=autoregressive&autoregressive.acceptance=curve"
    "&autoregressive.cost=params&autoregressive.params=0.5",
    "does-not-fit": "#model=DeepSeek-V4-Pro&hardware=H200&batch=256&context=65536&locality=0.255&gpus=4",
    "fault": "#model=pasted&config={}",
}


@pytest.mark.nightly
def test_it_fits_and_is_photographed(visit: Any) -> None:
    tab = visit(viewport=WIDE)
    tab.page.locator("summary", has_text="Precision").click()
    for scene, link in SCENES.items():
        tab.follow(link)
        for name, size in (("wide", WIDE), ("narrow", NARROW), ("tablet", TABLET)):
            tab.page.set_viewport_size(size)
            assert tab.fits(), (scene, name)
            ends = tab.page.eval_on_selector_all(".plot, .editor, pre, select, table", ENDS)
            assert len(ends) > 10 and max(ends) <= size["width"], (scene, name)
            for scheme in ("light", "dark") if SHOTS else ():
                tab.page.emulate_media(color_scheme=scheme)
                Path(SHOTS).mkdir(parents=True, exist_ok=True)
                tab.page.screenshot(path=Path(SHOTS) / f"calculator-{scene}-{name}-{scheme}.png", full_page=True)


def test_charts_follow_the_colour_scheme_and_the_window(visit: Any) -> None:
    tab = visit(color_scheme="light")
    pixels = "document.querySelector('#time-chart .u-wrap canvas').toDataURL()"
    light = tab.page.evaluate(pixels)
    tab.page.emulate_media(color_scheme="dark")
    tab.page.wait_for_function(f"(light) => {pixels} !== light", arg=light)
    tab.page.emulate_media(color_scheme="light")
    tab.page.wait_for_function(f"(light) => {pixels} === light", arg=light)
    # and the window
    widths = "[...document.querySelectorAll('.plot canvas')].map((each) => each.getBoundingClientRect().width)"
    before = tab.page.evaluate(widths)
    tab.page.set_viewport_size({"width": 900, "height": 900})
    tab.page.wait_for_function(
        f"(before) => {widths}.every((width, place) => !width || width !== before[place])", arg=before
    )
    for place in tab.page.locator(".plot").all():
        assert place.evaluate(
            "(box) => box.querySelector('canvas').getBoundingClientRect().width <= box.clientWidth + 1"
        )
