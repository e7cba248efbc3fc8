"""A trained MTP layer in a folder of its own: what every command makes of it, and its way back into the target's
file."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from family_models import target_of
from loopback import free_port
from mtp_models import Folder, mtp_folders, shaken
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import EngineConfig
from paceline.draft.mtp.checkpoint import MARK, read_mtp
from paceline.draft.mtp.drafter import MtpDrafter
from paceline.draft.mtp.stitch import stitch
from paceline.draft.registry import make_drafter
from paceline.engine.llm import LLM
from paceline.errors import (
    CacheError,
    ConfigError,
    DeployError,
    DrafterMismatchError,
    ModelFileError,
    UnsupportedModelError,
)
from paceline.loop.adapt.config import DeployConfig, OtherEngineConfig
from paceline.loop.adapt.servers.vllm_sglang.drafter_folder import Start, command_of, given_to
from paceline.loop.adapt.servers.vllm_sglang.engine_folders import EngineFolders
from paceline.loop.adapt.servers.vllm_sglang.start import serve_with
from paceline.model.checkpoint import load_tensors
from paceline.plan.planner import FixedPlanner
from paceline.simulate.flags import METHODS
from paceline.train.methods.mtp import new_layer
from paceline.types import SamplingParams

pytestmark = pytest.mark.slow
FAKE = Path(__file__).parents[1] / "support" / "fake_engine.py"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return mtp_folders(tmp_path_factory)


def drafter_for(model: Path, folder: Path, seed: int = 9) -> Path:
    """A folder of the model's own layer, its weights changed as by training."""
    MtpDrafter(shaken(read_mtp(model), seed), num_drafted=4).save(folder)
    return folder


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.stdout


@pytest.mark.parametrize("name", ["qwen3+", "qwen3.5-moe+"])
def test_a_folder_holds_the_layer_by_the_target_s_own_names(name: str, folder_of: Folder, tmp_path: Path) -> None:
    """In both layouts; put back into the target's file, it is the target's layer."""
    model = folder_of(name)
    layer, stored = read_mtp(model), load_file(model / "model.safetensors")
    MtpDrafter(layer, num_drafted=4).save(tmp_path / "drafter")
    written = load_file(tmp_path / "drafter" / "model.safetensors")
    assert written.keys() == {each for each in stored if each.startswith(("mtp.", "model.layers.4."))}
    assert all(torch.equal(tensor, stored[each]) for each, tensor in written.items())
    again = read_mtp(tmp_path / "drafter")
    assert again.steps == 4 and again.config == layer.config and again.tells_normed == layer.tells_normed
    assert all(torch.equal(tensor, layer.tensors[each]) for each, tensor in again.tensors.items())
    back = shutil.copytree(model, tmp_path / "back")
    save_file(stored | {each: 2 * tensor for each, tensor in written.items()}, back / "model.safetensors")
    assert torch.equal(read_mtp(back).tensors["fc.weight"], 2 * layer.tensors["fc.weight"])
    raw = json.loads((tmp_path / "drafter" / "config.json").read_text())
    for wrong in ({"layout": "other"}, {"steps": True}, {"steps": 10**9}):  # 10^9 drafts: gigabytes of tables
        (tmp_path / "drafter" / "config.json").write_text(json.dumps(raw | {MARK: raw[MARK] | wrong}))
        with pytest.raises(ModelFileError, match="paceline_mtp in config.json is"):
            read_mtp(tmp_path / "drafter")


def test_answers_with_it_are_plain_decoding_s(folder_of: Folder, tmp_path: Path) -> None:
    model = folder_of("qwen3.5+")
    folder = drafter_for(model, tmp_path / "drafter")
    prompts, params = (
        ["one and two", "what is said again is said again"],
        SamplingParams(max_tokens=16, ignore_eos=True),
    )
    llm = LLM.of(EngineConfig(str(model), drafter=str(folder), dtype="float32", device="cpu", max_batch=2, max_len=96))
    assert isinstance(llm.drafter, MtpDrafter) and llm.drafter.num_drafted == 4
    llm.engine.planner = FixedPlanner()
    drafted = llm.generate(prompts, params)
    assert all(answer.stats.num_drafted > 20 for answer in drafted)
    llm.use_drafter("none")
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in llm.generate(prompts, params)]


def test_engines_serve_a_copy_of_the_target_that_has_it(folder_of: Folder, tmp_path: Path) -> None:
    """Clients see the target's name; the drafts are as many as the layer was trained for."""
    model, copy = folder_of("qwen3.5+"), tmp_path / "given" / "target"
    folder = drafter_for(model, tmp_path / "drafter")
    given = given_to(start := Start("vllm", str(model), str(folder)), tmp_path / "given")
    assert (given.folder, given.method, given.num_drafted, given.target) == (folder, "mtp", 4, copy)
    assert all(torch.equal(read_mtp(copy).tensors[name], each) for name, each in read_mtp(folder).tensors.items())
    vllm, sglang = (command_of(each, given) for each in (start, Start("sglang", str(model), str(folder))))
    assert vllm[2:5] == [str(copy), "--served-model-name", str(model)]
    assert json.loads(vllm[-1]) == {"method": "mtp", "num_speculative_tokens": 4}
    assert sglang[3:7] == ["--model-path", str(copy), "--served-model-name", str(model)]
    words = ["EAGLE", "draft-model-path", str(copy), "num-steps", "4", "eagle-topk", "1", "num-draft-tokens", "5"]
    assert [word.removeprefix("--speculative-") for word in sglang[-9:]] == words and METHODS["mtp"][
        "sglang"
    ] == "EAGLE"


def test_what_no_engine_reads_is_refused_with_the_way(folder_of: Folder, tmp_path: Path) -> None:
    MtpDrafter(new_layer(folder_of("qwen2")), num_drafted=3).save(tmp_path / "other")
    message = (
        "vllm reads MTP layers of Qwen3-Next and Qwen3.5 targets only: serve this one with paceline serve, or train"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        given_to(Start("vllm", str(folder_of("qwen2")), str(tmp_path / "other")), tmp_path / "scratch")
    model = folder_of("qwen3.5+")
    folder = drafter_for(model, tmp_path / "drafter")
    with pytest.raises(ConfigError, match="num_drafted must be at least 1, not 0"):
        given_to(Start("vllm", str(model), str(folder), num_drafted=0), tmp_path / "scratch")
    folders = EngineFolders(DeployConfig("vllm"), EngineConfig(model=str(model)), tmp_path / "state")
    with pytest.raises(DeployError, match="lies in the files of its target, which are not replaced"):
        folders.given(folder)
    assert not (tmp_path / "scratch").exists()


def test_an_engine_that_reads_it_there_passes_the_check(folder_of: Folder, tmp_path: Path) -> None:
    """Our server in vLLM's place drafts with the copy's layer; its acceptance length is that of the drafter's
    folder."""
    model, lines = folder_of("qwen3.5+"), list[str]()

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("ready: http"):
            signal.raise_signal(signal.SIGTERM)

    folder, command = drafter_for(model, tmp_path / "drafter"), f"{sys.executable} {FAKE} vllm"
    start = Start("vllm", str(model), str(folder), "127.0.0.1", free_port(), 3, "float32", command=command)
    assert serve_with(start, OtherEngineConfig("vllm", strict=True), say) == 0
    assert lines[0].endswith("mtp, 3 drafts a round") and lines[-1].startswith("ready: http")
    assert any("as it should be" in line for line in lines)


def test_inspect_says_what_it_is_and_what_it_brings(folder_of: Folder, tmp_path: Path) -> None:
    model = folder_of("qwen3.5+")
    folder = drafter_for(model, tmp_path / "drafter")
    shown = run("inspect", str(folder), "--model", str(model), "--num-prompts", "2", "--max-tokens", "6", "--json")
    report = json.loads(shown.splitlines()[-1])
    facts = {each["what"]: each["value"] for each in report["facts"]}
    assert facts["kind"] == "MTP layer" and facts["drafts"] == 4 and facts["taps"] == 3
    assert facts["hidden state"] == "after the final norm" and facts["made for"] == "qwen3_5_text, 4 layers, 258 tokens"
    assert report["tokens_per_round"] >= 1.0 and "variations" not in report


@pytest.mark.parametrize("name", ["qwen3+", "qwen3.5-moe+"])
def test_a_copy_of_the_target_has_it_in_its_file(name: str, folder_of: Folder, tmp_path: Path) -> None:
    model = folder_of(name)
    folder, out = drafter_for(model, tmp_path / "drafter"), tmp_path / "whole"
    report = json.loads(
        run("export", str(folder), "--format", "target", "--model", str(model), "--out", str(out), "--json")
    )
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    changed = {each for each in before if not torch.equal(before[each], after[each])}
    assert before.keys() == after.keys() and changed == set(report["written"]) and len(changed) > 10
    trained, again = read_mtp(folder), read_mtp(out)
    assert all(torch.equal(tensor, again.tensors[each]) for each, tensor in trained.tensors.items())
    assert {file.name for file in out.iterdir()} == {file.name for file in model.iterdir()}
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1, "an engine may be of another user"
    assert make_drafter("mtp", target_of(out), target_name=str(out)).num_drafted == 3


def test_experts_that_a_file_holds_together_are_put_together(folder_of: Folder, tmp_path: Path) -> None:
    """And copies of embedding and head stay as they are."""
    model = shutil.copytree(folder_of("qwen3.5-moe+"), tmp_path / "model")
    stored = load_file(model / "model.safetensors")
    owner, number = "mtp.layers.0.mlp.experts", read_mtp(model).config.num_experts
    parts = ("gate", "up", "down")
    each = {part: [stored.pop(f"{owner}.{expert}.{part}_proj.weight") for expert in range(number)] for part in parts}
    pairs = zip(each["gate"], each["up"], strict=True)
    together = {f"{owner}.gate_up_proj": torch.stack([torch.cat(pair) for pair in pairs])}
    together |= {f"{owner}.down_proj": torch.stack(each["down"])}
    save_file(stored | {name: tensor.bfloat16() for name, tensor in together.items()}, model / "model.safetensors")
    folder = drafter_for(model, tmp_path / "drafter")
    assert f"{owner}.gate_up_proj" in stitch(read_mtp(folder), model, tmp_path / "out")
    trained, again = read_mtp(folder), read_mtp(tmp_path / "out")
    for name, tensor in trained.tensors.items():
        expected = tensor.bfloat16() if "experts" in name else tensor
        torch.testing.assert_close(again.tensors[name], expected, rtol=0, atol=0)


def test_a_layer_that_the_target_did_not_have_is_added(folder_of: Folder, tmp_path: Path) -> None:
    """In one file, and beside shards."""
    plain = folder_of("qwen3")
    layer = shaken(new_layer(plain))
    stitch(layer, plain, tmp_path / "one")
    sharded = shutil.copytree(plain, tmp_path / "sharded")
    tensors = load_file(plain / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    save_file(tensors, sharded / "model-00001-of-00001.safetensors")
    index = {"metadata": {"total_size": 7}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    stitch(layer, sharded, tmp_path / "more")
    for out in (tmp_path / "one", tmp_path / "more"):
        again = read_mtp(out)
        assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in layer.tensors.items())
        assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
        assert dict(load_tensors(out)).keys() > tensors.keys()
        assert len({file.stat().st_mode for file in out.iterdir()}) == 1
        target_of(out)
    stitch(layer, sharded, tmp_path / "linked", links=True)
    links = [file.name for file in (tmp_path / "linked").iterdir() if file.is_symlink()]
    assert links == ["model-00001-of-00001.safetensors"] and target_of(tmp_path / "linked")
    assert json.loads((sharded / "model.safetensors.index.json").read_text()) == index
    new_index = json.loads((tmp_path / "more" / "model.safetensors.index.json").read_text())
    assert new_index["metadata"]["total_size"] == 7 + sum(tensor.nbytes for tensor in layer.tensors.values())


def test_files_that_appear_during_the_export_stay(
    folder_of: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were deleted, and a second export to the same place deleted the first one's temporary folder."""
    model, out = folder_of("qwen3+"), tmp_path / "out"
    layer, copy = read_mtp(model), shutil.copyfile

    def copied(source: Path, target: Path) -> None:
        monkeypatch.setattr(shutil, "copyfile", copy)
        stitch(layer, model, out)  # another process
        (out / "mine").touch()
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", copied)
    message = r"the model cannot be written to .*out \(.*not empty.*\): free space or choose another folder"
    with pytest.raises(CacheError, match=message):
        stitch(layer, model, out)
    assert {file.name for file in out.iterdir()} == {file.name for file in model.iterdir()} | {"mine"}
    assert not list(tmp_path.glob(".out*"))


def test_what_cannot_be_put_back_is_said_and_leaves_nothing(folder_of: Folder, tmp_path: Path) -> None:
    model = folder_of("qwen3+")
    folder, layer = drafter_for(model, tmp_path / "drafter"), read_mtp(model)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CacheError, match="is there already: choose another folder"):
        stitch(layer, model, tmp_path / "full")
    with pytest.raises(DrafterMismatchError, match="vocabulary: the mtp layer is of a target with 258"):
        stitch(layer, folder_of("few"), tmp_path / "out")
    packed = shutil.copytree(model, tmp_path / "packed")
    stored = load_file(packed / "model.safetensors")
    name = "model.layers.4.eh_proj.weight"
    save_file(stored | {name: stored[name].to(torch.float8_e4m3fn)}, packed / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="eh_proj.weight' of the target's mtp layer is torch.float8"):
        stitch(layer, packed, tmp_path / "out")
    save_file(stored | {"model.layers.4.more.weight": torch.ones(2)}, packed / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="has no counterpart in the trained one"):
        stitch(layer, packed, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    for words in (["--format", "speculators", "--model", str(model)], ["--format", "target"]):
        with pytest.raises(ConfigError, match="format target, the only one for a trained MTP layer"):
            run("export", str(folder), "--out", str(tmp_path / "out"), *words)
