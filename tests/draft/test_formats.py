"""Drafters in z-lab's and in speculators' format: there and back, what is said, and the same drafts either way."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_drafters import BOTH_WAYS, CAUSAL, IDS, drafted, raw_2, written
from tiny_dflash import HIDDEN, KINDS, VOCAB, raw_config, tiny_target

from paceline.draft.dflash.checkpoint import read_draft_ids, read_stored
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.draft.formats.export import export, rows_of
from paceline.draft.formats.family import read_drafter
from paceline.draft.formats.packed import PACKED
from paceline.draft.registry import make_drafter
from paceline.errors import CacheError, ConfigError, ModelFileError, UnsupportedModelError
from paceline.model.target import head_weight

VERIFIER = {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
RECORDED = {
    "architectures", "speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config",
    "draft_vocab_size", "block_size", "target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id",
    "sliding_window_non_causal", "sample_from_anchor", "dtype", "tie_word_embeddings",
}  # fmt: skip
"""Keys of a config.json that speculators 0.9.0 wrote, less auto_map and transformers_version."""


def exported(source: Path, form: str, out: Path, **options: Any) -> list[str]:
    return export(read_stored(source), form, out, verifier=VERIFIER, **options)


def ids_of(folder: Path) -> list[int] | None:
    ids = read_stored(folder).vocabulary.ids
    assert (ids is None) == (read_draft_ids(folder) is None)
    return None if ids is None else ids.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "raw", [raw_config(), raw_config(**BOTH_WAYS), raw_config(**CAUSAL), raw_2(), raw_2(**BOTH_WAYS)]
)
def test_there_and_back_keeps_every_key_and_tensor(tmp_path: Path, raw: dict[str, Any]) -> None:
    raw = {**raw, "auto_map": {"": "config.Mine"}, "note": "mine"}
    raw["dflash_config"]["more"] = [1]
    source = written(tmp_path / "own", raw)
    exported(source, "speculators", tmp_path / "spec")
    exported(tmp_path / "spec", "z-lab", tmp_path / "back")
    back, first = read_stored(tmp_path / "back"), read_stored(source)
    assert {key: value for key, value in back.config.raw.items() if key != "speculators"} == raw
    assert back.tensors.keys() == first.tensors.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in first.tensors.items())
    exported(tmp_path / "back", "speculators", tmp_path / "again")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("spec", "again")]
    assert configs[0] == configs[1]
    assert (tmp_path / "spec/model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()


def test_the_config_is_that_of_speculators(tmp_path: Path) -> None:
    exported(written(tmp_path / "own", raw_config(**BOTH_WAYS)), "speculators", tmp_path / "spec")
    config = json.loads((tmp_path / "spec/config.json").read_text())
    assert config.keys() == RECORDED | {"z_lab"}
    assert config["architectures"] == ["DFlashDraftModel"] and config["aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert config["speculators_config"] == {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1}
        ],
        "verifier": VERIFIER,
    }
    assert (
        config["sliding_window_non_causal"]
        and config["draft_vocab_size"] == VOCAB
        and config["mask_token_id"] == VOCAB - 1
    )
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    assert not {"dflash_config", "block_size", "num_target_layers"} & config["transformer_layer_config"].keys()
    assert "lm_head.weight" not in load_file(tmp_path / "spec/model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "raw", [raw_config(), raw_config(**CAUSAL, sample_from_anchor=True), raw_2()], ids=["full", "causal", "2"]
)
def test_the_export_drafts_the_same(tmp_path: Path, raw: dict[str, Any], kind: Any) -> None:
    """Also from its own head: d2t, t2d and lm_head say what draft_ids beside the target's head do."""
    target = tiny_target(1, kind=kind)
    ids = None if "DFlash2" in str(raw) else IDS
    source = written(tmp_path / "own", raw, ids)
    exported(source, "speculators", tmp_path / "spec", head_rows=rows_of(head_weight(target)))
    drafts = [drafted(target, make_drafter(str(folder), target)) for folder in (source, tmp_path / "spec")]
    assert drafts[0] == drafts[1] and len(drafts[0]) > 5 and len({token for block in drafts[0] for token in block}) > 2
    if ids is not None:
        stored = load_file(tmp_path / "spec/model.safetensors")
        assert stored["d2t"].tolist() == [1, 3, 3, 6] and stored["t2d"].nonzero().flatten().tolist() == IDS.tolist()
        assert torch.equal(stored["lm_head.weight"], head_weight(target).float()[IDS])
        assert ids_of(tmp_path / "spec") == IDS.tolist()


@pytest.mark.slow
def test_what_a_format_has_no_place_for_is_said_or_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "own", raw_config(), IDS)
    with pytest.raises(
        ConfigError, match="drafts among 4 tokens, and the format wants the target's head for them: name it"
    ):
        exported(source, "speculators", tmp_path / "spec")
    note = exported(source, "z-lab", tmp_path / "z")[0]
    assert "draft vocabulary of 4 tokens" in note and "name the target (--model)" in note
    assert ids_of(tmp_path / "z") is None and "draft_vocab_size" not in read_stored(tmp_path / "z").config.raw
    with pytest.raises(CacheError, match="is there already"):
        exported(source, "z-lab", tmp_path / "z")
    with pytest.raises(ConfigError, match="format must be one of"):
        exported(source, "onnx", tmp_path / "onnx")
    for keys in ({"output_multiplier": 2.0}, {"final_logit_softcapping": 3.0}, {"is_causal": True}):
        bent = written(tmp_path / next(iter(keys)), raw_config(**keys))
        with pytest.raises(UnsupportedModelError, match="has no place for"):
            exported(bent, "speculators", tmp_path / "none")
    second = written(tmp_path / "two", raw_2(), IDS)
    assert "drafts among all tokens" in exported(second, "speculators", tmp_path / "two-spec")[0]


@pytest.mark.slow
def test_a_head_of_its_own_is_used_and_kept(tmp_path: Path) -> None:
    """A head as wide as the draft vocabulary, or as the target's, with weights in both formats."""
    target = tiny_target(1)
    other_VD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))
    for ids, rows in ((IDS, other_VD[IDS]), (None, other_VD)):
        source = written(tmp_path / f"own{len(rows)}", raw_config())
        plain = drafted(target, read_drafter(source))
        stored = load_file(source / "model.safetensors") | {"lm_head.weight": rows}
        if ids is not None:
            stored["d2t"] = ids - torch.arange(len(ids))
        save_file(stored, source / "model.safetensors")
        own = read_drafter(source)
        drafts = drafted(target, own)
        assert drafts != plain and own.head_VD is not None
        own.save(tmp_path / f"saved{len(rows)}")
        exported(source, "speculators", tmp_path / f"spec{len(rows)}")
        for name in (f"saved{len(rows)}", f"spec{len(rows)}"):
            assert drafted(target, read_drafter(tmp_path / name)) == drafts, name
        assert exported(source, "z-lab", tmp_path / f"z{len(rows)}") == []
        assert drafted(target, read_drafter(tmp_path / f"z{len(rows)}")) == drafts
        notes = export(read_stored(source), "z-lab", tmp_path / f"plain{len(rows)}", with_vocabulary=False)
        assert any("own head" in each for each in notes)
        assert drafted(target, read_drafter(tmp_path / f"plain{len(rows)}")) == plain


@pytest.mark.slow
def test_z_labs_format_has_the_draft_vocabulary_as_vllm_reads_it(tmp_path: Path) -> None:
    """draft_vocab_size in config.json, offsets and the head's rows among the weights, and the index names them."""
    target = tiny_target(1)
    source, out = written(tmp_path / "own", raw_config(), IDS), tmp_path / "z"
    assert exported(source, "z-lab", out, head_rows=rows_of(head_weight(target))) == []
    raw, stored = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert raw == raw_config() | {"draft_vocab_size": len(IDS)}
    assert stored["d2t"].tolist() == [1, 3, 3, 6] and torch.equal(
        stored["lm_head.weight"], head_weight(target).float()[IDS]
    )
    assert {*stored} == {*json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]}
    assert not (out / "draft_ids.safetensors").exists() and ids_of(out) == IDS.tolist()
    drafts = [drafted(target, make_drafter(str(folder), target)) for folder in (source, out)]
    assert drafts[0] == drafts[1]
    notes = export(read_stored(out), "z-lab", tmp_path / "plain", with_vocabulary=False)
    assert notes[0].startswith("the draft vocabulary of 4 tokens") and "--model" not in notes[0]
    assert json.loads((tmp_path / "plain/config.json").read_text()) == raw_config()
    assert "lm_head.weight" not in load_file(tmp_path / "plain/model.safetensors")


def test_the_vocabulary_of_dense_weights_next_to_packed_ones_is_read(tmp_path: Path) -> None:
    """All readers prefer model.safetensors; one of them returned no draft vocabulary because of the packed file."""
    source, out = written(tmp_path / "own", raw_config(), IDS), tmp_path / "z"
    exported(source, "z-lab", out, head_rows=rows_of(head_weight(tiny_target())))
    (out / PACKED).write_bytes(b"not read")
    assert ids_of(out) == IDS.tolist()


@pytest.mark.parametrize(
    ("raw", "flag"),
    [(raw_config(), True), (raw_2(), True), (raw_config(**BOTH_WAYS), True), (raw_config(**CAUSAL), False)],
)
def test_full_layers_are_not_said_to_be_causal(tmp_path: Path, raw: dict[str, Any], flag: bool) -> None:
    """vLLM takes sliding_window_non_causal for every layer, also where none has a window."""
    exported(written(tmp_path / "own", raw), "speculators", tmp_path / "spec")
    assert json.loads((tmp_path / "spec/config.json").read_text())["sliding_window_non_causal"] is flag


@pytest.mark.slow
def test_offsets_that_are_ids_are_found_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    exported(
        written(tmp_path / "own", raw_config(), IDS),
        "speculators",
        tmp_path / "spec",
        head_rows=rows_of(torch.eye(VOCAB, HIDDEN)),
    )
    file = tmp_path / "spec/model.safetensors"
    stored = load_file(file)
    save_file({**stored, "d2t": IDS}, file)
    with caplog.at_level(logging.WARNING):
        assert ids_of(tmp_path / "spec") == IDS.tolist()
    assert "holds token ids in place of offsets" in caplog.text
    save_file({**stored, "d2t": torch.tensor([0, 0, 0, 0])}, file)
    with pytest.raises(ModelFileError, match="name other tokens"):
        read_stored(tmp_path / "spec")


@pytest.mark.slow
def test_what_is_not_understood_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = raw_config(note=1)
    raw["dflash_config"]["use_magic"] = True
    source = written(tmp_path / "own", raw)
    (source / "mask_embedding.pt").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        read_stored(source)
    assert (
        "not read, as nothing here knows what to do with it: note, dflash_config.use_magic, mask_embedding.pt"
        in caplog.text
    )
    exported(written(tmp_path / "plain", raw_config()), "speculators", tmp_path / "spec")
    config = json.loads((tmp_path / "spec/config.json").read_text()) | {"anchor_mixing": 3}
    config["transformer_layer_config"] |= {"window_shift": 1}
    (tmp_path / "spec/config.json").write_text(json.dumps(config))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        stored = read_stored(tmp_path / "spec")
    assert stored.unread == ("anchor_mixing", "transformer_layer_config.window_shift")
    assert "anchor_mixing, transformer_layer_config.window_shift" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        read_stored(written(tmp_path / "usual", raw_config(torch_dtype="bfloat16", tie_word_embeddings=False)))
    assert not caplog.text


@pytest.mark.slow
def test_defaults_that_a_config_leaves_out_are_qwen3s(tmp_path: Path) -> None:
    """Transformers writes only what differs from them."""
    exported(written(tmp_path / "own", raw_config()), "speculators", tmp_path / "spec")
    file = tmp_path / "spec/config.json"
    config = json.loads(file.read_text())
    for key in ("max_position_embeddings", "rms_norm_eps", "hidden_act", "model_type"):
        del config["transformer_layer_config"][key]
    file.write_text(json.dumps(config))
    shape = read_stored(tmp_path / "spec").config.shape
    assert (shape.max_position, shape.rms_norm_eps) == (32768, 1e-6)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"aux_hidden_state_layer_ids": [0, 2]}, UnsupportedModelError, "is the target's embedding"),
        ({"aux_hidden_state_layer_ids": None}, ModelFileError, "must be a list of layers"),
        ({"transformer_layer_config": None}, ModelFileError, "must be an object"),
        ({"target_hidden_size": 99}, UnsupportedModelError, "target_hidden_size 99"),
        ({"speculators_model_type": "eagle9"}, UnsupportedModelError, "'eagle9' are not implemented"),
    ],
)
def test_configs_of_speculators_that_are_refused(
    tmp_path: Path, keys: dict[str, Any], error: type[Exception], message: str
) -> None:
    exported(written(tmp_path / "own", raw_config()), "speculators", tmp_path / "spec")
    file = tmp_path / "spec/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    with pytest.raises(error, match=message):
        read_stored(tmp_path / "spec")


def test_others_find_the_weights_alone_and_may_read_them(tmp_path: Path) -> None:
    """Readers without an index take every *.safetensors; with one those it names."""
    folder = written(tmp_path / "own", raw_config(), IDS)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    named = set(index["weight_map"].values())
    assert named == {"model.safetensors"}
    assert index["weight_map"].keys() == load_file(folder / "model.safetensors").keys()
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o644 for file in folder.iterdir())
    (folder / "model.safetensors.index.json").unlink()  # a folder of an older version
    assert ids_of(folder) == IDS.tolist()
    DFlashDrafter(DFlashNetwork.random(DFlashConfig.from_json(raw_config()))).save(folder, in_8_bits=True)
    assert not (folder / "model.safetensors.index.json").exists(), "it would name a file that is not there"
