"""Rounds on the device that draft token by token, on meta tensors and by addresses: nothing in them needs the host, and
nothing is baked in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded_regions import Addresses, Launches, no_host_tensors
from tiny_dflash import target_shape, tiny_target
from tiny_eagle3 import VARIANTS, drafter_of, loud_network, raw_eagle3
from tiny_mtp import mtp_for

from paceline.engine.device_round import Form, StaticRound
from paceline.engine.device_rows import DeviceRows
from paceline.model.checkpoint import expected_shapes
from paceline.model.torch import parts
from paceline.model.torch.kernels import attend, available, skinny
from paceline.model.torch.kernels import layer as layer_kernels
from paceline.model.torch.recorded_pass import GraphDecoder

pytestmark = pytest.mark.slow

DRAFTS = 4
STEP_LAUNCHES, FORESEEN_LAUNCHES = 37, 75
"""Kernels that a drafting step with one layer and the choice of its draft launch at most, and what the choice takes
more where rows are drawn: the values of today. Only ever lower them."""
REST, RACE = 136, 157
"""The same of all else in a round of the tiny target, and of the race where rows are drawn."""


def on_meta() -> GraphDecoder:
    shape = target_shape(32, 11)
    tensors = [(name, torch.empty(size, device="meta")) for name, size in expected_shapes(shape).items()]
    return GraphDecoder(shape, tensors, num_rows=3, max_len=200, dtype=torch.bfloat16, device="meta")


def round_of(target: Any, variant: str, is_drawn: bool) -> tuple[StaticRound, DeviceRows, Any]:
    is_mtp = variant == "mtp"
    drafter: Any = (
        mtp_for(target) if is_mtp else drafter_of(loud_network(raw_eagle3(**VARIANTS[variant])), num_drafted=DRAFTS)
    )
    drafter.bind(target)
    target.set_taps(drafter.tap_layers)
    rows = DeviceRows(3, target.cache.max_len, target.device)
    form = Form(is_drawn, is_mocked=False, drafter=drafter)
    return StaticRound(target, rows, form, 3, 1 + DRAFTS), rows, drafter


@pytest.mark.parametrize("is_drawn", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("variant", ["3.1", "3", "draft-vocabulary", "one-norm-before-fc", "mtp"])
@torch.inference_mode()
def test_a_round_needs_nothing_of_the_host(variant: str, is_drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    region, _, _ = round_of(on_meta(), variant, is_drawn)
    mode = Launches()

    def launched(*args: Any, **options: Any) -> None:
        mode.count += 1

    def attended(query_THD: torch.Tensor, *others: Any) -> torch.Tensor:
        mode.count += 2
        return torch.empty_like(query_THD).flatten(1)

    monkeypatch.setattr(available, "can_use", lambda device: True)
    monkeypatch.setattr(skinny, "can_run", lambda *arguments, **options: False)  # as many launches
    monkeypatch.setattr(layer_kernels, "_launch", launched)
    monkeypatch.setattr(attend, "run_kernels", attended)
    with no_host_tensors(), mode:
        region.compute()
        mode.count = 0
        region.compute()
    most = DRAFTS * (STEP_LAUNCHES + is_drawn * FORESEEN_LAUNCHES) + REST + is_drawn * RACE
    assert mode.count <= most, mode.count


@pytest.mark.parametrize("is_drawn", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("variant", ["3.1", "sliding", "own-embedding", "mtp"])
@torch.inference_mode()
def test_a_round_has_fixed_addresses_and_bakes_nothing_in(
    variant: str, is_drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run on other rows it uses the same memory, and gives what a round gives that never ran before."""
    monkeypatch.setattr(parts, "can_pack", lambda weight: False)  # packed weights tell no address
    used, fresh = (round_of(tiny_target(kind=GraphDecoder), variant, is_drawn) for _ in range(2))
    addresses, outputs = list[Any](), list[Any]()
    for seed, (each, own_rows, own) in ((1, used), (2, used), (2, fresh)):
        refill(own_rows, each, own, seed)
        with Addresses() as mode:
            each.compute()
        addresses.append((mode.outside, own._states.data_ptr()))
        outputs.append([tensor.clone() for tensor in (each.read_out, own_rows.values, own._states)])
    assert addresses[0] == addresses[1]
    for one, two in zip(outputs[1], outputs[2], strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(outputs[0][0], outputs[1][0])


def refill(rows: DeviceRows, region: StaticRound, drafter: Any, seed: int) -> None:
    """Other caches, drafting states, lengths, last tokens and numbers of drafts; one row is idle."""
    generator = torch.Generator().manual_seed(seed)
    kv = region.target_pass._decoder.kv
    for tensor in (kv.keys, kv.values, drafter._path.cache.keys, drafter._path.cache.values, drafter._states):
        tensor.normal_(generator=generator)
    state = rows.first(3)
    state.length_B.copy_(torch.randint(1, 40, (3,), generator=generator))
    state.anchor_B.copy_(torch.randint(0, 11, (3,), generator=generator))
    state.most_B.copy_(torch.randint(1, 1 + DRAFTS, (3,), generator=generator))
    state.left_B.copy_(torch.tensor([9, 0, 7]))
    state.draws.seed_B.copy_(torch.tensor([seed, 0, 0]))
    state.draws.inverse_temperature_B.copy_(torch.tensor([1.0, 0.0, 0.0]))
    state.draws.top_p_B.fill_(1.0)
