"""experiments/sharded_alone.py: FSDP2 in a group of one follows the whole network, killed and resumed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

FILE = Path(__file__).parents[2] / "experiments" / "sharded_alone.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sharded_alone", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(("optimiser", "is_autocast"), [("muon", False), ("adamw", True)])
def test_parts_follow_the_whole_network(script: ModuleType, optimiser: str, is_autocast: bool) -> None:
    check(script.sharded_alone("cpu", optimiser, is_autocast), is_autocast)
    assert not dist.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("optimiser", "is_autocast"), [("adamw", False), ("muon", False), ("adamw", True)])
def test_parts_follow_the_whole_network_on_a_gpu(script: ModuleType, optimiser: str, is_autocast: bool) -> None:
    # Muon's Newton-Schulz steps are in bfloat16, and sum in another order on parts of a matrix.
    check(script.sharded_alone("cuda", optimiser, is_autocast), is_autocast, 1e-3 if optimiser == "muon" else 1e-4)


def check(found: dict[str, object], is_autocast: bool, close: float = 1e-4) -> None:
    """With autocast FSDP2 gathers weights in bfloat16, norms too, which the whole network has in float32."""
    assert found["steps"] == [1, 2, 3, 4] and found["states_misplaced"] == []
    assert float(str(found["loss_difference"])) < (0.1 if is_autocast else 1e-4)
    assert float(str(found["weight_difference"])) < (1e-2 if is_autocast else close)
