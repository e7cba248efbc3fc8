"""`paceline distill` as it is typed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.commands.distill import distill
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.loop.distill import config as asks
from paceline.loop.distill.run import DistillResult
from paceline.train.config import AnswerConfig, PromptsConfig


def typed(out: Path, *answers: Path) -> dict[str, Any]:
    return {
        "config": asks.DistillConfig(out, answers=answers),
        "teacher": EngineConfig(),
        "prompting": PromptsConfig(),
        "answering": AnswerConfig(),
        "student": asks.StudentConfig(),
        "teaching": asks.TeachingConfig(),
        "gate": asks.GateConfig(),
        "files": asks.FilesConfig(),
    }


@pytest.mark.parametrize("passed", [True, False])
def test_the_exit_status_says_whether_it_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    result = DistillResult(tmp_path, tmp_path / "student", None, passed, "why", (0, 1), 5, 0.1)
    monkeypatch.setattr("paceline.loop.distill.run.distill", lambda config, progress: result)
    if passed:
        distill(**typed(tmp_path, tmp_path))
    else:
        with pytest.raises(typer.Exit) as ended:
            distill(**typed(tmp_path, tmp_path), as_json=True)
        assert ended.value.exit_code == 3 and '"reason": "why"' in capsys.readouterr().out


def test_without_answers_it_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--answers FOLDER"):
        distill(**typed(tmp_path))
    with pytest.raises(ConfigError, match="paceline regenerate"):
        distill(**typed(tmp_path), dry_run=True)


def test_settings_that_select_prompts_are_refused_next_to_answers_alone(tmp_path: Path) -> None:
    """They selected nothing: every answer was learned from."""
    words = typed(tmp_path, tmp_path)
    with pytest.raises(ConfigError, match="limit means nothing without prompts to read"):
        distill(**words | {"prompting": PromptsConfig(limit=5)})
    with pytest.raises(ConfigError, match="tags select prompts, not answers: give answers of these tags alone"):
        distill(**words | {"prompting": PromptsConfig(("p.jsonl",), tags=("acme",))})


def test_without_trl_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is computed or written."""
    monkeypatch.delitem(sys.modules, "paceline.loop.distill.teach", raising=False)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[distill\]'"):
        distill(**typed(tmp_path / "out", tmp_path))
    assert not (tmp_path / "out").exists()
