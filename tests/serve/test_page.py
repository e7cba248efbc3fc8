"""The page at `/` in headless Chromium, against a server of canned answers.

    PACELINE_SCREENSHOTS=shots pytest tests/serve/test_page.py

Skips without playwright or a Chromium (PACELINE_CHROMIUM, or chromium, chromium-browser or google-chrome in PATH).
After every test: no error in the page's console, no request to another origin.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_server import HISTOGRAM, HOSTILE, MARKDOWN, MARKUP, PAGE, STORY, STORY_TEXT, STORY_TOKENS, PageServer

from paceline.serve.app import PAGES

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[dev]")
expect = api.expect
expect.set_options(timeout=30_000)
"""A Chromium whose pages were put out of memory takes its time to answer; nothing here waits that long otherwise."""
NAMES = ("chromium", "chromium-browser", "google-chrome")
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
WIDE, NARROW = {"width": 1280, "height": 860}, {"width": 390, "height": 844}


def chromium() -> str | None:
    return os.environ.get("PACELINE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    if path is None:
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} in PATH, and PACELINE_CHROMIUM is not set")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Visit:
    """One visitor's tab, with what the page wrote to its console and whom it called."""

    def __init__(self, browser: Any, server: PageServer, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
        self.page = self.context.new_page()
        self.server = server
        self.errors: list[str] = []
        self.urls: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.goto(server.url)
        expect(self.page.get_by_text("smol-135m").first).to_be_attached()

    def ask(self, prompt: str) -> Any:
        """Sends `prompt`; the article that its answer grows in."""
        self.page.get_by_label("Message").fill(prompt)
        self.page.get_by_label("Message").press("Enter")
        return self.page.get_by_role("article", name="Answer").last

    def compare(self, prompt: str) -> Any:
        """Runs `prompt` side by side; the verdict, once both are done."""
        self.page.get_by_role("radio", name="Side by side").check()
        self.ask(prompt)
        verdict = self.page.locator("#verdict")
        expect(verdict).to_be_visible()
        return verdict

    def settings(self) -> None:
        self.page.get_by_text("Settings", exact=True).click()

    def fits(self) -> bool:
        return self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.fixture
def visit(browser: Any, server: PageServer) -> Iterator[Any]:
    visits: list[Visit] = []

    def start(**options: Any) -> Visit:
        visits.append(Visit(browser, server, **options))
        return visits[-1]

    yield start
    for each in visits:
        each.context.close()
        assert all(url.startswith((server.url, "data:")) for url in each.urls)
        assert each.errors == []


def done(reply: Any) -> None:
    expect(reply).not_to_have_attribute("aria-busy", "true")
    expect(reply).to_contain_text("tokens/s")


def text_of(reply: Any) -> str:
    """As it is read: paragraphs with an empty line between them."""
    return reply.locator(".answer").inner_text()


def clipboard(tab: Any) -> str:
    return tab.page.evaluate("navigator.clipboard.readText()")


def test_the_policy_lets_only_the_pages_own_files_in(server: PageServer, visit: Any) -> None:
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
    tab = visit()
    answer = tab.page.request.get(server.url)
    assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_vendored_file_is_that_of_the_package_and_brings_its_licence() -> None:
    folder = PAGE.parent / "vendor"
    notes = (folder / "README.md").read_text()
    version = re.search(r"marked (\d+\.\d+\.\d+)", notes)
    assert version and f"marked v{version[1]} " in (folder / "marked.esm.js").read_text()[:100]
    for digest, name in (found := re.findall(r"([0-9a-f]{64})  (\S+)", notes)):
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert len(found) == 2 and PAGES["/page/vendor/marked.LICENSE"].read_text().count("Permission is hereby granted")


def test_an_answer_streams_and_its_tokens_are_coloured(visit: Any, server: PageServer) -> None:
    server.second_half.clear()
    tab = visit()
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


def test_the_request_carries_the_settings_and_the_conversation(visit: Any, server: PageServer) -> None:
    tab = visit()
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
    tab.page.get_by_label("Temperature").fill("9")
    tab.page.get_by_label("Message").fill("third")
    tab.page.get_by_label("Message").press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "temperature"
    assert len(server.chats()) == 2
    tab.page.get_by_role("button", name="Clear").click()
    expect(tab.page.get_by_role("article")).to_have_count(0)
    expect(tab.page.get_by_role("heading", name="Guessed ahead")).to_be_visible()


def test_counts_are_shown_as_shares(visit: Any) -> None:
    tab = visit()
    reply = tab.ask("counts")
    done(reply)
    assert text_of(reply) == STORY_TEXT
    shares = reply.locator(".chunk").evaluate_all("all => all.map(each => each.style.getPropertyValue('--share'))")
    assert [float(share) for share in shares[:3]] == [0, 2 / 3, 0.8]
    expect(tab.page.get_by_text("drafted share of a chunk")).to_be_visible()
    expect(reply).to_contain_text(f"{PER_ROUND:.2f} tokens per round")


def test_text_that_comes_later_than_its_tokens(visit: Any) -> None:
    tab = visit()
    reply = tab.ask("held")
    done(reply)
    assert text_of(reply) == "Café au lait."
    assert reply.locator(".drafted").all_text_contents() == ["é", "lait", "."]
    assert reply.locator(".own").all_text_contents() == ["Caf", " a", "u"]
    expect(tab.page.locator("#shares")).to_be_hidden()


def test_a_fenced_block_stands_apart(visit: Any) -> None:
    tab = visit(permissions=["clipboard-read", "clipboard-write"])
    reply = tab.ask("code")
    done(reply)
    assert reply.locator("pre").all_text_contents() == ["def twice(x):\n    return 2 * x"]
    assert reply.locator(".language").all_text_contents() == ["python"]
    assert reply.locator("pre .drafted").all_text_contents() == ["def", "(x):", "    return"]
    expect(reply.get_by_text("Call it.")).to_be_visible()
    reply.get_by_role("button", name="Copy code").click()
    expect(reply.get_by_text("Copied")).to_be_visible()
    assert clipboard(tab) == "def twice(x):\n    return 2 * x"


def test_a_fence_that_is_still_open(visit: Any, server: PageServer) -> None:
    server.second_half.clear()
    tab = visit()
    reply = tab.ask("open")
    expect(reply.locator("pre")).to_have_text("x = ")
    assert reply.locator(".language").all_text_contents() == ["python"]
    assert "`" not in text_of(reply)
    reply.get_by_role("button", name="Copy code").focus()
    server.second_half.set()
    done(reply)
    expect(reply.locator("pre")).to_have_text("x = 24")
    expect(reply.get_by_text("After.")).to_be_visible()
    assert "`" not in text_of(reply)
    assert tab.page.evaluate("document.activeElement.getAttribute('aria-label')") == "Copy code"  # the same button all along


def test_markdown_is_shown_whole(visit: Any) -> None:
    tab = visit(permissions=["clipboard-read", "clipboard-write"])
    reply = tab.ask("markdown")
    done(reply)
    answer = reply.locator(".answer")
    for element, texts in {
        "h3": ["Palindromes"], "strong": ["palindrome"], "em": ["reads"], "del": ["twice"],
        ":not(pre) > code": ["level", "True"],
        "ul > li": ["until one letter is left", "☑ or none"], "ol > li > .code pre": ["word[0] == word[-1]"],
        "blockquote": ["Case matters.\nSo do spaces."], "th": ["word", "answer"], "td": ["level", "True", "lever", "False"],
        ".language": ["python", "js"], "a": ["the page", "https://example.org/c"],
    }.items():  # fmt: skip
        assert answer.locator(element).all_text_contents() == texts, element
    assert answer.locator("hr").count() == 1 and answer.locator("ol > li").count() == 2
    assert answer.locator("a").first.get_attribute("href") == "https://example.org/a?b=1"
    assert answer.locator("a").first.get_attribute("rel") == "noopener noreferrer nofollow"
    assert answer.locator("td").nth(1).evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    assert "3 < 4." in text_of(reply)
    shown = answer.evaluate("element => element.textContent")
    coloured = "".join(answer.locator(".drafted, .own").all_text_contents())
    assert len(coloured) > 0.9 * len(re.sub(r"\s", "", shown)), "most of the text kept the colours of its tokens"
    reply.get_by_role("button", name="Copy answer").click()
    expect(reply.get_by_text("Copied")).to_be_visible()
    assert clipboard(tab) == MARKDOWN


def test_hostile_markdown_does_nothing(visit: Any) -> None:
    tab = visit()
    reply = tab.ask("hostile")
    done(reply)
    answer = reply.locator(".answer")
    assert tab.page.title() == "paceline"
    assert answer.locator("img, script, style, iframe, svg, object").count() == 0
    schemes = answer.locator("[href], [src]").evaluate_all("all => all.map(each => [each.tagName, each.protocol, each.host])")
    assert schemes and all(each == ["A", "https:", "evil.example"] for each in schemes)
    names = answer.locator("*").evaluate_all("all => [...new Set(all.flatMap(each => each.getAttributeNames()))]")
    assert set(names) <= {"class", "href", "title", "target", "rel", "tabindex", "type", "aria-label", "scope", "style"}
    assert answer.locator("a").all_text_contents()[0] == "image: seven"
    for text in (
        "[two](JaVaScRiPt:alert(1))",
        "[five](/v1/models)",
        "<iframe src=",
        "document.title = 'taken'",
        "<svg onload=alert(1)>",
    ):
        assert text in text_of(reply)
    before = len(tab.urls)
    answer.get_by_text("eight").click()
    assert len(tab.urls) == before and tab.page.title() == "paceline"
    assert HOSTILE.startswith("[one]")
    deep = tab.ask("deep")
    done(deep)
    assert text_of(deep) == ">" * 20000 + "x"


def test_which_drafter_of_a_pool_answered(visit: Any) -> None:
    reply = visit().ask("pool")
    done(reply)
    expect(reply.locator(".by")).to_have_text("smol-135m, drafter words, rounds drafted: dflash 27, ngram 2")


def test_the_factor_over_plain_decoding(visit: Any, server: PageServer) -> None:
    tab = visit()
    speed = tab.page.get_by_label("Speed-up over plain decoding")
    expect(speed).to_be_hidden()
    reply = tab.ask("How many loaves?")
    done(reply)
    factor = (STORY_TOKENS - 1) * 0.05 / 5 / 0.134
    expect(speed).to_have_text(f"{factor:.2f}× the speed of plain decoding, estimated")
    expect(reply.locator(".stats li").first).to_have_text(f"{factor:.2f}× plain decoding, estimated")
    expect(reply.locator(".by")).to_have_text("smol-135m, rounds drafted: dflash 27, ngram 2")
    expect(tab.page.locator("#drafter")).to_have_text("drafter dflash")
    reply.get_by_text("Where the time went").click()
    expect(reply).to_contain_text("the mean of 5 rounds without drafts in this answer")
    reply.get_by_role("button", name="Measure speed-up").click()
    expect(speed).to_have_text(re.compile(r"^\d+\.\d\d× the speed of plain decoding, measured$"))
    expect(reply).to_contain_text(
        re.compile(r"Measured: [\d.]+ tokens/s with plain decoding, [\d.]+ with speculation. Both gave")
    )
    first, plain = server.chats()
    assert plain == first | {"speculate": "off"}
    assert tab.page.get_by_role("article").count() == 1
    tab.settings()
    tab.page.get_by_label("Speculation").select_option("off")
    off = tab.ask("And plainly?")
    done(off)
    expect(off.locator(".by")).to_have_text("smol-135m, plain decoding")
    expect(off).not_to_contain_text("×")
    expect(speed).to_be_hidden()
    expect(off.get_by_role("button", name="Measure speed-up")).to_have_count(0)


def test_an_answer_is_made_anew(visit: Any, server: PageServer) -> None:
    tab = visit()
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


def test_the_keyboard_is_enough(visit: Any, server: PageServer) -> None:
    tab = visit()
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


def test_stop_hangs_up_and_keeps_the_text(visit: Any, server: PageServer) -> None:
    tab = visit()
    reply = tab.ask("slow")
    expect(reply).to_contain_text("on and on and")
    stop = tab.page.get_by_role("button", name="Stop")
    stop.click()
    expect(reply).to_contain_text("Stopped.")
    expect(stop).to_be_hidden()
    assert server.left.wait(30)
    done(tab.ask("and now?"))
    assert server.chats()[-1]["messages"][1]["content"].startswith(" on and")


def test_errors_are_shown_and_can_be_retried(visit: Any, server: PageServer) -> None:
    tab = visit()
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


def test_markup_stays_text(visit: Any, server: PageServer) -> None:
    server.models = ["smol-135m", "<b>other</b>"]
    tab = visit()
    reply = tab.ask("markup")
    done(reply)
    assert text_of(reply) == (MARKUP * 2).replace("&amp;", "&")
    assert tab.page.title() == "paceline"
    assert tab.page.locator("#chat :is(img, script, b:not(.stats b))").count() == 0
    assert tab.page.get_by_label("Model").locator("option").all_text_contents() == server.models
    tab.page.get_by_label("Message").fill(MARKUP)
    tab.page.get_by_role("button", name="Send").click()
    expect(tab.page.locator(".asked").last).to_have_text(MARKUP)
    refused = "(() => { try { document.body.innerHTML = '<b>'; return ''; } catch (error) { return error.name; } })()"
    assert tab.page.evaluate(refused) == "TypeError"
    tab.errors[:] = [error for error in tab.errors if "Trusted" not in error]


def test_the_key_is_kept_for_the_tab_only(visit: Any, server: PageServer) -> None:
    tab = visit()
    tab.settings()
    tab.page.get_by_label("API key").fill("sk-secret")
    done(tab.ask("hello"))
    assert [each["auth"] for each in server.asked] == [None, "Bearer sk-secret", "Bearer sk-secret"]
    tab.page.reload()
    assert tab.page.get_by_label("API key").input_value() == "sk-secret"
    assert tab.page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 1, ""]


def test_side_by_side(visit: Any, server: PageServer) -> None:
    tab = visit()
    verdict = tab.compare("How many loaves?")
    assert [chat["speculate"] for chat in server.chats()] == ["off", "auto"]
    off, on = tab.page.get_by_role("article").all()
    assert text_of(off) == text_of(on) == STORY_TEXT
    assert off.locator(".drafted").count() == 0 and on.locator(".drafted").count() > 0
    expect(off).to_contain_text("1.00 tokens per round")
    expect(verdict).to_contain_text(re.compile(r"Speed-up of decoding\s*\d+\.\d\d×"))
    expect(verdict).to_contain_text("Identical")
    expect(verdict).to_contain_text("57% of drafts kept")
    assert verdict.locator("rect").count() == len(HISTOGRAM)
    bars = verdict.get_by_role(
        "img", name="Rounds by drafts kept: 0 kept in 3, 1 kept in 5, 2 kept in 8, 3 kept in 12, 4 kept in 4"
    )
    expect(bars).to_be_visible()


def test_side_by_side_tells_where_texts_differ(visit: Any, server: PageServer) -> None:
    tab = visit()
    tab.settings()
    tab.page.get_by_label("Temperature").fill("1")
    tab.page.get_by_role("radio", name="Side by side").check()
    tab.page.get_by_label("Run both at once").check()
    verdict = tab.compare("differ")
    expect(verdict).to_contain_text("From character 21 on. Sampled answers")
    seeds = {chat["seed"] for chat in server.chats()}
    assert len(seeds) == 1
    expect(verdict).to_contain_text(f"Seed {seeds.pop()} for both.")


@pytest.mark.parametrize(("name", "size"), [("wide", WIDE), ("narrow", NARROW)])
def test_it_fits_and_is_photographed(visit: Any, tmp_path: Path, name: str, size: Any) -> None:
    shots = Path(os.environ.get("PACELINE_SCREENSHOTS") or tmp_path)
    shots.mkdir(parents=True, exist_ok=True)
    tab = visit(viewport=size)

    def shoot(what: str, *schemes: str) -> None:
        assert tab.fits(), what
        for scheme in schemes:
            tab.page.emulate_media(color_scheme=scheme)
            tab.page.evaluate(
                "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
            )  # scrolled and painted
            tab.page.screenshot(path=shots / f"page-{what}-{name}-{scheme}.png")

    shoot("welcome", "light")
    tab.settings()
    shoot("settings", "dark")
    tab.settings()
    reply = tab.ask("How many loaves does a baker sell in a day who sells 24 in the morning and half as many in the afternoon?")
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
