"""The tokenizer of the model whose answers are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.model.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_path(model)
