"""What the page at `/` makes of an answer's markup: fences, markdown, and text that would do harm.

Skips without playwright or a Chromium; chat_visit.py says what is checked after every test.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from chat_visit import clipboard, done, expect, text_of
from page_server import HOSTILE, MARKDOWN, MARKUP, PageServer

pytestmark = pytest.mark.slow

pytest_plugins = ("chat_visit",)


def test_a_fenced_block_stands_apart(chat: Any) -> None:
    tab = chat(permissions=["clipboard-read", "clipboard-write"])
    reply = tab.ask("code")
    done(reply)
    assert reply.locator("pre").all_text_contents() == ["def twice(x):\n    return 2 * x"]
    assert reply.locator(".language").all_text_contents() == ["python"]
    assert reply.locator("pre .drafted").all_text_contents() == ["def", "(x):", "    return"]
    expect(reply.get_by_text("Call it.")).to_be_visible()
    reply.get_by_role("button", name="Copy code").click()
    expect(reply.get_by_text("Copied")).to_be_visible()
    assert clipboard(tab) == "def twice(x):\n    return 2 * x"


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
    assert tab.page.evaluate("document.activeElement.getAttribute('aria-label')") == "Copy code"  # the same button all along


def test_markdown_is_shown_whole(chat: Any) -> None:
    tab = chat(permissions=["clipboard-read", "clipboard-write"])
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


def test_hostile_markdown_does_nothing(chat: Any) -> None:
    tab = chat()
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
