"""Photographs the pages: chat, /docs, calculator, the reports of train and bench decode, and compare.

    python experiments/page_screenshots.py shots --train runs/tiny --bench runs/bench

Each at 1280 and 390 columns, light and dark, into a folder. Ends with an error if a page writes an error or a warning
to its console, or is wider than its window. `--train` and `--bench` are run folders, whose reports are made anew;
without them those pages are left out. Needs playwright and a Chromium (PACELINE_CHROMIUM, or one in PATH).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server_process import server

from paceline.bench.pages.run_page import page as report_page
from paceline.bench.pages.run_page import read_run
from paceline.simulate.calculator import page as calculator_page

SIZES = {1280: 860, 390: 844}
QUESTIONS = ("Write a Python function that says whether a word is a palindrome.", "Now explain it in three sentences.")
ANSWER_MS = 240_000
Visit = Callable[[Any], None]


def chat(page: Any) -> None:
    """A conversation of two questions, with its times open."""
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Max tokens").fill("160")
    for number, question in enumerate(QUESTIONS, 1):
        page.get_by_label("Message").fill(question)
        page.get_by_label("Message").press("Enter")
        page.get_by_role("button", name="Regenerate").wait_for(timeout=ANSWER_MS)
        page.wait_for_function(f"document.querySelectorAll('#chat .more').length === {number}", timeout=ANSWER_MS)
    page.get_by_text("Where the time went").last.click()


def settings(page: Any) -> None:
    page.get_by_text("Settings", exact=True).click()


def side_by_side(page: Any) -> None:
    page.get_by_role("radio", name="Side by side").check()
    page.get_by_label("Message").fill(QUESTIONS[0])
    page.get_by_label("Message").press("Enter")
    page.locator("#verdict").wait_for(timeout=ANSWER_MS)


def docs(page: Any) -> None:
    page.get_by_role("heading", name="Schemas").wait_for()


def nothing(page: Any) -> None:
    page.wait_for_load_state()


class Photographer:
    """Takes the pictures of one page after another; `faults` are what should not be."""

    def __init__(self, browser: Any, out: Path) -> None:
        self.browser, self.out = browser, out
        self.faults: list[str] = []

    def shoot(self, name: str, url: str, visit: Visit, whole: bool = True) -> None:
        """`whole`: the page from its top to its end, else the window as a visitor sees it."""
        for width, height in SIZES.items():
            page = self.browser.new_page(viewport={"width": width, "height": height}, reduced_motion="reduce")
            page.on("console", lambda message: self._heard(name, message))
            page.on("pageerror", lambda error: self.faults.append(f"{name}: {error}"))
            page.goto(url)
            visit(page)
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                self.faults.append(f"{name}: wider than {width} columns")
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                page.screenshot(path=self.out / f"{name}-{width}-{scheme}.png", full_page=whole)
            page.close()
            print(f"{name}, {width} columns", flush=True)

    def _heard(self, name: str, message: Any) -> None:
        self.faults.append(f"{name}: console {message.type}: {message.text}")


@contextmanager
def photographer(out: Path) -> Iterator[Photographer]:
    from playwright.sync_api import sync_playwright

    executable = os.environ.get("PACELINE_CHROMIUM") or next(
        filter(None, map(shutil.which, ("chromium", "google-chrome"))), None
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--disable-gpu"])
        yield Photographer(browser, out)
        browser.close()


def served(camera: Photographer, model: str) -> None:
    command = [sys.executable, "-m", "paceline", "serve", "--model", model, "--port", "0"]
    with server([*command, "--drafter", "default=default", "--drafter", "lookup=ngram"]) as (_, port, _):
        url = f"http://127.0.0.1:{port}/"
        camera.shoot("docs", url + "docs", docs, whole=False)
        camera.shoot("welcome", url, nothing, whole=False)
        camera.shoot("settings", url, settings, whole=False)
        camera.shoot("chat", url, chat, whole=False)
        camera.shoot("side-by-side", url, side_by_side, whole=False)


def files(camera: Photographer, runs: dict[str, Path | None]) -> None:
    pages = {"calculator": calculator_page()}
    pages |= {name: report_page(read_run(folder)) for name, folder in runs.items() if folder}
    for name, text in pages.items():
        file = camera.out / f"{name}.html"
        file.write_text(text, encoding="utf-8")
        camera.shoot(name, file.resolve().as_uri(), nothing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--train", type=Path)
    parser.add_argument("--bench", type=Path)
    parser.add_argument("--without-server", action="store_true", help="only the pages that are files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with photographer(args.out) as camera:
        files(camera, {"train": args.train, "bench": args.bench})
        if not args.without_server:
            served(camera, args.model)
    for fault in camera.faults:
        print(fault, file=sys.stderr)
    sys.exit(1 if camera.faults else 0)


if __name__ == "__main__":
    main()
