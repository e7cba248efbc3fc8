"""Options of `train` that would have no effect next to others: each is refused by name, never ignored."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import pytest
from tiny_runs import paceline

from paceline.config import EngineConfig
from paceline.draft.dflash.checkpoint import read_stored
from paceline.draft.dflash.config import DFlashConfig, new_config
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.draft.eagle3 import checkpoint as eagle3
from paceline.draft.eagle3.checkpoint import Eagle3Config
from paceline.draft.eagle3.drafter import Eagle3Drafter, Eagle3Network
from paceline.draft.formats.export import export
from paceline.draft.formats.family import drafter_of
from paceline.errors import ConfigError, PromptError
from paceline.model.target import Target
from paceline.train.config import (
    AnswerConfig,
    DrafterShape,
    LoopConfig,
    LossConfig,
    PromptsConfig,
    RemoteConfig,
    TrainConfig,
)
from paceline.train.learn.initial_weights import network_for
from paceline.train.methods.kinds import check_drafter
from paceline.train.plan.choices import for_chains, trained_kind
from paceline.train.plan.target_facts import read_target
from paceline.train.plan.training_plan import make_plan
from paceline.train.run_file import write_run_file
from paceline.train.tiny import write_tiny_target
from paceline.train.unused_settings import check_unused

PARTS = ("prompting", "answering", "remote", "shape", "loop", "loop.loss", "loop.optim")


@pytest.fixture
def drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a target, and a drafter of each method that fits it."""
    write_tiny_target(tmp_path / "target")
    raw = new_config(64, 260, 6, num_layers=1, head_dim=16)
    DFlashDrafter(DFlashNetwork.random(DFlashConfig.from_json(raw))).save(tmp_path / "dflash")
    chain = eagle3.new_config(64, 260, 6, draft_vocab_size=260, head_dim=16)
    Eagle3Drafter(Eagle3Network.random(Eagle3Config.from_json(chain))).save(tmp_path / "eagle3")
    sizes = cast(Target, read_target(EngineConfig(str(tmp_path / "target"))).shape)
    for kind in ("dflash2", "dspark"):
        shape = DrafterShape(kind=kind, selector_rank=6, codebooks="free")
        drafter_of(network_for(sizes, "none", shape, tmp_path / "dflash", 0)[1]).save(tmp_path / kind)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(config: TrainConfig) -> TrainConfig:
    """Returns the config after the checks of the command, as if every setting but defaults had been typed."""
    names = [f"{part}.{each.name}" for part in PARTS for each in fields(attrgetter(part)(config))]
    names += [each.name for each in fields(config)]
    check_unused(config, trained_kind(config), [name for name in names if config.is_given(name)])
    return for_chains(config)


@pytest.mark.parametrize(
    ("init", "words", "message"),
    [
        ("dflash", ("--first-layers", "copied"), "--first-layers means nothing for the drafter of --init dflash"),
        ("dflash", ("--first-layers", "random"), "--first-layers means nothing for the drafter of --init dflash"),
        ("dflash", ("--selector-rank", "8"), "--selector-rank means nothing for dflash drafters"),
        ("dflash", ("--codebooks", "free"), "--codebooks means nothing for dflash drafters"),
        ("dflash", ("--eagle-version", "3"), "--eagle-version means nothing for dflash drafters"),
        ("eagle3", ("--eagle-version", "3", "--drafter-kind", "eagle3"), "--eagle-version is 3, but 3.1 in the"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_settings_of_new_drafters_are_refused_next_to_init(
    init: str, words: tuple[str, ...], message: str, more: tuple[str, ...], drafters: Path
) -> None:
    """These four options were read past; the other sizes were refused already."""
    with pytest.raises(ConfigError, match=message):
        paceline("train", "--target", drafters / "target", "--out", "run", "--init", init, *words, *more)


def test_a_run_file_may_hold_settings_that_its_drafter_decides(drafters: Path) -> None:
    """`--init` next to the file of a new drafter, and a file that an earlier version wrote next to `--init`."""
    config = TrainConfig(Path("run"), EngineConfig("target"), init="dflash", given=("init", "target.model", "out"))
    write_run_file(config)
    paceline("train", "--config", "run/run.yaml", "--dry-run", "--device-name", "H100")
    Path("start.yaml").write_text("target: {model: target}\nprompting: {limit: 5}\nshape: {start: random}\n")
    words = ("--answers", "answers", "--init", "dflash", "--out", "run")
    with pytest.raises(PromptError, match="answers"):  # the settings are accepted: what is missing are answers
        paceline("train", "--config", "start.yaml", *words)


@pytest.mark.parametrize(
    ("init", "shape", "message"),
    [
        ("dflash2", {"selector_rank": 8}, "selector_rank is 8, but 6 in the drafter of --init dflash2"),
        ("dspark", {"selector_rank": 8}, "selector_rank is 8, but 6 in the drafter of --init dspark"),
        ("dflash2", {"codebooks": "factored"}, "codebooks is factored, but free in the drafter of --init dflash2"),
        ("dflash2", {"kind": "dflash"}, "kind is dflash, but dflash2 in the drafter of --init dflash2"),
        ("dspark", {"kind": "dflash2"}, "--drafter-kind dflash2: a dspark drafter cannot become one"),
        ("dflash2", {"kind": "dspark"}, "--drafter-kind dspark: a dflash2 drafter cannot become one"),
        ("dflash2", {"selector_rank": 6, "codebooks": "free"}, None),
        ("dspark", {"kind": "dspark", "selector_rank": 6}, None),
        ("dflash", {"kind": "dflash2", "selector_rank": 8, "codebooks": "factored"}, None),
    ],
)
def test_codebooks_and_method_of_init_are_kept(
    init: str, shape: dict[str, Any], message: str | None, drafters: Path
) -> None:
    given = ("init", *(f"shape.{name}" for name in shape))
    config = TrainConfig(target=EngineConfig("target"), init=init, shape=DrafterShape(**shape), given=given)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        for_chains(config)
        check_drafter(config)


@pytest.mark.parametrize(
    ("kind", "shape", "loop", "message"),
    [
        ("dflash", {"selector_rank": 8}, {}, "selector_rank means nothing for dflash drafters: leave it out"),
        ("dflash", {"codebooks": "free"}, {}, "codebooks means nothing for dflash drafters"),
        ("dflash", {"ttt_steps": 5}, {}, "ttt_steps means nothing for dflash drafters"),
        ("dflash", {}, {"selector_from": 0.5}, "selector_from means nothing for dflash drafters"),
        ("dflash", {}, {"loss": LossConfig(selector=2.0)}, "selector means nothing for dflash drafters"),
        ("dflash", {}, {"loss": LossConfig(gamma=4.0)}, "gamma means nothing for the loss d-pace"),
        ("dflash", {}, {"loss": LossConfig("ce", alpha=0.2)}, "alpha means nothing for the loss ce"),
        ("dflash2", {"eagle_version": "3"}, {}, "eagle_version means nothing for dflash2 drafters"),
        ("dspark", {}, {"selector_share": 0.5}, "selector_share means nothing for dspark drafters"),
        ("eagle3", {}, {"loss": LossConfig("ce", gamma=4.0)}, "gamma means nothing for eagle3 drafters"),
        ("eagle3", {}, {"attention": "sdpa"}, "attention means nothing for eagle3 drafters"),
        ("eagle3", {"block_size": 16}, {}, "block_size means nothing for eagle3 drafters, whose"),
        ("mtp", {"codebooks": "free"}, {}, "codebooks means nothing for mtp drafters"),
        ("mtp", {"eagle_version": "3"}, {}, "eagle_version means nothing for mtp drafters"),
        ("mtp", {"block_size": 6}, {}, "block_size means nothing for mtp drafters, whose"),
        ("dflash2", {"selector_rank": 8, "codebooks": "free"}, {"selector_from": 0.5}, None),
        ("dspark", {"selector_rank": 8, "codebooks": "free"}, {}, None),
        ("eagle3", {"block_size": 6, "ttt_steps": 5, "eagle_version": "3"}, {}, None),
        ("mtp", {"ttt_steps": 5}, {"loss": LossConfig(gamma=4.0)}, None),
    ],
)
def test_settings_of_another_method_or_loss_are_refused(
    kind: str, shape: dict[str, Any], loop: dict[str, Any], message: str | None
) -> None:
    config = TrainConfig(shape=DrafterShape(kind=kind, **shape), loop=LoopConfig(**loop))
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        assert checked(checked(config)) == checked(config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--public",), "--public means nothing without --push-to-hub"),
        (("--heldout-share", "0.5", "--heldout", "p.jsonl"), "--heldout-share means nothing next to heldout"),
        (("--features", "online", "--feature-dtype", "int8"), "--feature-dtype means nothing for features online"),
        (("--features", "cached", "--stream-buffer", "1G"), "--stream-buffer means nothing for features cached"),
        (("--stream-buffer", "1G"), "--stream-buffer means nothing for features auto"),
        (("--features-from", "http://127.0.0.1:1", "--serve-share", "0.1"), "--serve-share means nothing for a target"),
        (("--answers", "a", "--limit", "5"), "--limit means nothing without prompts to read"),
        (("--answers", "a", "--openers", "o.txt"), "--openers means nothing without --self-written prompts"),
        (("--prompts", "p.jsonl", "--openers", "o.txt"), "--openers means nothing without --self-written prompts"),
        (("--answers", "a", "--temperature", "0.7"), "--temperature means nothing without prompts to answer"),
        (("--answers", "a", "--raw"), "--raw means nothing without prompts to answer"),
        (("--prompts", "p.jsonl", "--samples", "4"), "--samples above 1 need a temperature above 0"),
        (("--served-name", "m"), "--served-name means nothing without a server"),
        (("--at-once", "4"), "--at-once means nothing without a server"),
        (("--ray", "local", "--patience-minutes", "4"), "--patience-minutes means nothing without a server"),
        (("--features-folder", "states"), "--features-folder needs --features-from"),
        (("--drafter-kind", "dspark", "--selector-weight", "2"), "--selector-weight means nothing for dspark drafters"),
        (("--drafter-kind", "eagle3", "--block-size", "8"), "--block-size means nothing for eagle3 drafters, whose"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_options_without_effect_next_to_others_are_refused(
    words: tuple[str, ...], message: str, more: tuple[str, ...], drafters: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        paceline("train", "--target", drafters / "target", "--out", "run", *words, *more)


@pytest.mark.parametrize(
    "changes",
    [
        {"push_to_hub": "me/mine", "public": True},
        {"features": "streamed", "stream_buffer": 1, "feature_dtype": "int8"},
        {"remote": RemoteConfig(features_from="http://a:1", served_name="m", at_once=2), "stream_buffer": 1},
        {"answers": (Path("a"),), "heldout": ("p",), "prompting": PromptsConfig(limit=3)},
        {"answers": (Path("a"),), "ood": ("p",), "answering": AnswerConfig(temperatures=(0.5,), samples=2)},
        {"answers": (Path("a"),), "prompting": PromptsConfig(self_written=9, openers=Path("o"), tags=("acme",))},
        {"prompting": PromptsConfig(openers=Path("o"))},
        {"answers": (Path("a"),), "answering": AnswerConfig(temperatures=(0.5,)), "given": ("answers",)},
    ],
)
def test_the_same_options_next_to_what_they_need_are_used(changes: dict[str, Any]) -> None:
    config = TrainConfig(**changes)
    assert checked(config) == config


def test_settings_of_the_method_of_init_are_used(drafters: Path) -> None:
    """A DFlash 2 drafter stays one without --drafter-kind."""
    config = TrainConfig(init="dflash2", loop=LoopConfig(selector_from=0.5))
    assert checked(config) == config
    with pytest.raises(ConfigError, match="selector_from means nothing for learn low-rank, which leaves the selector"):
        checked(replace(config, loop=replace(config.loop, learn="low-rank")))


def test_a_speculators_folder_is_continued_with_a_plan(drafters: Path) -> None:
    """The plan refused its config.json, so that a run began without a plan and --dry-run failed."""
    export(read_stored("dflash"), "speculators", drafters / "speculators", verifier={"name_or_path": "target"})
    config = TrainConfig(Path("run"), EngineConfig("target"), init="speculators", prompting=PromptsConfig(("p.jsonl",)))
    Path("p.jsonl").write_text('{"prompt": "Say hi."}\n')
    plans = [make_plan(replace(config, init=init)) for init in ("speculators", "dflash")]
    assert plans[0].sizes == plans[1].sizes and plans[0].sizes.num_layers == 1
