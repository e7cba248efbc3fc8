"""OpenAI's client for Node streams an answer, through serving_clients.cjs. Skips where there is no node or no
package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from live_server import serving, talker, wait_until

SCRIPT = Path(__file__).parents[2] / "experiments" / "serving_clients.cjs"


def modules() -> Path | None:
    """Where npm put `openai`: NODE_PATH, or where experiments/serving_clients.sh installs it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    clients = Path(os.environ.get("CLIENTS_VENV") or cache / "paceline-peers" / "serving-clients")
    named = [Path(each) for each in os.environ.get("NODE_PATH", "").split(os.pathsep) if each]
    return next((each for each in (*named, clients / "node" / "node_modules") if (each / "openai").is_dir()), None)


@pytest.mark.slow
def test_the_node_client_streams_with_usage() -> None:
    node, node_modules = shutil.which("node"), modules()
    if node is None:
        pytest.skip("node is not installed")
    if node_modules is None:
        pytest.skip(
            "the npm package openai is in neither NODE_PATH nor CLIENTS_VENV: experiments/serving_clients.sh node "
            "installs it"
        )
    with serving(talker()) as live:
        command = [node, str(SCRIPT), live.url, "fake"]
        ran = subprocess.run(
            command, env={**os.environ, "NODE_PATH": str(node_modules)}, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stderr
        answer = json.loads(ran.stdout)
        assert answer["chunks"] > 2 and answer["text"]
        assert answer["usages"][0]["completion_tokens"] > 0 and len(answer["reasons"]) == 1
        assert live.seen.outcomes and set(live.seen.outcomes) <= {"stop", "length"}
        wait_until(live.is_idle)
