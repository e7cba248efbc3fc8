"""Stage 13: Transformers' `generate` with the same 8B shape, each way that a user would try, and our rounds beside
it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from gpu_day_stages import models
from gpu_day_stages.models import free_memory, shape_of
from gpu_day_stages.visit import Skipped, Visit
from paceline.draft.base import NoDrafter


def peers(visit: Visit) -> None:
    """Tokens per second: ours, eager, with a static cache, with DFlash speculation, and compiled (last: it may not
    end).

    Drafters are random: of theirs about nothing is accepted, and our rounds keep one token, so that both make one token
    a round.
    """
    context, count = visit.sized(256, 12), visit.sized(64, 6)
    with visit.part("paceline"):
        ours(visit, context, count)
    free_memory()
    own, device = shape_of(visit, "8B"), torch.device(visit.device)
    config = transformers.Qwen3Config(
        vocab_size=own.vocab_size, hidden_size=own.hidden_size, intermediate_size=own.intermediate_size,
        num_hidden_layers=own.num_layers, num_attention_heads=own.num_heads, num_key_value_heads=own.num_kv_heads,
        head_dim=own.head_dim, max_position_embeddings=own.max_position, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    dtype = visit.sized(torch.bfloat16, torch.float32)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    prompt = torch.randint(1, own.vocab_size, (1, context), device=device)
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "eager": dict,
        "dflash speculation": lambda: {"assistant_model": assistant(visit, model), "speculation_type": "dflash"},
        "static cache": lambda: {"cache_implementation": "static", "disable_compile": True},
    }
    if device.type == "cuda":
        ways["static cache, compiled"] = lambda: {"cache_implementation": "static"}
    for name, options in ways.items():
        with visit.part(f"Transformers, {name}"):
            measure(visit, name, model, prompt, count, options())
        free_memory()


def ours(visit: Visit, context: int, count: int) -> None:
    """Plain rounds, and rounds of a random drafter of five layers and blocks of 16 that keep one token."""
    target = models.random_target(visit, "8B", max_len=models.needed_len(context, 1, count, 16))
    drafter = models.random_dflash(target, visit.sized(5, 1))
    for name, used, width in (("plain", NoDrafter(), 0), ("dflash speculation", drafter, 15)):
        engine = models.running_engine(target, used, batch=1, width=width, kept=1, context=context)
        times = models.round_times(visit, engine, count)["ms"]
        engine.abort(0)
        visit.report(f"paceline, {name}", tokens_per_s=1e3 / statistics.median(times), ms=models.summary(times))


@torch.inference_mode()
def measure(visit: Visit, name: str, model: Any, prompt: torch.Tensor, count: int, options: dict[str, Any]) -> None:
    """Seconds of a new token: the difference of a long answer and a short one over that of their lengths."""

    mask = torch.ones_like(prompt)

    def seconds(length: int) -> float:
        began = time.perf_counter()
        out = model.generate(prompt, max_new_tokens=length, do_sample=False, attention_mask=mask, **options)
        number = out.shape[1] - prompt.shape[1]  # to the host: it waits for the device
        float(out.sum())
        if number != length:
            raise RuntimeError(f"it wrote {number} tokens in the place of {length}")
        return time.perf_counter() - began

    first_s = seconds(count)
    rates = []
    for _ in range(visit.sized(2, 1)):
        short, whole = seconds(count // 4), seconds(count)
        rates.append((count - count // 4) / max(whole - short, 1e-9))
    figures = {"all_tokens_per_s": rates, "first_s": first_s}
    visit.report(f"Transformers, {name}", tokens_per_s=statistics.median(rates), **figures)


def assistant(visit: Visit, model: Any) -> Any:
    """A random drafter of five layers and blocks of 16, of the one class that Transformers has for them."""
    if not hasattr(transformers, "MuseGlimmerAssistantModel"):
        raise Skipped("this Transformers has no DFlash drafter")
    own = model.config
    layers = own.num_hidden_layers
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=own.hidden_size, intermediate_size=own.intermediate_size, num_hidden_layers=visit.sized(5, 1),
        num_attention_heads=own.num_attention_heads, num_key_value_heads=own.num_key_value_heads, head_dim=own.head_dim,
        block_size=visit.sized(16, 4), mask_token_id=own.vocab_size - 1,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
        target_layer_ids=sorted({layer * (layers - 1) // 5 for layer in range(1, 5)}),
    )  # fmt: skip
    with model.device:
        return transformers.MuseGlimmerAssistantModel(config).to(model.dtype).eval()
