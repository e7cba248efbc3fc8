"""Files that are absurd or hostile are refused in one line, before anything large is allocated or anything waits."""

from __future__ import annotations

import copy
import errno
import json
import mmap
import os
import random
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import byte_level_vocabulary, write_gguf
from model_folders import transformers_model, write_config, write_weights
from safetensors import SafetensorError
from safetensors.torch import save_file
from tiny_builtin import raising

from paceline.draft import vocabulary
from paceline.draft.dflash.checkpoint import read_stored
from paceline.draft.dflash.config import is_dflash, new_config
from paceline.draft.formats import packed
from paceline.draft.mtp import stitch
from paceline.errors import MemoryBudgetError, ModelFileError, PacelineError
from paceline.model import checkpoint
from paceline.model import remote_embedding as ends
from paceline.model.checkpoint import check_finite, check_tensors, eos_token_ids, load_config, load_tensors, read_json
from paceline.model.gguf.blocks import Blocks
from paceline.model.text.tokenizer import Tokenizer
from paceline.model.torch.attention import rope_tables
from paceline.train.learn.checkpoint import latest_checkpoint

JUNK: tuple[Any, ...] = (
    "x",
    -1,
    0,
    10**9,
    10**400,
    1.5,
    float("inf"),
    float("nan"),
    None,
    True,
    [],
    [[1]],
    {},
    {"a": [{}]},
)
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**6},
        {"num_hidden_layers": 10**9, "architecture": "MistralForCausalLM", "sliding_window": 4},
        {"vocab_size": 10**400},
        {"rope_theta": float("inf")},
        {"rope_theta": 10**400},
        {"rope_theta": 1, "rope_scaling": YARN},
        {"rms_norm_eps": float("nan")},
        {"architectures": [["x"]]},
        {"rope_scaling": {"rope_type": ["yarn"]}},
        {"rope_scaling": YARN | {"original_max_position_embeddings": 0, "factor": None}},
        {"rope_scaling": YARN | {"factor": float("inf")}},
        {"rope_scaling": YARN | {"beta_fast": "x"}},
        {"rope_scaling": YARN | {"attention_factor": [1]}},
        {"architecture": "Qwen2ForCausalLM", "use_sliding_window": True, "max_window_layers": "x"},
        {"architecture": "Qwen2ForCausalLM", "use_sliding_window": True, "layer_types": [{}, {}]},
        {"architecture": "Qwen2ForCausalLM", "use_sliding_window": True, "layer_types": 5},
    ],
)
def test_absurd_configs(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PacelineError) as caught:
        load_config(write_config(tmp_path, **changes))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [1, 0, "true", [], {}])
@pytest.mark.parametrize("key", ["attention_bias", "tie_word_embeddings", "norm_topk_prob", "use_sliding_window"])
def test_flags_of_another_type(key: str, value: Any, tmp_path: Path) -> None:
    """norm_topk_prob 1 is true for Transformers, and was false here: other answers, without a word."""
    with pytest.raises(ModelFileError, match=f"{key} must be true or false"):
        load_config(write_config(tmp_path, **{key: value}))


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("Phi3ForCausalLM", "model.layers.0.self_attn.qkv_proj.weight"),
        ("GptOssForCausalLM", "model.layers.0.mlp.experts.gate_up_proj"),
        ("GptOssForCausalLM", "model.layers.0.mlp.experts.down_proj_blocks"),
    ],
)
def test_a_single_number_in_place_of_a_fused_matrix(architecture: str, name: str, tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, architecture, head_dim=8))
    with pytest.raises(ModelFileError, match=rf"tensor '{name}' has shape \(\), the config asks for"):
        list(check_tensors(config, [(name, torch.tensor(1.0))], tmp_path))


def test_a_key_of_ours_in_a_config_means_nothing(tmp_path: Path) -> None:
    assert load_config(write_config(tmp_path, family="qwen3")).family == "llama"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_fifos_and_folders_are_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelFileError, match="no regular file"):
        read_json(tmp_path / name)
    os.mkfifo(tmp_path / "model.gguf")
    for read in (load_config, Tokenizer.from_path):
        with pytest.raises(PacelineError):
            read(tmp_path / "model.gguf")


@pytest.mark.slow
def test_fuzzed_configs(tmp_path: Path) -> None:
    """Whatever a key of a model's or drafter's config holds, it is read or refused."""
    rng = random.Random(1)
    write_config(tmp_path, "Qwen3ForCausalLM", rope_scaling=dict(YARN), use_sliding_window=True, sliding_window=8)
    base = json.loads((tmp_path / "config.json").read_text()) | {
        "eos_token_id": 1,
        "layer_types": ["full_attention"] * 2,
    }
    drafter = new_config(32, 96, 8, num_layers=2, head_dim=16)
    save_file({f"layers.{layer}.norm.weight": torch.ones(32) for layer in range(2)}, tmp_path / "model.safetensors")
    outcomes: Counter[tuple[str, bool]] = Counter()
    for _ in range(300):
        for raw, read in ((base, _read_all), (drafter, read_stored)):
            changed = json.loads(json.dumps(raw))
            for _ in range(rng.randint(1, 2)):
                part = rng.choice([changed] + [value for value in changed.values() if isinstance(value, dict)])
                if part:
                    part[rng.choice(list(part))] = copy.deepcopy(rng.choice(JUNK))
            (tmp_path / "config.json").write_text(json.dumps(changed))
            is_dflash(changed)
            outcomes[read.__name__, _is_read(read, tmp_path)] += 1
    assert (
        len(outcomes) == 4 and min(outcomes.values()) >= 20
    )  # else the junk says nothing: all is read, or all refused


def _is_read(read: Callable[[Path], object], path: Path) -> bool:
    """False when it is refused in the words of a PacelineError; anything else goes up."""
    try:
        read(path)
    except PacelineError:
        return False
    return True


def _read_all(folder: Path) -> None:
    config = load_config(folder)
    eos_token_ids(folder)
    if config.head_dim < 4096:
        rope_tables(config, 4)


@pytest.mark.slow
def test_fuzzed_gguf_headers(tmp_path: Path) -> None:
    """Bytes of the header changed, lengths and offsets among them; the file is read or refused, and nothing else."""
    rng, path = random.Random(2), tmp_path / "model.gguf"
    write_gguf(path, transformers_model("Qwen2ForCausalLM"), "qwen2", **byte_level_vocabulary(300))
    whole, header = (
        path.read_bytes(),
        path.stat().st_size - 4 * sum(p.numel() for p in transformers_model("Qwen2ForCausalLM").parameters()),
    )
    outcomes: Counter[tuple[int, bool]] = Counter()
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.choice([rng.randrange(header), rng.randrange(1200), rng.randrange(header - 2000, header - 8)])
            change = rng.choice(
                [b"\x00", b"\xff", b"\xff" * 8, b"\x00\x00\x00\x80", struct.pack("<Q", rng.randrange(2**63))]
            )
            data[at : at + len(change)] = change
        path.write_bytes(data)
        for number, read in enumerate((load_config, Tokenizer.from_path, lambda file: list(load_tensors(file)))):
            outcomes[number, _is_read(read, path)] += 1
    assert len(outcomes) == 6 and min(outcomes.values()) >= 3


def _gguf(num_tensors: int = 1, kind: int = 0, offset: int = 0, size: int = 8, value: bytes = b"") -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, 1 if value else 0) + value
    return head + struct.pack("<Q1sIQIQ", 1, b"t", 1, size, kind, offset) + bytes(256)


ENTRY = struct.pack("<Q1sI", 1, b"k", 9)


@pytest.mark.parametrize(
    "data",
    [
        _gguf(num_tensors=2**63),
        _gguf(offset=2**64 - 32),
        _gguf(offset=2**63),
        _gguf(offset=7),
        _gguf(offset=4096),
        _gguf(size=2**62),
        _gguf(size=0),
        _gguf(kind=999),
        _gguf(kind=8, size=33),
        _gguf(value=ENTRY + struct.pack("<IQ", 8, 2**63)),
        _gguf(value=ENTRY + struct.pack("<IQ", 4, 2**61)),
        _gguf(value=ENTRY + struct.pack("<IQ", 9, 3)),
        _gguf(value=ENTRY + struct.pack("<IQQ", 8, 1, 2**64 - 1)),
    ],
)
def test_absurd_gguf_headers(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(ModelFileError, match="no whole GGUF file"):
        list(load_tensors(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    ("key", "value"), [("block_count", 2**31), ("block_count", 10**6), ("embedding_length", 2**31)]
)
def test_absurd_gguf_sizes(key: str, value: int, tmp_path: Path) -> None:
    path, model = tmp_path / "a.gguf", transformers_model("Qwen2ForCausalLM")
    write_gguf(path, model, "qwen2")
    name = f"qwen2.{key}".encode()
    data = path.read_bytes()
    at = data.index(name) + len(name) + 4
    path.write_bytes(data[:at] + struct.pack("<I", value) + data[at + 4 :])
    with pytest.raises(ModelFileError, match=key):
        load_config(path)


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**63]}},
        {"w": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}},
        {"w": 5},
        [],
    ],
)
def test_absurd_safetensors_headers(header: Any, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        list(load_tensors(tmp_path))


def _empty_tensors(folder: Path, number: int) -> None:
    header = {f"t{each}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for each in range(number)}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.mark.slow
def test_many_tensors_parse_their_header_a_bounded_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each opening of the file parses all of its header."""
    opened, real = Counter[str](), checkpoint.safe_open
    monkeypatch.setattr(checkpoint, "safe_open", lambda *words, **more: (opened.update("o"), real(*words, **more))[1])
    _empty_tensors(tmp_path, 5000)
    assert len(list(load_tensors(tmp_path))) == 5000
    assert opened["o"] <= 65
    monkeypatch.setattr(checkpoint, "MOST_TENSORS", 4999)
    opened.clear()
    with pytest.raises(ModelFileError, match="holds 5,000 tensors, no model has so many"):
        list(load_tensors(tmp_path))
    assert opened["o"] == 1


def test_a_header_of_many_megabytes_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header as long as a million tensors need; the file has the length that it declares."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 57 * 2**20))
        file.truncate(58 * 2**20)
    monkeypatch.delattr(checkpoint, "safe_open")
    with pytest.raises(ModelFileError, match="has a header of 57 MiB, no model needs that"):
        list(load_tensors(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    """A damaged target, small model and drafter; the error names the tensor."""
    weights = {name: tensor.to(dtype) for name, tensor in write_weights(tmp_path).items()}
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 5] = value
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=f"{name}.*NaN or an infinity"):
        list(check_tensors(load_config(tmp_path), load_tensors(tmp_path), tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(new_config(32, 96, 8, num_layers=2, head_dim=16)))
    with pytest.raises(ModelFileError, match=f"{name}.*NaN or an infinity"):
        read_stored(tmp_path)


def test_which_weights_are_numbers() -> None:
    check_finite("w", torch.full((4, 4), 6e4, dtype=torch.float16), "x")  # their sum is not finite in float16
    scales = torch.zeros(2, 34, dtype=torch.uint8)
    check_finite("w", Blocks(scales, (2, 32), "Q8_0"), "x")
    scales[1, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    for weight in (Blocks(scales, (2, 32), "Q8_0"), torch.ones(3, dtype=torch.int32)):
        with pytest.raises(ModelFileError, match="'w'"):
            check_finite("w", weight, "x")


def _read_gguf(folder: Path) -> None:
    (folder / "m.gguf").write_bytes(b"GGUF" + bytes(20))
    load_config(folder / "m.gguf")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        SafetensorError("Error while mapping: Cannot allocate memory (os error 12)"),
    ],
    ids=["python", "kernel", "torch", "safetensors"],
)
@pytest.mark.parametrize("of", ["safetensors", "gguf", "checkpoint"])
def test_too_little_memory_is_no_damaged_file(
    of: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `inspect` of a file that is larger than the memory of its process may be; nobody is told to delete the
    file."""
    if of == "gguf" and isinstance(error, (RuntimeError, SafetensorError)):
        pytest.skip("the header of a GGUF file is read without these libraries")
    monkeypatch.setattr(checkpoint, "safe_open", raising(error))
    monkeypatch.setattr(mmap, "mmap", raising(error))
    write_weights(tmp_path)
    (tmp_path / "step-1").mkdir()
    for name in ("config.json", "trainer.json"):
        (tmp_path / "step-1" / name).write_text("{}")
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "step-1")
    reads = {
        "safetensors": lambda: list(load_tensors(tmp_path)),
        "gguf": lambda: _read_gguf(tmp_path),
        "checkpoint": lambda: latest_checkpoint(tmp_path),
    }
    with pytest.raises(MemoryBudgetError, match="there is too little memory.*: end other programs") as caught:
        reads[of]()
    assert "delete" not in str(caught.value) and "fetch" not in str(caught.value)


READERS: dict[str, Callable[[Path], object]] = {
    "a remote target's matrices": lambda folder: list(ends._read(folder, (ends.EMBEDDING,))),
    "a target's names": lambda folder: stitch._names(folder / "model.safetensors", {folder / "model.safetensors": []}),
    "a packed drafter": lambda folder: packed.read_packed(folder / "model.safetensors"),
    "a draft vocabulary": vocabulary.read_draft_ids,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_other_readers_of_weights_bound_the_header_too(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model.safetensors", vocabulary.DRAFT_IDS):
        with (tmp_path / name).open("wb") as opened:
            opened.write(struct.pack("<Q", 57 * 2**20))
            opened.truncate(58 * 2**20)
    for module in (ends, stitch):
        monkeypatch.setattr(module, "safe_open", raising(AssertionError("the header was parsed")))
    monkeypatch.setattr(checkpoint, "load_file", raising(AssertionError("the header was parsed")))
    with pytest.raises(ModelFileError, match="has a header of 57 MiB"):
        read(tmp_path)
