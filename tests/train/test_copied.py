"""First layers copied from targets of every shape that the decoder runs: what is copied, translated, cut, and
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import SHAPE, write_config
from safetensors.torch import save_file
from tiny_dflash import tiny_target

from paceline.config import EngineConfig
from paceline.draft.dflash.config import DFlashConfig, new_config
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.model.backends import load_target
from paceline.model.checkpoint import load_config, random_tensors
from paceline.train.config import DrafterShape, TrainConfig
from paceline.train.learn.initial_weights import network_for
from paceline.train.methods.copied_layers import copy_layers, fuse_taps, head_size
from paceline.train.methods.kinds import initial_drafter
from paceline.train.tiny import write_tiny_target

QWEN2 = {"architecture": "Qwen2ForCausalLM"}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {"attention_bias": True},
    "qwen2": QWEN2,
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 16},
}


def write_target(folder: Path, **changes: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A random model whose norms are not ones; its biases are as loud as what they are added to."""
    write_config(folder, **{"num_hidden_layers": 4, **changes})
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: tensor + 0.3 * torch.rand(tensor.shape, generator=generator) if "norm" in name else 8 * tensor
        for name, tensor in random_tensors(load_config(folder), seed=1)
    }
    save_file(weights, folder / "model.safetensors")
    return folder, weights


def start(folder: Path, **shape: Any) -> tuple[dict[str, Any], DFlashNetwork]:
    target = load_target(EngineConfig(str(folder), dtype="float32", device="cpu"))
    return network_for(target, str(folder), DrafterShape(**{"num_layers": 2, "start": "copied", **shape}), None, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_bias_and_norm_is_the_targets(kind: str, tmp_path: Path) -> None:
    folder, theirs = write_target(tmp_path, **KINDS[kind])
    raw, network = start(folder)
    state, sources = network.state_dict(), {0: 0, 1: 2}
    taken = {name.removeprefix("model."): tensor for name, tensor in theirs.items()}
    for index, layer in sources.items():
        for name in (each for each in taken if each.startswith(f"layers.{layer}.")):
            assert torch.equal(state[name.replace(f".{layer}.", f".{index}.", 1)], taken[name]), name
    has_bias = kind in ("qwen2", "llama-biased")
    assert ("layers.0.self_attn.q_proj.bias" in state) == has_bias == raw.get("attention_bias", False)
    if kind == "qwen2":
        assert not state["layers.0.self_attn.o_proj.bias"].any(), (
            "Qwen2 has none there, and Qwen3's config means all four"
        )
    ones = torch.stack([state[f"layers.{index}.input_layernorm.weight"] for index in sources])
    torch.testing.assert_close(state["hidden_norm.weight"], ones.mean(0))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_head_norms_keep_the_size_that_heads_have_in_the_target(kind: str, tmp_path: Path) -> None:
    folder, theirs = write_target(tmp_path, **KINDS[kind])
    state = start(folder)[1].state_dict()
    normed = torch.randn(4000, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(0))
    normed = normed * theirs["model.layers.0.input_layernorm.weight"]
    heads = normed @ theirs["model.layers.0.self_attn.q_proj.weight"].T
    if kind == "qwen2":
        heads = heads + theirs["model.layers.0.self_attn.q_proj.bias"]
    size = heads.square().mean().sqrt()
    weight = state["layers.0.self_attn.q_norm.weight"]
    assert weight.unique().numel() == 1 and float(weight[0]) == pytest.approx(float(size), rel=0.1)


def test_one_loud_head_does_not_decide_for_the_others() -> None:
    projection = torch.nn.Linear(8, 32)
    torch.nn.init.normal_(projection.weight)
    torch.nn.init.zeros_(projection.bias)
    quiet = head_size(projection, torch.ones(8), 8)
    projection.bias.data[:8] = 100.0
    assert head_size(projection, torch.ones(8), 8) < 3 * quiet
    assert float(projection.bias.detach().square().mean().sqrt()) > 10 * quiet, "what the mean over all would be near"


def test_a_narrower_mlp_keeps_the_loudest_neurons(tmp_path: Path) -> None:
    folder, theirs = write_target(tmp_path)
    state = start(folder, intermediate_size=16)[1].state_dict()
    gate, up, down = (theirs[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    loudness = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept = [index for index in range(len(gate)) if (loudness > loudness[index]).sum() < 16]
    assert torch.equal(state["layers.0.mlp.gate_proj.weight"], gate[kept])
    assert torch.equal(state["layers.0.mlp.down_proj.weight"], down[:, kept])
    wide = start(folder, intermediate_size=80)[1].state_dict()
    assert torch.equal(wide["layers.0.mlp.up_proj.weight"][:64], up) and wide["layers.0.mlp.up_proj.weight"][64:].any()
    assert torch.equal(wide["layers.0.mlp.down_proj.weight"][:, :64], down)


def test_fewer_heads_are_the_first_ones(tmp_path: Path) -> None:
    folder, theirs = write_target(tmp_path, **QWEN2)
    raw, network = start(folder, num_heads=2)
    state = network.state_dict()
    assert (raw["num_attention_heads"], raw["num_key_value_heads"]) == (2, 1)
    ours, other = "layers.0.self_attn.", "model.layers.0.self_attn."
    for name, rows in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8)):
        assert torch.equal(state[f"{ours}{name}.weight"], theirs[f"{other}{name}.weight"][:rows])
        assert torch.equal(state[f"{ours}{name}.bias"], theirs[f"{other}{name}.bias"][:rows])
    assert torch.equal(state[f"{ours}o_proj.weight"], theirs[f"{other}o_proj.weight"][:, :16])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 1}, "copied layers need heads of the target's: .*--first-layers random"),
        ({"num_heads": 8, "num_kv_heads": 4}, "copied layers need heads of the target's"),
        ({"num_heads": 3, "num_kv_heads": 2}, "3 query heads over 2 key heads do not divide evenly"),
    ],
)
def test_heads_that_cannot_be_copied_are_refused(shape: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        start(write_target(tmp_path)[0], **shape)


def test_what_the_target_lacks_stays_random_but_not_everything(tmp_path: Path) -> None:
    """Experts have no MLP to copy; a model with other names has nothing."""
    folder, theirs = write_target(tmp_path)
    config = DFlashConfig.from_json(start(folder)[0])
    first, network = DFlashNetwork.random(config, 0), DFlashNetwork.random(config, 0)
    copy_layers(network, ((name, tensor) for name, tensor in theirs.items() if ".mlp." not in name), None)
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(network.state_dict()[name], first.state_dict()[name])
    assert torch.equal(
        network.state_dict()["layers.1.self_attn.v_proj.weight"], theirs["model.layers.2.self_attn.v_proj.weight"]
    )
    with pytest.raises(ConfigError, match="has nothing that fits a draft layer: start from random layers"):
        copy_layers(network, (), None)


def test_fused_taps_count_alike_and_come_out_at_about_unit_size(tmp_path: Path) -> None:
    _, network = start(write_target(tmp_path)[0], num_taps=2)
    size = SHAPE["hidden_size"]
    scale_F = torch.cat([torch.full((size,), 1.0), torch.full((size,), 1 / 128)])
    fuse_taps(network, scale_F)
    generator = torch.Generator().manual_seed(0)
    quiet, loud = torch.randn(500, size, generator=generator), 128 * torch.randn(500, size, generator=generator)
    fused = network.fc(torch.cat([quiet, loud], dim=1)).detach()
    assert 0.5 < float(fused.square().mean().sqrt()) < 1.2
    for tap in (quiet, loud):
        assert torch.corrcoef(torch.stack([fused.flatten(), tap.flatten()]))[0, 1] > 0.6


@pytest.mark.slow
def test_a_drafter_with_biases_is_served_as_it_was_trained(tmp_path: Path) -> None:
    """Through its file: the engine's text stays the target's, in the native pass and in PyTorch."""
    folder = write_tiny_target(tmp_path / "target")
    raw = (folder / "config.json").read_text().replace("LlamaForCausalLM", "Qwen2ForCausalLM")
    (folder / "config.json").write_text(raw.replace('"llama"', '"qwen2"'))
    weights = {
        name: tensor if "norm" in name else 4 * tensor for name, tensor in random_tensors(load_config(folder), 0)
    }
    save_file(weights, folder / "model.safetensors")
    _, network = start(folder)
    DFlashDrafter(network).save(tmp_path / "drafter")
    prompt, answers = [65, 66, 67], []
    for backend in ("torch", "auto"):
        llm = LLM(
            str(folder),
            drafter=str(tmp_path / "drafter"),
            dtype="float32",
            device="cpu",
            backend=backend,
            speculate="full",
        )
        answers.append(llm.generate_ids([prompt])[0].token_ids)
        llm.use_drafter("none")
        assert llm.generate_ids([prompt])[0].token_ids == answers[-1]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_continued_drafter_may_draft_longer_blocks_and_attend_to_less(is_causal: bool, tmp_path: Path) -> None:
    """No weight depends on block size and window. Without --block-size and --sliding-window they stay the drafter's.
    A causal drafter stays causal; --sliding-window made it attend both ways."""
    target = tiny_target(num_rows=1)
    raw = new_config(32, 11, 6, num_layers=1, block_size=4, head_dim=8, is_causal=is_causal)
    drafter = DFlashNetwork.random(DFlashConfig.from_json(raw))
    DFlashDrafter(drafter).save(tmp_path)
    shapes = DrafterShape(), DrafterShape(block_size=16, sliding_window=256)
    for shape, expected in zip(shapes, (4, 16), strict=True):
        config = TrainConfig(init=str(tmp_path), shape=shape)
        initial = initial_drafter(config, target, None)
        read = initial.network.config
        assert initial.drafter.raw["block_size"] == read.block_size == expected
        assert (read.shape.window(0), read.is_causal) == (shape.sliding_window, (is_causal,))
        weights = initial.network.state_dict()
        assert all(torch.equal(weights[name], value) for name, value in drafter.state_dict().items())


def test_a_continued_drafter_whose_windows_alone_are_causal_stays_so(tmp_path: Path) -> None:
    """--sliding-window gave all of its layers a window, and made all of them attend both ways."""
    raw = new_config(32, 11, 6, num_layers=2, block_size=4, head_dim=8)
    raw |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}
    DFlashDrafter(DFlashNetwork.random(DFlashConfig.from_json(raw))).save(tmp_path)
    for window, expected in ((None, 8), (256, 256)):
        config = TrainConfig(init=str(tmp_path), shape=DrafterShape(sliding_window=window))
        initial = initial_drafter(config, tiny_target(num_rows=1), None)
        for read in (initial.network.config, DFlashConfig.from_json(initial.drafter.raw)):
            assert read.is_causal == (True, False)
            assert [read.shape.window(layer) for layer in range(2)] == [expected, None]
