"""Names of drafters: every one is made, an unknown one is answered with those that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doubles import FakeTarget
from safetensors.torch import save_file

from paceline.draft import shipped
from paceline.draft.base import NoDrafter
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.registry import folder_of, make_drafter
from paceline.draft.small_model import SmallModelDrafter
from paceline.errors import ConfigError, DrafterMismatchError, ModelNotFoundError, UnsupportedModelError
from paceline.model.checkpoint import random_tensors
from paceline.model.config.decoder import DecoderConfig


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget(vocab_size=32, hidden_size=64)


def test_names(target: FakeTarget) -> None:
    for name, kind in (
        ("none", NoDrafter),
        (None, NoDrafter),
        ("ngram", NgramDrafter),
        ("random-dflash", DFlashDrafter),
    ):
        assert type(make_drafter(name, target)) is kind
        make_drafter(name, target, num_drafted=3).bind(target)
    assert make_drafter("ngram", target, num_drafted=3, min_match=2).num_drafted == 3
    assert make_drafter("random-dflash", target, block_size=4, num_layers=2).num_drafted == 3


def test_default_is_the_shipped_one_else_ngram(
    target: FakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "CHECKOUT", tmp_path)
    assert type(make_drafter("default", target, target_name="tiny")) is NgramDrafter
    monkeypatch.setitem(shipped.SHIPPED, "tiny", {})
    shipped.find_or_report.cache_clear()
    DFlashDrafter.random(target).save(tmp_path / "tiny")
    drafter = make_drafter("default", target, target_name="tiny", num_drafted=2)
    assert type(drafter) is DFlashDrafter and drafter.num_drafted == 2
    for name in ("", "other", f"{tmp_path}/tiny", "./tiny", ".."):
        assert type(make_drafter("default", target, target_name=name)) is NgramDrafter


def test_a_ready_drafter_is_taken_as_it_is(target: FakeTarget) -> None:
    drafter = NgramDrafter(num_drafted=2)
    assert make_drafter(drafter, target) is drafter
    with pytest.raises(ConfigError, match="NgramDrafter takes no options"):
        make_drafter(drafter, target, num_drafted=3)


def test_folders_say_what_they_are(target: FakeTarget, tmp_path: Path) -> None:
    DFlashDrafter.random(target, block_size=5).save(tmp_path / "dflash")
    assert make_drafter(str(tmp_path / "dflash"), target).num_drafted == 4

    config = DecoderConfig("llama", 32, 16, 24, 1, 2, 1, 8, 4096)
    folder = tmp_path / "lm"
    folder.mkdir()
    save_file(dict(random_tensors(config)), folder / "model.safetensors")
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    (folder / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 4096}))
    small = make_drafter(str(folder), target, num_drafted=2)
    assert type(small) is SmallModelDrafter and small.num_drafted == 2
    small.bind(target)
    with pytest.raises(DrafterMismatchError, match="vocabulary"):
        small.bind(FakeTarget(vocab_size=33))


def test_other_kinds_of_speculators_are_named(target: FakeTarget, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "dflash7"}))
    with pytest.raises(UnsupportedModelError, match="'dflash7' are not implemented in speculators format"):
        make_drafter(str(tmp_path), target)


def test_unknown_names_list_the_known(target: FakeTarget) -> None:
    with pytest.raises(ModelNotFoundError, match="default, none, ngram, mtp, random-dflash"):
        make_drafter("n-gram", target)


def test_the_checkpoint_of_default_is_that_of_the_target() -> None:
    own = shipped.find("smollm2-135m")
    assert folder_of("default", "smollm2-135m") == folder_of("smollm2-135m") == own
    for target_name in (None, "org/other", str(own)):
        with pytest.raises(ConfigError, match="one of .*smollm2-135m"):
            folder_of("default", target_name)
