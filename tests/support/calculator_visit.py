"""The calculator page in a tab of headless Chromium, for its tests: `pytest_plugins = ("calculator_visit",)`, fixture
`visit`.

Skips without playwright or a Chromium (PACELINE_CHROMIUM, or chromium, chromium-browser or google-chrome in PATH).
After every test: no error in the page's console, no request but for the page itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_tabs import Tabs, running_browser

from paceline.simulate.calculator_page import page

WIDE = {"width": 1360, "height": 900}
PATIENCE_MS = 120_000
FOLLOW = """(link) => new Promise((done) => {
    history.replaceState(null, '', '#');
    addEventListener('hashchange', () => setTimeout(done), { once: true });
    location.hash = link;
})"""
FAST_TIMERS = "{ const later = window.setTimeout; window.setTimeout = (work, ms = 0) => later(work, ms / 10); }"
"""The page's timers, and this file's, in their order and ten times as fast."""
SHOWN = """() => [...document.querySelectorAll('data, output, .where, #sensitivity, .plot')]
    .map((each) => each.getAttribute('aria-label') ?? each.value ?? each.textContent).join('|')"""


class Visit:
    """One tab, with what it wrote to its console and whom it called."""

    def __init__(self, tabs: Tabs, file: Path, link: str = "", **options: Any) -> None:
        self.tab = tabs.take(**{"viewport": WIDE, **options})
        self.page, self.errors, self.urls = self.tab.page, self.tab.errors, self.tab.urls
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.goto(file.as_uri() + link)

    def follow(self, link: str) -> None:
        """Restores the settings of a link, as when it is typed over the page's own; much cheaper than another visit."""
        assert len(link) > 1, "no event comes of an empty one"
        self.page.evaluate(FOLLOW, link.replace(" ", "%20"))

    def figure(self, name: str) -> float:
        return float(self.page.locator(f"#{name}").get_attribute("value"))

    def code(self, name: str) -> str:
        return self.page.locator(f"#{name}").text_content()

    def shown(self) -> str:
        return self.page.evaluate(SHOWN)

    def script(self, body: str, *arguments: Any) -> Any:
        """Returns the result of an async function over `given`, `follow(link)` and `shown()`, in one call to the
        page."""
        return self.page.evaluate(f"async (given) => {{ const follow = {FOLLOW}, shown = {SHOWN}; {body} }}", arguments)

    def unfold(self, control: Any) -> Any:
        if not control.is_visible():
            self.page.locator("summary", has_text="Precision").click()
        return control

    def set(self, name: str, value: Any) -> None:
        """Set a control like a person would."""
        if name == "drafter":
            self.page.locator(f"label:has(#drafter-{value})").click()
            return
        control = self.unfold(self.page.locator(f"#{name}"))
        if control.evaluate("(each) => each.tagName") == "SELECT":
            control.select_option(value)
        elif control.get_attribute("type") == "checkbox":
            control.set_checked(value)
        else:
            control.fill(str(value))

    def fits(self) -> bool:
        return self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    def link(self) -> str:
        """Once it has been written, which the page does 250 ms after a change: its timers come in their order."""
        return self.page.evaluate("() => new Promise((done) => setTimeout(() => done(location.hash), 300))")

    def rest(self) -> None:
        """Wait for the last of the page's timers: it gives a button its words back after 1600 ms."""
        self.page.evaluate("() => new Promise((done) => setTimeout(done, 1700))")


@pytest.fixture(scope="module")
def calculator_tabs() -> Iterator[Tabs]:
    with running_browser() as browser:
        importlib.import_module("playwright.sync_api").expect.set_options(timeout=PATIENCE_MS)
        yield Tabs(browser, FAST_TIMERS)


@pytest.fixture(scope="module")
def calculator_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "calculator.html"
    file.write_text(page(), encoding="utf-8")
    return file


@pytest.fixture
def visit(calculator_tabs: Tabs, calculator_file: Path) -> Iterator[Any]:
    visits: list[Visit] = []

    def start(link: str = "", **options: Any) -> Visit:
        visits.append(Visit(calculator_tabs, calculator_file, link, **options))
        return visits[-1]

    yield start
    for each in visits:
        assert {url.partition("#")[0] for url in each.urls if not url.startswith("data:")} == {calculator_file.as_uri()}
        assert [error for error in each.errors if error.startswith(("error", "warning"))] == []
        calculator_tabs.give_back(each.tab)
