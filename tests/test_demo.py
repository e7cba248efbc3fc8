"""experiments/demo.py: what a model wrote runs with limits, and a model that cannot be had is replaced by the
smallest."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import demo
import pytest

from paceline.errors import DownloadError


def test_code_is_the_first_block_or_everything() -> None:
    assert demo.code_of("Here:\n```python\nx = 1\n```\nand\n```\ny\n```") == "x = 1\n"
    assert demo.code_of("x = 1") == "x = 1"


@pytest.mark.slow
def test_what_was_written_runs_and_says_what_it_prints() -> None:
    function = demo.TASK.split("```")[1].removeprefix("python\n").replace("(number)", "(number, lower=False)")
    assert demo.run(f"{function}\n{demo.CHECK}") == demo.EXPECTED.replace("mmxxvi", "MMXXVI")
    assert demo.run("1 / 0") == "ZeroDivisionError: division by zero"
    assert demo.run("raise SystemExit(3)") == "exit status 3"


@pytest.mark.slow
def test_what_was_written_has_little_time_memory_and_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "LIMIT_S", 1)
    assert "exit status -" in demo.run("while True: pass")
    assert "MemoryError" in demo.run("x = bytearray(1 << 30)")
    assert "File too large" in demo.run(f"with open({str(tmp_path / 'x')!r}, 'w') as file: file.write('x')")
    monkeypatch.setattr(demo, "WAIT_S", 0.2)
    assert "did not end" in demo.run("import time; time.sleep(9)")


def test_the_smallest_model_answers_where_the_coder_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(name: str) -> Path:
        if name == demo.CODER:
            raise DownloadError("no network: check it")
        return Path(name)

    monkeypatch.setattr(demo, "resolve", resolve)
    monkeypatch.setattr(demo, "LLM", lambda name, **settings: SimpleNamespace(name=name))
    assert demo.load(demo.CODER).name == demo.SMALLEST
    assert "no network" in capsys.readouterr().err
    monkeypatch.setattr(demo, "resolve", lambda name: Path(name))
    monkeypatch.setattr(demo, "memory_bytes", lambda: demo.BUILTINS[demo.CODER].memory_bytes - 1)
    assert demo.load(demo.CODER).name == demo.SMALLEST
    assert "GB of memory" in capsys.readouterr().err
