"""experiments/demo.py: what a model wrote is called, and a model that cannot be had is replaced by the smallest."""

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
def test_what_was_written_is_called() -> None:
    given = demo.TASK.split("```")[1].removeprefix("python\n")
    assert [*demo.checked(given).values()] == [True, False]
    wanted = given.replace("(number)", "(number, lower=False)").replace(
        "return result", "return result.lower() if lower else result"
    )
    assert [*demo.checked(wanted).values()] == [True, True]
    assert not any(demo.checked("not Python").values())


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
