"""The learning rate that a resumed run logs."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_training import config, trainer

from paceline.runs.folder import RunFolder
from paceline.train.learn.step_log import risen_rate

pytestmark = pytest.mark.slow


def test_a_run_that_is_lengthened_says_that_the_learning_rate_rises(tmp_path: Path) -> None:
    run, first = RunFolder(tmp_path), trainer(tmp_path / "checkpoints", config(max_steps=4))
    first.run(lambda figures: run.log(**figures))
    same, longer = (trainer(tmp_path / "checkpoints", config(max_steps=steps)) for steps in (4, 40))
    assert same.resume() and risen_rate(run, same) is None
    assert longer.resume() and longer.state.step == 4
    note = risen_rate(run, longer)
    assert note is not None and "the learning rate goes up from" in note
