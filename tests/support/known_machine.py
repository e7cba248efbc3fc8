"""A machine whose speeds are known, so that no run of a test measures the one it stands on, which takes seconds.

from known_machine import known_machine  # in a folder's conftest.py: for all its tests
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.hardware import Machine
from paceline.train import run as train_run
from paceline.train.plan import target_facts as facts

KNOWN = Machine("some processor", 3e10, {"bfloat16": 5e11, "float32": 2e11}, 1, 16 * 2**30)


@pytest.fixture(scope="module", autouse=True)
def known_machine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "_measured_once", lambda device: facts.MachineFacts(KNOWN))
        patch.setattr(train_run, "this_machine", lambda device: KNOWN)
        yield
