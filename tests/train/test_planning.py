"""Plans: the shape under its share of a pass, who chose what, hours from minutes, no weight read, kept by the run's
folder."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_folders import write_config
from shown import Shown
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import EngineConfig
from paceline.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from paceline.hardware import Machine
from paceline.report.tables import Progress
from paceline.runs.ranks import Ranks
from paceline.train import run as train_run
from paceline.train.config import (
    AnswerConfig,
    DrafterShape,
    LoopConfig,
    OptimConfig,
    PromptsConfig,
    RemoteConfig,
    TrainConfig,
)
from paceline.train.plan import target_facts as facts
from paceline.train.plan.choices import MOST_SHARE
from paceline.train.plan.expected_acceptance import Learned, expected_of, expected_tokens
from paceline.train.plan.stored_plan import apply_stored
from paceline.train.plan.training_plan import make_plan, option_of

LAPTOP = Machine("some processor", 3e10, {"bfloat16": 5e11, "float32": 2e11}, 2, 16 * 2**30)

GIVEN = ("answering.temperatures", "answering.samples")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(facts, "_measured_once", lambda device: facts.MachineFacts(LAPTOP))
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def prompts(folder: Path, number: int = 200) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Write a function number {n}."}) + "\n" for n in range(number)))
    return str(file)


def train_config(folder: Path, model: str = "qwen2.5-coder-0.5b", **changes: Any) -> TrainConfig:
    return TrainConfig(folder / "run", EngineConfig(model), PromptsConfig((prompts(folder),)), **changes)


def test_a_small_target_on_a_processor(tmp_path: Path) -> None:
    """Never fetched: the catalogue knows its sizes."""
    plan = make_plan(train_config(tmp_path, minutes=60.0))
    assert plan.share_of_pass < MOST_SHARE and plan.config.shape.is_copied
    assert plan.config.shape.draft_vocab in (8192, 12288, 16384, 32768) and plan.config.loop.loss.vocab == 8192
    assert plan.config.shape.block_size == 8 and plan.config.loop.blocks_per_step == 192
    assert plan.hours["all"] == pytest.approx(sum(plan.hours[name] for name in ("answers", "features", "steps")))
    assert plan.hours["all"] <= 1.3 and plan.config.loop.max_minutes is not None and plan.blocks > 0
    assert plan.expected is not None and not plan.expected["is_own"]
    low, high = plan.expected["interval"]
    assert f"a guess: {low:.2f} to {high:.2f} by " in plan.text and low < plan.expected["tokens_per_round"] < high
    assert plan.data.prompts == 200 and plan.data.is_known
    assert json.loads(json.dumps(plan.as_json()))["is_copyable"]


def test_experts_count_as_far_as_they_are_active(tmp_path: Path) -> None:
    dense = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
    folder = tmp_path / "Qwen3-30B-A3B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dense | sizes | heads))
    plan = make_plan(train_config(tmp_path, str(folder / "config.json")), "8x H100")
    assert plan.machine == "8 x H100" and plan.config.shape.block_size == 16 and not plan.config.shape.is_copied
    assert not plan.is_copyable
    assert plan.sizes.hidden_size == 2048 and plan.share_of_pass < MOST_SHARE
    one = make_plan(train_config(tmp_path, str(folder)), "H100")
    assert one.hours["answers"] == pytest.approx(8 * plan.hours["answers"])
    assert plan.memory_bytes > 60e9, "all experts are held"


@pytest.mark.slow
def test_what_was_asked_for_wins_and_who_chose_is_told(tmp_path: Path) -> None:
    shape = DrafterShape(num_layers=1, draft_vocab=4096)
    loop = LoopConfig(optim=OptimConfig(lr=1e-3))
    plan = make_plan(train_config(tmp_path, shape=shape, loop=loop))
    assert (plan.config.shape.num_layers, plan.config.shape.draft_vocab, plan.config.loop.optim.lr) == (1, 4096, 1e-3)
    assert "shape.num_layers" not in plan.chosen and "loop.optim.lr" not in plan.chosen and "shape.start" in plan.chosen
    config = replace(train_config(tmp_path), given=("shape.block_size", "loop.loss.vocab"))
    plan = make_plan(config)
    assert plan.config.loop.loss.vocab is None and "loop.loss.vocab" not in plan.chosen
    assert "yours      --loss-vocab None, --block-size 8" in plan.text
    shape = DrafterShape(is_causal=False, attention_bias=False, tap_layers=(0, 2))
    text = make_plan(
        replace(config, shape=shape, given=("shape.is_causal", "shape.attention_bias", "shape.tap_layers"))
    )
    assert "yours      --no-attention-bias, --bidirectional, --tap-layers 0,2" in text.text, "as they are typed"
    off = make_plan(train_config(tmp_path, plan="off"))
    assert [*off.chosen] == ["max_len"] and off.config.shape == DrafterShape()
    further = make_plan(train_config(tmp_path, init="default"))
    assert [*further.chosen] == ["max_len"], "a drafter that goes on keeps its shape and recipe"
    assert (further.sizes.num_layers, further.sizes.num_heads, further.sizes.block_size) == (2, 14, 8)
    assert 16384 <= further.sizes.draft_vocab < 20000 and further.share_of_pass < MOST_SHARE
    assert further.expected is None and "no curve for a drafter that is trained further" in further.text
    wider = make_plan(train_config(tmp_path, init="default", shape=DrafterShape(block_size=16)))
    assert wider.sizes == replace(further.sizes, block_size=16)
    with pytest.raises(ConfigError, match="there is no drafter in"):
        make_plan(train_config(tmp_path, init=str(tmp_path / "nothing")))


@pytest.mark.slow
def test_a_processor_without_products_of_bfloat16_trains_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch makes them out of others there, at a fifth of the speed."""
    fast = make_plan(train_config(tmp_path, minutes=60.0))
    assert fast.config.loop.autocast and "loop.autocast" not in fast.chosen
    slow = replace(LAPTOP, flops_per_s={"bfloat16": 1e11, "float32": 5e11})
    monkeypatch.setattr(facts, "_measured_once", lambda device: facts.MachineFacts(slow))
    plan = make_plan(train_config(tmp_path, minutes=60.0))
    assert not plan.config.loop.autocast and "chosen     --full-precision: this processor" in plan.text
    assert plan.chosen["loop.autocast"] == "this processor has no products of bfloat16: float32 is 5.0 times as fast"
    assert plan.blocks == pytest.approx(fast.blocks), "as fast as the other, which multiplies as much in bfloat16"
    assert plan.share_of_pass == pytest.approx(fast.share_of_pass)
    further = make_plan(train_config(tmp_path, init="default"))
    assert not further.config.loop.autocast and list(further.chosen) == ["loop.autocast", "max_len"]
    asked_for = make_plan(replace(train_config(tmp_path), given=("loop.autocast",)))
    assert asked_for.config.loop.autocast


def test_answers_that_are_there_get_the_minutes(tmp_path: Path) -> None:
    """They are not counted yet, so that time alone ends their steps."""
    config = TrainConfig(
        tmp_path / "run", EngineConfig("qwen2.5-coder-0.5b"), answers=(tmp_path / "answers",), minutes=30.0
    )
    plan = make_plan(config)
    assert (
        plan.config.loop.max_minutes == pytest.approx(30.0)
        and plan.hours["all"] == pytest.approx(0.5)
        and plan.blocks > 0
    )
    short = make_plan(replace(config, minutes=None, loop=LoopConfig(max_minutes=3.0)))
    assert short.hours["steps"] == pytest.approx(0.05)
    assert make_plan(replace(config, minutes=None)).hours["all"] == 0.0, "without an end nothing is known"


def test_too_little_time_answers_fewer_prompts_and_says_so(tmp_path: Path) -> None:
    plan = make_plan(train_config(tmp_path, minutes=2.0))
    assert plan.config.prompting.limit == plan.data.prompts < 200
    assert "all 200 prompts would take" in plan.chosen["prompting.limit"]


@pytest.mark.slow
def test_few_prompts_are_answered_more_than_once(tmp_path: Path) -> None:
    """Where there is time, and nobody has said how."""
    plan = make_plan(train_config(tmp_path, minutes=120.0))
    answering, why = plan.config.answering, plan.chosen["answering.temperatures"]
    assert answering.temperatures == (0.0, 0.7) and answering.samples > 1 and "answering.samples" in plan.chosen
    assert re.fullmatch(
        rf"200 answers would be learned from \d+ times, {1 + answering.samples} to a prompt \d+ times", why
    )
    assert plan.hours["answers"] + plan.hours["features"] <= 0.26 * plan.hours["all"]
    once = make_plan(
        train_config(tmp_path, minutes=120.0, answering=AnswerConfig(temperatures=(0.0,), samples=1), given=GIVEN)
    )
    assert once.hours["answers"] == pytest.approx(plan.hours["answers"] / (1 + answering.samples))
    assert once.config.answering.temperatures == (0.0,) and "answering.temperatures" not in once.chosen
    far = train_config(tmp_path, minutes=60.0, remote=RemoteConfig(answers_from="http://127.0.0.1:1"))
    for config in (
        far,
        train_config(tmp_path),
        train_config(tmp_path, minutes=60.0, plan="off"),
        train_config(tmp_path, minutes=3.0),
    ):
        assert "answering.temperatures" not in make_plan(config).chosen


@pytest.mark.slow
def test_a_target_elsewhere_costs_nothing_here_and_lends_no_layers(tmp_path: Path) -> None:
    elsewhere = RemoteConfig(answers_from="http://127.0.0.1:1", features_from="http://127.0.0.1:2")
    asking = PromptsConfig((f"{prompts(tmp_path)}=2",))
    config = replace(train_config(tmp_path), prompting=asking, remote=elsewhere, features="streamed")
    plan = make_plan(config)
    assert plan.data.prompts == 200 and plan.data.is_known, "a source may carry a weight"
    assert plan.hours["answers"] == plan.hours["features"] == plan.disk_bytes["features"] == 0.0 < plan.hours["steps"]
    assert not plan.config.shape.is_copied
    assert "the hidden states are of http://127.0.0.1:2: what they take there is not in these hours" in plan.text
    assert plan.memory_bytes < make_plan(replace(config, remote=RemoteConfig())).memory_bytes
    kept = make_plan(train_config(tmp_path, features="cached")).disk_bytes["features"]
    assert make_plan(train_config(tmp_path, features="cached", feature_dtype="int8")).disk_bytes["features"] == kept / 2


def test_a_wide_head_costs_a_shape_its_layers(tmp_path: Path) -> None:
    folder = tmp_path / "narrow"
    folder.mkdir()
    write_config(folder, vocab_size=20_000, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    plan = make_plan(train_config(tmp_path, str(folder)))
    assert plan.config.shape.draft_vocab == 8192 and plan.config.shape.num_layers < 3
    assert "the least that was found" in plan.chosen["shape.num_layers"]


def test_a_curve_is_quoted_for_its_own_target_only() -> None:
    estimate = expected_tokens("smollm2-135m", 994_000)
    assert estimate is not None and estimate["tokens_per_round"] == 2.83 and not estimate["is_beyond_the_curve"]
    less, more = expected_tokens("smollm2-135m", 96_000), expected_tokens("smollm2-135m", 5e6)
    assert less is not None and less["tokens_per_round"] == pytest.approx(2.07 * 2.83 / 3.11, abs=0.01)
    assert more is not None and more["tokens_per_round"] == 2.83 and more["is_beyond_the_curve"]
    assert expected_tokens("qwen2.5-coder-0.5b", 1e6) is None


def test_a_plan_counts_different_answers_and_says_when_they_are_few(tmp_path: Path) -> None:
    """60 prompts, each answer learned from some eighty times: 16 held out, 44 to learn from; advise gives them 1.0x."""
    config = replace(train_config(tmp_path, "smollm2-135m"), prompting=PromptsConfig((prompts(tmp_path, 60),)))
    plan = make_plan(replace(config, minutes=600.0), "H100")
    assert plan.blocks > 200_000 and plan.expected is not None
    assert plan.expected["answers"] == 44 and plan.expected["advised"] == 3000
    assert (
        plan.expected["tokens_per_round"]
        == expected_of("smollm2-135m", Learned(1e9, 44, plan.expected["places"]))["tokens_per_round"]
    )
    assert plan.expected["tokens_per_round"] < 1.2
    assert "44 answers are too few: 3,000 are advised" in plan.text


def test_a_plan_for_gpus_has_loading_compiling_and_checkpoints_and_a_range(tmp_path: Path) -> None:
    config = replace(train_config(tmp_path, "Qwen3-8B"), prompting=PromptsConfig((prompts(tmp_path, 60),)))
    plan = make_plan(config, "8x H100")
    assert {"loading", "compiling", "checkpoints"} <= plan.hours.keys() and plan.hours["all"] > 1 / 60
    assert plan.hours["all"] == pytest.approx(sum(value for name, value in plan.hours.items() if name != "all"))
    low, high = plan.hours_range or (0.0, 0.0)
    assert 0 < low < plan.hours["all"] < high and "compiling 20 s" in plan.text and " to " in plan.text
    assert "44 answers are too few: 30,000 are advised" in plan.text
    long_plan = make_plan(replace(config, minutes=240.0), "8x H100")
    assert " of 240 minutes are used: by then each answer was learned from 100 times" in long_plan.text


def test_a_resumed_run_keeps_its_choices(tmp_path: Path) -> None:
    stored = make_plan(train_config(tmp_path)).as_json()
    stored["values"] |= {"shape.num_layers": 7, "gone.setting": 3}
    assert apply_stored(train_config(tmp_path), stored).shape.num_layers == 7
    assert apply_stored(train_config(tmp_path, shape=DrafterShape(num_layers=2)), stored).shape.num_layers == 2


@pytest.mark.parametrize(
    ("name", "number", "machine"),
    [
        ("H100", 1, "H100"),
        ("8x H100", 8, "H100"),
        ("8xH100", 8, "H100"),
        ("2 x RTX 4090", 2, "RTX 4090"),
        ("4 L40S", 4, "L40S"),
        ("4 × L40S", 4, "L40S"),
    ],
)
def test_machines_by_name(name: str, number: int, machine: str) -> None:
    resolved = facts.machine_of(name)
    assert (resolved.number, resolved.machine.name, resolved.is_here) == (number, machine, False)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device-name 'abacus' is not known: choose from B200"):
        make_plan(train_config(tmp_path), "abacus")
    with pytest.raises(ConfigError, match="device-name '' is not known"):
        make_plan(train_config(tmp_path), "")
    with pytest.raises(ModelNotFoundError, match="no model 'nothing'"):
        make_plan(train_config(tmp_path, "nothing"))


@pytest.mark.slow
def test_the_command_says_the_plan_and_stops(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.commands import train as command

    monkeypatch.setattr(command, "run_train", lambda *args, **options: pytest.fail("it must not train"))
    words = ["train", "--target", "qwen2.5-coder-0.5b", "--prompts", prompts(tmp_path), "--dry-run", "--json"]
    app([*words, "--out", str(tmp_path / "run"), "--layers", "2"], prog_name="paceline", standalone_mode=False)
    output = capsys.readouterr()
    line = json.loads(output.out)
    assert (
        line["sizes"]["num_layers"] == 2
        and line["values"]["shape.start"] == "copied"
        and "plan: a drafter" in output.err
    )
    assert json.loads((tmp_path / "run" / "dry-run.json").read_text()) == line
    with pytest.raises(ConfigError, match="--device-name plans for another machine: add --dry-run"):
        app(["train", "--device-name", "H100"], prog_name="paceline", standalone_mode=False)


def test_a_plan_speaks_in_options_that_train_has(tmp_path: Path) -> None:
    """Options chosen for one reason share a line, and the plan says how many prompts are held out."""
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    plan = make_plan(train_config(tmp_path, minutes=4.0))
    assert plan.chosen
    for name in plan.chosen:
        assert re.search(rf"{option_of(name)}\b", shown), name
    lines = plan.text.splitlines()
    reasons = [line.rpartition(": ")[2] for line in lines if line.startswith("  chosen")]
    assert len(reasons) == len(set(reasons)) and not any("shape." in line or "loop." in line for line in lines)
    assert "of them held out" in plan.text


def planned(config: TrainConfig, shown: Shown | None = None) -> TrainConfig:
    return train_run._planned(config, Ranks(), lambda: None, shown or Progress())


def test_config_json_of_a_hub_id_is_fetched_before_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it there was no plan, `minutes` was ignored, and the next start, which had one, was refused."""
    write_config(tmp_path)
    raw, fetched = json.loads((tmp_path / "config.json").read_text()), list[str]()
    monkeypatch.setattr(train_run, "light_folder", fetched.append)
    monkeypatch.setattr(facts, "_hub_config", lambda name: raw if name in fetched else None)
    train_run._check_inputs(train_config(tmp_path, "org/new-model"))
    config = planned(train_config(tmp_path, "org/new-model", minutes=60.0))
    assert fetched == ["org/new-model"] and config.loop.max_minutes is not None
    values = json.loads((tmp_path / "run" / "plan.json").read_text())["values"]
    assert {"loop.max_minutes", "loop.blocks_per_step"} <= values.keys()


def test_a_run_without_a_plan_has_none_later_either_and_keeps_its_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: TrainConfig) -> None:
        raise UnsupportedModelError("its sizes are not known")

    shown, config = Shown(), train_config(tmp_path, "org/new-model", minutes=60.0)
    with monkeypatch.context() as patched:
        patched.setattr(train_run, "make_plan", fail)
        first = planned(config, shown)
    note = "note: no plan, so defaults hold, also when the run is resumed: its sizes are not known"
    assert shown.lines == [note] and first.loop == LoopConfig(max_minutes=60.0)
    assert planned(config, shown).loop == first.loop and shown.lines == [note]


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        ({}, {"minutes": 30.0}, 30.0),
        ({"minutes": 60.0}, {"minutes": 90.0}, 75.0),
        ({"minutes": 60.0}, {"minutes": 50.0}, 35.0),
        ({"minutes": 60.0}, {"minutes": 10.0}, 0.1),
        ({"minutes": 60.0}, {}, 45.0),
        ({"loop": LoopConfig(max_minutes=5.0)}, {"minutes": 30.0}, 30.0),
    ],
)
def test_a_resumed_run_gets_the_minutes_that_are_given_now(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], steps: float
) -> None:
    """They were ignored if the first start had none, and bounded by the first plan until there was a checkpoint."""
    answers = {"prompting": PromptsConfig(), "answers": (tmp_path / "answers",)}
    config = replace(train_config(tmp_path), **answers)
    planned(replace(config, **before))
    file = tmp_path / "run" / "plan.json"
    plan = json.loads(file.read_text())
    if "minutes" in before:
        assert plan["values"]["loop.max_minutes"] == 60.0
        file.write_text(json.dumps(plan | {"values": plan["values"] | {"loop.max_minutes": 45.0}}))
    for _ in range(2):  # a third start changes nothing more
        assert planned(replace(config, **after)).loop.max_minutes == steps
    if after:
        plan = json.loads(file.read_text())
        assert plan["minutes"] == after["minutes"] and plan["values"]["loop.max_minutes"] == steps


def test_minutes_without_effect_are_noted(tmp_path: Path) -> None:
    config, shown = replace(train_config(tmp_path, minutes=60.0), loop=LoopConfig(max_minutes=5.0)), Shown()
    planned(config, shown)
    planned(config, shown)
    assert not any("has no effect" in line for line in shown.lines)
    assert planned(replace(config, minutes=90.0), shown).loop.max_minutes == 5.0
    planned(replace(config, scale="tiny"), shown)
    assert ["--max-minutes" in line for line in shown.lines if "--minutes has no effect" in line] == [True, True]
