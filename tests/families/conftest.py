"""Each family's tiny model, written once for all files here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_models import FAMILIES, Written, model_of


@pytest.fixture(scope="session")
def written() -> Written:
    return {}


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def family_model(name: str, written: Written, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder of a family's tiny model, and the model in Transformers."""
    return model_of(name, written, tmp_path_factory)
