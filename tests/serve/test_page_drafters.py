"""The chat page: a drafter is chosen, a reload keeps the conversation, speed-ups that cannot be are not shown, words
explained; what it makes of an answer's markup: fences, markdown, and text that would do harm.

Also the header that names a drafter, in the server. In Chromium where there is one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from chat_visit import NARROW, Visit, clipboard, done, expect, text_of
from live_server import serving
from page_server import HOSTILE, LOADING, MARKDOWN, MARKUP, STORY_TEXT, STORY_TOKENS, PageServer
from small_llm import tiny_model

from paceline.engine.llm import LLM
from paceline.plan.routes import Router
from paceline.report.statistics import BUSY, FEWEST_TOKENS, doubt
from paceline.serve.http.failures import RequestRefused
from paceline.serve.requests.routing import chosen_route
from paceline.types import Route

pytest_plugins = ("chat_visit",)
FACTORS = [(2.0, 3.0, 200), (3.004, 3.0, 200), (3.006, 3.0, 200), (1.27, 1.04, 200), (9.37, 3.0, 4), (1.0, None, 99)]
"""Factor, acceptance length and tokens."""
GUARD = """async (cases) => {
    const { doubt } = await import("./page/speedup.js");
    return cases.map((each) => doubt(...each));
}"""
BOX = "(element) => { const box = element.getBoundingClientRect(); return [box.top, box.bottom, box.left, box.right]; }"


def test_a_header_names_a_drafter_that_is_there() -> None:
    names = ("general", "words")
    assert chosen_route("words", names) == Route("words")
    assert chosen_route("none", names) == Route("none")
    with pytest.raises(RequestRefused, match="names one of general, words, none"):
        chosen_route("wrods", names)


@pytest.mark.slow
def test_a_request_gets_the_drafter_that_its_header_names(tmp_path: Path) -> None:
    drafters, sizes = {"first": "ngram", "words": "ngram"}, {"max_batch": 2, "max_len": 128}
    folder = str(tiny_model(tmp_path / "model"))

    def pool() -> LLM:
        return LLM(folder, drafters=drafters, dtype="float32", device="cpu", router=Router(), **sizes)

    body = {"messages": [{"role": "user", "content": "one two one two"}], "max_tokens": 8, "return_metrics": True}
    with serving(pool) as live:
        (model,) = live.request("GET", "/v1/models")[1]["data"]
        assert model["drafters"] == ["first", "words"]
        for name in ("words", "first", "none"):
            status, answer, _ = live.post("/v1/chat/completions", body, {"X-Paceline-Drafter": name})
            assert status == 200 and answer["metrics"]["speculative_decoding"]["drafter"] == name
        status, answer, _ = live.post("/v1/chat/completions", body, {"X-Paceline-Drafter": "third"})
        assert status == 400 and answer["error"]["code"] == "drafter_not_found"


@pytest.mark.slow
def test_a_drafter_is_chosen_where_several_are_loaded(chat: Any, server: PageServer) -> None:
    server.told = {"drafter": "mine, default", "drafters": ["mine", "default"]}
    tab: Visit = chat()
    done(tab.ask("first"))
    tab.settings()
    tab.page.get_by_label("Drafter").select_option("mine")
    done(tab.ask("second"))
    assert [each["drafter"] for each in server.chats()] == [None, "mine"]
    server.told = {}
    tab.page.reload()
    expect(tab.page.locator("#whose-field")).to_be_hidden()


@pytest.mark.slow
def test_a_page_opened_while_the_model_loads_gets_its_drafters(chat: Any, server: PageServer) -> None:
    tab: Visit = chat()
    server.told, server.num_loading = {"drafter": "mine, default", "drafters": ["mine", "default"]}, 1
    tab.page.reload()
    expect(tab.page.locator("#server")).to_contain_text(LOADING)
    expect(tab.page.locator("#drafter")).to_have_text("drafters mine, default")
    tab.errors[:] = [error for error in tab.errors if "503" not in error]


@pytest.mark.slow
def test_a_reload_keeps_the_conversation_until_it_is_cleared(chat: Any, server: PageServer) -> None:
    tab: Visit = chat()
    done(tab.ask("first"))
    reply = tab.ask("long")
    done(reply)
    shown = [text_of(reply), reply.locator(".stats").inner_text(), reply.locator(".drafted").count()]
    speed = tab.page.locator("#speed").inner_text()
    tab.page.reload()
    expect(tab.page.get_by_role("article")).to_have_count(2)
    again = tab.page.get_by_role("article").last
    assert [text_of(again), again.locator(".stats").inner_text(), again.locator(".drafted").count()] == shown
    assert tab.page.locator("#speed").inner_text() == speed
    expect(tab.page.get_by_role("heading", name="Guessed ahead")).to_be_hidden()
    tab.page.get_by_role("button", name="Regenerate").click()
    expect(tab.page.get_by_role("article")).to_have_count(2)
    done(tab.page.get_by_role("article").last)
    assert [message["content"] for message in server.chats()[-1]["messages"]] == ["first", STORY_TEXT, "long"]
    tab.page.get_by_role("button", name="Clear chat").click()
    assert tab.page.evaluate("localStorage.length") == 0
    tab.page.evaluate("localStorage.setItem('paceline-conversation', '{not JSON')")
    tab.page.reload()
    expect(tab.page.get_by_role("heading", name="Guessed ahead")).to_be_visible()
    assert tab.page.evaluate("localStorage.length") == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_no_speed_up_that_cannot_be_and_none_of_few_tokens(chat: Any) -> None:
    tab: Visit = chat()
    assert tab.page.evaluate(GUARD, FACTORS) == [doubt(*each) or "" for each in FACTORS]
    speed = tab.page.get_by_label("Speed-up over plain decoding")
    few = f"{STORY_TOKENS} tokens are too few for a verdict: time at least {FEWEST_TOKENS}"
    for prompt, word, why in (("few", "speed-up not told", few), ("busy", "machine busy", BUSY)):
        reply = tab.ask(prompt)
        done(reply)
        expect(speed).to_be_hidden()
        expect(reply.locator(".stats")).not_to_contain_text("×")
        term = reply.get_by_role("button", name=word)
        assert term.get_attribute("aria-description") == f"{why}."
    reply = tab.ask("long")
    done(reply)
    word = reply.locator(".stats").get_by_role("button", name="estimated")
    explained = "(element) => getComputedStyle(element, '::after').content"
    assert word.evaluate(explained) == "none"
    word.hover()
    assert "Not measured against a second run" in word.evaluate(explained)
    tab.page.mouse.move(0, 0)
    assert word.evaluate(explained) == "none"
    word.focus()
    tab.page.keyboard.press("Shift+Tab")
    tab.page.keyboard.press("Tab")
    assert "Plain decoding takes a round for each" in word.evaluate(explained)


@pytest.mark.slow
def test_settings_push_nothing_down_and_a_phones_header_has_two_rows(chat: Any) -> None:
    tab: Visit = chat(viewport=NARROW)
    examples = tab.page.locator("#examples")
    before = examples.evaluate(BOX)
    tab.settings()
    expect(tab.page.locator("#fields")).to_be_visible()
    assert examples.evaluate(BOX) == before and tab.fits()
    tab.page.keyboard.press("Escape")
    expect(tab.page.locator("#fields")).to_be_hidden()
    reply = tab.ask("long")
    done(reply)
    expect(tab.page.locator("#speed")).to_be_visible()
    tops = tab.page.locator("header > :is(h1, #speed, .modes, #api, details)").evaluate_all(
        "(all) => all.map((each) => { const box = each.getBoundingClientRect(); return (box.top + box.bottom) / 2; })"
    )
    assert len({round(top / 20) for top in tops}) <= 2, tops
    reply.get_by_text("Where the time went").click()
    expect(reply.get_by_role("row", name="Connection and page")).to_be_in_viewport()
    last = reply.locator(".more").evaluate(BOX)[1]
    tab.page.wait_for_function(
        "(top) => document.querySelector('footer').getBoundingClientRect().top >= top - 1", arg=last
    )
    assert tab.fits() and re.match(r"\d+\.\d\d×", tab.page.locator("#speed").inner_text())


# Markup: fences, markdown, and text that would do harm


@pytest.mark.slow
def test_a_fenced_block_stands_apart(chat: Any) -> None:
    tab = chat(permissions=("clipboard-read", "clipboard-write"))
    reply = tab.ask("code")
    done(reply)
    assert reply.locator("pre").all_text_contents() == ["def twice(x):\n    return 2 * x"]
    assert reply.locator(".language").all_text_contents() == ["python"]
    assert reply.locator("pre .drafted").all_text_contents() == ["def", "(x):", "    return"]
    expect(reply.get_by_text("Call it.")).to_be_visible()
    reply.get_by_role("button", name="Copy code").click()
    expect(reply.get_by_text("Copied")).to_be_visible()
    assert clipboard(tab) == "def twice(x):\n    return 2 * x"


@pytest.mark.slow
def test_a_fence_that_is_still_open(chat: Any, server: PageServer) -> None:
    server.second_half.clear()
    tab = chat()
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
    assert (
        tab.page.evaluate("document.activeElement.getAttribute('aria-label')") == "Copy code"
    )  # the same button all along


@pytest.mark.slow
def test_markdown_is_shown_whole(chat: Any) -> None:
    tab = chat(permissions=("clipboard-read", "clipboard-write"))
    reply = tab.ask("markdown")
    done(reply)
    answer = reply.locator(".answer")
    for element, texts in {
        "h3": ["Palindromes"], "strong": ["palindrome"], "em": ["reads"], "del": ["twice"],
        ":not(pre) > code": ["level", "True"],
        "ul > li": ["until one letter is left", "☑ or none"], "ol > li > .code pre": ["word[0] == word[-1]"],
        "blockquote": ["Case matters.\nSo do spaces."], "th": ["word", "answer"],
        "td": ["level", "True", "lever", "False"],
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


@pytest.mark.slow
def test_hostile_markdown_does_nothing(chat: Any) -> None:
    tab = chat()
    reply = tab.ask("hostile")
    done(reply)
    answer = reply.locator(".answer")
    assert tab.page.title() == "paceline"
    assert answer.locator("img, script, style, iframe, svg, object").count() == 0
    schemes = answer.locator("[href], [src]").evaluate_all(
        "all => all.map(each => [each.tagName, each.protocol, each.host])"
    )
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


@pytest.mark.slow
def test_markup_stays_text(chat: Any, server: PageServer) -> None:
    server.models = ["smol-135m", "<b>other</b>"]
    tab = chat()
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
