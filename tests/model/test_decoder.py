"""Our decoder against Transformers, family by family, at tiny shapes: whole, chunked, ragged, rolled back, tapped."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from paceline.errors import ContextLengthError
from paceline.model.config.decoder import DecoderConfig
from paceline.model.target import ForwardBatch
from paceline.model.torch.decoder import Decoder

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = ["llama", "llama3-scaled-tied", "mistral-window", "qwen2-bias", "qwen3-norms"]


def build(family: str) -> tuple[Any, DecoderConfig]:
    import transformers  # here, because every process that collects this file would import it

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position": 256,
    }
    if family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False))
        config = DecoderConfig("llama", **shape)
    elif family == "llama3-scaled-tied":
        hf = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE)
        model = transformers.LlamaForCausalLM(hf)
        config = DecoderConfig("llama", **shape, tie_embeddings=True, rope_scaling=LLAMA3_ROPE)
    elif family == "mistral-window":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, head_dim=8, sliding_window=7))
        config = DecoderConfig("mistral", **shape, windows=(7, 7, 7))
    elif family == "qwen2-bias":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))
        config = DecoderConfig("qwen2", **shape, qkv_bias=True)
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8))
        config = DecoderConfig("qwen3", **shape, qk_norm=True)
    for name, parameter in model.named_parameters():  # norms and biases away from 1 and 0, so that a lost one shows
        if "norm" in name or "bias" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return model.eval(), DecoderConfig(**{**_fields(config), "rms_norm_eps": model.config.rms_norm_eps})


def _fields(config: DecoderConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def decoder_for(family: str, num_rows: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Any, Decoder]:
    model, config = build(family)
    tensors = [(name, tensor.detach().clone()) for name, tensor in model.state_dict().items()]
    return model, Decoder(config, tensors, num_rows=num_rows, max_len=128, dtype=dtype)


@torch.inference_mode()
def reference(model: Any, tokens: list[int]) -> Any:
    return model(torch.tensor([tokens]), output_hidden_states=True)


def text(length: int, seed: int = 0) -> list[int]:
    return (
        [random.Random(seed).randrange(97) for _ in range(length)]
        if length == 1
        else random.Random(seed).choices(range(97), k=length)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass_equals_transformers(family: str) -> None:
    model, decoder = decoder_for(family)
    tokens = text(40)
    row = decoder.cache.allocate()
    assert row is not None
    out = decoder.forward(ForwardBatch([row], [0], [40], tokens))
    assert out.logits_TV is not None
    torch.testing.assert_close(out.logits_TV, reference(model, tokens).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_random_rollbacks_equal_one_pass(family: str) -> None:
    model, decoder = decoder_for(family)
    tokens, rng = text(60, seed=1), random.Random(2)
    expected = reference(model, tokens).logits[0]
    row = decoder.cache.allocate()
    assert row is not None
    done = 0
    while done < len(tokens):
        count = min(rng.randint(1, 9), len(tokens) - done)
        keep = rng.randint(1, count)
        fed = tokens[done : done + keep] + [rng.randrange(97) for _ in range(count - keep)]
        out = decoder.forward(ForwardBatch([row], [done], [count], fed))
        assert out.logits_TV is not None
        torch.testing.assert_close(out.logits_TV[:keep], expected[done : done + keep], atol=1e-4, rtol=1e-4)
        decoder.cache.rollback([row], [done + keep])
        done += keep


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (5, 5, 5, 5), (1, 4, 4, 2)])
def test_ragged_rows_do_not_see_each_other(family: str, counts: tuple[int, ...]) -> None:
    model, decoder = decoder_for(family)
    texts = [text(20 + 7 * index, seed=index) for index in range(4)]
    rows = [decoder.cache.allocate() for _ in texts]
    starts = [len(tokens) - count for tokens, count in zip(texts, counts, strict=True)]
    for row, tokens, start in zip(rows, texts, starts, strict=True):
        assert row is not None
        decoder.forward(ForwardBatch([row], [0], [start], tokens[:start], "none"))
    packed = [token for tokens, start in zip(texts, starts, strict=True) for token in tokens[start:]]
    out = decoder.forward(ForwardBatch([row for row in rows if row is not None], starts, list(counts), packed))
    assert out.logits_TV is not None
    expected = torch.cat(
        [reference(model, tokens).logits[0, start:] for tokens, start in zip(texts, starts, strict=True)]
    )
    torch.testing.assert_close(out.logits_TV, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3-norms"])
def test_taps_are_transformers_hidden_states(family: str) -> None:
    model, decoder = decoder_for(family)
    decoder.set_taps((2, 0))
    tokens = text(12)
    decoder.cache.allocate()
    out = decoder.forward(ForwardBatch([0], [0], [12], tokens, "last"))
    hidden = reference(model, tokens).hidden_states
    assert out.taps_TF is not None
    assert out.logits_TV is not None
    assert out.logits_TV.shape == (1, 97)
    torch.testing.assert_close(out.taps_TF, torch.cat([hidden[3][0], hidden[1][0]], dim=-1), atol=1e-4, rtol=1e-4)


def test_embed_and_head_are_the_first_and_last_step() -> None:
    model, decoder = decoder_for("llama")
    tokens = torch.tensor(text(5))
    torch.testing.assert_close(decoder.embed(tokens), model.model.embed_tokens(tokens))
    hidden = torch.randn(5, 48)
    torch.testing.assert_close(decoder.head(hidden), model.lm_head(hidden), atol=1e-5, rtol=1e-5)


def test_bfloat16_stays_close() -> None:
    model, decoder = decoder_for("llama", dtype=torch.bfloat16)
    tokens = text(30)
    decoder.cache.allocate()
    out = decoder.forward(ForwardBatch([0], [0], [30], tokens))
    assert out.logits_TV is not None
    assert out.logits_TV.dtype == torch.bfloat16
    torch.testing.assert_close(out.logits_TV.float(), reference(model, tokens).logits[0], atol=0.05, rtol=0.05)


def test_a_context_beyond_the_model_is_refused() -> None:
    _, decoder = decoder_for("llama")
    with pytest.raises(ContextLengthError, match="lower max_len"):
        decoder.allocate_cache(1, 257)
