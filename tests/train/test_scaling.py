"""Features in one scale: the same function, and nothing of it left in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.draft.dflash.config import DFlashConfig, new_config
from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.errors import CacheError
from paceline.train.documents.dataset import Document
from paceline.train.features.hidden_states import (
    Features,
    ScaledFeatures,
    begin_without_mean,
    measure_scale,
    stored_scale,
    train_in_scaled_units,
)

HIDDEN = 16


class Loud:
    """Random features, the second tap a hundred times as loud, with a mean, and one position that screams."""

    def of(self, number: int) -> Features:
        taps = torch.randn(20, 2 * HIDDEN, generator=torch.Generator().manual_seed(number))
        taps[:, HIDDEN:] *= 100
        taps[:, 3] += 5
        taps[0] *= 1000
        return Features(taps, taps[:, :HIDDEN])


DOCUMENTS = [Document(str(index), np.zeros(20, dtype=np.int32), 5) for index in range(6)]


def network() -> DFlashNetwork:
    raw = new_config(HIDDEN, 11, 6, num_layers=2, head_dim=8)
    raw["dflash_config"]["target_layer_ids"] = [1, 4]
    return DFlashNetwork.random(DFlashConfig.from_json(raw))


def scaled(scale_F: Tensor) -> Tensor:
    return ScaledFeatures(Loud(), scale_F).of(2).taps_SF


def test_scales_are_powers_of_two_that_bring_quiet_positions_to_about_one() -> None:
    scale_F, mean_F = measure_scale(Loud(), DOCUMENTS)
    assert torch.equal(scale_F.log2(), scale_F.log2().round())
    sizes = scaled(scale_F)[1:].square().mean(0).sqrt()
    assert float(sizes.min()) > 0.3 and float(sizes.max()) < 3
    assert mean_F.abs().argmax() == 3


def test_the_network_computes_what_it_did_bit_for_bit() -> None:
    net, scale_F = network(), measure_scale(Loud(), DOCUMENTS)[0]
    before, taps = net.fc(Loud().of(2).taps_SF), scaled(scale_F)
    train_in_scaled_units(net, scale_F)
    assert torch.equal(net.fc(taps), before)


def test_checkpoints_hold_the_real_weights() -> None:
    net, scale_F = network(), measure_scale(Loud(), DOCUMENTS)[0]
    real = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    train_in_scaled_units(net, scale_F)
    assert not torch.equal(net.fc.weight, real["fc.weight"])
    assert all(torch.equal(tensor, real[name]) for name, tensor in net.state_dict().items())
    other = {name: tensor + 1 for name, tensor in real.items()}
    net.load_state_dict(other)
    assert torch.equal(other["fc.weight"], real["fc.weight"] + 1), "the caller's tensors stay"
    torch.testing.assert_close(net.fc.weight * scale_F, other["fc.weight"])


def test_a_new_network_is_blind_to_the_mean() -> None:
    net, (scale_F, mean_F) = network(), measure_scale(Loud(), DOCUMENTS)
    train_in_scaled_units(net, scale_F)
    begin_without_mean(net, mean_F)
    assert float((net.fc.weight.detach() @ mean_F).abs().max()) < 1e-5
    quiet, loud = net.fc.weight.detach().std(dim=0).split(HIDDEN)
    assert 0.5 < float(quiet.median() / loud.median()) < 2


def test_a_scale_of_other_features_is_measured_again(tmp_path: Path) -> None:
    file, other = tmp_path / "scale.safetensors", torch.ones(3)
    save_file({"scale": other, "mean": other + 1}, file, {"features": "other taps"})
    scale_F, _ = stored_scale(file, Loud(), DOCUMENTS, is_first=True, mark="a")
    assert torch.equal(scale_F, measure_scale(Loud(), DOCUMENTS)[0]) and torch.equal(load_file(file)["scale"], scale_F)


def test_a_run_keeps_its_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run" / "scale.safetensors"
    first = stored_scale(file, Loud(), DOCUMENTS, is_first=True, mark="a")
    monkeypatch.setattr(
        "paceline.train.features.hidden_states.measure_scale", lambda *arguments: pytest.fail("measured again")
    )
    again = stored_scale(file, Loud(), DOCUMENTS, is_first=True, mark="a")
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    save_file(load_file(file), file)  # as an earlier version wrote it
    stored_scale(file, Loud(), DOCUMENTS, is_first=True, mark="a")
    file.write_bytes(b"cut")
    with pytest.raises(CacheError, match="another --out"):
        stored_scale(file, Loud(), DOCUMENTS, is_first=True, mark="a")
