"""The token timing page in headless Chromium, opened from disk as a user opens it.

    PACELINE_SCREENSHOTS=shots pytest tests/bench/test_timing_page.py

Skips without playwright or a Chromium (PACELINE_CHROMIUM, or chromium, chromium-browser or google-chrome in PATH).
After every test: no error in the page's console, no request but for the page itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_tabs import running_browser
from timings import HOSTILE, story

from paceline.bench.pages.timing import Timing, page, svg
from paceline.simulate.calculator_page import hash_of

pytestmark = pytest.mark.slow

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[dev]")
expect = api.expect
expect.set_options(timeout=30_000)
WIDE, NARROW = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
SHOTS = os.environ.get("PACELINE_SCREENSHOTS")
VISIBLE = """(answer) => [...answer.children]
    .filter((span) => getComputedStyle(span).visibility === "visible").map((span) => span.textContent).join("")"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as browser:
        yield browser


class Visit:
    """The tab of all tests, with what its page wrote to its console and whom it called."""

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_context(viewport=WIDE).new_page()
        self.errors: list[str] = []
        self.urls: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.clock.install(time=0)
        self.page.clock.pause_at(1000)

    def open(self, file: Path, timing: Timing, reduced_motion: str) -> None:
        """Show the page of `timing` at normal speed, paused by the clock."""
        file.write_text(page(timing), encoding="utf-8")
        self.timing = timing
        self.errors.clear()
        self.urls.clear()
        self.page.set_viewport_size(WIDE)
        self.page.emulate_media(color_scheme="light", reduced_motion=reduced_motion)
        self.page.goto(file.as_uri())
        self.first_speed = self.page.locator("#rate").text_content()
        self.page.evaluate("setSpeed(SPEEDS.indexOf(1))")

    def pass_s(self, seconds: float) -> None:
        """Time goes by for the page."""
        self.page.clock.run_for(1000 * seconds)

    def now(self) -> float:
        return self.page.evaluate("state.now")

    def shown(self) -> list[str]:
        return [each.evaluate(VISIBLE) for each in self.page.locator(".answer").all()]

    def seek(self, seconds: float) -> None:
        self.page.evaluate("(s) => { if (state.playing) pause(); state.now = s; draw(); }", seconds)

    def fits(self) -> bool:
        return self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.fixture(scope="module")
def tab(browser: Any) -> Visit:
    return Visit(browser)


@pytest.fixture
def visit(tab: Visit, tmp_path: Path) -> Iterator[Any]:
    file = tmp_path / "compare.html"

    def start(timing: Timing | None = None, reduced_motion: str = "no-preference") -> Visit:
        tab.open(file, timing or story(), reduced_motion)
        return tab

    yield start
    assert [url for url in tab.urls if not url.startswith("data:")] == [file.as_uri()]
    assert tab.errors == []


def text_by(timing: Timing, now: float) -> list[str]:
    return ["".join(token.text for token in side.tokens if token.at_s <= now) for side in (timing.off, timing.on)]


def test_the_policy_names_the_script() -> None:
    whole = page(story())
    script = whole.split("<script>", 1)[1].split("</script>", 1)[0]
    assert f"script-src '{hash_of(script)}'" in whole
    assert "{{" not in whole and "http:" not in whole.replace("http://www.w3.org", "")
    assert "https:" not in whole


@pytest.mark.nightly
def test_it_plays_to_the_end_by_itself(visit: Any) -> None:
    tab = visit()
    expect(tab.page.get_by_role("button", name="Pause")).to_be_visible()
    tab.pass_s(tab.timing.off.total_s + 0.5)
    expect(tab.page.get_by_role("button", name="Play")).to_be_visible()
    assert tab.shown() == [tab.timing.off.text, tab.timing.on.text]
    off, on = tab.page.get_by_role("region").all()
    for side, answer in ((off, tab.timing.off), (on, tab.timing.on)):
        expect(side).to_contain_text(f"{answer.tokens_per_s:.1f} tokens/s")
        expect(side).to_contain_text(f"{len(answer.tokens)} of {len(answer.tokens)} tokens")
        expect(side).to_contain_text(f"{answer.tokens_per_round:.2f} per round")
        expect(side).to_contain_text(f"{answer.total_s:.2f} s done")
    expect(tab.page.locator("#live")).to_contain_text("Speculation off: done after")
    assert tab.page.locator("#verdict").text_content() == tab.timing.verdict.replace("x", "×", 1)


def test_every_moment_shows_what_had_come(visit: Any) -> None:
    tab = visit()
    for moment in (0.0, 0.0801, 0.3, 0.95):
        tab.seek(1.5)
        tab.seek(moment)
        assert tab.shown() == text_by(tab.timing, moment)
        assert tab.page.locator("#clock").text_content() == f"{moment:.2f} s"
        counts = [sum(token.at_s <= moment for token in side.tokens) for side in (tab.timing.off, tab.timing.on)]
        for side, count in zip(tab.page.get_by_role("region").all(), counts, strict=True):
            expect(side).to_contain_text(f"{count} of")


def test_the_tokens_of_a_round_light_up_together(visit: Any) -> None:
    tab = visit()
    tab.pass_s(0.3)
    on = tab.timing.on.tokens
    lit = (
        tab.page.locator(".answer")
        .nth(1)
        .evaluate("(answer) => [...answer.children].map((span) => span.matches('.fresh'))")
    )
    for place, token in enumerate(on):
        assert lit[place] == lit[max(at for at, other in enumerate(on) if other.round == token.round)]
    assert any(lit) and not all(lit)
    drafted = (
        tab.page.locator(".answer")
        .nth(1)
        .evaluate("(answer) => [...answer.children].map((span) => span.matches('.drafted'))")
    )
    assert drafted == [token.is_drafted for token in on]
    assert tab.page.locator(".answer").first.locator(".drafted").count() == 0
    # what is drafted differs by more than colour
    for where in (tab.page.locator(".foot .drafted"), tab.page.locator(".answer .drafted").first):
        assert where.evaluate("(span) => getComputedStyle(span).textDecorationLine") == "underline"
    expect(tab.page.get_by_role("list", name="Legend")).to_contain_text("drafted and kept")
    expect(tab.page.get_by_role("list", name="Legend")).to_contain_text("the target's own")


def test_speed_by_keys_and_by_the_slider(visit: Any) -> None:
    tab = visit()
    assert tab.first_speed == "0.5×", "what is over too soon begins in slow motion"
    for key, times, speed in (("-", 2, 0.25), ("+", 3, 4.0), ("-", 0, 1.0)):
        tab.page.evaluate("setSpeed(SPEEDS.indexOf(1))")
        for _ in range(times):
            tab.page.keyboard.press(key)
        assert tab.page.locator("#rate").text_content() == f"{speed:g}×"
        tab.page.keyboard.press("r")
        tab.pass_s(0.2)
        assert tab.now() == pytest.approx(0.2 * speed, abs=0.04 * speed)
        tab.page.keyboard.press("Space")
    slider = tab.page.get_by_role("slider", name="Speed")
    slider.focus()
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.locator("#rate").text_content() == "2×"
    tab.page.keyboard.press("Home")
    assert tab.page.locator("#rate").text_content() == "0.1×"
    assert slider.get_attribute("aria-valuetext") == "0.1 times"


def test_play_pause_restart_seek_by_keyboard(visit: Any) -> None:
    tab = visit()
    tab.pass_s(0.2)
    tab.page.keyboard.press("Space")
    expect(tab.page.get_by_role("button", name="Play")).to_be_visible()
    stood = tab.now()
    tab.pass_s(0.5)
    assert tab.now() == stood > 0.1
    names = []
    for _ in range(5):
        tab.page.keyboard.press("Tab")
        names.append(tab.page.evaluate("document.activeElement.id"))
        assert tab.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert names == ["prompt", "play", "restart", "speed", "time"]
    tab.page.keyboard.press("End")
    assert tab.now() == pytest.approx(tab.timing.off.total_s)
    assert tab.shown() == [tab.timing.off.text, tab.timing.on.text]
    tab.page.get_by_role("button", name="Restart").focus()
    tab.page.keyboard.press("Enter")
    tab.pass_s(0.1)
    assert tab.now() == pytest.approx(0.1, abs=0.04)
    expect(tab.page.get_by_role("button", name="Pause")).to_be_visible()


def test_where_motion_is_unwelcome_it_stands_complete(visit: Any) -> None:
    tab = visit(reduced_motion="reduce")
    assert tab.shown() == [tab.timing.off.text, tab.timing.on.text]
    expect(tab.page.get_by_role("button", name="Play")).to_be_visible()
    tab.page.get_by_role("button", name="Play").click()
    tab.pass_s(0.2)
    assert tab.shown() == text_by(tab.timing, tab.now())
    assert tab.page.locator(".fresh").count() == 0


def test_what_a_model_said_stays_text(visit: Any) -> None:
    tab = visit(story(HOSTILE, prompt=HOSTILE))
    tab.seek(60.0)
    assert tab.shown() == [HOSTILE, HOSTILE]
    assert tab.page.locator("#prompt").text_content() == HOSTILE
    assert tab.page.title() != "taken"
    assert tab.page.locator("img").count() == 0 and tab.page.locator("script").count() == 2
    refused = "(() => { try { document.body.innerHTML = '<b>'; return ''; } catch (error) { return error.name; } })()"
    assert tab.page.evaluate(refused) == "TypeError"
    tab.errors[:] = [error for error in tab.errors if "Trusted" not in error]


def photograph(page: Any, name: str) -> None:
    if SHOTS:
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(SHOTS) / name)


@pytest.mark.parametrize("what", ["compare", "compare-long"])
def test_it_fits_and_is_photographed(visit: Any, what: str) -> None:
    long = story("x" * 300 + " " + "word " * 120, prompt="why " * 200)
    tab = visit(long if what == "compare-long" else story())
    assert tab.first_speed == ("1×" if what == "compare-long" else "0.5×")
    for name, size in (("wide", WIDE), ("narrow", NARROW)):
        tab.page.set_viewport_size(size)
        for scheme in ("light", "dark"):
            tab.page.emulate_media(color_scheme=scheme)
            tab.seek(0.6)
            tab.page.evaluate("window.scrollTo(0, 0)")
            assert tab.fits(), what
            photograph(tab.page, f"{what}-{name}-{scheme}.png")


@pytest.mark.nightly
def test_the_picture_moves_in_an_image(browser: Any, tmp_path: Path) -> None:
    """Early most of it is empty, later it is not; still where motion is unwelcome."""
    (tmp_path / "demo.svg").write_text(svg(story(), 1.0), encoding="utf-8")
    context = browser.new_context(viewport={"width": 920, "height": 560})
    tab = context.new_page()
    tab.goto((tmp_path / "demo.svg").as_uri())
    visible = "[...document.querySelectorAll('.r')].filter((group) => getComputedStyle(group).opacity === '1').length"
    total = tab.evaluate("document.querySelectorAll('.r').length")
    for share, count in ((0.0, 0), (0.3, None), (1.0, total)):
        at_ms = 1000 * share * story().off.total_s + 1
        tab.evaluate(
            "(now) => document.getAnimations().forEach((one) => { one.pause(); one.currentTime = now; })", at_ms
        )
        num_visible = tab.evaluate(visible)
        assert num_visible == count if count is not None else 0 < num_visible < total
    photograph(tab, "compare-svg.png")
    tab.emulate_media(reduced_motion="reduce")
    assert tab.evaluate("document.getAnimations().length") == 0
    assert tab.evaluate(visible) == total
    context.close()
