"""GGUF files against Transformers and the gguf package, at tiny shapes."""

from __future__ import annotations

import mmap
import os
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from gguf_files import byte_level_vocabulary, finish, write_gguf
from model_folders import transformers_model

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.checkpoint import check_tensors, config_json, load_config, load_tensors
from paceline.model.gguf import metadata as our_gguf
from paceline.model.gguf.blocks import Blocks
from paceline.model.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_gguf_equals_the_model_it_was_made_from(arch: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = transformers_model(f"{arch.capitalize()}ForCausalLM", **changes)
    write_gguf(tmp_path / "model.gguf", model, arch)
    model.save_pretrained(tmp_path / "folder")
    config, expected = load_config(tmp_path / "model.gguf"), load_config(tmp_path / "folder")
    assert config == expected
    tensors = dict(check_tensors(config, load_tensors(tmp_path / "model.gguf"), "model.gguf"))
    missing, unexpected = model.__class__(model.config).load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    assert all(tensors[name].equal(model.state_dict()[name]) for name in tensors)


@pytest.mark.parametrize("quant", [Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1])
def test_quantised_round_trip(quant: Quant, tmp_path: Path) -> None:
    """Every type the gguf package can write: ours is its dequantisation, and near what went in."""
    model = transformers_model("Qwen2ForCausalLM")
    write_gguf(tmp_path / "model.gguf", model, "qwen2", quant)
    name = "model.layers.1.mlp.down_proj.weight"
    original = model.state_dict()[name]
    loaded = dict(load_tensors(tmp_path / "model.gguf"))[name]
    blocks = gguf.quants.quantize(original.numpy(), quant)
    assert loaded.dtype == torch.float32
    assert loaded.equal(torch.from_numpy(np.array(gguf.dequantize(blocks, quant), dtype=np.float32)))
    bits = {Quant.F16: 11, Quant.BF16: 8, Quant.Q8_0: 7, Quant.Q5_0: 4, Quant.Q5_1: 4}.get(quant, 3)
    assert (loaded - original).abs().max() <= original.abs().max() * 2.0**-bits


class TestParts:
    """A model that gguf-split, or gguf-py, has cut into files."""

    @pytest.fixture
    def parts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        model = transformers_model("LlamaForCausalLM")
        write_gguf(tmp_path / "whole.gguf", model, "llama")
        monkeypatch.setattr(gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=7))
        write_gguf(tmp_path / "x.gguf", model, "llama")
        files = sorted(tmp_path.glob("x-*.gguf"))
        assert len(files) > 2
        return files

    def test_they_are_read_as_one_whichever_is_named(self, parts: list[Path], tmp_path: Path) -> None:
        whole = dict(load_tensors(tmp_path / "whole.gguf"))
        for part in parts:
            assert config_json(part) == config_json(tmp_path / "whole.gguf")
            tensors = dict(load_tensors(part))
            assert tensors.keys() == whole.keys() and all(tensors[name].equal(whole[name]) for name in whole)

    def test_a_missing_part_is_named(self, parts: list[Path]) -> None:
        last = parts.pop()
        last.unlink()
        number = len(parts) + 1
        for part in (parts[0], parts[-1]):
            with pytest.raises(ModelFileError, match=f"part {number} of {number} is missing: put {last.name} beside"):
                config_json(part)

    def test_what_is_no_part_in_its_place_is_refused(self, parts: list[Path]) -> None:
        parts[1].write_bytes(parts[2].read_bytes())
        with pytest.raises(ModelFileError, match="is not part 2 of"):
            config_json(parts[0])

    def test_parts_under_other_names_are_refused(self, parts: list[Path], tmp_path: Path) -> None:
        renamed = parts[0].rename(tmp_path / "mine.gguf")
        with pytest.raises(ModelFileError, match="name them as gguf-split does"):
            config_json(renamed)


def test_a_rope_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    """The value as llama.cpp reads it."""
    model = transformers_model("LlamaForCausalLM")
    write_gguf(tmp_path / "a.gguf", model, "llama", add_rope_scaling_factor=4.0)
    assert config_json(tmp_path / "a.gguf")["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    write_gguf(tmp_path / "b.gguf", model, "llama", add_rope_scaling_factor=1.0)
    assert "rope_scaling" not in config_json(tmp_path / "b.gguf")


def test_blocks_are_kept_where_the_native_pass_reads_them(tmp_path: Path) -> None:
    """Mixed quantisations, as in most files: matrices stay as they are, Llama's rows in our order."""
    model = transformers_model("LlamaForCausalLM", attention_bias=True)
    kinds = {
        "self_attn.q_proj": Quant.Q4_1,
        "mlp.up_proj": Quant.Q8_0,
        "self_attn.v_proj": Quant.Q5_0,
        "lm_head": Quant.BF16,
    }
    write_gguf(tmp_path / "model.gguf", model, "llama", kinds)
    dense, kept = (
        dict(load_tensors(tmp_path / "model.gguf")),
        dict(load_tensors(tmp_path / "model.gguf", keep_blocks=True)),
    )
    config = load_config(tmp_path / "model.gguf")
    assert list(dict(check_tensors(config, kept.items(), "model.gguf"))) == list(dense)
    blocks = {name: tensor for name, tensor in kept.items() if isinstance(tensor, Blocks)}
    assert {name.split(".", 3)[-1]: tensor.kind for name, tensor in blocks.items()} == {
        "self_attn.q_proj.weight": "Q4_1",
        "mlp.up_proj.weight": "Q8_0",
        "self_attn.v_proj.weight": "Q5_0",
    }
    assert kept["lm_head.weight"].dtype == torch.bfloat16
    for name, tensor in kept.items():
        assert dense[name].equal(tensor.dense() if isinstance(tensor, Blocks) else tensor), name
    short = {"lm_head.weight": Blocks(torch.zeros(1, 34, dtype=torch.uint8), (1, 32), "Q8_0")}
    with pytest.raises(ModelFileError, match=r"lm_head\.weight.*the config asks for"):
        list(check_tensors(config, (kept | short).items(), "x"))


def one_tensor_gguf(path: Path, blocks: np.ndarray, quant: Quant, name: str = "output.weight") -> Path:
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_head_count(1)
    writer.add_tensor(name, blocks, raw_dtype=quant)
    finish(writer)
    return path


def half(value: float) -> np.ndarray:
    return np.array([value], dtype=np.float16).view(np.uint8)


def test_q6_k_block_by_hand(tmp_path: Path) -> None:
    """block_q6_K: ql[128], qh[64], int8 scales[16], half d. Value 256-element weight = d * scale * (6-bit - 32)."""
    rng = np.random.default_rng(1)
    low, high = rng.integers(0, 256, 128, dtype=np.uint8), rng.integers(0, 256, 64, dtype=np.uint8)
    scales = rng.integers(-128, 128, 16, dtype=np.int8)
    block = np.concatenate([low, high, scales.view(np.uint8), half(0.25)])
    expected = np.empty(256, dtype=np.float32)
    for n in range(2):
        for column in range(32):
            for quarter in range(4):
                nibble = low[64 * n + column + 32 * (quarter % 2)]
                nibble = nibble & 15 if quarter < 2 else nibble >> 4
                value = int(nibble) | (int(high[32 * n + column]) >> (2 * quarter) & 3) << 4
                expected[128 * n + 32 * quarter + column] = (
                    0.25 * int(scales[8 * n + 2 * quarter + column // 16]) * (value - 32)
                )
    path = one_tensor_gguf(tmp_path / "q6.gguf", np.stack([block, block]), Quant.Q6_K)
    ((name, tensor),) = load_tensors(path)
    assert (name, tuple(tensor.shape)) == ("lm_head.weight", (2, 256))
    np.testing.assert_array_equal(tensor[1].numpy(), expected)


def test_q4_k_block_by_hand(tmp_path: Path) -> None:
    """block_q4_K: half d, half dmin, scales[12] (eight 6-bit scales and mins), qs[128]. Weight = d*scale*q -
    dmin*min."""
    rng = np.random.default_rng(2)
    packed, nibbles = rng.integers(0, 256, 12, dtype=np.uint8), rng.integers(0, 256, 128, dtype=np.uint8)
    block = np.concatenate([half(0.5), half(0.125), packed, nibbles])
    p = packed.astype(int)
    expected = np.empty(256, dtype=np.float32)
    for j in range(8):
        if j < 4:
            scale, minimum = p[j] & 63, p[j + 4] & 63
        else:
            scale, minimum = (p[j + 4] & 15) | (p[j - 4] >> 6) << 4, (p[j + 4] >> 4) | (p[j] >> 6) << 4
        q = nibbles[32 * (j // 2) : 32 * (j // 2) + 32].astype(int)
        q = q & 15 if j % 2 == 0 else q >> 4
        expected[32 * j : 32 * j + 32] = 0.5 * scale * q - 0.125 * minimum
    ((_, tensor),) = load_tensors(one_tensor_gguf(tmp_path / "q4.gguf", block[None], Quant.Q4_K))
    np.testing.assert_array_equal(tensor[0].numpy(), expected)


def test_a_quantisation_that_is_not_multiplied_as_it_is_is_expanded_and_said(tmp_path: Path) -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (1, 84), dtype=np.uint8)
    blocks[:, 80:] = 0
    path = one_tensor_gguf(tmp_path / "q2.gguf", blocks, Quant.Q2_K)
    with pytest.warns(UserWarning, match=r"q2\.gguf: weights in Q2_K are expanded.*Q4_K"):
        ((_, tensor),) = load_tensors(path, keep_blocks=True)
    np.testing.assert_array_equal(np.asarray(tensor), gguf.dequantize(blocks, Quant.Q2_K))


def test_unknown_quantisation(tmp_path: Path) -> None:
    blocks = np.zeros((1, 292), dtype=np.uint8)
    with pytest.raises(UnsupportedModelError, match="Q8_K.*Q4_K"):
        list(load_tensors(one_tensor_gguf(tmp_path / "q8.gguf", blocks, Quant.Q8_K)))


YARN: dict[str, Any] = {
    "add_rope_scaling_type": gguf.RopeScalingType.YARN,
    "add_rope_scaling_factor": 4.0,
    "add_rope_scaling_orig_ctx_len": 64,
}


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    model = transformers_model("Qwen2ForCausalLM")
    write_gguf(tmp_path / "yarn.gguf", model, "qwen2", **YARN, add_rope_scaling_yarn_attn_factor=1.5)
    scaling = load_config(tmp_path / "yarn.gguf").rope_scaling or {}
    assert scaling["attention_factor"] == 1.5
    assert (scaling["rope_type"], scaling["factor"], scaling["original_max_position_embeddings"]) == ("yarn", 4.0, 64)


def test_gguf_rope_factors(tmp_path: Path) -> None:
    """Llama 3.1 files keep their rope scaling as a tensor; it belongs to the config, not to the weights."""
    factors = np.array([1.0, 1.0, 2.5, 8.0], dtype=np.float32)
    path = one_tensor_gguf(tmp_path / "llama3.gguf", factors, Quant.F32, our_gguf.ROPE_FACTORS)
    assert list(load_tensors(path)) == []
    scaling = our_gguf._rope_scaling(our_gguf.open_gguf(path), "llama")
    assert scaling == {"rope_type": "factors", "factors": [1.0, 1.0, 2.5, 8.0]}


def test_gguf_refusals(tmp_path: Path) -> None:
    model = transformers_model("Qwen2ForCausalLM")
    write_gguf(tmp_path / "falcon.gguf", model, "falcon")
    with pytest.raises(UnsupportedModelError, match="falcon"):
        load_config(tmp_path / "falcon.gguf")
    write_gguf(tmp_path / "experts.gguf", model, "qwen2", add_expert_count=4)
    with pytest.raises(UnsupportedModelError, match="experts"):
        load_config(tmp_path / "experts.gguf")
    with pytest.raises(ModelFileError, match=r"token_embd|embedding"):
        load_config(one_tensor_gguf(tmp_path / "part.gguf", np.zeros((1, 144), dtype=np.uint8), Quant.Q4_K))


@pytest.mark.parametrize(
    ("arch", "metadata", "named"),
    [
        ("granite", {"add_sliding_window": 8}, "granite.attention.sliding_window"),
        ("llama", {"add_sliding_window": 8, "add_sliding_window_pattern": [True, False]}, "attention.sliding_window"),
        ("qwen2", {"add_sliding_window": 8, "add_sliding_window_pattern": 2}, "attention.sliding_window"),
        ("llama", {"add_causal_attention": False}, "llama.attention.causal False"),
        ("qwen3", {"add_rope_dimension_count": 4}, "qwen3.rope.dimension_count 4"),
        ("qwen2", YARN | {"add_rope_scaling_attn_factors": 1.5}, "qwen2.rope.scaling.attn_factor 1.5"),
        ("granite", {"add_head_count_kv": [2, 4]}, "granite.attention.head_count_kv with different numbers"),
    ],
)
def test_gguf_keys_that_no_layer_computes_are_refused(
    arch: str, metadata: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "a.gguf", transformers_model("LlamaForCausalLM"), arch, **metadata)
    with pytest.raises(UnsupportedModelError, match=named):
        config_json(tmp_path / "a.gguf")


def test_equal_numbers_by_layer_are_one(tmp_path: Path) -> None:
    """Converters of Granite 4 write a list of equal numbers of key heads, and permute the rows of keys by head."""
    model = transformers_model("LlamaForCausalLM")
    write_gguf(tmp_path / "one.gguf", model, "granite")
    write_gguf(tmp_path / "list.gguf", model, "granite", add_head_count_kv=[2, 2])
    assert config_json(tmp_path / "list.gguf") == config_json(tmp_path / "one.gguf")
    one, listed = (dict(load_tensors(tmp_path / f"{name}.gguf")) for name in ("one", "list"))
    assert all(one[name].equal(listed[name]) for name in one)


@pytest.mark.parametrize(
    ("arch", "metadata", "windows"),
    [
        ("olmo2", {}, (8, 8)),  # all but every fourth
        ("olmo2", {"add_sliding_window_pattern": 2}, (8, None)),
        ("gemma3", {"add_sliding_window_pattern": [False, True]}, (None, 8)),
        ("llama", {"add_sliding_window_pattern": [True, True]}, (8, 8)),
    ],
)
def test_gguf_windows(arch: str, metadata: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    model = transformers_model("LlamaForCausalLM")
    write_gguf(tmp_path / "a.gguf", model, arch, add_sliding_window=8, **metadata)
    assert load_config(tmp_path / "a.gguf").windows == windows


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.5, 0.999])
def test_truncated_gguf(share: float, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, transformers_model("Qwen2ForCausalLM"), "qwen2")
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(ModelFileError, match=r"model\.gguf"):
        load_config(path)


def test_no_gguf_at_all(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("these are not the bytes you are looking for")
    with pytest.raises(ModelFileError, match=r"text\.gguf"):
        load_config(tmp_path / "text.gguf")


def test_a_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config, tensors and tokenizer share one pass over the header: a vocabulary of 152,000 tokens is slow to walk."""
    maps: list[int] = []

    class Counted(mmap.mmap):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            maps.append(1)
            return super().__new__(cls, *args, **kwargs)

    path, model = tmp_path / "model.gguf", transformers_model("Qwen2ForCausalLM")
    write_gguf(path, model, "qwen2", **byte_level_vocabulary(96 + 256))
    monkeypatch.setattr(mmap, "mmap", Counted)
    tokenizer, config, tensors = Tokenizer.from_path(path), load_config(path), dict(load_tensors(path))
    assert (tokenizer.vocab_size, config.num_layers, len(tensors)) == (352, 2, 27)
    assert len(maps) == 1
    write_gguf(path, transformers_model("Qwen2ForCausalLM", tie_word_embeddings=True), "qwen2")
    assert (
        load_config(path).tie_embeddings and not config.tie_embeddings
    )  # another file under the same name is read anew


CHATML = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
OTHER = "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
GEMMA = "{% for m in messages %}<start_of_turn>{{ m.content }}<end_of_turn>{% endfor %}"
PHI = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom|>", "<end_of_turn>", "<|end|>")


@pytest.mark.parametrize(
    ("arch", "template", "named", "ends"),
    [
        ("qwen2", CHATML, {"eos": 2}, (2, 0)),
        ("qwen3", CHATML, {"eos": 2, "eom": 3}, (2, 3, 0)),
        ("qwen2", CHATML, {"eos": 0, "eot": 2}, (0, 2)),
        ("qwen2", OTHER, {"eos": 0}, (0,)),
        ("qwen2", None, {"eos": 0}, (0,)),
        ("qwen2", CHATML, {"eos": 3}, (3,)),
        ("llama", CHATML, {"eos": 2}, (2,)),
        ("gemma2", GEMMA, {"eos": 0}, (0, 4)),
        ("gemma3", GEMMA, {"eos": 0, "eot": 4}, (0, 4)),
        ("gemma3", None, {"eos": 0}, (0,)),
        ("phi3", PHI, {"eos": 0}, (0, 5)),
        ("phi3", CHATML, {"eos": 2}, (2,)),
        ("llama", OTHER, {"eos": 0, "eot": 2, "eom": 0}, (0, 2)),
        ("llama", None, {}, ()),
    ],
)
def test_every_token_that_ends_an_answer(
    arch: str, template: str | None, named: dict[str, int], ends: tuple[int, ...], tmp_path: Path
) -> None:
    """Those that the file names, and those of Qwen's, Gemma's and Phi's chat models; none that others happen to
    have."""
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", arch)
    vocabulary = byte_level_vocabulary(302, SPECIALS)
    for key, value in vocabulary.items():
        getattr(writer, key)(value)
    for kind, index in named.items():
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", 296 + index)
    if template is not None:
        writer.add_chat_template(template)
    finish(writer)
    assert Tokenizer.from_path(tmp_path / "t.gguf").eos_token_ids == tuple(296 + index for index in ends)


SAID = "Don't SHOUT'LL, 12345 été\n\n x/\n"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        (
            "refact",
            ["Don", "'t", " SHOUT", "'", "LL", ",", " ", "1", "2", "3", "4", "5", " été", "\n\n", " x", "/", "\n"],
        ),
        ("dbrx", ["Don", "'t", " SHOUT", "'LL", ",", " ", "123", "45", " été", "\n\n", " x", "/\n"]),
        ("smaug-bpe", ["Don", "'t", " SHOUT", "'LL", ",", " ", "123", "45", " été", "\n\n", " x", "/\n"]),
        ("gpt-4o", ["Don't", " SHOUT'LL", ",", " ", "123", "45", " été", "\n\n", " x", "/\n"]),
    ],
)
def test_how_words_are_split(pre: str, words: list[str], tmp_path: Path) -> None:
    """Each word's bytes stand apart, for there are no merges between letters that could hide a split."""
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    for key, value in (byte_level_vocabulary(300) | {"add_tokenizer_pre": pre}).items():
        getattr(writer, key)(value)
    finish(writer)
    backend, _ = our_gguf.build_tokenizer(our_gguf.open_gguf(tmp_path / "t.gguf"))
    pieces = [SAID[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(SAID)]
    assert pieces == words
    assert backend.decode(backend.encode(SAID, add_special_tokens=False).ids) == SAID
