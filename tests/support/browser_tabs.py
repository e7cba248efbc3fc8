"""Headless Chromium and its tabs, for tests of pages.

A tab costs a second of processor time to open and little to reuse, so `Tabs` keeps those that tests have given back:
emptied, with the pointer and storage of a new one. Window, colour scheme, motion and permissions are set anew for each
test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from javascript import NAMES, chromium

LAUNCH_TIMEOUT_MS = 120_000


@contextlib.contextmanager
def running_browser() -> Iterator[Any]:
    """A headless Chromium; skips the test where there is none, or no playwright."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[dev]")
    path = chromium()
    if path is None:
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} in PATH, and PACELINE_CHROMIUM is not set")
    with api.sync_playwright() as playwright:
        # Debian's script asks for rasterization on a GPU, which is emulated where there is none.
        browser = playwright.chromium.launch(executable_path=path, timeout=LAUNCH_TIMEOUT_MS, args=["--disable-gpu"])
        yield browser
        browser.close()


class Tab:
    """One page in a context of its own, with the errors of its console and the addresses it requested."""

    def __init__(self, browser: Any, script: str) -> None:
        self.context = browser.new_context()
        if script:
            self.context.add_init_script(script)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.urls: list[str] = []
        self.page.on("console", lambda message: self.errors.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.errors.append(f"error: {error}"))
        self.page.on("request", lambda request: self.urls.append(request.url))

    def empty(self) -> None:
        """Make it as a new one, so that nothing of a page goes on in it."""
        self.page.unroute_all()
        self.page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
        self.context.clear_cookies()
        self.page.goto("about:blank")
        self.page.mouse.move(0, 0)


class Tabs:
    """Tabs of one browser; `script` runs in every page before its own."""

    def __init__(self, browser: Any, script: str = "") -> None:
        self._browser, self._script = browser, script
        self._free: list[Tab] = []

    def take(
        self,
        viewport: dict[str, int],
        color_scheme: str = "light",
        reduced_motion: str = "no-preference",
        permissions: tuple[str, ...] = (),
    ) -> Tab:
        """An empty tab with this window and these preferences of its reader."""
        tab = self._free.pop() if self._free else Tab(self._browser, self._script)
        tab.errors.clear()
        tab.urls.clear()
        tab.page.set_viewport_size(viewport)
        tab.page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
        tab.context.clear_permissions()
        if permissions:
            tab.context.grant_permissions(permissions)
        return tab

    def give_back(self, tab: Tab) -> None:
        tab.empty()
        self._free.append(tab)
