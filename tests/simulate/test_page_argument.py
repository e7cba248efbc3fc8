"""The calculator page's drafters and its argument, in headless Chromium: cards, sentences, pasted runs, assumptions,
contrast.

    pytest tests/simulate/test_page_argument.py

Skips without playwright or a Chromium; calculator_visit.py says what is checked after every test.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytestmark = pytest.mark.slow

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[dev]")
expect = api.expect
pytest_plugins = ("calculator_visit",)
RUN = json.dumps(
    {
        "model": "mine",
        "results": [
            {"drafter": "none", "batch": 1, "speedup": 1.0},
            {
                "drafter": "d",
                "batch": 1,
                "tokens_per_round": 3.0,
                "speedup": 2.0,
                "accepted_histogram": [10, 10, 20, 30],
            },
        ],
    }
)
CONTRASTS = """(name) => {
    const probe = document.createElement('div');
    document.body.append(probe);
    const light = (value) => {
        probe.style.color = value;
        const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map((each) => each / 255)
            .map((each) => (each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const [one, other] = [light(`var(--${name})`), light('var(--paper)')].sort((a, b) => b - a);
    probe.remove();
    return (one + 0.05) / (other + 0.05);
}"""


def best(tab: Any, kind: str) -> float:
    return float(tab.page.locator(f"#best-{kind}").get_attribute("value"))


SET = """const control = document.getElementById(given[0]);
    control.value = given[1];
    control.dispatchEvent(new Event("input", { bubbles: true }));
    return Number(document.getElementById(`best-${given[2]}`).value);"""
"""Sets a field and returns a drafter's speed-up, in one call."""


@pytest.mark.nightly
def test_each_drafter_has_its_own_settings(visit: Any) -> None:
    tab = visit("#batch=32")
    before = {kind: best(tab, kind) for kind in ("ideal", "autoregressive", "block")}
    tab.set("drafter", "autoregressive")
    assert tab.page.locator("#chance").input_value() == "0.75" and tab.page.locator("#block").is_hidden()
    tab.set("chance", "0.9")
    assert best(tab, "autoregressive") > before["autoregressive"]
    assert (best(tab, "block"), best(tab, "ideal")) == (before["block"], before["ideal"])
    assert tab.figure("speedup") == best(tab, "autoregressive")
    tab.set("drafter", "block")
    assert tab.page.locator("#chance").input_value() == "0.89" and tab.figure("speedup") == before["block"]
    tab.set("drafter", "ideal")
    tab.set("chance", "1")
    assert best(tab, "ideal") > before["ideal"] and "--drafter-cost 0 " in tab.code("command")
    # the cards are one radio group for the keyboard
    tab.follow("#batch=32")
    tab.page.locator("#drafter-block").focus()
    tab.page.keyboard.press("ArrowRight")
    expect(tab.page.locator("#drafter-yours")).to_be_checked()
    tab.page.keyboard.press("ArrowLeft")
    tab.page.keyboard.press("ArrowLeft")
    expect(tab.page.locator("#drafter-autoregressive")).to_be_checked()
    expect(tab.page.locator("#speedup")).to_have_text("1.17×")


def test_a_pasted_run_is_a_drafter_and_bad_json_takes_nothing_away(visit: Any) -> None:
    tab = visit("#drafter=yours")
    expect(tab.page.locator("#fault")).to_contain_text("paste a run's JSON")
    assert best(tab, "block") == pytest.approx(2.98, abs=0.005), "the other drafters stay"
    broken = RUN.replace("[10, 10", "[10 10")
    tab.set("recorded", broken)
    expect(tab.page.locator("#fault")).to_contain_text("this is not JSON")
    assert tab.page.locator("#recorded").input_value() == broken and best(tab, "block") > 2.9
    tab.set("drafter", "block")
    expect(tab.page.locator("#fault")).to_be_hidden()
    tab.set("drafter", "yours")
    assert tab.page.locator("#recorded").input_value() == broken
    tab.set("recorded", f"decoding ...\n{RUN}\n")
    expect(tab.page.locator("#fault")).to_be_hidden()
    assert "histogram:10,10,20,30" in tab.code("command") and best(tab, "yours") == tab.figure("speedup")
    tab.set("recorded", '{"results": [{"drafter": "none"}]}')
    expect(tab.page.locator("#fault")).to_contain_text("no accepted_histogram")


def test_a_long_run_is_read_and_travels_as_what_was_read_of_it(visit: Any) -> None:
    long_run = json.loads(RUN) | {"texts": ["as long as runs are " * 50] * 12}
    tab = visit("#drafter=yours")
    tab.set("recorded", json.dumps(long_run, indent=1))
    link = tab.link()
    assert len(link) < 2000 < 10_000 < len(tab.page.locator("#recorded").input_value())
    shown = tab.shown()
    tab.follow("#batch=2")
    tab.follow(link)
    assert tab.shown() == shown and "histogram:10,10,20,30" in tab.code("command")


@pytest.mark.nightly
def test_sentences_of_the_argument_are_true_of_what_they_show(visit: Any) -> None:
    tab = visit()
    tab.page.locator("#say-opening").click()
    expect(tab.page.locator("#say-opening")).to_have_attribute("aria-pressed", "true")
    expect(tab.page.locator("#sentence")).to_contain_text("three times")
    assert round(best(tab, "autoregressive"), 1) == 1.2 and round(best(tab, "block")) == 3

    def speed(batch: int, kind: str) -> float:
        return tab.script(SET, "batch", str(batch), kind)

    tab.page.locator("#say-moe").click()
    expect(tab.page.locator("#batch")).to_have_value("8")
    few = [speed(batch, "autoregressive") for batch in (4, 8)]
    assert max(few) < 1.05 < min(speed(1, "autoregressive"), speed(128, "autoregressive"))
    tab.page.locator("#say-dense").click()
    falling = [round(speed(batch, "block"), 9) for batch in (1, 8, 32, 256)]
    assert falling == sorted(falling, reverse=True) and falling[0] == falling[1] > falling[2]
    tab.page.locator("#say-long").click()
    rising = [tab.script(SET, "context", context, "block") for context in ("1024", "32768", "131072")]
    assert rising == sorted(rising) and rising[-1] > 1.5 * rising[0]
    tab.page.locator("#say-small").click()
    assert tab.figure("each") / tab.figure("speedup") == pytest.approx(75)
    alone = best(tab, "block")
    assert alone > speed(64, "block") > speed(256, "block")
    expect(tab.page.locator("#say-small")).to_have_attribute("aria-pressed", "false")
    # a sentence keeps what was pasted
    tab.follow("#drafter=yours")
    tab.set("recorded", RUN)
    tab.page.locator("#say-dense").click()
    tab.set("drafter", "yours")
    assert tab.page.locator("#recorded").input_value() == RUN


def test_units_and_assumptions_are_one_click_away(visit: Any) -> None:
    tab = visit("#model=Qwen3.5-27B&overhead=ms&overhead_ms=6.9")
    dialog = tab.page.locator("#assumptions")
    expect(dialog).to_be_hidden()
    tab.page.get_by_role("button", name="Units and assumptions").click()
    expect(dialog).to_be_visible()
    expect(dialog.locator("#limits li").nth(1)).to_contain_text("6.9 ms are added to every round")
    expect(dialog.locator("#numbers")).to_contain_text("8 TB/s of memory traffic")
    for word in ("acceptance length", "speed-up", "GB", "overhead"):
        expect(dialog).to_contain_text(word)
    tab.page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert tab.page.evaluate("document.activeElement.id") == "show-assumptions"
    # overhead is a number, or solved from a plain rate
    tab.follow("#model=Qwen3.5-27B&batch=1&context=6144")
    bare = tab.figure("speedup")
    tab.set("overhead", "rate")
    tab.set("plain_rate", "75")
    assert tab.figure("speedup") > bare and "--plain-rate 75" in tab.code("command")
    assert tab.figure("rate") / tab.figure("speedup") == pytest.approx(75)
    match = re.search(
        r"overhead[^%]*%, ([\d.]+) ms", tab.page.locator("#time-chart .legend").inner_text().replace("\n", " ")
    )
    assert match and match[1] == "6.87"


def test_text_and_lines_stand_out(visit: Any) -> None:
    """WCAG AA: 4.5 for text, 3 for lines and fills."""
    tab = visit()
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme)
        for name in ("ink", "soft", "accent", "token", "own", "bad"):
            assert tab.page.evaluate(CONTRASTS, name) >= 4.5, (scheme, name)
        for name in ("edge", "part1", "part2", "part3", "part4", "part5", "part6"):
            assert tab.page.evaluate(CONTRASTS, name) >= 3, (scheme, name)
