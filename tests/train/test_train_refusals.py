"""Input that `paceline train` refuses, with its messages: options, prompts, answers, folders."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shown import Shown
from tiny_runs import TINY, figures, paceline

from paceline.config import EngineConfig
from paceline.data.answers import Answer, AnswerShards
from paceline.data.tags import Tagged
from paceline.draft.dflash.config import DFlashConfig, new_config
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.draft.eagle3 import checkpoint as eagle3
from paceline.draft.eagle3.checkpoint import Eagle3Config
from paceline.draft.eagle3.drafter import Eagle3Drafter, Eagle3Network
from paceline.errors import CacheError, ConfigError, DrafterMismatchError, PromptError
from paceline.runs.folder import RunFolder
from paceline.runs.ranks import Ranks
from paceline.runs.stopping import Stop
from paceline.train import run as train_run
from paceline.train.answers.mixture import check_begun
from paceline.train.config import DrafterShape, TrainConfig
from paceline.train.documents.dataset import heldout_prompts, read_corpus
from paceline.train.methods.kinds import check_drafter
from paceline.train.tiny import write_tiny_target


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("--loss", "mse"), ConfigError, "loss must be one of ce, d-pace, kl, lk, lk-hybrid, not 'mse'"),
        (("--optimiser", "sgd"), ConfigError, "optimiser must be one of adamw, muon, not 'sgd'"),
        (("--attention", "fast"), ConfigError, "attention must be one of auto, split, sdpa, flex, not 'fast'"),
        (
            ("--features", "guessed"),
            ConfigError,
            "features must be one of auto, online, cached, streamed, not 'guessed'",
        ),
        (("--scale", "huge"), ConfigError, "scale must be one of default, tiny, not 'huge'"),
        (("--block-size", "1"), ConfigError, "block-size must be between 2 and 1024"),
        (("--lr", "0"), ConfigError, "lr must be above 0"),
        (("--epochs", "0"), ConfigError, "must be above 0"),
        (("--max-steps", "0"), ConfigError, "max-steps must be at least 1, not 0"),
        (("--max-minutes", "0"), ConfigError, "max-minutes must be above 0, not 0"),
        (("--seed", "-1"), ConfigError, "seed must be 0 or more, not -1"),
        (("--layers", "4097"), ConfigError, "layers must be at most 4096, not 4097"),
        (("--ttt-steps", "1024"), ConfigError, "ttt-steps must be between 1 and 1023, not 1024"),
        (("--taps", "0"), ConfigError, "taps must be at least 1, not 0"),
        (("--tap-layers", "1,-1"), ConfigError, "tap-layers must be 0 or more, not -1"),
        (("--sliding-window", "0"), ConfigError, "sliding-window must be at least 1, not 0"),
        (("--mask-token", "-1"), ConfigError, "mask-token must be 0 or more, not -1"),
        (("--loss", "kl", "--loss-vocab", "100"), ConfigError, "leave the loss vocabulary out"),
        (("--temperature", "warm"), ConfigError, "--temperature 'warm' is no list of numbers"),
        (
            ("--init", "/no/such/drafter"),
            ConfigError,
            "there is no drafter in /no/such/drafter: give a folder with config.json",
        ),
        (
            ("--answers", "/no/such/answers"),
            PromptError,
            "there are no answers at /no/such/answers: make them with paceline",
        ),
        (("--prompts", "/no/such.jsonl"), PromptError, "there is no prompt file /no/such.jsonl: check --prompts"),
        (("--ood", "/no/such.jsonl"), PromptError, "there is no prompt file /no/such.jsonl"),
        (("--push-to-hub", "me/my/own"), ConfigError, "'me/my/own' is no repository .*: give owner/name"),
        (("--scale", "tiny", "--dry-run"), ConfigError, "--scale tiny has fixed settings and makes no plan: leave"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(
    words: tuple[str, ...], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("paceline.train.run.load_target", loaded)
    monkeypatch.setattr("paceline.train.answers.regenerate._load", loaded)
    with pytest.raises(error, match=message):
        paceline("train", "--target", write_tiny_target(tmp_path / "target"), "--out", tmp_path / "run", *words)


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tap-layers", "2,99"), "--tap-layers: the target has layers 0 to 5"),
        (("--tap-layers", "2,2"), "--tap-layers names a layer twice"),
        (("--tap-layers", "2,99", "--drafter-kind", "eagle3"), "--tap-layers: the target has layers 0 to 5"),
        (("--taps", "3", "--tap-layers", "1,2"), "--taps is 3, but --tap-layers names 2 layers: leave one out"),
        (("--mask-token", "260"), "--mask-token 260: the target has tokens 0 to 259"),
        (("--heads", "3", "--kv-heads", "2"), "3 query heads over 2 key heads do not divide evenly"),
        (("--init", "dflash"), "--init .*dflash: hidden size: the drafter says 32, the target has 64"),
        (("--init", "eagle3", "--drafter-kind", "eagle3"), "--init .*eagle3: hidden size: the drafter says 32, the"),
        (("--init", "fits", "--layers", "2"), "--layers is 2, but 1 in the drafter of --init fits: leave --layers out"),
        (("--init", "fits", "--taps", "2"), "--taps is 2, but 1 in"),
        (("--init", "fits", "--mask-token", "7"), "--mask-token is 7, but 259 in"),
        (("--init", "chains", "--drafter-kind", "eagle3", "--draft-vocab", "9"), "--draft-vocab is 9, but 260 in"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_before_prompts_are_answered(
    words: tuple[str, ...], message: str, more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts were answered first, and the message blamed a drafter that nobody had given. Sizes that the drafter
    of --init does not have were read past."""
    target = write_tiny_target(tmp_path / "target")
    for width, names in ((32, ("dflash", "eagle3")), (64, ("fits", "chains"))):
        dflash = DFlashConfig.from_json(new_config(width, 260, 6, num_layers=1, head_dim=16))
        DFlashDrafter(DFlashNetwork.random(dflash)).save(tmp_path / names[0])
        eagle = Eagle3Config.from_json(eagle3.new_config(width, 260, 6, draft_vocab_size=260, head_dim=16))
        Eagle3Drafter(Eagle3Network.random(eagle)).save(tmp_path / names[1])
    monkeypatch.setattr("paceline.train.run.regenerate", lambda *args: pytest.fail("prompts are answered"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, DrafterMismatchError), match=message):
        paceline("train", "--target", target, "--out", tmp_path / "run", *words, *more)


def test_sizes_that_the_drafter_of_init_has_may_be_given(tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target")
    config = DFlashConfig.from_json(new_config(64, 260, 6, num_layers=1, head_dim=16))
    DFlashDrafter(DFlashNetwork.random(config)).save(tmp_path / "fits")
    layers = config.shape
    shape = DrafterShape(
        num_layers=1, intermediate_size=layers.intermediate_size, num_heads=layers.num_heads, num_kv_heads=1,
        num_taps=1, tap_layers=config.target_layer_ids, mask_token_id=259, is_causal=False, attention_bias=False,
        block_size=16, sliding_window=32, draft_vocab=9,
    )  # fmt: skip
    check_drafter(TrainConfig(target=EngineConfig(str(target)), init=str(tmp_path / "fits"), shape=shape))


@pytest.mark.parametrize("number", [0, 260, 1_000])
def test_the_whole_draft_vocabulary_of_init_may_be_given(number: int, tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target")
    config = Eagle3Config.from_json(eagle3.new_config(64, 260, 6, draft_vocab_size=260, head_dim=16))
    Eagle3Drafter(Eagle3Network.random(config)).save(tmp_path / "chains")
    shape = DrafterShape(kind="eagle3", num_layers=1, draft_vocab=number)
    check_drafter(TrainConfig(target=EngineConfig(str(target)), init=str(tmp_path / "chains"), shape=shape))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts: give at least one row"),
        ("\n\n", "holds no prompts: give at least one row"),
        ('{"prompt": "a"}\n{"prompt": "b"\n', "prompts.jsonl, line 2"),
        ('{"prompt": "a"}\n\n{"answer": 3}\n', "prompts.jsonl, line 3"),
        ('{"prompt": "a"}\n[1]\n', "prompts.jsonl, line 2"),
    ],
)
def test_bad_prompts_are_named_by_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(text)
    with pytest.raises(PromptError, match=message):
        paceline(*TINY, "--strict", "--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": EngineConfig("b")}, "--target a, not b"),
        ({"init": "default"}, "--init none, not default"),
        ({"max_len": 128}, "--max-len 256, not 128"),
        ({}, None),
        ({"max_len": 256}, None),
    ],
)
def test_a_run_with_checkpoints_keeps_its_target_its_init_and_its_longest_document(
    tmp_path: Path, change: dict[str, Any], message: str | None
) -> None:
    """It went on with the weights of the one and the answers or hidden states of the other."""
    RunFolder.create("train", {"target": "a", "init": None, "max_len": 256}, tmp_path)
    config = replace(TrainConfig(tmp_path, EngineConfig("a")), **change)
    check_begun(config)
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    with (
        pytest.raises(ConfigError, match=f"was begun with {message}: choose another --out")
        if message
        else nullcontext()
    ):
        check_begun(config)
    RunFolder(tmp_path).write_json("config.json", {"what": "train"})
    check_begun(config)  # nothing is stored of an earlier version


def written(folder: Path, token: int, text: str) -> Path:
    answers = [
        Answer(f"p{n}@0", "here", 0, 0.0, [65, 66], [token] * 3 + [67 + n] * 3, "length", text) for n in range(9)
    ]
    AnswerShards(folder).write(answers)
    return folder


def test_prompts_that_are_learned_from_are_not_out_of_distribution(tmp_path: Path) -> None:
    learned, shown = read_corpus([written(tmp_path / "learned", 70, "")], 64, 0.0), Shown()
    rows = [Answer(f"p{n}@0", "here", 0, 0.0, [65, 66], [70, 71, 72, n], "stop", "") for n in range(7, 12)]
    AnswerShards(tmp_path / "ood").write(rows)
    stages = train_run._Stages(TrainConfig(tmp_path, max_len=64), Ranks(), lambda: None, shown, Stop(shown.say))
    documents = stages._ood(tmp_path / "ood", learned)
    assert sorted(document.prompt for document in documents) == ["p10", "p11", "p9"]
    assert shown.lines == ["note: 2 of 5 --ood documents are left out: their prompts are learned from"]


def test_held_out_prompts_that_the_drafter_of_init_may_know_are_noted(tmp_path: Path) -> None:
    """The prompts with the smallest hashes are held out, a share of all prompts. So a run on ten times as many prompts
    learns from most of those that the smaller run held out."""
    few, many = (heldout_prompts([f"p{n}@0" for n in range(number)], 0.02, 128, 16) for number in (100, 1000))
    assert len(few - many) > len(few) / 2
    rows = [Answer(f"p{n}@0", "", 0, 0.0, [65, n], [70, 71, 72, n], "stop", "") for n in range(40)]
    AnswerShards(tmp_path / "answers").write(rows)
    for init, number in ((None, 0), ("some/drafter", 1)):
        shown = Shown()
        stages = train_run._Stages(
            TrainConfig(tmp_path, init=init, max_len=64), Ranks(), lambda: None, shown, Stop(shown.say)
        )
        assert stages._corpus([Tagged(tmp_path / "answers")], None).heldout
        assert sum("the drafter of --init may have learned" in line for line in shown.lines) == number


@pytest.mark.slow
def test_without_held_out_documents_the_newest_step_counts(tmp_path: Path, capsys: Any) -> None:
    answers = written(tmp_path / "answers", 70, "")
    paceline(*TINY, "--answers", answers, "--out", tmp_path / "run", "--max-steps", "4", "--json")
    line, steps = json.loads(capsys.readouterr().out), figures(tmp_path / "run")
    assert line["heldout"] == {} and len(steps) == 4 and steps[4]["loss"] != steps[1]["loss"]
    assert (line["loss"], line["eal"]) == (steps[4]["loss"], steps[4]["eal"])


def test_an_empty_folder_of_answers_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        PromptError, match=f"there are no answers in {tmp_path}/empty: make them with paceline regenerate"
    ):
        paceline(*TINY, "--answers", tmp_path / "empty", "--out", tmp_path / "run")


def test_answers_with_tokens_that_the_target_lacks_are_refused(tmp_path: Path) -> None:
    answers = written(tmp_path / "answers", 30_000, "")
    with pytest.raises(
        PromptError, match="holds token 30000, the target has 260 tokens: .*regenerate them with this target"
    ):
        paceline(*TINY, "--answers", answers, "--out", tmp_path / "run")


def test_answers_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    target, words = (
        write_tiny_target(tmp_path / "target"),
        ("train", "--device", "cpu", "--out", tmp_path / "run", "--target"),
    )
    answers = written(tmp_path / "answers", 70, "what these tokens mean to another model")
    with pytest.raises(
        PromptError, match="tokens of another tokenizer than the target's: regenerate them with this target"
    ):
        paceline(*words, target, "--answers", answers)


@pytest.mark.slow
def test_prompts_that_are_all_held_out_teach_nothing(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(4)))
    other = tmp_path / "other.jsonl"
    other.write_text("\n" + file.read_text())  # the same texts in other rows of another file
    words = ("--max-tokens", "8", "--prompts", file, "--heldout", f"{other}=1", "--features", "streamed")
    with pytest.raises(PromptError, match="nothing is left to learn from: every document is held out"):
        paceline(*TINY, *words, "--out", tmp_path / "run")


def test_a_damaged_file_of_answers_is_named(tmp_path: Path) -> None:
    (tmp_path / "answers-r0-00000.parquet").write_bytes(b"PAR1 cut short")
    with pytest.raises(PromptError, match="answers-r0-00000.parquet is no file of answers"):
        paceline(*TINY, "--answers", tmp_path, "--out", tmp_path / "run")


def test_a_run_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot write"):
        paceline(*TINY, "--out", tmp_path / "file" / "run")
