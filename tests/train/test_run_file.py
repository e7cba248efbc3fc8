"""run.yaml: a run written down is the same run read back; typed options win; unknown names are refused with the
nearest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cli import app
from paceline.commands import train as command
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.train.config import (
    AnswerConfig,
    DrafterShape,
    LoopConfig,
    LossConfig,
    OptimConfig,
    PromptsConfig,
    TrainConfig,
)
from paceline.train.run_file import as_tree, config_of, read_run_file, with_value, write_run_file


def whole(out: Path) -> TrainConfig:
    return TrainConfig(
        out,
        EngineConfig("some/model", dtype="float32", threads=2),
        PromptsConfig(("a.jsonl", "b.jsonl"), limit=7),
        answers=(Path("x"),),
        answering=AnswerConfig(temperatures=(0.0, 0.7)),
        shape=DrafterShape(num_layers=2, tap_layers=(1, 4), start="copied", is_causal=False),
        loop=LoopConfig(epochs=2.5, loss=LossConfig("ce", vocab=0), optim=OptimConfig(lr=2e-3)),
    )


def test_written_and_read_back_it_is_the_same_run(tmp_path: Path) -> None:
    config = whole(tmp_path)
    again = config_of(read_run_file(write_run_file(config)))
    assert with_value(again, "given", None) == config
    assert again.is_given("shape.num_layers") and again.is_given("shape.block_size"), "all of a file is asked for"
    assert not again.is_given("init")


def test_a_continued_drafter_keeps_its_block_size_when_the_file_is_run_again(tmp_path: Path) -> None:
    """The file said 8, the default of new drafters, and a drafter of 12 became one of 8."""
    config = with_value(with_value(whole(tmp_path), "init", "some/drafter"), "given", ("init",))
    again = config_of(read_run_file(write_run_file(config)))
    assert again.init == "some/drafter" and not again.is_given("shape.block_size")
    assert not again.is_given("shape.num_layers"), "other sizes than the drafter's are refused"
    config = with_value(config, "given", ("init", "shape.block_size"))
    assert config_of(read_run_file(write_run_file(config))).is_given("shape.block_size"), "8 as an option"


@pytest.mark.parametrize(("kind", "is_written"), [("eagle3", False), ("dflash", True)])
def test_sizes_that_a_plan_chose_are_not_written_for_a_continued_drafter(kind: str, is_written: bool) -> None:
    """They are not the drafter's: the file was refused when it was run again."""
    shape = DrafterShape(kind=kind, num_heads=4, draft_vocab=32_000, ttt_steps=5)
    tree = as_tree(TrainConfig(init="some/drafter", shape=shape, given=("init", "shape.kind")))["shape"]
    assert "num_heads" not in tree and ("draft_vocab" in tree) == is_written and tree["ttt_steps"] == 5


def test_what_differs_from_the_default_was_given(tmp_path: Path) -> None:
    config = whole(tmp_path)
    assert config.is_given("shape.num_layers") and config.is_given("loop.optim.lr")
    assert not config.is_given("shape.block_size") and not config.is_given("loop.anchors")


@pytest.fixture
def started_configs(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The configs that the command hands to the library, which does nothing here."""
    configs: list[TrainConfig] = []

    def stop(config: TrainConfig, **options: Any) -> None:
        configs.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr(command, "run_train", stop)
    return configs


def typed(*words: object) -> None:
    with pytest.raises(ConfigError, match="enough"):
        app(["train", *map(str, words)], prog_name="paceline", standalone_mode=False)


def test_what_is_typed_wins_over_the_file(tmp_path: Path, started_configs: list[TrainConfig]) -> None:
    file = write_run_file(whole(tmp_path))
    typed("--config", file, "--layers", "5", "--lr", "1e-3", "--block", "6", "--seed", "9", "--out", tmp_path / "other")
    (config,) = started_configs
    assert (config.shape.num_layers, config.shape.block_size, config.loop.optim.lr) == (5, 6, 1e-3)
    assert (config.loop.seed, config.answering.seed, config.out) == (9, 9, tmp_path / "other")
    assert config.shape.tap_layers == (1, 4) and config.prompting.prompts == ("a.jsonl", "b.jsonl"), (
        "the rest is the file's"
    )
    assert as_tree(config)["loop"]["loss"] == as_tree(whole(tmp_path))["loop"]["loss"]


def test_typed_minutes_end_the_steps_of_a_file_with_minutes_of_its_own(
    tmp_path: Path, started_configs: list[TrainConfig]
) -> None:
    """The file's plan had chosen loop.max_minutes, which counts as given, so that --minutes had no effect."""
    file = write_run_file(with_value(with_value(whole(tmp_path), "minutes", 60.0), "loop.max_minutes", 45.0))
    typed("--config", file, "--minutes", "120")
    typed("--config", file, "--minutes", "120", "--max-minutes", "7")
    typed("--config", file)
    limits = [(config.minutes, config.loop.max_minutes) for config in started_configs]
    assert limits == [(120.0, None), (120.0, 7.0), (60.0, 45.0)]
    assert not started_configs[0].is_given("loop.max_minutes") and started_configs[0].is_given("loop.epochs")


def test_an_option_typed_at_its_default_counts_as_asked_for(tmp_path: Path, started_configs: list[TrainConfig]) -> None:
    typed("--layers", "3", "--loss-vocab", "0", "--first-layers", "copied", "--heads", "4", "--intermediate-size", "64")
    (config,) = started_configs
    assert (
        config.is_given("shape.num_layers")
        and config.is_given("loop.loss.vocab")
        and not config.is_given("loop.optim.lr")
    )
    assert (config.shape.num_heads, config.shape.intermediate_size, config.shape.is_copied) == (4, 64, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shap: {num_layers: 2}", "unknown setting shap: did you mean shape?"),
        ("shape: {num_layer: 2}", "unknown setting shape.num_layer: did you mean shape.num_layers?"),
        ("layers: 2", "unknown setting layers: did you mean shape.num_layers?"),
        ("loop: {optim: {rate: 2}}", "unknown setting loop.optim.rate"),
        ("shape: 3", "shape must hold settings by name, such as num_layers"),
        ("shape: {num_layers: two}", "shape.num_layers cannot be 'two'"),
        ("shape: {num_layers: true}", "shape.num_layers cannot be True"),
        ("shape: {start: warm}", "shape.start cannot be 'warm'"),
        ("shape: {num_layers: 0}", "num_layers must be at least 1"),
        ("- a", "holds no settings by name"),
        ("a: [", "cannot be read"),
        ("out: !!python/object:os.system {}", "cannot be read"),
    ],
)
def test_bad_files_are_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        config_of(read_run_file(file))
    assert message in str(refused.value)


def test_a_folder_in_the_home_of_nobody_keeps_its_name(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("out: ~no_such_user/run\ntarget: {model: target}")
    assert config_of(read_run_file(file)).out == Path("~no_such_user/run")


def test_json_is_read_too_and_numbers_as_yaml_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"loop": {"optim": {"lr": "2e-3"}, "epochs": 3}, "prompting": {"prompts": "one.jsonl"}}')
    config = config_of(read_run_file(file))
    assert (config.loop.optim.lr, config.loop.epochs, config.prompting.prompts) == (2e-3, 3.0, ("one.jsonl",))


def test_what_may_be_deleted_of_a_run_is_said_with_its_size(tmp_path: Path) -> None:
    assert command.kept_files(tmp_path) == []
    for name, size in (
        ("drafter/model.safetensors", 9),
        ("checkpoints/step-1/weights", 2_000_000),
        ("features-ood/a", 1_500_000),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    (line,) = command.kept_files(tmp_path)
    assert "(4 MB) may be deleted" in line and line.endswith(f"serving needs {tmp_path / 'drafter'} alone")
    assert str(tmp_path / "checkpoints") in line and str(tmp_path / "features-ood") in line
