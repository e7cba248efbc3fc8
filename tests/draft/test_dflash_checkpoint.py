"""DFlash checkpoints: what is written, what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_dflash import HIDDEN, VOCAB, network, raw_config, tiny_target

from paceline.draft.dflash.checkpoint import weights_file
from paceline.draft.dflash.config import DFlashConfig, default_layer_ids, new_config
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.draft.formats.family import read_drafter
from paceline.draft.formats.packed import PACKED
from paceline.errors import ConfigError, DrafterMismatchError, ModelFileError, UnsupportedModelError
from paceline.loop.adapt.gate.lineage import weights_hash


def test_checkpoint_goes_round_unchanged(tmp_path: Path) -> None:
    raw = raw_config(note={"kept": [1, None]}, is_causal=False)
    state = {name: tensor.bfloat16() for name, tensor in network(raw).state_dict().items()}
    drafter = DFlashDrafter(DFlashNetwork.of(DFlashConfig.from_json(raw), state))
    drafter.save(tmp_path / "first")
    again = read_drafter(tmp_path / "first", num_drafted=2)
    again.save(tmp_path / "second")
    again.save(tmp_path / "first")  # over itself, while its weights are mapped
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert json.loads((tmp_path / "second" / "config.json").read_text()) == raw
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.network.state_dict().items())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first", "second"]


def test_checkpoint_in_8_bits(tmp_path: Path) -> None:
    """Half the bytes, every number within a half step of its block and a rounding to bfloat16, and all else as it
    was."""
    raw = raw_config(num_layers=2)
    state = {name: tensor.bfloat16() for name, tensor in network(raw).state_dict().items()}
    drafter = DFlashDrafter(DFlashNetwork.of(DFlashConfig.from_json(raw), state), draft_ids=torch.arange(0, VOCAB, 2))
    drafter.save(tmp_path / "dense")
    drafter.save(tmp_path / "small", in_8_bits=True)
    assert sorted(file.name for file in (tmp_path / "small").iterdir()) == [
        "config.json",
        "draft_ids.safetensors",
        PACKED,
    ]
    sizes = [weights_file(tmp_path / name).stat().st_size for name in ("dense", "small")]
    assert sizes[1] < 0.7 * sizes[0]  # of such a tiny network names take much
    again = read_drafter(tmp_path / "small")
    assert again.draft_ids is not None and torch.equal(again.draft_ids, torch.arange(0, VOCAB, 2))
    num_rounded = 0
    for name, tensor in again.network.state_dict().items():
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            num_rounded += 1
            blocks, was = (each.float().reshape(-1, 32) for each in (tensor, state[name]))
            most = was.abs().amax(dim=1, keepdim=True)
            assert bool(((blocks - was).abs() <= most / 254 * 1.01 + was.abs() / 256).all()), name
        else:
            assert torch.equal(tensor, state[name]), name
    assert num_rounded >= 5 * 2
    again.save(tmp_path / "small")  # dense again: nothing of the other file is left
    assert weights_file(tmp_path / "small").name == "model.safetensors" and not (tmp_path / "small" / PACKED).exists()
    assert all(
        torch.equal(tensor, again.network.state_dict()[name])
        for name, tensor in read_drafter(tmp_path / "small").network.state_dict().items()
    )


def test_dense_weights_are_read_where_both_are_there(tmp_path: Path) -> None:
    drafter = DFlashDrafter(network(raw_config()))
    for folder, in_8_bits in (("dense", False), ("both", True)):
        drafter.save(tmp_path / folder, in_8_bits=in_8_bits)
    assert (small := weights_hash(tmp_path / "both")) not in (None, weights_hash(tmp_path / "dense"))
    (tmp_path / "both" / "model.safetensors").write_bytes((tmp_path / "dense" / "model.safetensors").read_bytes())
    loaded = read_drafter(tmp_path / "both").network.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in drafter.network.state_dict().items())
    assert weights_hash(tmp_path / "both") == weights_hash(tmp_path / "dense") != small


@pytest.mark.parametrize("fault", ["cut", "no whole blocks", "NaN"])
def test_damaged_weights_in_8_bits_are_refused(tmp_path: Path, fault: str) -> None:
    from safetensors.torch import load_file, save_file

    DFlashDrafter(network(raw_config())).save(tmp_path / "small", in_8_bits=True)
    file = tmp_path / "small" / PACKED
    if fault == "cut":
        file.write_bytes(file.read_bytes()[:-100])
        message = "damaged"
    else:
        stored = load_file(file)
        data = stored["fc.weight"].clone()
        if fault == "NaN":
            data[0, :2] = 255  # the half-precision scale of the first block
            stored["fc.weight"], message = data, "holds NaN or an infinity"
        else:
            stored["fc.weight"], message = data[:, :-1].contiguous(), "holds no whole blocks"
        save_file(stored, file)
    with pytest.raises(ModelFileError, match=message):
        read_drafter(tmp_path / "small")


def test_sharded_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    raw, state = raw_config(), network(raw_config()).state_dict()
    names, weight_map = list(state), {}
    for shard, part in enumerate((names[:5], names[5:])):
        file = f"model-{shard}.safetensors"
        save_file({name: state[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    loaded = read_drafter(tmp_path).network.state_dict()
    assert all(torch.equal(loaded[name], state[name]) for name in names)


def test_tensor_names_are_those_of_the_format() -> None:
    names = set(network(new_config(HIDDEN, VOCAB, 36, num_layers=5, head_dim=8)).state_dict())
    assert len(names) == 58
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.4.self_attn.k_norm.weight"} <= names


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": 64}, "hidden size: the drafter says 64, the target has 32"),
        ({"vocab_size": 12}, "vocabulary: the drafter says 12, the target has 11"),
        ({"num_target_layers": 7}, "target layers: the drafter says 7, the target has 6"),
        ({"dflash_config": {"mask_token_id": 11, "target_layer_ids": [1]}}, "mask token: the drafter says 11"),
        (
            {"dflash_config": {"mask_token_id": 10, "target_layer_ids": [1, 6]}},
            r"tapped layers: the drafter says \[6\]",
        ),
    ],
)
def test_a_drafter_for_another_target_is_refused(keys: dict[str, Any], message: str) -> None:
    target = tiny_target()
    drafter = DFlashDrafter(DFlashNetwork.random(DFlashConfig.from_json(raw_config() | keys)))
    with pytest.raises(DrafterMismatchError, match=message):
        drafter.bind(target)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"speculators_model_type": "dflash"}, UnsupportedModelError),
        ({"architectures": ["DFlash3DraftModel"]}, UnsupportedModelError),
        ({"architectures": ["DFlash2DraftModel"]}, ModelFileError),
        ({"layer_types": ["full_attention"]}, ModelFileError),
        ({"dflash_config": {"target_layer_ids": [1]}}, ModelFileError),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 1]}}, ModelFileError),
        ({"block_size": 1}, ModelFileError),
        ({"hidden_size": None}, ModelFileError),
    ],
)
def test_configs_we_do_not_understand(keys: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        DFlashConfig.from_json(raw_config() | keys)


def test_settings_come_from_dflash_config_first() -> None:
    raw = raw_config(output_multiplier=2.0, input_embedding_scale=3.0)
    raw["dflash_config"] |= {"block_size": 5, "output_multiplier": 4.0}
    config = DFlashConfig.from_json(raw)
    assert (config.block_size, config.output_multiplier, config.input_embedding_scale) == (5, 4.0, 3.0)
    raw["dflash_config"].pop("target_layer_ids")
    assert config.target_layer_ids == DFlashConfig.from_json(raw | {"num_target_layers": 6}).target_layer_ids
    assert default_layer_ids(36, 5) == [1, 9, 17, 25, 33] and default_layer_ids(30, 1) == [15]


def test_weights_that_do_not_fit_are_named() -> None:
    raw = raw_config()
    state = network(raw).state_dict()
    with pytest.raises(ModelFileError, match="layers.0.input_layernorm.weight"):
        DFlashNetwork.of(
            DFlashConfig.from_json(raw), {k: v for k, v in state.items() if k != "layers.0.input_layernorm.weight"}
        )
    with pytest.raises(ModelFileError, match="extra"):
        DFlashNetwork.of(DFlashConfig.from_json(raw), {**state, "extra": torch.zeros(1)})


def test_num_drafted_beyond_the_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 to 7"):
        DFlashDrafter(network(raw_config()), num_drafted=8)


def test_a_draft_vocabulary_is_kept_beside_the_checkpoint(tmp_path: Path) -> None:
    ids, folder = torch.tensor([1, 4, 5, 9]), tmp_path / "drafter"
    DFlashDrafter(network(raw_config()), draft_ids=ids).save(folder)
    again = read_drafter(folder)
    assert again.draft_ids is not None and again.draft_ids.tolist() == ids.tolist()
    DFlashDrafter(network(raw_config())).save(folder)
    assert read_drafter(folder).draft_ids is None, "another drafter's tokens must not stay"
    (folder / "draft_ids.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelFileError, match="delete it"):
        read_drafter(folder)
