"""Sets threads, processes and instruction set of all tests, leaves slow files unimported, and orders files.

Tests run tiny tensors: one thread is faster than two that wait for each other. PACELINE_TEST_THREADS takes another
number of PyTorch's threads, PACELINE_ISA another instruction set of the native library in the tests' own process
(tests/machines.py tries all of them). With PACELINE_DEVICE_ROUNDS=1 engines over a GraphDecoder make device rounds.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("chat_visit", "small_drafter")  # tests take both fixtures and functions from them

SLOW_FILE = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test-quick` does not even import a file of slow tests only: that alone takes seconds."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return True if SLOW_FILE.search(collection_path.read_text()) else None


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()  # thousands of modules and items are allocated, none of which is garbage


def pytest_collection_finish(session: pytest.Session) -> None:
    """Later collections of garbage, which servers and tests ask for by the dozen, need not walk what is imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for what the tests of a file imported: transformers alone made every later collection take a second."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests first, so that no process of pytest-xdist ends with minutes of work alone."""
    if not os.environ.get("PACELINE_NIGHTLY"):
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(pytest.mark.skip("nightly: set PACELINE_NIGHTLY=1, as .ci/nightly does"))
    slow: dict[Path, int] = {}
    for item in items:
        slow[item.path] = slow.get(item.path, 0) + (item.get_closest_marker("slow") is not None)
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(autouse=True, scope="session")
def _machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import torch  # here, because the process that only hands tests to others needs no PyTorch

    from paceline import hardware
    from paceline.train.plan import target_facts

    if os.environ.get("PACELINE_DEVICE_ROUNDS"):
        from paceline.engine import device_round

        device_round.EVERYWHERE = True
    thaw, gc.unfreeze = gc.unfreeze, lambda: None  # as a server does that ends
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("PACELINE_TEST_THREADS", "1")))
    if isa := os.environ.get("PACELINE_ISA"):
        from paceline.model.native import library as native_lib

        native_lib.use(isa)
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # measuring takes seconds where bfloat16 is emulated; test_hardware.py does
        patch.setattr(hardware, "_matmul_flops_per_s", lambda device: {"bfloat16": 2e11, "float32": 2e11})
        # The user's own file keeps the speeds that were really measured.
        usual, own, path = os.environ.get("PACELINE_HOME"), tmp_path_factory.mktemp("home"), target_facts.speeds_file

        def speeds_file() -> Path:
            return own / target_facts.FILE if os.environ.get("PACELINE_HOME") == usual else path()

        patch.setattr(target_facts, "speeds_file", speeds_file)
        yield
    gc.unfreeze = thaw
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    from small_llm import tiny_model  # here, because it imports PyTorch

    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")
