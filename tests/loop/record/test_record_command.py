"""`paceline record` as a process: a signal ends it with the traces on disk, and no key is in any file or line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from small_llm import tiny_model
from trace_files import rows
from upstream import answering, chunked, completion, events

from paceline.cli import app
from paceline.errors import PacelineError

pytestmark = pytest.mark.slow
KEY = "sk-very-secret-0123456789"


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", "record", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "200"}
    )


def test_the_proxy_is_ended_by_a_signal(tmp_path: Path) -> None:
    model, store = tiny_model(tmp_path / "tiny"), tmp_path / "store"
    pieces = events(completion("Hello.", is_delta=True))
    with answering(lambda incoming: chunked(pieces)) as upstream:
        process = start("--upstream", upstream.url, "--port", "0", "--model", str(model), "--out", str(store), "--json")
        assert process.stderr and process.stdout
        first_line = process.stderr.readline()
        address = re.findall(r"http://127.0.0.1:\d+", first_line)[0]
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
        for number in range(1200):
            try:
                request = urllib.request.Request(
                    f"{address}/v1/chat/completions", body, {"authorization": f"Bearer {KEY}"}
                )
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert answer.read() == b"".join(pieces)
                break
            except OSError:
                assert number < 1199, "it does not listen"
                time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert json.loads(output) == {"folder": str(store), "num_written": 1, "num_answers": 1, "dropped": {}}
    assert [row["text"] for row in rows(store)] == ["Hello."]
    assert KEY not in first_line + output + errors
    assert all(KEY.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_file_to_import_without_requests(tmp_path: Path) -> None:
    diary = tmp_path / "diary.txt"
    diary.write_text("nothing")
    words = ["record", "--model", str(tiny_model(tmp_path / "tiny")), "--import", str(diary), "--out", str(tmp_path)]
    with pytest.raises(PacelineError, match="holds no requests"):
        app(words, prog_name="paceline", standalone_mode=False)
