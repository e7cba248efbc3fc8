"""Runs the calculator's modules that need no page: in Node where there is one, else in headless Chromium."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import Any

import pytest

from paceline.simulate.calculator_page import PURE, joined

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 300


def chromium() -> str | None:
    return os.environ.get("PACELINE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def run_js(main: str, value: Any) -> Any:
    """`main`, a function of JavaScript that sees everything the modules export, applied to `value`. Skips without
    either."""
    source = re.sub(r"^export ", "", joined(PURE), flags=re.MULTILINE)
    script = f"{source}\nconst found = JSON.stringify(({main})({json.dumps(value)}));\n"
    node = shutil.which("node")
    if node and not os.environ.get("PACELINE_NO_NODE"):
        program = '"use strict";\n' + script + "process.stdout.write(found);"
        done = subprocess.run([node, "-"], input=program, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)
    return json.loads(_in_chromium(script))


def _in_chromium(script: str) -> str:
    api = pytest.importorskip("playwright.sync_api", reason="neither Node nor playwright is installed")
    path = chromium()
    if path is None:
        pytest.skip("neither Node nor Chromium is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        result = browser.new_page().evaluate(f'() => {{ "use strict"; {script} return found; }}')
        browser.close()
    return result
