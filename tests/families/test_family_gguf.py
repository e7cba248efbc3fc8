"""Families from GGUF files as llama.cpp's convert_hf_to_gguf.py writes them: names by the gguf package's own table,
norms with their offset, rows of queries and keys in the order of ggml's rope, experts in one tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from family_models import FAMILIES, VOCAB, Family, reference, text, transformers_model
from gguf import GGMLQuantizationType as Quant
from gguf import GGUFWriter
from gguf_files import add_sizes, byte_level_vocabulary, finish, permute
from torch import Tensor

from paceline.config import EngineConfig
from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.backends import load_target
from paceline.model.gguf.to_folder import LLAMA3_SCALING, write_folder
from paceline.model.native.library import load as native_library
from paceline.model.target import ForwardBatch, Target
from paceline.model.text.tokenizer import Tokenizer

WHOLE_BLOCKS = {"intermediate_size": 64}
LENGTH = 40
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 500000.0}
LLAMA3 = LLAMA3_SCALING | {"factor": 32.0, "rope_theta": 500000.0}


@dataclass(frozen=True)
class Stored:
    """A family's name in GGUF, and the special steps of its converter."""

    arch: str
    options: dict[str, Any] = field(default_factory=dict)
    """Config options, limited to values that a file can express."""
    is_permuted: bool = False
    norm_offset: float = 0.0
    keys: dict[str, str] = field(default_factory=dict)
    """Keys of fractions, and what config.json calls them."""


ARCHITECTURES = {
    "llama": Stored("llama", {"rope_parameters": LLAMA3}, is_permuted=True),
    "granite": Stored(
        "granite",
        is_permuted=True,
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "smollm3": Stored("smollm3", is_permuted=True),
    "olmo2": Stored("olmo2"),
    "olmo3": Stored(
        "olmo2",
        {
            "layer_types": [FULL, SLIDING, SLIDING, SLIDING],
            "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 500000.0}},
        },
    ),
    "phi3": Stored("phi3"),
    "phi4-mini": Stored("phi3"),
    "gemma2": Stored(
        "gemma2",
        {"query_pre_attn_scalar": 8},
        norm_offset=1.0,
        keys={"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
    ),
    "gemma3": Stored(
        "gemma3", {"query_pre_attn_scalar": 8, "layer_types": None, "num_hidden_layers": 7}, norm_offset=1.0
    ),
    "qwen3-moe": Stored("qwen3moe", {"mlp_only_layers": [], "moe_intermediate_size": 32}),
    "mixtral": Stored("llama", is_permuted=True),
}


def options_of(name: str) -> Family:
    family, stored = FAMILIES[name], ARCHITECTURES[name]
    options = family.options | WHOLE_BLOCKS | stored.options
    return replace(family, options={key: value for key, value in options.items() if value is not None})


def write(path: Path, model: Any, name: str, kind: Quant = Quant.F32) -> Path:
    """Matrices in `kind`, vectors in float32; a byte-level vocabulary."""
    stored, config = ARCHITECTURES[name], model.config
    writer = GGUFWriter(path, stored.arch)
    for key, value in byte_level_vocabulary(VOCAB).items():
        getattr(writer, key)(value)
    head_dim = add_sizes(writer, config)
    if stored.arch != "phi3":
        writer.add_key_length(head_dim)
    write_rope(writer, config, stored, head_dim)
    for key, value in stored.keys.items():
        writer.add_float32(f"{stored.arch}.{key}", float(getattr(config, value)))
    if getattr(config, "sliding_window", None) and stored.arch not in ("smollm3", "qwen3moe"):
        writer.add_sliding_window(config.sliding_window)
    if name == "olmo3":
        writer.add_sliding_window_pattern([kind == SLIDING for kind in config.layer_types])
    if name in ("qwen3-moe", "mixtral"):
        writer.add_expert_count(5)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if name == "qwen3-moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    write_tensors(writer, model, stored, kind)
    finish(writer)
    return path


def write_rope(writer: GGUFWriter, config: Any, stored: Stored, head_dim: int) -> None:
    parameters = config.rope_parameters
    main = parameters.get("full_attention", parameters)
    writer.add_rope_freq_base(main["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * main.get("partial_rotary_factor", 1.0)))
    if main.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(main["factor"])
        writer.add_rope_scaling_attn_factors(0.1 * math.log(main["factor"]) + 1)
        writer.add_rope_scaling_orig_ctx_len(main["original_max_position_embeddings"])
    if main.get("rope_type") == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
        plain = main["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    if main.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for which in ("long", "short"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(main[f"{which}_factor"], dtype=np.float32))


def write_tensors(writer: GGUFWriter, model: Any, stored: Stored, kind: Quant) -> None:
    config = model.config
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == stored.arch)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    for hf_name, tensor in parts_of(model.state_dict()).items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        values = tensor.float().numpy()
        count = next((count for part, count in heads.items() if part in hf_name), None)
        if stored.is_permuted and count is not None:
            values = permute(values, count)
        if hf_name.endswith("norm.weight"):
            values = values + np.float32(stored.norm_offset)
        own = kind if values.ndim > 1 and "ffn_gate_inp" not in name else Quant.F32
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), own), raw_dtype=own)


def parts_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gates of all experts apart from what they are multiplied with."""
    parts: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            parts |= {name.replace("gate_up", "gate") + ".weight": gate, name.replace("gate_up", "up") + ".weight": up}
        else:
            parts[f"{name}.weight" if name.endswith("experts.down_proj") else name] = tensor
    return parts


def logits_of(target: Target, tokens: list[int]) -> Tensor:
    row = target.cache.allocate()
    assert row is not None
    out = target.forward(ForwardBatch([row], [0], [len(tokens)], tokens)).logits_TV
    assert out is not None
    return out.clone()


def target_of(path: Path, **settings: Any) -> Target:
    return load_target(EngineConfig(str(path), dtype="float32", device="cpu", max_batch=1, max_len=64, **settings))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_is_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    model, tokens = transformers_model(options_of(name)), text(LENGTH)
    path = write(tmp_path / "model.gguf", model, name)
    torch.testing.assert_close(logits_of(target_of(path), tokens), reference(model, tokens)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(native_library() is None, reason="the native library is not built: run make native")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_stay_blocks(name: str, tmp_path: Path) -> None:
    """Also of several matrices in one tensor, and of experts."""
    model, tokens = transformers_model(options_of(name)), text(LENGTH)
    path = write(tmp_path / "model.gguf", model, name, Quant.Q8_0)
    blocks, dense = target_of(path, weight_format="blocks"), target_of(path, weight_format="dense")
    assert blocks.weight_format in ("Q8_0", "Q8_0+float32")  # type: ignore[attr-defined]
    torch.testing.assert_close(logits_of(blocks, tokens), logits_of(dense, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_folder_of_it_is_transformers_s(name: str, tmp_path: Path) -> None:
    """Or is refused, where its tensors have other names."""
    from transformers import AutoModelForCausalLM

    model, tokens = transformers_model(options_of(name)), text(LENGTH)
    path = write(tmp_path / "model.gguf", model, name)
    if name in ("phi3", "phi4-mini", "qwen3-moe", "mixtral"):
        with pytest.raises(UnsupportedModelError, match="fetch the model's own folder"):
            write_folder(path, tmp_path / "folder")
        return
    write_folder(path, tmp_path / "folder")
    options = {"attn_implementation": "eager"} if name == "gemma2" else {}
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32, **options).eval()
    expected = reference(model, tokens)[0]
    torch.testing.assert_close(reference(read, tokens)[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits_of(target_of(tmp_path / "folder"), tokens), expected, atol=1e-4, rtol=1e-4)


def test_a_folder_of_frequencies_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    family = options_of("llama")
    rope = {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}}
    path = write(tmp_path / "a.gguf", transformers_model(replace(family, options=family.options | rope)), "llama")
    with pytest.raises(UnsupportedModelError, match=r"its rope_freqs\.weight is not the scaling of Llama 3"):
        write_folder(path, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_special_tokens_of_phi_3_swallow_the_white_space_behind_them(tmp_path: Path) -> None:
    """The special tokens of Phi-3 do, but for the three that also stand in texts, as in the model's tokenizer.json."""
    tokens = ["<unk>", "<s>", "</s>", "<|user|>", "<|endoftext|>", "▁", "a", "\n", "▁a"]
    for arch, ids in (("phi3", [3, 8, 2, 8, 4, 5, 7, 6]), ("llama", [3, 5, 7, 6, 2, 5, 7, 6, 4, 5, 7, 6])):
        writer = GGUFWriter(tmp_path / "t.gguf", arch)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types([2, 3, 3, 3, 3, 1, 1, 1, 1])
        writer.add_token_scores([0.0] * 9)
        finish(writer)
        tokenizer = Tokenizer.from_path(tmp_path / "t.gguf")
        assert tokenizer.encode("<|user|>\na</s>\na<|endoftext|>\na", add_special_tokens=False) == ids


def test_a_stack_of_experts_must_be_one(tmp_path: Path) -> None:
    model = transformers_model(options_of("mixtral"))
    path = write(tmp_path / "model.gguf", model, "mixtral")
    reader = gguf.GGUFReader(path)
    flat = GGUFWriter(tmp_path / "flat.gguf", "llama")
    for key, entry in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            inner = entry.types[1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
            flat.add_key_value(key, entry.contents(), entry.types[0], sub_type=inner)
    for stored in reader.tensors:
        data = stored.data.reshape(-1, stored.data.shape[-1]) if "ffn_up_exps" in stored.name else stored.data
        flat.add_tensor(stored.name, data)
    finish(flat)
    with pytest.raises(ModelFileError, match="no stack of experts"):
        target_of(tmp_path / "flat.gguf")
