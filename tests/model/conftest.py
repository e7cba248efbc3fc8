"""Each test leaves the native library on the instruction set and threads that it ran on before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from native_models import restored

from paceline.model.native import library as native_lib


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    if native_lib.load() is None:
        yield
        return
    with restored():
        yield
