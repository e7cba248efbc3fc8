"""The calculator page in a tab of headless Chromium, for its tests: `pytest_plugins = ("calculator_visit",)`, fixture `visit`.

Skips without playwright or a Chromium (PACELINE_CHROMIUM, or chromium, chromium-browser or google-chrome in PATH).
After every test: no error in the page's console, no request but for the page itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from javascript import chromium

from paceline.simulate.calculator import page

WIDE = {"width": 1360, "height": 900}
PATIENCE_MS = 120_000
SHOWN = """() => [...document.querySelectorAll('data, output, .where, #sensitivity, .plot')]
    .map((each) => each.getAttribute('aria-label') ?? each.value ?? each.textContent).join('|')"""


class Visit:
    """One tab, with what it wrote to its console and whom it called."""

    def __init__(self, browser: Any, file: Path, link: str = "", **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": WIDE, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.errors: list[str] = []
        self.urls: list[str] = []
        self.page.on("console", lambda told: self.errors.append(told.text) if told.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.goto(file.as_uri() + link)

    def figure(self, name: str) -> float:
        return float(self.page.locator(f"#{name}").get_attribute("value"))

    def code(self, name: str) -> str:
        return self.page.locator(f"#{name}").text_content()

    def shown(self) -> str:
        return self.page.evaluate(SHOWN)

    def unfold(self, control: Any) -> Any:
        if not control.is_visible():
            self.page.locator("summary", has_text="Precision").click()
        return control

    def set(self, name: str, value: Any) -> None:
        """As a person would."""
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


@pytest.fixture(scope="module")
def calculator_browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[dev]")
    api.expect.set_options(timeout=PATIENCE_MS)
    path = chromium()
    if path is None:
        pytest.skip("no Chromium in PATH, and PACELINE_CHROMIUM is not set")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def calculator_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "calculator.html"
    file.write_text(page(), encoding="utf-8")
    return file


@pytest.fixture
def visit(calculator_browser: Any, calculator_file: Path) -> Iterator[Any]:
    visits: list[Visit] = []

    def start(link: str = "", **options: Any) -> Visit:
        visits.append(Visit(calculator_browser, calculator_file, link, **options))
        return visits[-1]

    yield start
    for each in visits:
        each.context.close()
        assert {url.partition("#")[0] for url in each.urls if not url.startswith("data:")} == {calculator_file.as_uri()}
        assert each.errors == []
