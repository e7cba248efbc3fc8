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

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.checkpoint import load_config
from paceline.model.gguf.container import open_gguf
from paceline.model.gguf.metadata import build_tokenizer
from paceline.model.target import ForwardBatch

PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]


def write(path: Path, name: str, divisor: float = 1.0, **changes: Any) -> Any:
    """Write the tiny model of a row and return it, its tensors in float32."""
    model, writer = transformers_model(FAMILIES[name]), GGUFWriter(path, "gemma4")
    config, is_wide = model.config, name == "gemma4-small"
    slides, kv_heads = [kind == "sliding_attention" for kind in config.layer_types], 2 if is_wide else 1
    keys: dict[str, Any] = {
        "block_count": 4, "context_length": 512, "embedding_length": 32, "head_count": 4, "layer_norm_rms_eps": 1e-6,
        "head_count_kv": [2, kv_heads, 2, kv_heads], "feed_forward_length": [48, 48, 96, 96] if is_wide else 48,
        "sliding_window": WINDOW, "sliding_window_pattern": slides, "shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input, "key_length": 16, "key_length_swa": 8,
        "rope_freq_base": 1e6, "rope_freq_base_swa": 1e4, "rope_dimension_count": 16, "final_logit_softcapping": 8.0,
        **byte_level_vocabulary(VOCAB),
    }  # fmt: skip
    for key, value in (keys | changes).items():
        getattr(writer, key if key.startswith("add_") else f"add_{key}")(value)
    writer.add_tensor("rope_freqs.weight", np.array([divisor] * 2 + [1e30] * 6, dtype=np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, 4)
    for key, tensor in model.state_dict().items():
        if key != "lm_head.weight":
            key = f"{key}.weight" if key.endswith("layer_scalar") else key
            writer.add_tensor(str(names.get_name(key, try_suffixes=(".weight",))), tensor.float().numpy())
    finish(writer)
    return model


@pytest.mark.parametrize("name", ["gemma4", "gemma4-small"])
def test_a_file_is_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    model, tokens = write(tmp_path / "model.gguf", name), text(40)
    target = target_of(tmp_path / "model.gguf")
    target.cache.allocate()
    logits_TV = target.forward(ForwardBatch([0], [0], [len(tokens)], tokens)).logits_TV
    assert logits_TV is not None
    torch.testing.assert_close(logits_TV, reference(model, tokens)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"divisor": 2.0}, UnsupportedModelError, "with other numbers than 1 and 1e30 is not implemented"),
        ({"head_count_kv": [2, 2, 2]}, ModelFileError, "must have a value for each of 4 layers"),
        ({"expert_count": 4}, UnsupportedModelError, "with experts is not implemented"),
    ],
)
def test_what_is_not_read_is_named(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:  # fmt: skip
    write(tmp_path / "model.gguf", "gemma4", **changes)
    with pytest.raises(error, match=message):
        load_config(tmp_path / "model.gguf")


def test_its_tokenizer_merges_pieces_as_the_file_lists_them(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "words.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(PIECES)
    writer.add_token_scores([0.0] * len(PIECES))
    writer.add_token_types([3, 3, 3, 2, *[6] * 256, *[1] * 5])
    writer.add_token_merges(["a b", "▁ ab"])
    writer.add_bos_token_id(2)
    writer.add_add_space_prefix(False)
    finish(writer)
    tokenizer, _ = build_tokenizer(open_gguf(tmp_path / "words.gguf"))
    ids = tokenizer.encode("ab ab\n").ids
    assert [PIECES[token] for token in ids] == ["<bos>", "ab", "▁ab", "<0x0A>"]
    assert tokenizer.decode(ids) == "ab ab\n"
