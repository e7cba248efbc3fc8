"""Settings of a real drafter read wrongly, one at a time: does `paceline inspect` name each?

    python experiments/planted_mismatches.py --model smollm2-135m --out runs/planted

The target answers `--prompts` of inspect's prompts, greedy. Each plant is then measured and varied as `paceline inspect --vary`
does it (`paceline/adapt/mismatch.py`): tokens a round as it is, of the drafter as it was meant, and what is named. A plant is
found where the named setting is the planted one; one that costs less than what naming takes cannot be found, and is said so.
Writes results.json into `--out`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import LLM
from paceline.adapt.mismatch import LEAST_SURE, LOW, PROMPTS, Ranked, ask, encode, measure, named, rank
from paceline.draft.checkpoint import DFlashConfig, StoredDrafter, read_stored
from paceline.draft.dflash2 import drafter_from
from paceline.draft.registry import folder_of
from paceline.draft.vocabulary import Vocabulary
from paceline.errors import PacelineError
from paceline.model.target import head_weight
from paceline.runlog import record_of


def with_keys(stored: StoredDrafter, **keys: Any) -> StoredDrafter:
    """Keys of config.json changed, within dflash_config where it has them."""
    raw, nested = dict(stored.config.raw), dict(stored.config.raw["dflash_config"])
    for name, value in keys.items():
        (nested if name in nested else raw)[name] = value
    return replace(stored, config=DFlashConfig.from_json(raw | {"dflash_config": nested}))


def with_tensors(stored: StoredDrafter, change: Callable[[str, Tensor], Tensor]) -> StoredDrafter:
    return replace(stored, tensors={name: change(name, tensor) for name, tensor in stored.tensors.items()})


def interleaved(stored: StoredDrafter) -> StoredDrafter:
    """Rows of queries and keys in the order of the other rotary style."""
    size = stored.config.shape.head_dim
    order = torch.stack([torch.arange(size // 2), torch.arange(size // 2, size)], dim=1).flatten()

    def change(name: str, tensor: Tensor) -> Tensor:
        is_turned = any(f".{which}." in name for which in ("q_proj", "k_proj", "q_norm", "k_norm"))
        return tensor.unflatten(0, (-1, size))[:, order].flatten(0, 1) if is_turned else tensor

    return with_tensors(stored, change)


def with_norms(stored: StoredDrafter, step: int) -> StoredDrafter:
    """Weights of norms that are `step` more."""
    return with_tensors(stored, lambda name, tensor: tensor + step if name.endswith("norm.weight") else tensor)


def with_features_turned(stored: StoredDrafter) -> StoredDrafter:
    """Features of the target's layers in the other order."""
    num_layers = len(stored.config.target_layer_ids)

    def change(name: str, tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (num_layers, -1)).flip(1).flatten(1) if name == "fc.weight" else tensor

    return with_tensors(stored, change)


def with_taps_turned(stored: StoredDrafter) -> StoredDrafter:
    """Taps of DFlash 2's convolutions in the other order."""

    def change(name: str, tensor: Tensor) -> Tensor:
        if name.endswith("_conv.base_kernel"):
            return tensor.flip(1)
        return tensor.unflatten(0, (2, 2, -1)).flip(1).flatten(0, 2) if name.endswith("kernel_projection.weight") else tensor

    return with_tensors(stored, change)


def with_codebooks_exchanged(stored: StoredDrafter) -> StoredDrafter:
    """A selector's codebook of predecessors in place of that of successors, and the other way round."""
    other = {"predecessor": "successor", "successor": "predecessor"}

    def change(name: str, tensor: Tensor) -> Tensor:
        which = name.removeprefix("candidate_selector.").removesuffix("_codebook")
        return stored.tensors[name.replace(which, other[which])] if which in other else tensor

    return with_tensors(stored, change)


def plants(stored: StoredDrafter, llm: LLM) -> dict[str, tuple[str, Callable[[], StoredDrafter]]]:
    """What is wrong, in words: the kind that `inspect` should name, and the drafter with it."""
    config, (ids, _), layers = stored.config, stored.vocabulary, list(stored.config.target_layer_ids)

    def head(rows: Tensor) -> StoredDrafter:
        assert ids is not None
        return replace(stored, vocabulary=Vocabulary(ids, head_weight(llm.target)[rows].to(stored.tensors["fc.weight"].dtype)))

    theta, most = config.shape.rope_theta, llm.target.vocab_size
    sliding = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0, "is_causal": False}
    made: dict[str, tuple[str, Callable[[], StoredDrafter]]] = {
        "nothing": ("", lambda: stored),
        "layer ids one too high": (
            "layer ids off by one",
            lambda: with_keys(stored, target_layer_ids=[each + 1 for each in layers]),
        ),
        "layer ids one too low": (
            "layer ids off by one",
            lambda: with_keys(stored, target_layer_ids=[each - 1 for each in layers]),
        ),
        "layers in the other order": ("layer order", lambda: with_features_turned(stored)),
        "mask token 0": ("mask token", lambda: with_keys(stored, mask_token_id=0)),
        "mask token one too low": ("mask token", lambda: with_keys(stored, mask_token_id=config.mask_token_id - 1)),
        "rope_theta 10000": ("rotary length", lambda: with_keys(stored, rope_theta=1e4)),
        f"rope_theta {10 * theta:g}": ("rotary length", lambda: with_keys(stored, rope_theta=10 * theta)),
        "heads interleaved": ("rotary style", lambda: interleaved(stored)),
        "a window of 4": ("window flag", lambda: with_keys(stored, **sliding)),
        "slots see only those before": ("window flag", lambda: with_keys(stored, is_causal=True)),
        "another head": ("head", lambda: head((ids if ids is not None else torch.arange(most)).roll(1))),
        "other draft tokens": ("head", lambda: replace(stored, vocabulary=Vocabulary(torch.arange(most - 12288, most)))),
        "d2t taken for ids": ("head", lambda: replace(stored, vocabulary=Vocabulary(offsets_as_ids(ids)))),
        "anchor slot": ("anchor slot", lambda: with_keys(stored, sample_from_anchor=True)),
        "norms less 1": ("norm flags", lambda: with_norms(stored, -1)),
        "norms plus 1": ("norm flags", lambda: with_norms(stored, 1)),
        "embedding scale": ("embedding scale", lambda: with_keys(stored, input_embedding_scale=llm.target.hidden_size**0.5)),
    }
    if config.second:
        made |= {
            "taps of convolutions turned": ("convolution", lambda: with_taps_turned(stored)),
            "codebooks exchanged": ("selector", lambda: with_codebooks_exchanged(stored)),
        }
    return made


def offsets_as_ids(ids: Tensor | None) -> Tensor:
    """Token ids with their places added: what a reader makes of a file that holds ids where it expects offsets."""
    assert ids is not None
    return ids + torch.arange(len(ids))


@dataclass(frozen=True)
class Found:
    plant: str
    kind: str
    """The one that is planted."""
    tokens_per_round: float
    """With the plant; 0 where it raises an error."""
    named: str | None
    """Kind of what is named, or the error."""
    change: str
    mended: float
    """Tokens a round of what is named."""
    verdict: str
    """found; error, where the drafter is refused by name; harmless, where it costs too little to be told; missed."""


def look(plant: str, kind: str, make: Callable[[], StoredDrafter], llm: LLM, requests: list[Any], right: float) -> Found:
    try:
        ranked: list[Ranked] = rank(llm, make(), requests)
    except PacelineError as error:
        return Found(plant, kind, 0.0, str(error), "", 0.0, "error")
    spoiled, best = ranked[0].tokens_per_round, named(ranked)
    is_right, is_harmless = (best.kind if best else "") == kind, not best and right < spoiled * LEAST_SURE
    verdict = "found" if is_right else ("harmless" if is_harmless else "missed")
    told = (best.kind, best.change, best.tokens_per_round) if best else (None, "", 0.0)
    return Found(plant, kind, spoiled, *told, verdict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--plants", default="", help="only those whose words hold one of these, comma-separated")
    parser.add_argument("--out", type=Path, default=Path("runs/planted"))
    args = parser.parse_args()
    stored = read_stored(folder_of(args.drafter, args.model))
    llm = LLM(args.model, drafter="none", max_batch=8)
    requests = ask(llm, [encode(llm.tokenizer, prompt) for prompt in PROMPTS[: args.prompts]], args.max_tokens)
    right = measure(llm, drafter_from(stored), requests)
    print(f"as it is {right:.2f} tokens a round; below {LOW} inspect varies by itself\n", flush=True)
    print("| planted | tokens a round | named | brings | |\n|---|---|---|---|---|")
    found = []
    for plant, (kind, make) in plants(stored, llm).items():
        if any(words in plant for words in args.plants.split(",")):
            each = look(plant, kind, make, llm, requests, right)
            found.append(each)
            told = f"{each.named}: {each.change}" if each.change else each.named
            print(f"| {plant} | {each.tokens_per_round:.2f} | {told} | {each.mended:.2f} | {each.verdict} |", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    line = record_of({"right": right, "found": [asdict(each) for each in found]})
    (args.out / "results.json").write_text(json.dumps(line, indent=1) + "\n", encoding="utf-8")
    return int(any(each.verdict == "missed" for each in found))


if __name__ == "__main__":
    sys.exit(main())
