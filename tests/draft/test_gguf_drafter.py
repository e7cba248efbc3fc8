"""DFlash drafters as GGUF files: there and back, llama.cpp's own keys and names, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import byte_level_vocabulary, finish
from stored_drafters import BOTH_WAYS, CAUSAL, IDS, drafted, raw_2, written
from tiny_dflash import SLIDING, VOCAB, raw_config, tiny_target
from typer.testing import CliRunner

from paceline.cli import app
from paceline.draft.dflash.checkpoint import read_draft_ids, read_stored, write_checkpoint
from paceline.draft.formats.export import export, rows_of
from paceline.draft.formats.family import read_drafter
from paceline.draft.registry import folder_of, make_drafter
from paceline.errors import CacheError, ConfigError, ModelFileError, UnsupportedModelError
from paceline.model.target import head_weight

RECORDED = {
    "general.architecture": "dflash",
    "dflash.block_count": 3,
    "dflash.embedding_length": 32,
    "dflash.feed_forward_length": 48,
    "dflash.attention.head_count": 4,
    "dflash.attention.key_length": 8,
    "dflash.attention.value_length": 8,
    "dflash.attention.causal": False,
    "dflash.block_size": 8,
    "tokenizer.ggml.mask_token_id": VOCAB - 1,
}
"""Metadata as in the files of llama.cpp's converter."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def fields_of(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def exported(
    tmp_path: Path, raw: dict[str, Any], ids: torch.Tensor | None = None, **options: Any
) -> tuple[Path, list[str]]:
    file = tmp_path / "out" / "drafter.gguf"
    left_out = export(read_stored(written(tmp_path / "own", raw, ids)), "gguf", file, **options)
    return file, left_out


def target_file(file: Path, num_tokens: int) -> Path:
    """The target's GGUF file, as far as its tokenizer goes."""
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in byte_level_vocabulary(num_tokens).items():
        getattr(writer, key)(value)
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(3)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    finish(writer)
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    "raw",
    [
        raw_config(),
        raw_config(**BOTH_WAYS),
        raw_config(rope_scaling={**YARN, "beta_fast": None}),
        raw_2(),
        raw_2(**BOTH_WAYS),
        raw_2(output_multiplier=0.5),
    ],
)
@pytest.mark.parametrize("ids", [None, IDS], ids=["all tokens", "a draft vocabulary"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_there_and_back_keeps_every_key_and_tensor(
    tmp_path: Path, raw: dict[str, Any], ids: torch.Tensor | None, dtype: torch.dtype
) -> None:
    raw = {**raw, "note": "mine"}
    first = read_stored(written(tmp_path / "first", raw))
    write_checkpoint(tmp_path / "own", raw, {name: each.to(dtype) for name, each in first.tensors.items()}, ids)
    stored, file = read_stored(tmp_path / "own"), tmp_path / "drafter.gguf"
    export(stored, "gguf", file)
    back = read_stored(file)
    assert back.config == stored.config and back.config.raw == raw and back.form == "gguf"
    assert back.tensors.keys() == stored.tensors.keys()
    assert all(
        torch.equal(back.tensors[name], each) and back.tensors[name].dtype == dtype
        for name, each in stored.tensors.items()
    )
    read_ids = read_draft_ids(file)
    assert (read_ids is None and ids is None) or (
        read_ids is not None and ids is not None and torch.equal(read_ids, ids)
    )
    export(back, "z-lab", tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text()) == raw
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "own/model.safetensors").read_bytes()


def test_keys_and_names_are_llama_cpps(tmp_path: Path) -> None:
    file, _ = exported(tmp_path, raw_2(**BOTH_WAYS))
    fields, config = fields_of(file), read_stored(tmp_path / "own").config
    assert {key: fields[key] for key in RECORDED} == RECORDED
    assert fields["dflash.target_layers"] == [layer + 1 for layer in config.target_layer_ids], (
        "it names inputs of layers"
    )
    assert [
        fields[f"dflash.{name}"] for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    ] == [2, 4, 5, 6]
    assert fields["dflash.attention.sliding_window"] == SLIDING["sliding_window"]
    assert fields["dflash.attention.sliding_window_pattern"] == [True, False, True]
    tensors = {each.name: each for each in gguf.GGUFReader(file).tensors}
    layer = {
        "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm", "ffn_norm", "ffn_gate",
        "ffn_up", "ffn_down", "attn_conv_proj", "ffn_conv_proj",
    }  # fmt: skip
    whole = {"fc", "enc.output_norm", "output_norm", "selector_predecessor", "selector_successor", "selector_hidden"}
    expected = {f"{name}.weight" for name in whole} | {
        f"blk.{index}.{name}.weight" for index in range(3) for name in layer
    }
    expected |= {f"blk.{index}.{side}_conv_base" for index in range(3) for side in ("attn", "ffn")}
    assert tensors.keys() == expected
    assert tensors["blk.0.attn_conv_base"].shape.tolist() == [32, 2, 2], "hidden size, taps, sides"
    assert tensors["fc.weight"].shape.tolist() == [3 * 32, 32]


def test_a_file_of_llama_cpps_converter_is_read_without_our_keys(tmp_path: Path) -> None:
    """Its keys alone: no paceline.config, matrices in half precision, norms in float32."""
    source = read_stored(written(tmp_path / "own", raw_config(**BOTH_WAYS, rope_scaling=YARN)))
    export(source, "gguf", tmp_path / "ours.gguf")
    reader, writer = gguf.GGUFReader(tmp_path / "ours.gguf"), gguf.GGUFWriter(tmp_path / "theirs.gguf", "dflash")
    for name, field in reader.fields.items():
        if not name.startswith(("paceline.", "GGUF.", "general.", "dflash.vocab_size")):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
    for each in reader.tensors:
        is_norm = each.data.ndim == 1
        writer.add_tensor(each.name, np.array(each.data) if is_norm else each.data.astype(np.float16))
    finish(writer)
    stored = read_stored(tmp_path / "theirs.gguf")
    for name in ("target_layer_ids", "block_size", "mask_token_id", "is_causal", "from_anchor", "second"):
        assert getattr(stored.config, name) == getattr(source.config, name), name
    assert stored.config.shape == replace(source.config.shape, vocab_size=1)
    assert (stored.config.vocab_size, stored.config.num_target_layers) == (None, None), "these files do not say"
    assert all(torch.allclose(stored.tensors[name].float(), each, atol=2e-3) for name, each in source.tensors.items())
    assert read_drafter(tmp_path / "theirs.gguf").num_drafted == 7


@pytest.mark.slow
@pytest.mark.parametrize("raw", [raw_config(), raw_2()], ids=["1", "2"])
def test_it_drafts_the_same(tmp_path: Path, raw: dict[str, Any]) -> None:
    target = tiny_target(1)
    file, _ = exported(tmp_path, raw, IDS, head_rows=rows_of(head_weight(target)))
    assert drafted(target, make_drafter(str(file), target)) == drafted(target, read_drafter(tmp_path / "own"))
    assert folder_of(str(file)) == file
    assert make_drafter(str(file), target).source == str(file.resolve())


def test_the_heads_rows_of_a_draft_vocabulary_go_with_its_tokens(tmp_path: Path) -> None:
    head_VD = head_weight(tiny_target(1))
    file, left_out = exported(tmp_path, raw_config(), IDS, head_rows=rows_of(head_VD))
    tensors = {each.name: each.data for each in gguf.GGUFReader(file).tensors}
    assert tensors["d2t"].tolist() == IDS.tolist(), "llama.cpp scatters rows to these tokens"
    assert torch.equal(torch.tensor(tensors["output.weight"]), head_VD[IDS].float())
    assert not any("vocabulary" in each for each in left_out)
    vocabulary = read_stored(file).vocabulary
    assert vocabulary.ids is not None and torch.equal(vocabulary.ids, IDS) and vocabulary.head_VD is not None


def test_a_draft_vocabulary_without_a_head_is_kept_for_us_and_said(tmp_path: Path) -> None:
    file, left_out = exported(tmp_path, raw_config(), IDS)
    assert any("draft vocabulary of 4 tokens" in each and "--model" in each for each in left_out)
    assert "output.weight" not in {each.name for each in gguf.GGUFReader(file).tensors}
    assert read_draft_ids(file) is not None


@pytest.mark.slow
def test_the_targets_tokenizer_goes_along(tmp_path: Path) -> None:
    raw = raw_config() | {"vocab_size": 300}
    target = target_file(tmp_path / "target.gguf", 300)
    file, left_out = exported(tmp_path, raw, target=target)
    theirs, ours = fields_of(target), fields_of(file)
    copied = {key: value for key, value in theirs.items() if key.startswith("tokenizer.")}
    assert len(copied) >= 6 and all(ours[key] == value for key, value in copied.items())
    assert ours["tokenizer.ggml.mask_token_id"] == VOCAB - 1 and not left_out
    assert read_stored(file).config.vocab_size == 300
    with pytest.raises(ConfigError, match="300 tokens, the drafter's target 11"):
        export(read_stored(written(tmp_path / "other", raw_config())), "gguf", tmp_path / "x.gguf", target=target)
    without, left_out = exported(tmp_path / "b", raw)
    assert any("tokenizer" in each and "--model" in each for each in left_out) and without.is_file()


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (raw_config(**CAUSAL), "only to earlier ones"),
        (raw_config(is_causal=True), "only to earlier ones"),
        (raw_config(sample_from_anchor=True), "sample_from_anchor"),
        (raw_config(input_embedding_scale=2.0), "input_embedding_scale"),
        (raw_config(attention_bias=True), "self_attn.._proj.bias"),
        (raw_config(rope_scaling={**YARN, "rope_type": "longrope"}), "longrope"),
        (raw_config(rope_scaling={**YARN, "attention_factor": 2.0}), "yarn"),
    ],
)
def test_what_llama_cpp_has_no_word_for_is_refused(tmp_path: Path, raw: dict[str, Any], what: str) -> None:
    if "longrope" in what:
        raw["rope_scaling"] |= {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    with pytest.raises(UnsupportedModelError, match=what):
        exported(tmp_path, raw)
    assert not (tmp_path / "out").exists()


def test_files_that_are_none_of_ours(tmp_path: Path) -> None:
    file, _ = exported(tmp_path, raw_config())
    with pytest.raises(CacheError, match="another file"):
        export(read_stored(tmp_path / "own"), "gguf", file)
    with pytest.raises(ConfigError, match=r"ends in \.gguf"):
        export(read_stored(tmp_path / "own"), "gguf", tmp_path / "folder")
    model = target_file(tmp_path / "model.gguf", 300)
    with pytest.raises(UnsupportedModelError, match="'llama' is no DFlash drafter"):
        read_stored(model)
    with pytest.raises(ModelFileError, match="holds no DFlash or EAGLE-3 drafter"):
        folder_of(str(model))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"dflash.target_layers": [1, 2, 3]}, ModelFileError, "target_layer_ids"),
        ({"dflash.target_layers": None}, ModelFileError, "has no dflash.target_layers"),
        ({"dflash.target_layers": [0, 2, 3]}, ModelFileError, "counts from 1"),
        ({"dflash.block_size": 4}, ModelFileError, "block_size is 4 in llama.cpp's keys and 8"),
        ({"dflash.rope.freq_base": 5e5}, ModelFileError, "rope_theta is 500000.0 in llama.cpp's keys and 10000.0"),
        ({"dflash.attention.head_count_kv": 2}, ModelFileError, "num_kv_heads is 2 in llama.cpp's keys and 1"),
        ({"dflash.attention.sliding_window": 9}, ModelFileError, r"windows is \[9, None, 9\] in llama.cpp's keys and"),
        ({"dflash.rope.scaling.factor": 8.0}, ModelFileError, "rope_scaling is .*8.0.* in llama.cpp's keys and .*4.0"),
        ({"dflash.selector_top_k": 5}, ModelFileError, "selector_top_k is 5 in llama.cpp's keys and 6"),
        (
            {"dflash.block_count": 2**31, "dflash.attention.sliding_window_pattern": None},
            ModelFileError,
            "'num_hidden_layers' as a whole number from 1 to 4096",
        ),
        ({"paceline.config": "{"}, ModelFileError, "no JSON"),
        ({"paceline.config": "[1]"}, ModelFileError, "no object"),
        ({"paceline.draft_ids": [5, 1]}, ModelFileError, "ascend"),
    ],
)
def test_files_that_contradict_themselves(tmp_path: Path, changed: dict[str, Any], error: Any, message: str) -> None:
    """A key that was changed with another program is not read in two ways in silence."""
    file, _ = exported(tmp_path, raw_2(**BOTH_WAYS, rope_scaling=YARN), IDS)
    reader, writer = gguf.GGUFReader(file), gguf.GGUFWriter(tmp_path / "changed.gguf", "dflash")
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")) and changed.get(name, 0) is not None:
            kind, *inner = field.types
            writer.add_key_value(name, changed.get(name, field.contents()), kind, inner[-1] if inner else None)
    for each in reader.tensors:
        writer.add_tensor(each.name, np.array(each.data))
    finish(writer)
    with pytest.raises(error, match=message):
        read_stored(tmp_path / "changed.gguf")


def test_the_commands(tmp_path: Path) -> None:
    written(tmp_path / "own", raw_config())
    out = tmp_path / "drafter.gguf"
    words = ["export", str(tmp_path / "own"), "--format", "gguf", "--out", str(out), "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert json.loads(done.stdout.splitlines()[-1])["format"] == "gguf"
    done = CliRunner().invoke(app, ["inspect", str(out)], catch_exceptions=False)
    assert "gguf" in done.stdout and "DFlash v1" in done.stdout
