"""Write docs/cli.md from the commands' own --help: `python docs/make_cli.py`. A test checks that the file is current."""

from __future__ import annotations

import os
from pathlib import Path

from typer.testing import CliRunner

from paceline.cli import app

MAKING = (("train",), ("regenerate",), ("synthesize",), ("distill",), ("turn",), ("evaluate",), ("report",))
MAKING += (("export",), ("inspect",))
BENCH = (("bench",), ("bench", "decode"), *(("bench", name) for name in ("serving", "latency", "steps", "lossy")))
ADAPTING = (("adapt",), *(("adapt", name) for name in ("watch", "check", "replay", "log", "gate")))
PREDICTING = (("advise",), ("simulate",), ("simulate-serving",), ("compare",), ("calculator",))
DRAFTERS = (("drafters",), *(("drafters", word) for word in ("list", "load", "drain", "unload")))
JUDGING = (("store",), *(("store", name) for name in ("add", "show", "split", "label", "forget")), ("evals",))
JUDGING += tuple(("evals", name) for name in ("make", "run", "compare"))
SERVING = (("serve",), *DRAFTERS, ("record",), ("audit",), *ADAPTING)
COMMANDS = ((), ("generate",), ("chat",), ("models",), *BENCH, *MAKING, *JUDGING, *SERVING, *PREDICTING)
TARGET = Path(__file__).parent / "cli.md"


def render() -> str:
    """The whole page."""
    parts = ["# The command line\n\nMade by `python docs/make_cli.py` from `--help`; do not edit."]
    os.environ["COLUMNS"] = "100"
    runner = CliRunner()
    for words in COMMANDS:
        shown = runner.invoke(app, [*words, "--help"], prog_name="paceline", terminal_width=100).output
        parts.append(f"## {' '.join(('paceline', *words))}\n\n```text\n{shown.strip()}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
