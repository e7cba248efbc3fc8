"""The student before it has learned anything: some of the teacher's layers, or a smaller model, as a folder of its own.

    write_start(StudentConfig(layers=12), resolve("smollm2-135m"), Path("runs/x/start"))

Embedding, last norm and head are the teacher's; of its layers some are taken over as they are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import ConfigError, refuse
from paceline.hub import resolve
from paceline.loop.distill.config import StudentConfig
from paceline.loop.distill.influence import most_influential
from paceline.model import checkpoint
from paceline.model.config.decoder import DecoderConfig, has_llama_layers
from paceline.model.gguf.to_folder import config_json_of, write_model
from paceline.model.text.tokenizer import Tokenizer
from paceline.runs.folder import write_whole

DEFAULT_SHARE = 0.4
"""Of the teacher's layers: 12 of 30."""
LAYERS = "layers.json"
"""Beside a student's first weights: which layers they are; the last file written."""
BY_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
"""Lists of config.json that say something of each layer."""


def spread_layers(num_layers: int, kept: int) -> tuple[int, ...]:
    """Which layers of so many stay: spread evenly, the first and the last among them. Raises ConfigError."""
    if not 1 <= kept <= num_layers:
        raise ConfigError(f"layers must be between 1 and the teacher's {num_layers}, not {kept}")
    if kept == 1:
        return (0,)
    return tuple(round(place * (num_layers - 1) / (kept - 1)) for place in range(kept))


def num_kept(config: StudentConfig, num_layers: int) -> int:
    """How many layers are taken over of so many. Raises ConfigError."""
    kept = config.layers or len(config.keep_layers) or max(1, round(DEFAULT_SHARE * num_layers))
    return len(spread_layers(num_layers, kept))


def kept_layers(config: StudentConfig, num_layers: int, influence: Sequence[float] | None = None) -> tuple[int, ...]:
    """As asked for, of so many layers; evenly spread where nothing is known of their influence. Raises ConfigError."""
    if not config.keep_layers:
        kept = num_kept(config, num_layers)
        return spread_layers(num_layers, kept) if influence is None else most_influential(influence, kept)
    if config.keep_layers[-1] >= num_layers:
        raise ConfigError(f"keep_layers names layer {config.keep_layers[-1]}, the teacher's are 0 to {num_layers - 1}")
    return config.keep_layers


def check_layers(config: StudentConfig, teacher: Path) -> None:
    """Reads the teacher's config alone. Raises ConfigError where no student of these layers can be made of it."""
    if config.student:
        return
    shape = checkpoint.load_config(teacher)
    refuse(
        ConfigError,
        (
            not has_llama_layers(shape.family),
            f"layers of {shape.family} depend on where they stand and cannot be taken out: give a smaller model with --student",
        ),
    )
    kept_layers(config, shape.num_layers)


def write_start(
    config: StudentConfig, teacher: Path, folder: Path, influence: Callable[[], Sequence[float]] | None = None
) -> tuple[int, ...]:
    """Write the student's first weights in float32; returns the teacher's layers that it has, none for a smaller model.

    `influence` is asked where layers are chosen by it. A folder that is there stays.

    Raises ConfigError where that student cannot be made of this teacher, and what reading models raises.
    """
    if (folder / LAYERS).is_file():
        return tuple(json.loads((folder / LAYERS).read_text(encoding="utf-8")))
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while it wrote
    shape = checkpoint.load_config(teacher)
    if config.student:
        source = resolve(config.student)
        smaller = check_same_words(source, teacher)
        tensors = checkpoint.check_tensors(smaller, checkpoint.load_tensors(source), source)
        write_model(folder, config_json_of(source), tensors, source)
        return _noted(folder, ())
    check_layers(config, teacher)
    by_influence = influence is not None and config.choice == "influence" and not config.keep_layers
    layers = kept_layers(config, shape.num_layers, influence() if influence and by_influence else None)
    raw: dict[str, Any] = {**config_json_of(teacher), "num_hidden_layers": len(layers)}
    for name in BY_LAYER:
        if isinstance(raw.get(name), list):
            raw[name] = [raw[name][layer] for layer in layers]
    tensors = checkpoint.check_tensors(shape, checkpoint.load_tensors(teacher), teacher)
    write_model(folder, raw, _taken(tensors, layers), teacher)
    return _noted(folder, layers)


def _noted(folder: Path, layers: tuple[int, ...]) -> tuple[int, ...]:
    write_whole(folder / LAYERS, json.dumps(layers) + "\n")
    return layers


def check_same_words(student: Path, teacher: Path) -> DecoderConfig:
    """The student's config. Raises ConfigError where it does not speak in the teacher's tokens."""
    ours, theirs = checkpoint.load_config(student), checkpoint.load_config(teacher)
    words = [Tokenizer.from_path(each).backend.get_vocab(with_added_tokens=True) for each in (student, teacher)]
    if ours.vocab_size != theirs.vocab_size or words[0] != words[1]:
        raise ConfigError(
            f"{student} has other tokens than its teacher {teacher}: give a smaller model of the teacher's family, or leave "
            "--student out and take the teacher's layers"
        )
    return ours


def _taken(tensors: Iterator[tuple[str, Tensor]], layers: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """With only these layers, numbered anew."""
    places = {str(layer): str(place) for place, layer in enumerate(layers)}
    for name, tensor in tensors:
        parts = name.split(".")
        if parts[1] == "layers":
            if parts[2] not in places:
                continue
            parts[2] = places[parts[2]]
        yield ".".join(parts), tensor


def num_weights(config: Any) -> tuple[int, int]:
    """Weights of the layers, and of the embedding and the head that a pass reads."""
    sizes: dict[bool, int] = {True: 0, False: 0}
    for name, shape in checkpoint.expected_shapes(config).items():
        number = 1
        for size in shape:
            number *= size
        sizes[name.startswith("model.layers.")] += number
    return sizes[True], sizes[False]
