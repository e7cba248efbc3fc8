"""Writes a tiny random target to disk: byte tokens, a chat template, weights from a fixed seed. With it, `paceline
train --scale tiny` runs every stage in seconds; its answers are meaningless.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.model.checkpoint import load_config, random_tensors
from paceline.runs.folder import whole_file, write_whole
from paceline.runs.ranks import Ranks
from paceline.train.config import TrainConfig
from paceline.train.run_file import with_defaults

PARTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
TINY = {
    "loop.epochs": 2.0, "loop.blocks_per_step": 128, "loop.anchors": 16, "loop.heldout_every": 10,
    "answering.max_tokens": 48, "answering.max_prompt_tokens": 128, "max_len": 256,
}  # fmt: skip
"""Settings used with --scale tiny, except for those that the user gave."""


def at_scale(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """Applies --scale tiny; with another --scale, returns the config unchanged. The returned config has a tiny random
    model as the target, and small values for all settings that the user did not give. If `config` names neither prompts
    nor answers, it also has a few prompts. The first of the processes `ranks` writes the model and the prompts to
    `config.out`."""
    if config.scale == "default":
        return config
    folder, file = config.out / "target", config.out / "prompts.jsonl"
    if ranks.is_first:
        write_tiny_target(folder)
    prompts = config.prompting.prompts
    if not prompts and not config.answers:
        prompts = (str(file),)
        if ranks.is_first and not file.exists():
            write_whole(file, "".join(f'{{"prompt": "Say something about number {n}."}}\n' for n in range(96)))
    taps = {} if config.shape.is_chained else {"shape.num_layers": 2, "shape.num_taps": 2}
    target, prompting = replace(config.target, model=str(folder)), replace(config.prompting, prompts=prompts)
    return with_defaults(replace(config, target=target, prompting=prompting), TINY | taps)


def write_tiny_target(folder: Path) -> Path:
    """Writes a tiny language model with random weights and a byte tokenizer to `folder`, unless it exists; returns the
    folder. Raises CacheError for disk errors."""
    if (folder / "model.safetensors").is_file():
        return folder
    write_whole(folder / "config.json", json.dumps(PARTS["config"], indent=1))
    with whole_file(folder / "tokenizer.json") as scratch:
        byte_tokenizer(PARTS["special_tokens"]).save(str(scratch))
    write_whole(folder / "tokenizer_config.json", json.dumps(PARTS["tokenizer_config"]))
    # Larger weights than usual and an untied head: otherwise the model repeats one token forever.
    tensors = random_tensors(load_config(folder))
    louder = {name: tensor if "norm" in name else tensor * 4 for name, tensor in tensors}
    with whole_file(folder / "model.safetensors") as scratch:  # written last: it marks the others as complete
        save_file(louder, scratch)
    return folder


def byte_tokenizer(special: list[str]) -> Tokenizer:
    """Returns a tokenizer with one token per byte, in GPT-2's representation, followed by the tokens `special`."""
    visible = [byte for byte in range(256) if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD)]
    hidden = [byte for byte in range(256) if byte not in visible]
    vocab = {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(hidden)}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return backend
