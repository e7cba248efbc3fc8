"""The token timing page: `timing_page.html` with a run's token times put in; one file that needs no server and no network.

Whatever a model or a user wrote travels as JSON and reaches the page as text only; the content security policy names the
script's hash and lets nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path

from paceline.bench.timing import Timing
from paceline.runlog import plain
from paceline.tables import printable

TEMPLATE = Path(__file__).with_name("timing_page.html")
DATA, HASH, TITLE = "{/* TIMING */}", "sha256-SCRIPT", "paceline compare"


def page(timing: Timing) -> str:
    """The whole page."""
    template = TEMPLATE.read_text(encoding="utf-8")
    return (
        template.replace(HASH, script_hash(template), 1)
        .replace(DATA, embedded(timing), 1)
        .replace(f"<title>{TITLE}</title>", f"<title>{html.escape(printable(f'{timing.model}: {timing.verdict}'))}</title>", 1)
    )


def embedded(timing: Timing) -> str:
    """JSON that no HTML parser can mistake for markup."""
    text = json.dumps(plain(timing) | {"verdict": timing.verdict, "speed": timing.usual_speed}, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def script_hash(template: str) -> str:
    """Of the page's script, as its content security policy wants it."""
    script = template.split("<script>", 1)[1].split("</script>", 1)[0]
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
