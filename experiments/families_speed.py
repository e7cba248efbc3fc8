"""Plain decoding of each family natively and in PyTorch, one stream, random weights: seconds of a pass of one position.

    python experiments/families_speed.py --out runs/families-speed

A model of each family's layers, all of one size (`--layers` of `--hidden` numbers, a vocabulary of 8,192), in bfloat16;
ways take turns `--repeat` times, each of `--passes` passes of one position. What is told is the median of each way's
passes and the ratio of the two, and beside it Q4_K weights in the native pass. Weights are random: what a family says
is no text, what its layers cost is real. Run it alone on the machine; it takes about four minutes on two cores. Writes
results.json into `--out`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from paceline.config import EngineConfig
from paceline.model.backends import form_of, load_target
from paceline.model.target import ForwardBatch, Target
from paceline.runs.folder import write_results

CONTEXT = 64
"""Tokens before the timed ones."""
EXPERTS = {"num_experts_per_tok": 8, "moe_intermediate_size": 256}
DELTA = {
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"]},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 512},
    "granite": {
        "architectures": ["GraniteForCausalLM"], "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.0156, "logits_scaling": 8.0,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"]},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 64, "norm_topk_prob": True, **EXPERTS},
    "gpt-oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 32, "num_experts_per_tok": 4},
    "qwen3.5": {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **DELTA},
}  # fmt: skip


def config_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    shape = {
        "hidden_size": args.hidden, "num_hidden_layers": args.layers, "intermediate_size": 4 * args.hidden,
        "vocab_size": 8192,
        "num_attention_heads": args.hidden // 64, "num_key_value_heads": args.hidden // 256, "head_dim": 64,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    }  # fmt: skip
    own = FAMILIES[name]
    return shape | own | ({"intermediate_size": args.hidden} if name == "gpt-oss" else {})


class Timed:
    """One way to compute a model, with a row of text behind it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.target: Target = load_target(
            EngineConfig(
                str(folder), weights="random", dtype="bfloat16", device="cpu", max_batch=1, max_len=256, **settings
            )
        )
        row = self.target.cache.allocate()
        assert row is not None
        self.row, self.form = row, str(form_of(self.target))
        self.target.forward(ForwardBatch([row], [0], [CONTEXT], list(range(1, CONTEXT + 1)), "none"))

    def passes_ms(self, count: int) -> list[float]:
        durations: list[float] = []
        for number in range(count):
            began = time.perf_counter()
            self.target.forward(ForwardBatch([self.row], [CONTEXT], [1], [number + 5], only_argmax=True))
            durations.append(1e3 * (time.perf_counter() - began))
            self.target.cache.rollback([self.row], [CONTEXT])
        return durations


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    folder = args.out / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(name, args), indent=1) + "\n", encoding="utf-8")
    settings: dict[str, dict[str, Any]] = {
        "torch": {"backend": "torch"},
        "native": {},
        "q4_k": {"weight_format": "q4_k"},
    }
    ways = {way: Timed(folder, **own) for way, own in settings.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for timed in ways.values():
        timed.passes_ms(args.passes)
    for _ in range(args.repeat):
        for way, timed in ways.items():
            times[way].append(statistics.median(timed.passes_ms(args.passes)))
    medians = {way: statistics.median(each) for way, each in times.items()}
    forms = {way: timed.form for way, timed in ways.items()}
    return {
        "family": name,
        "ms": medians,
        "runs_ms": times,
        "forms": forms,
        "bytes": ways["native"].target.weight_bytes,
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/families-speed"))
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(FAMILIES), help="some of them, by commas"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args(words)
    rows = []
    for name in args.only:
        rows.append(measured(name, args))
        ms = rows[-1]["ms"]
        print(
            f"{name}: torch {ms['torch']:.2f} ms, native {ms['native']:.2f} ms, q4_k {ms['q4_k']:.2f} ms",
            file=sys.stderr,
        )
    print("| family | PyTorch ms | native ms | times as fast | Q4_K ms |\n|---|---|---|---|---|")
    for row in rows:
        ms = row["ms"]
        cells = [f"{ms['torch']:.2f}", f"{ms['native']:.2f}", f"{ms['torch'] / ms['native']:.1f}", f"{ms['q4_k']:.2f}"]
        print("| " + " | ".join([row["family"], *cells]) + " |")
    write_results(args.out / "results.json", {"threads": torch.get_num_threads(), "options": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
