"""What passes of a model with gated delta nets take in our decoder and through Transformers, when drafts are refused.

    python experiments/hybrid_passes.py --layers 4 --vocab 4096

Random weights of Qwen3.5-0.8B's widths, with fewer layers and a smaller vocabulary so that they fit. Both implementations go
on from the same prompt: rounds of `--count` tokens of which `--kept` stand, then passes of one token; the median of `--rounds`.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from paceline.model.checkpoint import check_tensors, load_config, random_tensors
from paceline.model.decoder import Decoder
from paceline.model.hf import HFTarget
from paceline.model.target import ForwardBatch, Target
from paceline.runlog import record_of

WIDTHS = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def timed(target: Target, rounds: int, count: int, kept: int, prompt: int) -> float:
    """Median milliseconds of a pass of `count` tokens, and of what the rollback to `kept` of them costs the next one."""
    generator, row, times = torch.Generator().manual_seed(0), target.cache.allocate(), list[float]()
    assert row is not None

    def drawn(number: int) -> list[int]:
        return torch.randint(0, target.vocab_size, (number,), generator=generator).tolist()

    target.forward(ForwardBatch([row], [0], [prompt], drawn(prompt), "none"))
    for _ in range(rounds + 3):
        start, tokens = target.cache.lengths[row], drawn(count)
        began = time.perf_counter()
        target.forward(ForwardBatch([row], [start], [count], tokens)).best_T()
        target.cache.rollback([row], [start + kept])
        times.append(time.perf_counter() - began)
    target.cache.free(row)
    return 1e3 * median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("vocab", 4096), ("rounds", 30), ("count", 8), ("kept", 3), ("prompt", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_config(
        Qwen3_5TextConfig(**WIDTHS, vocab_size=args.vocab, num_hidden_layers=args.layers), dtype=dtype
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        config = load_config(folder)
        tensors = check_tensors(config, random_tensors(config), folder)
        targets: dict[str, Target] = {
            "ours": Decoder(config, tensors, max_len=2048, dtype=dtype),
            "transformers": HFTarget(model, 1, 2048),
        }
    found = {
        name: {
            "round_ms": timed(target, args.rounds, args.count, args.kept, args.prompt),
            "plain_ms": timed(target, args.rounds, 1, 1, args.prompt),
        }
        for name, target in targets.items()
    }
    print(json.dumps(record_of({**vars(args), "threads": torch.get_num_threads(), "ms": found})))


if __name__ == "__main__":
    main()
