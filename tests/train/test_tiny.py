"""The tiny target of `--scale tiny` is complete or written again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.model.checkpoint import load_config, load_tensors
from paceline.train import tiny


def test_a_target_whose_writing_was_interrupted_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(tensors: Any, file: Path) -> None:
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tiny, "save_file", cut)
        with pytest.raises(KeyboardInterrupt):
            tiny.write_tiny_target(tmp_path / "target")
    folder = tiny.write_tiny_target(tmp_path / "target")
    assert load_config(folder).num_layers and len(dict(load_tensors(folder))) > 5
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in folder.iterdir()} == names
