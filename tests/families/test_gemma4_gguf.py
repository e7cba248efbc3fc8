"""Gemma 4 from GGUF files as llama.cpp's convert_hf_to_gguf.py writes them: numbers listed by layer, divisors of
frequencies that do not rotate, names of per-layer embeddings, its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from family_models import FAMILIES, VOCAB, WINDOW, reference, target_of, text, transformers_model
from gguf import GGUFWriter
from gguf_files import byte_level_vocabulary, finish

from paceline.errors import ModelFileError, NativeError, UnsupportedModelError
from paceline.model.checkpoint import load_config
from paceline.model.gguf.container import open_gguf
from paceline.model.gguf.metadata import build_tokenizer
from paceline.model.target import ForwardBatch

PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
ROPE = "rope_freqs.weight"


def write(path: Path, model: Any, divisors: list[float] | None = None, **changes: Any) -> Path:
    """The model's tensors in float32, its keys as the converter writes them, and a byte-level vocabulary."""
    config, writer = model.config, GGUFWriter(path, "gemma4")
    config.allow_global_per_layer_attribute_access = True
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    full = config.per_layer_config["full_attention"]
    first_shared, is_wide = config.num_hidden_layers - config.num_kv_shared_layers, config.use_double_wide_mlp
    inner = [config.intermediate_size * (1 + (is_wide and layer >= first_shared)) for layer in range(len(slides))]
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": [config.num_key_value_heads if own else full.num_key_value_heads for own in slides],
        "feed_forward_length": inner if is_wide else config.intermediate_size,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "sliding_window": WINDOW,
        "sliding_window_pattern": slides,
        "shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "key_length": full.head_dim,
        "key_length_swa": config.head_dim,
        "rope_freq_base": 1e6,
        "rope_freq_base_swa": 1e4,
        "rope_dimension_count": full.head_dim,
        "final_logit_softcapping": config.final_logit_softcapping,
        **byte_level_vocabulary(VOCAB),
    }
    for key, value in (keys | changes).items():
        getattr(writer, key if key.startswith("add_") else f"add_{key}")(value)
    turning = full.head_dim // 8
    own = [1.0] * turning + [1e30] * (full.head_dim // 2 - turning) if divisors is None else divisors
    writer.add_tensor(ROPE, np.array(own, dtype=np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            name = f"{name}.weight" if name.endswith("layer_scalar") else name
            stored = names.get_name(name, try_suffixes=(".weight",))
            assert stored is not None, name
            writer.add_tensor(stored, tensor.float().numpy())
    finish(writer)
    return path


@pytest.mark.parametrize("name", ["gemma4", "gemma4-small"])
def test_a_file_is_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    model, tokens = transformers_model(FAMILIES[name]), text(40)
    path = write(tmp_path / "model.gguf", model)
    target = target_of(path)
    target.cache.allocate()
    logits_TV = target.forward(ForwardBatch([0], [0], [len(tokens)], tokens)).logits_TV
    assert logits_TV is not None
    torch.testing.assert_close(logits_TV, reference(model, tokens)[0], atol=1e-4, rtol=1e-4)
    with pytest.raises(NativeError, match="has no layers of different sizes"):
        target_of(path, weight_format="blocks", backend="native")


@pytest.mark.parametrize(
    ("divisors", "changes", "error", "message"),
    [
        ([2.0] * 8, {}, UnsupportedModelError, "with other numbers than 1 and 1e30 is not implemented"),
        (None, {"head_count_kv": [2, 2, 2]}, ModelFileError, "must have a value for each of 4 layers"),
        (None, {"sliding_window_pattern": [True, False]}, ModelFileError, "must have a value for each of 4 layers"),
        (None, {"expert_count": 4}, UnsupportedModelError, "with experts is not implemented"),
    ],
)
def test_what_is_not_read_is_named(
    divisors: list[float] | None, changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf", transformers_model(FAMILIES["gemma4"]), divisors, **changes)
    with pytest.raises(error, match=message):
        load_config(path)


def test_its_tokenizer_merges_pieces_as_the_file_lists_them(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "words.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(PIECES)
    writer.add_token_scores([0.0] * len(PIECES))
    writer.add_token_types([3, 3, 3, 2, *[6] * 256, *[1] * (len(PIECES) - 260)])
    writer.add_token_merges(["a b", "▁ ab"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)
    finish(writer)
    tokenizer, ends = build_tokenizer(open_gguf(tmp_path / "words.gguf"))
    ids = tokenizer.encode("ab ab\n").ids
    assert [PIECES[token] for token in ids] == ["<bos>", "ab", "▁ab", "<0x0A>"] and ends == (1,)
    assert tokenizer.decode(ids) == "ab ab\n"
