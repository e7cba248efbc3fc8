"""The page at `/` in a tab of headless Chromium, against a server of canned answers, for its tests:
`pytest_plugins = ("chat_visit",)`, fixture `chat`.

Skips without playwright or a Chromium (PACELINE_CHROMIUM, or chromium, chromium-browser or google-chrome in PATH).
After every test: no error in the page's console, no request to another origin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser_tabs import Tabs, running_browser
from loopback import running
from page_server import PageServer

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[dev]")
expect = api.expect
expect.set_options(timeout=30_000)
"""A Chromium whose pages were put out of memory takes its time to answer; nothing here waits that long otherwise."""
WIDE, NARROW = {"width": 1280, "height": 860}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def tabs() -> Iterator[Tabs]:
    with running_browser() as browser:
        yield Tabs(browser)


@pytest.fixture
def server() -> Iterator[PageServer]:
    with running(PageServer()) as server:
        yield server


class Visit:
    """One visitor's tab, with what the page wrote to its console and whom it called."""

    def __init__(self, tabs: Tabs, server: PageServer, **options: Any) -> None:
        self.tab = tabs.take(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
        self.page, self.errors, self.urls = self.tab.page, self.tab.errors, self.tab.urls
        self.server = server
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
def chat(tabs: Tabs, server: PageServer) -> Iterator[Any]:
    visits: list[Visit] = []

    def start(**options: Any) -> Visit:
        visits.append(Visit(tabs, server, **options))
        return visits[-1]

    yield start
    for each in visits:
        assert all(url.startswith((server.url, "data:")) for url in each.urls)
        assert [error for error in each.errors if error.startswith("error")] == []
        tabs.give_back(each.tab)


def done(reply: Any) -> None:
    expect(reply).not_to_have_attribute("aria-busy", "true")
    expect(reply).to_contain_text("tokens/s")


def text_of(reply: Any) -> str:
    """The text as a reader sees it: paragraphs separated by empty lines."""
    return reply.locator(".answer").inner_text()


def clipboard(tab: Any) -> str:
    return tab.page.evaluate("navigator.clipboard.readText()")
