"""EAGLE-3 checkpoints in both styles: what is read, what is written back, what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from round_loop import generate
from safetensors.torch import load_file, save_file
from tiny_dflash import HIDDEN, PROMPT, VOCAB, tiny_target
from tiny_eagle3 import IDS, drafter_of, loud_network, raw_eagle3
from torch import Tensor

from paceline.draft.eagle3.checkpoint import Eagle3Config, is_eagle3, read_eagle3
from paceline.draft.eagle3.drafter import Eagle3Drafter
from paceline.draft.registry import make_drafter
from paceline.errors import ModelFileError, UnsupportedModelError

MAPS = {"d2t": IDS - torch.arange(len(IDS)), "t2d": torch.isin(torch.arange(VOCAB), IDS)}
SHAPE = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
         "num_hidden_layers", "rms_norm_eps", "max_position_embeddings")  # fmt: skip


def raw_reduced(**keys: Any) -> dict[str, Any]:
    return raw_eagle3(draft_vocab_size=len(IDS), **keys)


def raw_speculators(**keys: Any) -> dict[str, Any]:
    flat = raw_reduced()
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": None, "architectures": []}},
        "transformer_layer_config": {"model_type": "llama", **{key: flat[key] for key in SHAPE}},
        "draft_vocab_size": len(IDS),
        "eagle_aux_hidden_state_layer_ids": flat["eagle_aux_hidden_state_layer_ids"],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "target_hidden_size": None,
        "embed_requires_grad": False,
        **keys,
    }


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def tensors_of(raw: dict[str, Any]) -> dict[str, Tensor]:
    return {**loud_network(raw).state_dict(), **MAPS}


def answer_of(drafter: Eagle3Drafter) -> Any:
    """The answer and how many drafts stood, which tells drafters apart."""
    answers, rounds = generate(tiny_target(), drafter, [PROMPT], 30)
    return answers, [stats.num_accepted_B for stats in rounds]


def test_round_trip_of_specforges_style(tmp_path: Path) -> None:
    raw = {**raw_reduced(), "torch_dtype": "bfloat16"}
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors_of(raw).items()}
    drafter = Eagle3Drafter.from_folder(write(tmp_path / "given", raw, named), num_drafted=4)
    assert drafter.num_drafted == 4 and drafter.ids.tolist() == IDS.tolist()
    drafter.save(tmp_path / "written")
    assert json.loads((tmp_path / "written/config.json").read_text()) == raw
    written = load_file(tmp_path / "written/model.safetensors")
    assert written.keys() == named.keys()
    for name, tensor in named.items():
        assert torch.equal(written[name], tensor) and written[name].dtype == tensor.dtype, name
    assert written["d2t"].dtype == torch.int64 and written["t2d"].dtype == torch.bool


@pytest.mark.slow
def test_both_styles_are_the_same_drafter(tmp_path: Path) -> None:
    raw = raw_reduced()
    plain = drafter_of(loud_network(raw))
    plain.save(tmp_path / "specforge")
    other = write(tmp_path / "speculators", raw_speculators(), tensors_of(raw))
    drafters = [plain]
    for folder in (tmp_path / "specforge", other):
        loaded = make_drafter(str(folder), tiny_target())
        assert isinstance(loaded, Eagle3Drafter)
        drafters.append(loaded)
    assert {drafter.name for drafter in drafters} == {"eagle3"}
    answers = [answer_of(drafter) for drafter in drafters]
    assert answers[0] == answers[1] == answers[2]
    drafters[2].save(tmp_path / "converted")
    converted = json.loads((tmp_path / "converted/config.json").read_text())
    assert converted["architectures"] == ["LlamaForCausalLMEagle3"] and "midlayer.hidden_norm.weight" in load_file(
        tmp_path / "converted/model.safetensors"
    )
    again, before = Eagle3Drafter.from_folder(tmp_path / "converted").config, drafters[2].config
    assert {name: getattr(again, name) for name in again.__slots__ if name != "raw"} == {
        name: getattr(before, name) for name in before.__slots__ if name != "raw"
    }


def test_ways_of_counting_layers() -> None:
    """Top-level ids count hidden states, SGLang's count layers; the first is asked first."""
    raw = raw_eagle3(tap_layers=[1, 3, 4])
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert Eagle3Config.from_json(raw).tap_layers == (1, 3, 4)
    own = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}, "eagle_aux_hidden_state_layer_ids": None}
    assert Eagle3Config.from_json({**raw, **own}).tap_layers == (0, 2)


@pytest.mark.slow
def test_an_embedding_of_its_own_is_used(tmp_path: Path) -> None:
    raw, twin = raw_reduced(), tiny_target()
    embedding = twin.embed(torch.arange(VOCAB)).clone()
    same = write(tmp_path / "same", raw, {**tensors_of(raw), "embed_tokens.weight": embedding})
    other = write(tmp_path / "other", raw, {**tensors_of(raw), "embed_tokens.weight": embedding.flip(0)})
    plain = answer_of(drafter_of(loud_network(raw)))
    assert answer_of(Eagle3Drafter.from_folder(same)) == plain != answer_of(Eagle3Drafter.from_folder(other))


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"])
def test_what_is_missing_is_named(name: str, tmp_path: Path) -> None:
    """Some engines load such a file and draft nonsense."""
    tensors = {key: tensor for key, tensor in tensors_of(raw_reduced()).items() if key != name}
    with pytest.raises(ModelFileError, match=f"are missing: {name}; export it with its head"):
        read_eagle3(write(tmp_path / "drafter", raw_reduced(), tensors))


def test_a_whole_vocabulary_needs_no_maps(tmp_path: Path) -> None:
    raw = raw_eagle3()
    folder = write(tmp_path / "drafter", raw, loud_network(raw).state_dict())
    assert read_eagle3(folder).ids.tolist() == list(range(VOCAB))


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ({"d2t": torch.zeros(len(IDS), dtype=torch.long)}, "d2t and t2d name different tokens"),
        ({"d2t": torch.zeros(3, dtype=torch.long)}, "d2t must hold 7 whole numbers"),
        ({"d2t": MAPS["d2t"] + 9}, "d2t does not name 7 different tokens of 11"),
        ({"d2t": MAPS["d2t"].float()}, "d2t must hold 7 whole numbers"),
        ({"t2d": ~MAPS["t2d"]}, "d2t and t2d name different tokens"),
    ],
)
def test_vocabularies_that_cannot_be(maps: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_eagle3(write(tmp_path / "drafter", raw_reduced(), {**tensors_of(raw_reduced()), **maps}))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"fc_norm": False}, r"fc_norm.\* are there, and fc_norm is false in config.json: set fc_norm to true"),
        ({"fc_norm": True, "version": "3"}, r"fc_norm.\* are missing, and fc_norm is true"),
        ({"norm_before_fc": True, "version": "3"}, r"input_norm.\* are missing, and norm_before_fc is true"),
    ],
)
def test_norms_and_their_flags_must_agree(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    """SpecForge's exports of EAGLE-3.1 were seen without the flag: engines then leave the norms out and say nothing."""
    tensors = tensors_of(raw_reduced(version=flags.get("version", "3.1")))
    with pytest.raises(ModelFileError, match=message):
        read_eagle3(write(tmp_path / "drafter", raw_reduced(**flags), tensors))


def test_a_tensor_of_another_size_is_named(tmp_path: Path) -> None:
    tensors = {**tensors_of(raw_reduced()), "fc.weight": torch.ones(HIDDEN, 2 * HIDDEN)}
    with pytest.raises(ModelFileError, match=r"'fc.weight' has shape \(32, 64\), the config asks for \(32, 96\)"):
        Eagle3Drafter.from_folder(write(tmp_path / "drafter", raw_reduced(), tensors))


def test_a_config_without_architectures_is_read_and_written_with_them(tmp_path: Path) -> None:
    """It was taken for a language model that drafts, whose config names no architecture."""
    raw = {name: value for name, value in raw_reduced().items() if name != "architectures"}
    folder = write(tmp_path / "drafter", raw, tensors_of(raw_reduced()))
    drafter = make_drafter(str(folder), tiny_target())
    assert isinstance(drafter, Eagle3Drafter)
    drafter.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]


def test_what_is_not_understood_is_said_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = {**raw_reduced(), "looks_both_ways": True, "bos_token_id": 1}
    folder = write(tmp_path / "drafter", raw, {**tensors_of(raw), "verifier_norm.weight": torch.ones(HIDDEN)})
    drafter = Eagle3Drafter.from_folder(folder)
    assert [message.split(": ", 1)[1] for message in caplog.messages] == [
        "not understood and not used, of config.json: looks_both_ways",
        "not understood and not used, of the weights: verifier_norm.weight",
    ]
    drafter.save(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text()) == raw
    assert "verifier_norm.weight" in load_file(tmp_path / "again/model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_fc": True}, "norm_before_fc and fc_norm exclude each other"),
        ({"norm_output": "yes"}, "norm_output must be true or false"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3]}, "must list layers from 1 on"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 3]}, "names a layer twice"),
        ({"eagle_config": 3}, "eagle_config must be an object"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' as a whole number"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, "layer_types names 2 layers, there are 1"),
    ],
)
def test_impossible_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        Eagle3Config.from_json({**raw_eagle3(), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' are not implemented"),
        ({"architectures": ["DFlashDraftModel"]}, "is no EAGLE-3 drafter"),
    ],
)
def test_what_is_not_implemented(changes: dict[str, Any], message: str) -> None:
    raw = {**raw_eagle3(), **changes}
    if "eagle_config" in changes:
        raw["eagle_aux_hidden_state_layer_ids"] = None
    with pytest.raises(UnsupportedModelError, match=message):
        Eagle3Config.from_json(raw)


def test_which_configs_are_eagle3() -> None:
    """The original repository's say LlamaForCausalLM with a draft vocabulary."""
    assert is_eagle3({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000})
    assert is_eagle3({"architectures": ["Eagle3LlamaForCausalLM"]}) and is_eagle3({"speculators_model_type": "eagle3"})
    keys = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")
    assert all(is_eagle3({"model_type": "llama", key: {}}) for key in keys), "without architectures, by its keys"
    assert not is_eagle3({"dflash_config": {}, "draft_vocab_size": 9}) and not is_eagle3({"model_type": "llama"})
    assert not is_eagle3({"architectures": ["LlamaForCausalLM"]}) and not is_eagle3(
        {"speculators_model_type": "peagle"}
    )
