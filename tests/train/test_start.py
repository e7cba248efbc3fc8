"""A drafter's first config and weights: fitting the target, near log(vocabulary), and copies of the target where
asked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_llm import tiny_model
from small_training import VOCAB, tiny_decoder
from torch import Tensor
from torch.nn import functional as F

from paceline.config import EngineConfig
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.errors import ConfigError, DrafterMismatchError, UnsupportedModelError
from paceline.model.backends import load_target
from paceline.model.checkpoint import load_tensors
from paceline.model.target import head_weight
from paceline.model.torch.decoder import Decoder
from paceline.train.config import DrafterShape
from paceline.train.learn.initial_weights import FirstNorm, config_for, network_for, scale_first_logits
from paceline.train.learn.losses import Head, Slots


def test_a_new_drafter_has_the_targets_measures() -> None:
    target = tiny_decoder()
    raw = config_for(target, DrafterShape(num_layers=2, block_size=6))
    config = DFlashConfig.from_json(raw)
    assert (config.shape.hidden_size, config.shape.num_heads, config.shape.num_kv_heads) == (32, 4, 2)
    assert (config.shape.head_dim, config.shape.intermediate_size, config.vocab_size) == (8, 48, VOCAB)
    assert (config.block_size, config.mask_token_id, config.num_target_layers) == (6, VOCAB - 1, 4)
    assert config.target_layer_ids == (0, 1, 2, 3), "as many as there are, up to five"
    assert config.shape.window(0) is None and config.is_causal == (False, False)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"is_causal": True}, (True, None, (0, 1, 2, 3), 23)),
        ({"sliding_window": 5}, (False, 5, (0, 1, 2, 3), 23)),
        ({"sliding_window": 5, "is_causal": True}, (True, 5, (0, 1, 2, 3), 23)),
        ({"tap_layers": (3, 1), "mask_token_id": 7}, (False, None, (3, 1), 7)),
        ({"num_taps": 2}, (False, None, (0, 1), 23)),
    ],
)
def test_its_shape_is_what_was_asked_for(shape: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = DFlashConfig.from_json(config_for(tiny_decoder(), DrafterShape(num_layers=1, **shape)))
    assert (config.is_causal[0], config.shape.window(0), config.target_layer_ids, config.mask_token_id) == expected


@pytest.mark.slow
def test_the_seed_decides_the_weights() -> None:
    states = [network_for(tiny_decoder(), "none", DrafterShape(), None, seed)[1].state_dict() for seed in (0, 0, 1)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["fc.weight"], states[2]["fc.weight"])


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_layers_copied_from_the_target(num_layers: int, tmp_path: Path) -> None:
    """Two target layers: three draft layers take one of them twice."""
    folder = tiny_model(tmp_path / "model")
    _, network = network_for(
        load_target(EngineConfig(str(folder), dtype="float32", device="cpu")),
        str(folder),
        DrafterShape(num_layers=num_layers, start="target"),
        None,
        0,
    )
    theirs = dict(load_tensors(folder))
    sources = {1: [0], 2: [0, 1], 3: [0, 0, 1]}[num_layers]
    state = network.state_dict()
    for index, layer in enumerate(sources):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm"):
            assert torch.equal(state[f"layers.{index}.{name}.weight"], theirs[f"model.layers.{layer}.{name}.weight"])
        assert state[f"layers.{index}.self_attn.q_norm.weight"].isfinite().all()
    normed = torch.randn(4000, 32, generator=torch.Generator().manual_seed(0))
    deviation = (normed @ state["layers.0.self_attn.k_proj.weight"].T).std()
    assert state["layers.0.self_attn.k_norm.weight"][0] == pytest.approx(float(deviation), rel=0.1)


def test_impossible_shapes_are_refused() -> None:
    for values in ({"num_layers": 0}, {"block_size": 1}):
        with pytest.raises(ConfigError, match="must be (at least|between)"):
            DrafterShape(**values)
    with pytest.raises(ConfigError, match="start must be one of random, copied, target, not 'warm'"):
        DrafterShape(start="warm")  # type: ignore[arg-type]
    for shape in (DrafterShape(tap_layers=(1, 4)), DrafterShape(mask_token_id=VOCAB)):
        with pytest.raises(DrafterMismatchError, match="tapped layers|mask token"):
            network_for(tiny_decoder(), "none", shape, None, 0)


def test_init_takes_a_drafter_of_this_target_only(tmp_path: Path) -> None:
    raw, network = network_for(tiny_decoder(), "none", DrafterShape(num_layers=1), None, 3)
    DFlashDrafter(network).save(tmp_path)
    again, taken = network_for(tiny_decoder(), "none", DrafterShape(num_layers=5), tmp_path, 0)
    assert again == raw
    assert all(torch.equal(tensor, taken.state_dict()[name]) for name, tensor in network.state_dict().items())
    assert all(parameter.dtype is torch.float32 and parameter.requires_grad for parameter in taken.parameters())
    with pytest.raises(DrafterMismatchError, match="vocabulary: the drafter says 24, the target has 258"):
        network_for(
            load_target(EngineConfig(str(tiny_model(tmp_path / "model")), dtype="float32", device="cpu")),
            "none",
            DrafterShape(),
            tmp_path,
            0,
        )


class Biased(Decoder):
    def matrix_head(self, hidden_TD: Tensor) -> Tensor:
        return super().matrix_head(hidden_TD) + 1.0


def test_the_head_as_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_decoder()
    weight_VD = head_weight(target)
    hidden = torch.randn(5, 32)
    torch.testing.assert_close(hidden @ weight_VD.T, target.head(hidden), atol=1e-5, rtol=1e-5)
    (weight_VD * torch.ones(1, requires_grad=True)).sum().backward()  # an inference tensor could not be kept
    monkeypatch.setattr(target, "__class__", Biased)
    with pytest.raises(UnsupportedModelError, match="head is no plain matrix"):
        head_weight(target)


class TestFirstLoss:
    """Hidden states that are all alike, as a new drafter's are, and favour or disfavour the labels."""

    num_tokens, size = 4096, 64

    def network(self) -> DFlashNetwork:
        return network_for(tiny_decoder(), "none", DrafterShape(num_layers=1), None, 0)[1]

    def batch(self, lean: float) -> tuple[Tensor, Head, Tensor]:
        """Logits of about deviation 8; labels lie `lean` deviations above the mean of the logits."""
        generator = torch.Generator().manual_seed(0)
        weight_VD = torch.randn(self.num_tokens, self.size, generator=generator)
        hidden_TD = torch.ones(300, self.size) + 0.05 * torch.randn(300, self.size, generator=generator)
        order_V = (weight_VD @ hidden_TD[0]).argsort()
        share = 0.5 * (1 + math.erf(lean / 2**0.5))
        nearby = torch.randint(-40, 40, (300,), generator=generator) + int(share * self.num_tokens)
        return hidden_TD, Head(weight_VD), order_V[nearby.clamp(0, self.num_tokens - 1)]

    @pytest.mark.slow
    @pytest.mark.parametrize("lean", [-3.0, -1.0, 0.0, 1.0])
    def test_it_is_near_the_logarithm_of_the_vocabulary_and_no_smaller_than_it_must_be(self, lean: float) -> None:
        hidden_TD, head, labels_T = self.batch(lean)
        network = self.network()
        factor = scale_first_logits(
            FirstNorm(network.norm.weight),
            head,
            hidden_TD,
            Slots(labels_T[:, None], torch.ones(300, 1, dtype=torch.bool)),
        )
        assert torch.equal(network.norm.weight, torch.full_like(network.norm.weight, factor))
        logits = head.logits(hidden_TD * factor)
        loss, deviation = F.cross_entropy(logits, labels_T).item(), float(logits.std(-1).mean())
        most = math.log(self.num_tokens) + 0.5
        assert loss < most + 0.05 and deviation < 1.01
        assert loss > most - 0.05 or deviation > 0.99, "as loud as one of the two allows"
        assert deviation == pytest.approx(1.0, abs=0.01) or lean <= 0
        assert (deviation < 0.3) == (lean == -3.0)
