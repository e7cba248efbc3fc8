"""The longest document of a run comes from its data, within the target's context and the machine's memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapt_requests import keyed, store

from paceline.config import EngineConfig
from paceline.data.answers import Answer, AnswerShards
from paceline.errors import ConfigError, ModelNotFoundError
from paceline.hardware import Machine
from paceline.report.tables import Progress
from paceline.runs.ranks import Ranks
from paceline.train import run as train_run
from paceline.train.config import PromptsConfig, TrainConfig
from paceline.train.documents.dataset import read_corpus
from paceline.train.plan import target_facts as facts
from paceline.train.plan.lengths import LEAST_LIMIT, STEP, Limit, fit_lengths, longest_of, with_length
from paceline.train.plan.training_plan import make_plan
from paceline.train.run_file import RUN_FILE, write_run_file

TAGGED = (("acme", 20), ("globex", 300))
LAPTOP = Machine("some processor", 3e10, {"bfloat16": 5e11, "float32": 2e11}, 2, 16 * 2**30)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(facts, "_measured_once", lambda device: facts.MachineFacts(LAPTOP))
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def answers(folder: Path, *lengths: tuple[int, int]) -> Path:
    """One answer for each (tokens of the prompt, tokens of the answer); no text loops."""
    rows = [
        Answer(f"q{number}@0", "here", 0, 0.0, [*range(prompt)], [*range(answer)], "stop", "")
        for number, (prompt, answer) in enumerate(lengths)
    ]
    AnswerShards(folder).write(rows)
    return folder


def train_config(
    folder: Path, *lengths: tuple[int, int], model: str = "qwen2.5-coder-0.5b", **more: Any
) -> TrainConfig:
    source = answers(folder / "answers", *lengths)
    return TrainConfig(folder / "run", EngineConfig(model), answers=(source,), **more)


def test_prompts_of_1500_tokens_are_learned_from(tmp_path: Path) -> None:
    """They were all left out: "there are no answers to learn from"."""
    plan = make_plan(train_config(tmp_path, *[(1500, 60)] * 30), reads_answers=True)
    assert longest_of(plan.config) == 1568 == -(-1560 // STEP) * STEP
    assert "99% of 30 prompts with answers are no longer, the longest has 1,560 tokens" in plan.text
    assert "30 documents" in plan.text and "left out" not in plan.text
    assert len(read_corpus(plan.config.answers, longest_of(plan.config), 0.0).train) == 30


def test_the_rows_of_other_tags_do_not_count(tmp_path: Path) -> None:
    rows = [keyed(n, tag=tag, prompt_ids=[65] * 9, answer_ids=[66] * length) for n, (tag, length) in enumerate(TAGGED)]
    config = TrainConfig(tmp_path, prompting=PromptsConfig(tags=("acme",)), answers=(store(tmp_path / "traces", rows),))
    assert fit_lengths(config)[0].max_len == 32


def test_one_answer_in_a_hundred_may_be_cut_and_is_counted(tmp_path: Path) -> None:
    plan = make_plan(train_config(tmp_path, *[(20, 76)] * 496, *[(20, 2000)] * 4), reads_answers=True)
    assert longest_of(plan.config) == 96 and plan.chosen["max_len"].endswith("; 4 of them are cut or left out")
    assert "4 cut at the longest document (max_len)" in plan.text
    corpus = read_corpus(plan.config.answers, longest_of(plan.config), 0.0)
    assert corpus.num_cut == 4 and "4 cut" in corpus.left_out_text


def test_a_given_length_stays(tmp_path: Path) -> None:
    plan = make_plan(train_config(tmp_path, (100, 60), (100, 60), max_len=128))
    assert plan.config.max_len == 128 and "max_len" not in plan.chosen


def test_the_length_is_within_context_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = train_config(tmp_path, *[(40_000, 500)] * 3)
    fitted, why = fit_lengths(config, [Limit(32_768, "the target's context is 32,768 tokens"), Limit(50_000, "memory")])
    assert fitted.max_len == 32_768 and why["max_len"].startswith("the target's context is 32,768 tokens, and 99%")
    assert why["max_len"].endswith("the longest has 40,500 tokens; 3 of them are cut or left out")
    assert make_plan(config).config.max_len == 32_768, "of qwen2.5-coder-0.5b"
    small = replace(LAPTOP, memory_bytes=3 * 2**30)
    monkeypatch.setattr(facts, "_measured_once", lambda device: facts.MachineFacts(small))
    plan = make_plan(config)
    assert LEAST_LIMIT <= longest_of(plan.config) < 32_768 and plan.chosen["max_len"].startswith("memory holds")
    assert plan.memory_bytes <= small.memory_bytes
    full = replace(LAPTOP, memory_bytes=2**20)
    monkeypatch.setattr(facts, "_measured_once", lambda device: facts.MachineFacts(full))
    assert longest_of(make_plan(config).config) == LEAST_LIMIT, "an estimate takes no more away"


def test_answers_that_the_run_generates_have_room(tmp_path: Path) -> None:
    """Held-out prompts are answered too, up to the limits of prompt and answer."""
    config = train_config(tmp_path, *[(20, 76)] * 30)
    assert with_length(config).max_len == 96
    for more in ({"heldout": ("a.jsonl",)}, {"ood": ("a.jsonl",)}, {"prompting": PromptsConfig(("a.jsonl",))}):
        assert with_length(replace(config, **more)).max_len == 512 + 256
    longer = train_config(tmp_path / "longer", *[(2000, 76)] * 30, heldout=("a.jsonl",))
    assert with_length(longer).max_len == 2080


def test_a_run_without_a_plan_has_a_length_too(tmp_path: Path) -> None:
    config = train_config(tmp_path, *[(1500, 60)] * 30, plan="off")
    assert make_plan(config).config.max_len == 1568 == with_length(config).max_len
    missing = TrainConfig(tmp_path / "run", answers=(tmp_path / "later",))
    assert with_length(missing).max_len == 512 + 256, "answers that do not exist yet"


@pytest.mark.parametrize("has_plan", [True, False])
def test_a_run_that_an_earlier_version_began_keeps_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_plan: bool
) -> None:
    """Its plan has no max_len where the default, then 1,024, was used; its run file has one."""

    def fails(config: TrainConfig) -> Any:
        raise ModelNotFoundError("a target without known sizes")

    config = train_config(tmp_path, *[(1500, 60)] * 30)
    config.out.mkdir()
    if has_plan:
        (config.out / "plan.json").write_text(json.dumps({"values": {}}))
    monkeypatch.setattr(train_run, "make_plan", fails)
    assert planned(config).max_len == 1568
    write_run_file(replace(config, max_len=1024))
    assert planned(config).max_len == 1024
    assert planned(replace(config, max_len=512)).max_len == 512, "given now"
    (config.out / RUN_FILE).write_text("[")
    with pytest.raises(ConfigError, match="run.yaml cannot be read .*: remove it"):
        planned(config)


def planned(config: TrainConfig) -> TrainConfig:
    return train_run._planned(config, Ranks(), lambda: None, Progress())
