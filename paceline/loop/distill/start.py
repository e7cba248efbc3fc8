"""Initialises the student, as a model folder: the teacher with some of its layers, or a smaller model.

    write_start(StudentConfig(layers=12), resolve("smollm2-135m"), Path("runs/x/start"))

Embedding, final norm, head and the selected layers are copied from the teacher. By default the layers with the highest
influence are selected: 1 - mean over the answers' tokens of cos(layer's input, its output). This is ShortGPT's block
influence (arXiv 2403.03853, section 3.1); a model recovers fastest from the removal of layers with low influence.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.bounds import refuse_unused
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.hub import resolve
from paceline.loop.distill.config import FilesConfig, StudentConfig
from paceline.model import checkpoint
from paceline.model.config.decoder import DecoderConfig, decoder_config, has_llama_layers
from paceline.model.gguf.container import is_gguf
from paceline.model.gguf.to_folder import config_json_of, write_model
from paceline.model.target import ForwardBatch
from paceline.model.text.tokenizer import Tokenizer
from paceline.runs.folder import write_whole
from paceline.train.documents.dataset import Document

DEFAULT_SHARE = 0.4
"""Share of the teacher's layers that the student gets by default: 12 of 30."""
LAYERS = "layers.json"
"""File in the start folder with the indices of the copied layers; it is written last."""
NUM_DOCUMENTS = 4
"""Number of answers that the influence is measured on; a few hundred tokens suffice to rank most layers."""
BY_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
"""Keys of config.json whose value is a list with one entry per layer."""


@torch.inference_mode()
def influences(llm: LLM, documents: Sequence[Document]) -> list[float]:
    """Measures the influence of every layer: 1 - mean cosine similarity of its input and output hidden states.

    The mean is over the answer tokens of the first 4 documents (NUM_DOCUMENTS). The first and the last layer get
    infinity, so that both are always copied.
    """
    target = llm.target
    num_layers = target.num_layers
    if num_layers < 3:
        return [float("inf")] * num_layers
    target.set_taps(tuple(range(num_layers - 1)))
    row = target.cache.allocate()
    assert row is not None, "the engine is not idle"
    sums, num_tokens = torch.zeros(num_layers - 2), 0
    for document in documents[:NUM_DOCUMENTS]:
        tokens, first = document.tokens.tolist(), document.answer_start
        out = target.forward(ForwardBatch([row], [0], [len(tokens)], tokens, "none"))
        assert out.taps_TF is not None
        taps_TLD = out.taps_TF[first:].float().unflatten(-1, (num_layers - 1, -1))
        alike_TL = torch.nn.functional.cosine_similarity(taps_TLD[:, :-1], taps_TLD[:, 1:], dim=-1)
        sums += (1 - alike_TL).sum(0).cpu()
        num_tokens += len(alike_TL)
        target.cache.rollback([row], [0])
    target.cache.free(row)
    target.set_taps(())
    return [float("inf"), *(sums / num_tokens).tolist(), float("inf")]


def spread_layers(num_layers: int, number: int) -> tuple[int, ...]:
    """Returns the indices of `number` evenly spaced layers, including the first and the last; only the first if
    `number` is 1. Raises ConfigError if `number` is not between 1 and `num_layers`."""
    if not 1 <= number <= num_layers:
        raise ConfigError(f"layers must be between 1 and the teacher's {num_layers}, not {number}")
    if number == 1:
        return (0,)
    return tuple(round(place * (num_layers - 1) / (number - 1)) for place in range(number))


def kept_layers(config: StudentConfig, num_layers: int, influence: Sequence[float] | None = None) -> tuple[int, ...]:
    """Returns the indices, ascending, of the teacher's layers that are copied into the student.

    These are `config.keep_layers`, if it is set. Otherwise they are `config.layers` layers [default: two fifths of
    all]. With `influence`, the result of `influences`, the most influential layers are chosen; without it, evenly
    spaced ones. `num_layers`: number of the teacher's layers. Raises ConfigError if the teacher does not have the
    requested layers.
    """
    if config.keep_layers:
        if config.keep_layers[-1] >= num_layers:
            raise ConfigError(
                f"keep_layers names layer {config.keep_layers[-1]}, the teacher's are 0 to {num_layers - 1}"
            )
        return config.keep_layers
    even = spread_layers(num_layers, config.layers or max(1, round(DEFAULT_SHARE * num_layers)))
    if influence is None:
        return even
    ranked = sorted(range(num_layers), key=lambda layer: -influence[layer])  # stable: ties go to the lower layer
    return tuple(sorted(ranked[: len(even)]))


def check_layers(config: StudentConfig, teacher: Path) -> None:
    """Checks that the layers that `config` selects can be copied from the teacher. Raises ConfigError in two cases: the
    model in the folder `teacher` does not have them, or its layers depend on their position, so that none can be left
    out. Does nothing if the student starts from a smaller model (`config.student`)."""
    if config.student:
        return
    shape = checkpoint.load_config(teacher)
    if not has_llama_layers(shape.family):
        raise ConfigError(
            f"layers of {shape.family} depend on their position and cannot be taken out: give a smaller model with "
            "--student"
        )
    kept_layers(config, shape.num_layers)


def gguf_format(files: FilesConfig, config: StudentConfig, teacher: Path) -> str:
    """Returns the format of the student's GGUF file; "none" if no such file is written. The setting "auto" gives "q4_1"
    if the teacher is a GGUF file and the student starts from its layers, otherwise "none"."""
    if files.gguf != "auto":
        return files.gguf
    return "q4_1" if is_gguf(teacher) and not config.student else "none"


def check_files(files: FilesConfig, config: StudentConfig, teacher: Path) -> None:
    """Checks that `files.embedding_format`, a format inside the GGUF file, is set only if that file is written. Raises
    ConfigError otherwise."""
    where = "without a GGUF file, which --gguf auto writes only for a teacher in one, without --student"
    refuse_unused(files, gguf_format(files, config, teacher) != "none", where, "embedding_format")


def write_start(
    config: StudentConfig, teacher: Path, folder: Path, influence: Callable[[], Sequence[float]] | None = None
) -> tuple[int, ...]:
    """Writes the untrained student in float32 to `folder`; does nothing if an earlier call has written it. Returns the
    indices of the teacher's layers copied into it. Returns () if the student starts from a smaller model instead
    (`config.student`).

    `influence`: function that computes the influence of the teacher's layers; called only if `config` chooses layers by
    influence. Raises ConfigError if the student does not fit the teacher, and ModelNotFoundError, ModelFileError,
    UnsupportedModelError or DownloadError if a model cannot be loaded.
    """
    if (folder / LAYERS).is_file():
        return tuple(json.loads((folder / LAYERS).read_text(encoding="utf-8")))
    shutil.rmtree(folder, ignore_errors=True)  # incomplete, from a killed run
    shape = checkpoint.load_config(teacher)
    if config.student:
        source = resolve(config.student)
        smaller = check_same_words(source, teacher)
        tensors = checkpoint.check_tensors(smaller, checkpoint.load_tensors(source), source)
        write_model(folder, config_json_of(source), tensors, source)
        layers = ()
    else:
        check_layers(config, teacher)
        by_influence = influence is not None and config.choice == "influence" and not config.keep_layers
        layers = kept_layers(config, shape.num_layers, influence() if influence and by_influence else None)
        raw = config_of_layers(config_json_of(teacher), layers, teacher)
        tensors = checkpoint.check_tensors(shape, checkpoint.load_tensors(teacher), teacher)
        write_model(folder, raw, _selected(tensors, layers), teacher)
    write_whole(folder / LAYERS, json.dumps(layers) + "\n")
    return layers


def config_of_layers(raw: dict[str, Any], layers: Sequence[int], teacher: Path) -> dict[str, Any]:
    """Returns the content of the student's config.json: `raw`, the teacher's, with the layers at the indices `layers`
    alone. Rules by a layer's index (every fourth without RoPE, windows from layer 28 on) become lists, so that each
    layer keeps what it has in the teacher. Raises ConfigError if the keys of this family cannot say so; `teacher` is
    named in the error."""
    shape = decoder_config(raw, teacher)
    own = {**raw, "num_hidden_layers": len(layers)}
    for name in BY_LAYER:
        if isinstance(raw.get(name), list):
            own[name] = [raw[name][layer] for layer in layers]
    if "none" in shape.ropes:
        own["no_rope_layers"] = [int(shape.rope(layer) != "none") for layer in layers]
    if None in shape.windows:  # some layers have a window and others none
        own["layer_types"] = ["full_attention" if shape.is_full(layer) else "sliding_attention" for layer in layers]
    if shape.dense_layers:
        own |= {"decoder_sparse_step": 1}
        own["mlp_only_layers"] = [place for place, layer in enumerate(layers) if not shape.has_experts(layer)]
    student = decoder_config(own, teacher)
    if [_options_of(student, place) for place in range(len(layers))] != [_options_of(shape, each) for each in layers]:
        raise ConfigError(
            f"{teacher}: layers of this model depend on their position and cannot be taken out: give a smaller model "
            "with --student"
        )
    return own


def _options_of(config: DecoderConfig, layer: int) -> tuple[object, ...]:
    """Returns (window, type of RoPE, True if it has experts) of a layer."""
    return config.window(layer), config.rope(layer), config.has_experts(layer)


def check_same_words(student: Path, teacher: Path) -> DecoderConfig:
    """Checks that a student that starts from a smaller model has the teacher's vocabulary; returns the smaller model's
    config. `student`, `teacher`: folders of the two models. Raises ConfigError if the vocabularies differ."""
    config, teacher_config = checkpoint.load_config(student), checkpoint.load_config(teacher)
    words = [Tokenizer.from_path(each).backend.get_vocab(with_added_tokens=True) for each in (student, teacher)]
    if config.vocab_size != teacher_config.vocab_size or words[0] != words[1]:
        raise ConfigError(
            f"{student} has other tokens than its teacher {teacher}: give a smaller model of the teacher's family, or "
            "leave --student out and take the teacher's layers"
        )
    return config


def _selected(tensors: Iterator[tuple[str, Tensor]], layers: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors outside the layers and those of the given layers, renumbered."""
    places = {str(layer): str(place) for place, layer in enumerate(layers)}
    for name, tensor in tensors:
        parts = name.split(".")
        if parts[1] == "layers":
            if parts[2] not in places:
                continue
            parts[2] = places[parts[2]]
        yield ".".join(parts), tensor


def num_weights(config: Any) -> tuple[int, int]:
    """Returns (number of weights in the decoder layers, number of weights in all other tensors) of a model with this
    config."""
    sizes: dict[bool, int] = {True: 0, False: 0}
    for name, shape in checkpoint.expected_shapes(config).items():
        sizes[name.startswith("model.layers.")] += math.prod(shape)
    return sizes[True], sizes[False]
