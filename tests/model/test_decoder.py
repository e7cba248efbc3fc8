"""The PyTorch decoder: one family against Transformers, rows that do not see each other, another dtype. All families:
tests/families/test_family_logits.py."""

from __future__ import annotations

import pytest
import torch
from native_models import BASE, SHAPES, random_weights, tokens_of

from paceline.errors import ContextLengthError
from paceline.model.config.decoder import DecoderConfig
from paceline.model.target import ForwardBatch
from paceline.model.torch.decoder import Decoder


def decoder_for(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(config, random_weights(config).items(), num_rows=4, max_len=128, dtype=dtype)


def logits_of(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of a text alone."""
    row = decoder.cache.allocate()
    assert row is not None
    logits_TV = decoder.forward(ForwardBatch([row], [0], [len(tokens)], tokens)).logits_TV
    decoder.cache.free(row)
    assert logits_TV is not None
    return logits_TV


@torch.inference_mode()
def test_one_pass_equals_transformers() -> None:
    import transformers  # here, because every process that collects this file would import it

    config, tokens = BASE, tokens_of(BASE, 40, seed=0)
    raw = transformers.LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, head_dim=config.head_dim,
        num_key_value_heads=config.num_kv_heads, max_position_embeddings=config.max_position,
        rms_norm_eps=config.rms_norm_eps, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(raw).eval()
    model.load_state_dict(random_weights(config))
    expected = model(torch.tensor([tokens]), output_hidden_states=True)
    decoder = decoder_for(config)
    decoder.set_taps((1, 0))
    decoder.cache.allocate()
    out = decoder.forward(ForwardBatch([0], [0], [len(tokens)], tokens))
    torch.testing.assert_close(out.logits_TV, expected.logits[0], atol=1e-4, rtol=1e-4)
    hidden = torch.cat([expected.hidden_states[layer + 1][0] for layer in (1, 0)], dim=-1)
    torch.testing.assert_close(out.taps_TF, hidden, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama3-rope-tied", "mistral-window", "qwen2-biases", "qwen3-norms"])
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (5, 5, 5, 5), (1, 4, 4, 2)])
def test_ragged_rows_do_not_see_each_other(name: str, counts: tuple[int, ...]) -> None:
    decoder = decoder_for(SHAPES[name])
    texts = [tokens_of(decoder.config, 20 + 7 * index, seed=index) for index in range(4)]
    starts = [len(tokens) - count for tokens, count in zip(texts, counts, strict=True)]
    expected = [logits_of(decoder, tokens)[start:].clone() for tokens, start in zip(texts, starts, strict=True)]
    rows = [row for _ in texts if (row := decoder.cache.allocate()) is not None]
    for row, tokens, start in zip(rows, texts, starts, strict=True):
        decoder.forward(ForwardBatch([row], [0], [start], tokens[:start], "none"))
    packed = [token for tokens, start in zip(texts, starts, strict=True) for token in tokens[start:]]
    out = decoder.forward(ForwardBatch(rows, starts, list(counts), packed))
    torch.testing.assert_close(out.logits_TV, torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_bfloat16_stays_close() -> None:
    tokens = tokens_of(BASE, 30, seed=0)
    exact, rounded = (logits_of(decoder_for(BASE, dtype), tokens) for dtype in (torch.float32, torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() < 0.02 * exact.norm()


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ContextLengthError, match="lower max_len"):
        decoder_for(BASE).allocate_cache(1, 257)
