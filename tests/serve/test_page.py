"""The page at `/` in headless Chromium, against a server of canned answers.

    PACELINE_SCREENSHOTS=shots pytest tests/serve/test_page.py

Skips without playwright or a Chromium (PACELINE_CHROMIUM, or chromium, chromium-browser or google-chrome in PATH).
After every test: no error in the page's console, no request to another origin.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any

import pytest
from chat_visit import NARROW, WIDE, done, expect, text_of
from page_server import HISTOGRAM, PAGE, STORY, STORY_TEXT, STORY_TOKENS, PageServer

from paceline.report.statistics import BUSY, FEWEST_TOKENS
from paceline.serve.http.app import PAGES

pytestmark = pytest.mark.slow

pytest_plugins = ("chat_visit",)
ERRORS = {
    "refuse": "16 requests are waiting. The server is busy: try again in 2 s.",
    "break": "The worker stopped; ask again.",
    "cut": "The connection ended before the answer was complete.",
}
"""A prompt that goes wrong, and what the page says then."""
PER_ROUND = 1 + sum(drafted for tokens in STORY for _, drafted in tokens) / (len(STORY) - 1)
"""Tokens per round of STORY; its first token is prefill's."""
FOCUS = """() => {
    const focused = document.activeElement, box = focused.closest("label") ?? focused;
    const outlined = [focused, box].some((each) => getComputedStyle(each).outlineStyle === "solid");
    return [focused.id || focused.name || focused.tagName, outlined];
}"""


def test_the_policy_lets_only_the_pages_own_files_in(server: PageServer, chat: Any) -> None:
    page = PAGE.read_text()
    scripts = [path for path in PAGES.values() if path.suffix == ".js" and path.parent == PAGE.parent]
    assert len(scripts) > 4
    for text in (page, *(path.read_text() for path in scripts)):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function|\son\w+=", text
        )
    assert page.count("<script") == 1 and "<style" not in page and not re.search(r"\sstyle=", page)
    assert re.findall(r"(?:src|href)=\"(?!data:)([^\"]*)\"", page) == ["page/chat.css", "page/chat.js", "docs"]
    assert "script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'" in page
    tab = chat()
    answer = tab.page.request.get(server.url)
    assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_mocked_server_says_so_and_promises_nothing(server: PageServer, chat: Any) -> None:
    promise = "The text is the one the target alone would have written"
    tab = chat()
    page = tab.page
    expect(page.locator("#mocked")).to_be_hidden()
    expect(page.get_by_text(promise)).to_be_visible()
    server.told = {"lossless": False, "mocked": "4 tokens a round"}
    page.reload()
    expect(page.locator("#mocked")).to_contain_text("lossless: false. Acceptance is mocked (4 tokens a round)")
    expect(page.get_by_text(promise)).to_be_hidden()
    done(tab.ask("story"))
    for viewport in (WIDE, NARROW):
        page.set_viewport_size(viewport)
        assert tab.fits()
        expect(page.locator("#mocked")).to_be_visible()


def test_the_vendored_file_is_that_of_the_package_and_brings_its_licence() -> None:
    folder = PAGE.parent / "vendor"
    notes = (folder / "README.md").read_text()
    version = re.search(r"marked (\d+\.\d+\.\d+)", notes)
    assert version and f"marked v{version[1]} " in (folder / "marked.esm.js").read_text()[:100]
    for digest, name in (digests := re.findall(r"([0-9a-f]{64})  (\S+)", notes)):
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert len(digests) == 2 and PAGES["/page/vendor/marked.LICENSE"].read_text().count("Permission is hereby granted")


def test_an_answer_streams_and_its_tokens_are_coloured(chat: Any, server: PageServer) -> None:
    server.second_half.clear()
    tab = chat()
    reply = tab.ask("How many loaves?")
    expect(reply).to_have_attribute("aria-busy", "true")
    expect(reply).to_contain_text("12, in the afternoon.")
    expect(reply).to_contain_text("to the first token")
    assert STORY_TEXT.startswith(text_of(reply)) and text_of(reply) != STORY_TEXT
    server.second_half.set()
    done(reply)
    assert text_of(reply) == STORY_TEXT
    drafted = [text for tokens in STORY for text, drafted in tokens if drafted]
    coloured = "".join(reply.locator(".drafted").all_text_contents())
    assert coloured.replace(" ", "") == "".join(drafted).replace(" ", "")
    line = "element => getComputedStyle(element).textDecorationLine"
    assert reply.locator(".drafted").first.evaluate(line) == "underline"
    assert reply.locator(".own").first.evaluate(line) == "none"
    tab.page.get_by_role("switch", name="Colour tokens").click()
    assert reply.locator(".drafted").first.evaluate(line) == "none"
    expect(reply.locator(".stats")).to_contain_text(f"{STORY_TOKENS} tokens")
    expect(reply).to_contain_text(f"{PER_ROUND:.2f} tokens per round")
    reply.get_by_text("Where the time went").click()
    expect(reply.get_by_role("row", name="Verify")).to_contain_text("110 ms")
    heard = tab.page.get_by_role("log").locator("p").all_text_contents()
    assert "".join(heard[:-1]) == STORY_TEXT
    assert heard[-1].startswith(f"Answer complete. {STORY_TOKENS} tokens")


def test_the_request_carries_the_settings_and_the_conversation(chat: Any, server: PageServer) -> None:
    tab = chat()
    done(tab.ask("first"))
    tab.settings()
    tab.page.get_by_label("System prompt").fill("Be brief.")
    tab.page.get_by_label("Temperature").fill("0.7")
    tab.page.get_by_label("Max tokens").fill("64")
    tab.page.get_by_label("Seed").fill("11")
    tab.page.get_by_label("Speculation").select_option("4")
    done(tab.ask("second"))
    first, second = server.chats()
    assert first["messages"] == [{"role": "user", "content": "first"}]
    assert (first["temperature"], first["speculate"], first["model"]) == (0, "auto", "smol-135m")
    assert "seed" not in first and first["stream"] and first["stream_options"] == {"include_usage": True}
    assert first["paceline_timings"] and first["return_metrics"]
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "first", STORY_TEXT, "second"]
    assert (second["temperature"], second["max_tokens"], second["seed"], second["speculate"]) == (0.7, 64, 11, 4)
    tab.settings()
    tab.page.get_by_label("Temperature").fill("9")
    tab.page.get_by_label("Message").fill("third")
    tab.page.get_by_label("Message").press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "temperature"
    assert len(server.chats()) == 2
    tab.page.get_by_role("button", name="Clear").click()
    expect(tab.page.get_by_role("article")).to_have_count(0)
    expect(tab.page.get_by_role("heading", name="Guessed ahead")).to_be_visible()


def test_counts_held_text_and_the_drafter_of_a_pool_are_shown(chat: Any) -> None:
    tab = chat()
    # text that comes later than its tokens
    reply = tab.ask("held")
    done(reply)
    assert text_of(reply) == "Café au lait."
    assert reply.locator(".drafted").all_text_contents() == ["é", "lait", "."]
    assert reply.locator(".own").all_text_contents() == ["Caf", " a", "u"]
    expect(tab.page.locator("#shares")).to_be_hidden()
    # how many tokens were drafted, not which
    reply = tab.ask("counts")
    done(reply)
    assert text_of(reply) == STORY_TEXT
    shares = reply.locator(".chunk").evaluate_all("all => all.map(each => each.style.getPropertyValue('--share'))")
    assert [float(share) for share in shares[:3]] == [0, 2 / 3, 0.8]
    expect(tab.page.get_by_text("drafted share of a chunk")).to_be_visible()
    expect(reply).to_contain_text(f"{PER_ROUND:.2f} tokens per round")
    reply = tab.ask("pool")
    done(reply)
    expect(reply.locator(".by")).to_have_text(
        "smol-135m, drafter words, rounds drafted: 27 by dflash, 2 by text lookup"
    )


def test_the_factor_over_plain_decoding(chat: Any, server: PageServer) -> None:
    tab = chat()
    speed = tab.page.get_by_label("Speed-up over plain decoding")
    expect(speed).to_be_hidden()
    reply = tab.ask("long")
    done(reply)
    times = 1 + FEWEST_TOKENS // STORY_TOKENS
    factor = (times * STORY_TOKENS - 1) * 0.05 / 5 / (0.024 + 0.11 * times)
    expect(speed).to_have_text(f"{factor:.2f}× the speed of plain decoding, estimated")
    expect(reply.locator(".stats li").first).to_have_text(f"{factor:.2f}× plain decoding, estimated")
    expect(reply.locator(".by")).to_have_text("smol-135m, rounds drafted: 27 by dflash, 2 by text lookup")
    expect(tab.page.locator("#drafter")).to_have_text("drafter dflash")
    reply.get_by_text("Where the time went").click()
    expect(reply).to_contain_text("the mean of 5 rounds without drafts in this answer")
    reply.get_by_role("button", name="Measure speed-up").click()
    # By the clock: where it says more than the acceptance length allows, that is said in the figure's place.
    rates = r"Measured: [\d.]+ tokens/s with plain decoding, [\d.]+ with speculation. Both gave"
    expect(reply).to_contain_text(re.compile(f"{rates}|No speed-up: {BUSY}"))
    first, plain = server.chats()
    assert plain == first | {"speculate": "off"}
    assert tab.page.get_by_role("article").count() == 1
    tab.settings()
    tab.page.get_by_label("Speculation").select_option("off")
    off = tab.ask("And plainly?")
    done(off)
    expect(off.locator(".by")).to_have_text("smol-135m, plain decoding")
    expect(off.locator(".stats")).not_to_contain_text("×")
    expect(speed).to_be_hidden()
    expect(off.get_by_role("button", name="Measure speed-up")).to_have_count(0)


def test_an_answer_is_made_anew(chat: Any, server: PageServer) -> None:
    tab = chat()
    done(tab.ask("first"))
    done(tab.ask("second"))
    regenerate = tab.page.get_by_role("button", name="Regenerate")
    expect(regenerate).to_have_count(1)
    regenerate.click()
    expect(tab.page.get_by_role("article")).to_have_count(2)
    done(tab.page.get_by_role("article").last)
    first, second, again = server.chats()
    assert second == again and len(first["messages"]) == 1
    done(tab.ask("third"))
    assert [message["content"] for message in server.chats()[-1]["messages"]] == [
        "first",
        STORY_TEXT,
        "second",
        STORY_TEXT,
        "third",
    ]


def test_the_keyboard_is_enough(chat: Any, server: PageServer) -> None:
    tab = chat()
    keys = tab.page.keyboard
    assert tab.page.evaluate("document.activeElement.id") == "prompt"
    keys.type("one")
    keys.press("Shift+Enter")
    keys.type("two")
    keys.press("Enter")
    done(tab.page.get_by_role("article", name="Answer"))
    assert server.chats()[0]["messages"][0]["content"] == "one\ntwo"
    assert tab.page.evaluate("document.activeElement.id") == "prompt"
    reached = set()
    for _ in range(18):
        keys.press("Tab")
        name, outlined = tab.page.evaluate(FOCUS)
        assert name == "BODY" or outlined, name
        reached.add(name)
    assert {"send", "colours", "clear", "mode", "SUMMARY", "prompt", "api"} <= reached
    tab.page.get_by_role("radio", name="Chat").focus()
    keys.press("ArrowRight")
    expect(tab.page.get_by_role("button", name="Compare")).to_be_visible()
    tab.page.get_by_label("Message").focus()
    keys.type("slow")
    keys.press("Enter")
    expect(tab.page.get_by_role("article").first).to_contain_text("on and on")
    keys.press("Escape")
    expect(tab.page.get_by_text("Stopped.")).to_be_visible()


def test_stop_hangs_up_and_keeps_the_text(chat: Any, server: PageServer) -> None:
    tab = chat()
    reply = tab.ask("slow")
    expect(reply).to_contain_text("on and on and")
    stop = tab.page.get_by_role("button", name="Stop")
    stop.click()
    expect(reply).to_contain_text("Stopped.")
    expect(stop).to_be_hidden()
    assert server.left.wait(30)
    done(tab.ask("and now?"))
    assert server.chats()[-1]["messages"][1]["content"].startswith(" on and")


def test_errors_are_shown_and_can_be_retried(chat: Any, server: PageServer) -> None:
    tab = chat()
    for prompt, words in ERRORS.items():
        server.lenient = False
        tab.ask(prompt)
        expect(tab.page.get_by_role("alert")).to_have_text(words)
        server.lenient = True
        tab.page.get_by_role("button", name="Try again").click()
        expect(tab.page.get_by_role("alert")).to_have_count(0)
        done(tab.page.get_by_role("article").last)
        first, again = server.chats()[-2:]
        assert first["messages"] == again["messages"]
    tab.page.route("**/v1/chat/completions", lambda route: route.abort())
    tab.ask("hello?")
    expect(tab.page.get_by_role("alert")).to_have_text("The server cannot be reached. Is it still running?")
    tab.errors[:] = [error for error in tab.errors if "429" not in error and "net::ERR_FAILED" not in error]


def test_the_key_is_kept_for_the_tab_only(chat: Any, server: PageServer) -> None:
    tab = chat()
    tab.settings()
    tab.page.get_by_label("API key").fill("sk-secret")
    done(tab.ask("hello"))
    assert [each["auth"] for each in server.asked] == [None, "Bearer sk-secret", "Bearer sk-secret"]
    tab.page.reload()
    assert tab.page.get_by_label("API key").input_value() == "sk-secret"
    stored = tab.page.evaluate("[JSON.stringify(localStorage), sessionStorage.length, document.cookie]")
    assert "sk-secret" not in stored[0] and stored[1:] == [1, ""]


def test_side_by_side(chat: Any, server: PageServer) -> None:
    tab = chat()
    verdict = tab.compare("How many loaves?")
    assert [chat["speculate"] for chat in server.chats()] == ["off", "auto"]
    off, on = tab.page.get_by_role("article").all()
    assert text_of(off) == text_of(on) == STORY_TEXT
    assert off.locator(".drafted").count() == 0 and on.locator(".drafted").count() > 0
    expect(off).to_contain_text("1.00 tokens per round")
    few = f"{STORY_TOKENS} tokens are too few for a verdict"
    expect(verdict).to_contain_text(re.compile(f"Speed-up of decoding–({few}|{BUSY})"))  # by the clock
    expect(verdict).to_contain_text("Identical")
    expect(verdict).to_contain_text("57% of drafts kept")
    assert verdict.locator("rect").count() == len(HISTOGRAM)
    bars = verdict.get_by_role(
        "img", name="Rounds by drafts kept: 0 kept in 3, 1 kept in 5, 2 kept in 8, 3 kept in 12, 4 kept in 4"
    )
    expect(bars).to_be_visible()


def test_side_by_side_tells_where_texts_differ(chat: Any, server: PageServer) -> None:
    tab = chat()
    tab.settings()
    tab.page.get_by_label("Temperature").fill("1")
    tab.page.get_by_role("radio", name="Side by side").check()
    tab.page.get_by_label("Run both at once").check()
    verdict = tab.compare("differ")
    expect(verdict).to_contain_text("From character 21 on. Sampled answers")
    seeds = {chat["seed"] for chat in server.chats()}
    assert len(seeds) == 1
    expect(verdict).to_contain_text(f"Seed {seeds.pop()} for both.")


@pytest.mark.nightly
def test_it_fits_and_is_photographed(chat: Any) -> None:
    shots = os.environ.get("PACELINE_SCREENSHOTS")
    tab = chat()

    def shoot(what: str, *schemes: str) -> None:
        for name, size in (("wide", WIDE), ("narrow", NARROW)):
            tab.page.set_viewport_size(size)
            assert tab.fits(), (what, name)
            for scheme in schemes if shots else ():
                tab.page.emulate_media(color_scheme=scheme)
                tab.page.evaluate(
                    "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
                )  # scrolled and painted
                tab.page.screenshot(path=f"{shots}/page-{what}-{name}-{scheme}.png")

    shoot("welcome", "light")
    tab.settings()
    shoot("settings", "dark")
    tab.settings()
    reply = tab.ask(
        "How many loaves does a baker sell in a day who sells 24 in the morning and half as many in the afternoon?"
    )
    done(reply)
    reply.get_by_text("Where the time went").click()
    done(tab.ask("markdown"))
    shoot("markdown", "dark", "light")
    done(tab.ask("x" * 200))
    tab.ask("break")
    expect(tab.page.get_by_role("alert")).to_be_visible()
    shoot("chat", "dark", "light")
    tab.compare("How many loaves?")
    shoot("compare", "light", "dark")
