"""`paceline export` and `paceline inspect`, as they are called."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_drafter import write_drafter
from typer.testing import CliRunner

from paceline.cli import app
from paceline.commands.checkpoints import _target
from paceline.draft.dflash.checkpoint import read_stored
from paceline.draft.eagle3.checkpoint import Eagle3Config, read_eagle3
from paceline.draft.eagle3.checkpoint import new_config as new_eagle3
from paceline.draft.eagle3.drafter import Eagle3Drafter, Eagle3Network
from paceline.errors import ConfigError, ModelFileError, PacelineError
from paceline.model.checkpoint import load_tensors

pytest_plugins = ("small_drafter",)


def run(*words: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.stdout, result.stderr


def test_an_export_with_the_targets_name_and_rows(target: Path, drafter: Path, tmp_path: Path) -> None:
    out = tmp_path / "for-vllm"
    shown, messages = run("export", str(drafter), "--model", str(target), "--out", str(out), "--json")
    report = json.loads(shown.splitlines()[-1])
    assert (report["from"], report["format"], report["left_out"]) == ("z-lab", "speculators", [])
    assert f"is in {out}, in speculators format" in messages
    raw = json.loads((out / "config.json").read_text())
    verifier = raw["speculators_config"]["verifier"]
    assert verifier == {"architectures": ["LlamaForCausalLM"], "name_or_path": str(target)}
    assert raw["draft_vocab_size"] == 129
    head = dict(load_tensors(target))["lm_head.weight"]
    ids, own = read_stored(out).vocabulary
    assert ids is not None and own is not None and torch.equal(own.float(), head.float()[ids])


def test_either_format_has_the_targets_rows(target: Path, drafter: Path, tmp_path: Path) -> None:
    out = tmp_path / "z-lab"
    shown, _ = run("export", str(drafter), "--format", "z-lab", "--model", str(target), "--out", str(out), "--json")
    assert json.loads(shown.splitlines()[-1])["left_out"] == []
    ids, own = read_stored(out).vocabulary
    head = dict(load_tensors(target))["lm_head.weight"]
    assert ids is not None and own is not None and len(ids) == 129 and torch.equal(own.float(), head.float()[ids])


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("--vary",), "--vary"),
        (("--num-prompts", "2"), "--num-prompts"),
        (("--max-tokens", "9"), "--max-tokens"),
        (("--max-len", "64"), "--max-len"),
        (("--threads", "1"), "--threads"),
    ],
)
def test_options_of_a_measurement_are_refused_without_a_target(
    words: tuple[str, ...], option: str, drafter: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{option} means nothing without --model, which measures: give it"):
        run("inspect", str(drafter), *words)


def test_what_is_left_out_is_said(drafter: Path, tmp_path: Path) -> None:
    _, messages = run("export", str(drafter), "--format", "z-lab", "--out", str(tmp_path / "plain"))
    assert "left out: the draft vocabulary of 129 tokens" in messages
    with pytest.raises(ConfigError, match="target's head for them: name it"):
        run("export", str(drafter), "--out", str(tmp_path / "none"))
    with pytest.raises(ModelFileError, match="config.json is missing"):
        run("export", str(tmp_path), "--out", str(tmp_path / "none"))


def test_what_it_is(drafter: Path) -> None:
    shown, _ = run("inspect", str(drafter))
    for words in (
        "DFlash v1",
        "hidden size 32, 2 layers, 258 tokens",
        "drafts 3 tokens per round",
        "129 tokens",
        "hidden_states[1]",
    ):
        assert words in shown, words


@pytest.mark.slow
def test_a_drafter_that_never_learned_is_no_mismatch(target: Path, drafter: Path) -> None:
    shown, _ = run("inspect", str(drafter), "--model", str(target), "--num-prompts", "2", "--max-tokens", "9", "--json")
    report = json.loads(shown.splitlines()[-1])
    assert report["tokens_per_round"] < 2.0 and report["num_prompts"] == 2
    assert {"kind", "target", "fits", "tokens_per_round", "mismatch"} <= report.keys(), "the keys of the design's table"
    assert report["kind"] == "dflash" and report["target"] == str(target) and report["fits"] is True
    kinds = {each["kind"] for each in report["variations"]}
    assert {
        "as it is",
        "layer ids off by one",
        "mask token",
        "rotary length",
        "rotary style",
        "head",
        "anchor slot",
    } <= kinds
    shown, _ = run(
        "inspect",
        str(drafter),
        "--model",
        str(target),
        "--num-prompts",
        "1",
        "--max-tokens",
        "5",
        "--no-vary",
        "--json",
    )
    assert "variations" not in json.loads(shown.splitlines()[-1])


def test_another_targets_drafter_does_not_fit(target: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path / "other", hidden=64)
    shown, _ = run("inspect", str(tmp_path / "other"), "--model", str(target), "--json")
    report = json.loads(shown.splitlines()[-1])
    assert report["fits"] is False and "the target has" in report["mismatch"] and report["target"] == str(target)


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters") / "eagle3"
    raw = new_eagle3(32, 258, 2, head_dim=8, draft_vocab_size=100, tap_layers=[0, 1], pad_token_id=3)
    Eagle3Drafter(Eagle3Network.random(Eagle3Config.from_json(raw)), ids=torch.arange(7, 107)).save(folder)
    return folder


def test_an_eagle3_drafter_in_either_style(eagle3: Path, target: Path, tmp_path: Path) -> None:
    """There and back: every tensor, and what the config means."""
    first, second = tmp_path / "for-vllm", tmp_path / "for-sglang"
    _, messages = run("export", str(eagle3), "--model", str(target), "--out", str(first))
    assert f"(specforge) is in {first}, in speculators format" in messages
    raw = json.loads((first / "config.json").read_text())
    assert raw["speculators_config"]["verifier"] == {"architectures": ["LlamaForCausalLM"], "name_or_path": str(target)}
    assert (
        raw["eagle_aux_hidden_state_layer_ids"] == [1, 2] and raw["fc_norm"] is True and raw["draft_vocab_size"] == 100
    )
    assert raw["transformer_layer_config"]["hidden_size"] == 32 and "hidden_size" not in raw
    assert raw["transformer_layer_config"]["architectures"] == ["LlamaForCausalLM"]
    run("export", str(first), "--format", "specforge", "--out", str(second))
    one, *others = [read_eagle3(folder) for folder in (eagle3, first, second)]
    for other in others:
        assert replace(other.config, raw={}) == replace(one.config, raw={}) and torch.equal(other.ids, one.ids)
        assert other.tensors.keys() == one.tensors.keys() and not other.others
        assert all(torch.equal(tensor, one.tensors[name]) for name, tensor in other.tensors.items())
    assert json.loads((second / "config.json").read_text())["pad_token_id"] == 3
    for words, message in (
        (("--format", "z-lab", "--out", str(tmp_path / "no")), "has no format 'z-lab': give --format speculators"),
        (("--out", str(first)), "is there already"),
    ):
        with pytest.raises(PacelineError, match=message):
            run("export", str(eagle3), *words)


def test_an_eagle3_drafter_of_other_shapes_is_not_exported(eagle3: Path, tmp_path: Path) -> None:
    """It was written as it is, and failed in vLLM."""
    shutil.copytree(eagle3, broken := tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    save_file({**tensors, "fc.weight": tensors["fc.weight"][:, 1:].contiguous()}, broken / "model.safetensors")
    for form in ("specforge", "speculators"):
        with pytest.raises(ModelFileError, match=r"'fc.weight' has shape \(32, 63\), the config asks for \(32, 64\)"):
            run("export", str(broken), "--format", form, "--out", str(tmp_path / form))
        assert not (tmp_path / form).exists()


@pytest.mark.slow
def test_what_an_eagle3_drafter_is(eagle3: Path, target: Path) -> None:
    options = ("--model", str(target), "--num-prompts", "2", "--max-tokens", "6", "--vary", "--json")
    shown, _ = run("inspect", str(eagle3), *options)
    for words in ("EAGLE-3", "taps              0, 1", "norm_output true", "100 tokens", "tokens a round"):
        assert words in shown
    kinds = {each["kind"] for each in json.loads(shown.splitlines()[-1])["variations"]}
    assert kinds >= {"as it is", "norm flags", "rotary length", "input order", "layer order"}


def test_a_built_in_target_is_named_by_its_hub_id(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads the target's name from the exported config."""
    monkeypatch.setattr("paceline.model.remote_embedding.light_folder", lambda name: target)
    for name, hub_id in (("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"), ("org/other", "org/other")):
        assert _target(name, needs_head=False)[1]["name_or_path"] == hub_id
