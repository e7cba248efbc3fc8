"""Drafters' files in which one key or tensor is of another kind: refused in one line that names it, when read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_drafters import BOTH_WAYS, IDS, raw_2, written
from tiny_dflash import HIDDEN, raw_config, tiny_target
from tiny_eagle3 import IDS as EAGLE_IDS
from tiny_eagle3 import loud_network, raw_eagle3
from torch import Tensor

from paceline.draft.dflash.checkpoint import DENSE, read_stored, write_checkpoint
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.eagle3.checkpoint import LAYER_IDS, Eagle3Checkpoint, Eagle3Config, read_eagle3, write_eagle3
from paceline.draft.eagle3.drafter import Eagle3Drafter
from paceline.draft.formats.export import export, rows_of
from paceline.draft.formats.inspection import described
from paceline.draft.formats.packed import PACKED
from paceline.draft.pool import bind
from paceline.draft.registry import make_drafter, read_trained
from paceline.draft.vocabulary import DRAFT_IDS
from paceline.errors import DrafterMismatchError, ModelFileError, UnsupportedModelError

HEAD_VD = torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(0))
NAN, NUMBER, ONE = torch.full((4,), float("nan")), torch.tensor(1), torch.tensor(1.0)
VERIFIER = {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A DFlash drafter with a draft vocabulary and a head, in the format of speculators."""
    stored = read_stored(written(tmp_path / "own", raw_config(**BOTH_WAYS), IDS))
    export(stored, "speculators", tmp_path / "exported", head_rows=rows_of(HEAD_VD), verifier=VERIFIER)
    return tmp_path / "exported"


def change_tensor(file: Path, name: str, value: Tensor) -> None:
    save_file(load_file(file) | {name: value}, file, {"format": "pt"})


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("d2t", NUMBER, "d2t must be a list of whole numbers"),
        ("d2t", torch.zeros(4), "d2t must be a list of whole numbers"),
        ("t2d", NAN, "t2d must be a list of whole numbers"),
        ("lm_head.weight", ONE, r"the head of shape \[\] is no matrix"),
        ("lm_head.weight", torch.ones(4, HIDDEN) * NAN[:, None], "'lm_head.weight' holds NaN or an infinity"),
        ("lm_head.weight", torch.ones(3, HIDDEN), "the head has 3 rows for 4 tokens"),
    ],
)
def test_tensors_of_a_draft_vocabulary(name: str, value: Tensor, message: str, exported: Path) -> None:
    """A head of NaN was read, and drafted nothing that was ever accepted."""
    change_tensor(exported / DENSE, name, value)
    with pytest.raises(ModelFileError, match=message):
        read_stored(exported)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("t2d", torch.isin(torch.arange(12), IDS), r"tensor t2d has shape \(12,\), the config asks for \(11,\)"),
        (
            "lm_head.weight",
            torch.ones(4, HIDDEN + 1),
            rf"tensor lm_head.weight .* has shape \(4, {HIDDEN + 1}\), the config asks for \(4, {HIDDEN}\)",
        ),
    ],
)
def test_shapes_that_the_config_fixes(name: str, value: Tensor, message: str, exported: Path) -> None:
    """`inspect` described such a drafter as a sound one: they were compared with the target's sizes only."""
    change_tensor(exported / DENSE, name, value)
    with pytest.raises(ModelFileError, match=message):
        read_stored(exported)


def test_a_mask_for_the_tokenizers_tokens_alone_is_read(exported: Path) -> None:
    """Embeddings are often padded beyond the tokenizer's length, which such a mask has."""
    change_tensor(exported / DENSE, "t2d", torch.isin(torch.arange(10), IDS))
    ids = read_stored(exported).vocabulary.ids
    assert ids is not None and ids.tolist() == IDS.tolist()


def test_a_separate_head_of_another_shape(tmp_path: Path) -> None:
    config = DFlashConfig.from_json(raw_config())
    for ids, shape, expected in ((IDS, (4, HIDDEN + 1), (4, HIDDEN)), (torch.arange(10), (10, HIDDEN - 1), None)):
        folder = written(tmp_path / f"drafter-{len(ids)}", config.raw, ids)
        save_file({"ids": ids, "head": torch.ones(shape)}, folder / DRAFT_IDS)
        expected = expected or (len(ids), HIDDEN)
        with pytest.raises(ModelFileError, match=re.escape(f"has shape {shape}, the config asks for {expected}")):
            read_stored(folder)


def test_a_mask_alone_that_marks_no_token(exported: Path) -> None:
    stored = load_file(exported / DENSE)
    del stored["d2t"]
    save_file(stored | {"t2d": torch.zeros(11, dtype=torch.bool)}, exported / DENSE)
    with pytest.raises(ModelFileError, match="t2d: token ids must ascend"):
        read_stored(exported)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1, 4, 5, 11]), "the draft vocabulary names token 11 of 11"),
        (IDS + 2**40, "the draft vocabulary names token 1099511627785 of 11"),
        (NAN, "token ids must ascend"),
        (IDS.to(torch.complex64), "token ids must ascend"),
    ],
)
def test_draft_ids(ids: Tensor, message: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "drafter", raw_config(), IDS)
    save_file({"ids": ids}, folder / DRAFT_IDS)
    with pytest.raises(ModelFileError, match=message):
        read_stored(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("candidate_selector.predecessor_codebook", ONE, r"a codebook has shape \[\] for 4 tokens"),
        ("candidate_selector.successor_codebook", torch.ones(4), r"a codebook has shape \[4\] for 4 tokens"),
        ("candidate_selector.codebook_ids", NAN, "token ids must ascend"),
    ],
)
def test_packed_codebooks(name: str, value: Tensor, message: str, tmp_path: Path) -> None:
    stored = read_stored(written(tmp_path / "own", raw_2()))
    write_checkpoint(tmp_path / "packed", stored.config.raw, stored.tensors, IDS, in_8_bits=True)
    change_tensor(tmp_path / "packed" / PACKED, name, value)
    with pytest.raises(ModelFileError, match=message):
        read_stored(tmp_path / "packed")


@pytest.mark.parametrize("value", ["x", 3, [1], True])
@pytest.mark.parametrize("name", ["speculators_config", "verifier", "z_lab", "dflash_config"])
def test_objects_of_a_speculators_config(name: str, value: Any, exported: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        owner = {"verifier": raw["speculators_config"], "dflash_config": raw["z_lab"]}.get(name, raw)
        owner[name] = value

    change_config(exported, change)
    with pytest.raises(ModelFileError, match=f"{name} must be an object"):
        read_stored(exported)


def test_a_verifier_of_null_is_none(exported: Path, tmp_path: Path) -> None:
    change_config(exported, lambda raw: raw["speculators_config"].update(verifier=None))
    stored = read_stored(exported)
    assert described(stored, exported)
    export(stored, "speculators", tmp_path / "again", verifier=VERIFIER)
    raw = json.loads((tmp_path / "again" / "config.json").read_text())
    assert raw["speculators_config"]["verifier"] == VERIFIER


def test_layer_types_that_are_no_list(exported: Path) -> None:
    change_config(exported, lambda raw: raw["transformer_layer_config"].update(layer_types=3))
    with pytest.raises(ModelFileError, match="layer_types must name"):
        read_stored(exported)


@pytest.mark.parametrize("form", ["speculators", "z-lab", "gguf"])
def test_a_drafter_without_a_tensor_is_not_exported(form: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "own", raw_config())
    tensors = load_file(folder / DENSE)
    del tensors["fc.weight"]
    save_file(tensors, folder / DENSE)
    with pytest.raises(ModelFileError, match=r"'fc.weight' has shape None"):
        export(read_stored(folder), form, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("form", [None, VERIFIER], ids=["specforge", "speculators"])
def test_eagle3(form: dict[str, Any] | None, tmp_path: Path) -> None:
    raw = raw_eagle3(draft_vocab_size=len(EAGLE_IDS))
    tensors = {name: tensor.detach() for name, tensor in loud_network(raw).state_dict().items()}
    write_eagle3(tmp_path, Eagle3Checkpoint(Eagle3Config.from_json(raw), tensors, EAGLE_IDS), form)
    change_config(tmp_path, lambda raw: raw.update(speculators_config={"verifier": ["x"]}))
    with pytest.raises(ModelFileError, match="verifier must be an object"):
        read_eagle3(tmp_path)
    change_config(tmp_path, lambda raw: raw.pop("speculators_config"))
    assert read_eagle3(tmp_path).ids.tolist() == EAGLE_IDS.tolist()
    change_tensor(tmp_path / DENSE, "t2d", NUMBER)
    with pytest.raises(ModelFileError, match="d2t and t2d name different tokens"):
        read_eagle3(tmp_path)


@pytest.mark.parametrize("value", [1, "false", []])
def test_flags_of_another_type(value: Any, exported: Path) -> None:
    """ "false" was true for DFlash's flags, and 1 was false for EAGLE-3's."""
    for name in ("sample_from_anchor", "sliding_window_non_causal"):
        change_config(exported, lambda raw, name=name: raw.update({name: value}))
        with pytest.raises(ModelFileError, match=f"{name} must be true or false"):
            read_stored(exported)
        change_config(exported, lambda raw, name=name: raw.update({name: False}))
    eagle3 = raw_eagle3(norm_output=value), raw_eagle3(eagle_config={"use_aux_hidden_state": value})
    for read, raw in ((DFlashConfig, raw_config(is_causal=value)), *((Eagle3Config, each) for each in eagle3)):
        with pytest.raises(ModelFileError, match="(is_causal|norm_output|use_aux_hidden_state) must be true or false"):
            read.from_json(raw)


TOO_LARGE = {
    "hidden_size": (
        10**9,
        "no network of the config's sizes can be made .*: config and weights are of different drafters",
    ),
    "num_hidden_layers": (4096, "tensors, for 4096 layers: config and weights are of different drafters"),
    "intermediate_size": (10**9, "has shape .*, the config asks for .*1000000000"),
    "block_size": (10**9, "'block_size' as a whole number from 2 to 1024"),
    "draft_vocab_size": (10**9, "lm_head.weight has 11 rows for a draft_vocab_size of 1000000000"),
}
SIZES_OF = {"dflash": [*TOO_LARGE][:4], "dflash2": [*TOO_LARGE][:4], "eagle3": {*TOO_LARGE} - {"block_size"}}


@pytest.mark.parametrize(
    ("method", "key"), [(method, key) for method, keys in SIZES_OF.items() for key in sorted(keys)]
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(method: str, key: str, tmp_path: Path) -> None:
    """A block of 10^9 was bound for minutes, and a hidden size of 10^9 ended in a RuntimeError of PyTorch."""
    if method == "eagle3":
        raw = raw_eagle3()
        tensors = {name: tensor.detach() for name, tensor in loud_network(raw).state_dict().items()}
        write_eagle3(tmp_path, Eagle3Checkpoint(Eagle3Config.from_json(raw), tensors, torch.arange(11)))
    else:
        written(tmp_path, raw_config() if method == "dflash" else raw_2())
    value, message = TOO_LARGE[key]
    change_config(tmp_path, lambda raw: raw.update({key: value}))
    with pytest.raises(ModelFileError, match=message) as refused:
        read_trained(tmp_path)
    assert str(tmp_path) in str(refused.value)
    if key == "num_hidden_layers" and method != "eagle3":
        with pytest.raises(ModelFileError, match=f"^{tmp_path}: .* {message}"):  # `export` reads it so
            read_stored(tmp_path)


@pytest.mark.parametrize("kind", [[], {}, 3])
def test_an_eagle3_model_type_that_is_no_name(kind: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="EAGLE-3 layers of model_type .* are not implemented"):
        Eagle3Config.from_json(raw_eagle3() | {"model_type": kind})


def written_eagle3(folder: Path, **keys: Any) -> Path:
    raw = raw_eagle3(**keys)
    tensors = {name: tensor.detach() for name, tensor in loud_network(raw).state_dict().items()}
    write_eagle3(folder, Eagle3Checkpoint(Eagle3Config.from_json(raw), tensors, torch.arange(11)))
    return folder


@pytest.mark.parametrize("method", ["dflash2", "eagle3"])
@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "factor": -4}, r"rope type 'yarn' needs a positive 'factor' \(got -4\): correct config"),
        ({"rope_type": "longrope", "short_factor": 1}, "rope type 'longrope' needs a list of numbers 'short_factor'"),
        ({"rope_type": "dynamic"}, "rope type 'dynamic' is not implemented"),
    ],
)
def test_a_rope_type_is_refused_with_the_files_name(
    method: str, rope: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, raw_2()) if method == "dflash2" else written_eagle3(tmp_path)
    change_config(folder, lambda raw: raw.update(rope_scaling=rope))
    with pytest.raises((ModelFileError, UnsupportedModelError), match=f"^{folder}: {message}"):
        read_trained(folder)


@pytest.mark.parametrize("method", ["dflash2", "eagle3"])
def test_a_drafter_of_another_target_is_refused_with_its_name(method: str, tmp_path: Path) -> None:
    folder = written(tmp_path, raw_2(target_hidden_size=16)) if method == "dflash2" else written_eagle3(tmp_path)
    if method == "eagle3":
        change_config(folder, lambda raw: raw.update({LAYER_IDS: [1, 2, 9], "eagle_config": {}}))
    target = tiny_target()
    drafter = make_drafter(str(folder), target)
    with pytest.raises(DrafterMismatchError, match=f"^{folder}: (hidden size|tapped layers): the drafter says"):
        bind(drafter, target)


def test_an_eagle3_embedding_is_not_initialised_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Initialising it without memory imported TorchDynamo, in ten seconds on two busy cores."""
    folder = written_eagle3(tmp_path, hidden_size=24, target_hidden_size=HIDDEN)

    def initialised(*_: Any, **options: Any) -> None:
        raise AssertionError("an embedding is initialised that is read")

    monkeypatch.setattr(torch.nn.init, "normal_", initialised)
    network = Eagle3Drafter.from_folder(folder).network
    assert network.embed_tokens.weight.requires_grad and network.embed_tokens.weight.shape == (11, 24)
