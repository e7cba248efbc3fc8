"""Files of settings: a key that stands twice is refused, with its lines, in YAML and JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.runs.settings_file import read_settings_file
from paceline.train.run_file import read_run_file


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("loop:\n  epochs: 2\nshape: {}\nloop:\n  seed: 1\n", "line 4: loop stands twice, first in line 1"),
        ("loop:\n  epochs: 2\n  seed: 1\n  epochs: 3\n", "line 4: epochs stands twice, first in line 2"),
        ('{"loop": {"seed": 1, "seed": 2}}', "line 1: seed stands twice"),
        ("loop: {optim: {lr: 1.0, lr: 2.0}}", "line 1: lr stands twice"),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=line):
        read_run_file(file)


def test_keys_of_different_parts_and_merged_ones_are_no_doubles(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("base: &base {a: 1, b: 2}\nother:\n  <<: *base\n  a: 3\n")
    assert read_settings_file(file, "correct it")["other"] == {"a": 3, "b": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("answering: {grammar: {kind: regex, txt: a}}", "unknown setting answering.grammar.txt"),
        ("answering: {grammar: {kind: 3, text: a}}", "answering.grammar cannot be"),
    ],
)
def test_a_part_that_may_be_left_out_is_checked_too(tmp_path: Path, text: str, message: str) -> None:
    from paceline.train.run_file import config_of

    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        config_of(read_run_file(file))
