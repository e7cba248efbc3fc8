"""Rows that cannot be used are counted wherever they stand, and a plan says which they are before a weight is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from small_llm import tiny_model

from paceline import LLM
from paceline.cli import app
from paceline.config import EngineConfig
from paceline.data.prompts import read_prompts
from paceline.data.rows import MAX_LINE_BYTES, Dropped
from paceline.errors import ConfigError, PromptError
from paceline.report.tables import ignore
from paceline.runs.ranks import Ranks
from paceline.runs.stopping import Stop
from paceline.train.answers.mixture import read_mixture
from paceline.train.answers.prompt_tokens import REFUSED, TOO_LONG
from paceline.train.answers.regenerate import run as regenerate
from paceline.train.config import AnswerConfig, PromptsConfig, RegenerateConfig, TrainConfig
from paceline.train.documents.dataset import check_answers, read_corpus
from paceline.train.plan.lengths import fit_lengths, with_length
from paceline.train.plan.training_plan import make_plan
from paceline.train.run import _Stages
from paceline.types import SamplingParams

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
GOOD = {"input_ids": [1, 40, 41, 42, 2], "loss_mask": [0, 0, 1, 1, 1]}


def write(file: Path, *rows: Any) -> Path:
    file.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return file


def target(folder: Path, template: str | None = NO_SYSTEM) -> EngineConfig:
    """A tiny model with this chat template."""
    words = tiny_model(folder) / "tokenizer_config.json"
    words.write_text(json.dumps({"eos_token": "<|im_end|>"} | ({"chat_template": template} if template else {})))
    return EngineConfig(str(folder), dtype="float32", device="cpu", drafter="none")


LOSING = [
    ({"question": "Who wrote it?", "context": "Emma.", "answers": {"text": ["Jane"]}}, ["context"]),
    ({"question": "Capital of Peru?", "choices": ["Lima", "Cusco"], "answer": 0}, ["choices"]),
    ({"question": "Which?", "options": {"A": "x"}, "answer_idx": "A"}, ["options"]),
    ({"instruction": "Summarise.", "context": "A text.", "response": "r"}, ["context"]),
    ({"instruction": "Sort.", "input": ["b", "a"]}, ["input"]),
    ({"instruction": "Sort.", "instances": [{"input": "b a"}, {"input": "d c"}]}, ["instances"]),
    ({"system_prompt": "Be brief.", "question": "Why?", "response": "r"}, ["system_prompt"]),
    ({"prompt": "Say hi.", "system": 3}, ["system"]),
    ({"prompt": "Go on.", "history": [["a", "b"]]}, ["history"]),
    ({"prompt": "Go on.", "documents": [{"text": "d"}]}, ["documents"]),
    ({"prompt": "Go on.", "images": ["a.png"]}, ["images"]),
    ({"prompt": "Give JSON.", "response_format": {"type": "json_object"}}, ["response_format"]),
    ({"text": "Write f.", "code": "x", "test_list": ["assert f()"]}, ["test_list"]),
    ({"prompt": "What does this do?", "code": "f()"}, ["code"]),
    ({"text": "Write f.", "test": "assert f()"}, ["test"]),
    ({"instruction": "Translate.", "source": "Guten Tag."}, ["source"]),
    ({"question": "Which of them is right?", "references": ["a", "b"]}, ["references"]),
    ({"prompt": "Fill it in.", "template": "Dear {name}"}, ["template"]),
    ({"prompt": "Write f.", "language": "Rust"}, ["language"]),
    ({"messages": [{"role": "user", "content": "a", "weight": 0}]}, ["messages[].weight"]),
    ({"messages": [{"role": "user", "content": "a"}], "functions": [{"name": "f"}]}, ["functions"]),
    ({"messages": [{"role": "user", "content": "a"}], "prompt": "b"}, ["prompt"]),
    (
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "a"}], "system": "y"},
        ["system"],
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "system", "content": "x"},
                {"role": "user", "content": "b"},
            ]
        },
        ["messages of role system after the first turn"],
    ),
    ({"conversations": [{"from": "human", "value": "a", "weight": 0}]}, ["conversations[].weight"]),
]


@pytest.mark.parametrize(("row", "keys"), LOSING)
def test_keys_that_are_not_read_are_counted_and_refused_when_strict(tmp_path: Path, row: Any, keys: list[str]) -> None:
    file, dropped = write(tmp_path / "a.jsonl", row, row, {"prompt": "fine", "id": 1, "answer": "x"}), Dropped()
    prompts = read_prompts(file, dropped=dropped)
    assert len(prompts) == 3 and dropped.unread == dict.fromkeys(keys, 2)
    assert "reason step by step" not in prompts[0].turns[0]
    assert dropped.unread_text == f"not read: {keys[0]} (2 rows)"
    with pytest.raises(PromptError, match="line 1: not read: "):
        read_mixture(PromptsConfig((str(file),), strict=True), 0, ignore)


READ = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "c"}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "refusal": "No."}]},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "tool", "content": "3", "name": "f"},
        ]
    },
    {"prompt": "def f():", "entry_point": "f", "test": "assert f()", "canonical_solution": "x"},
    {"prompt": "def f():", "entry_point": "f", "test": "assert f()", "code": "x"},
]


@pytest.mark.parametrize("row", READ)
def test_keys_that_are_read_are_not_refused_when_strict(tmp_path: Path, row: Any) -> None:
    dropped = Dropped()
    read_prompts(write(tmp_path / "a.jsonl", row), dropped=dropped, strict=True)
    assert not dropped.unread


def test_keys_that_are_not_read_are_told_once_for_each_source(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"question": "a?", "context": "c", "choices": [1]},
        {"question": "b?", "context": "c"},
        {"question": "c?", "choices": []},
    ]
    notes: list[str] = []
    file = write(tmp_path / "a.jsonl", *rows)
    read_mixture(PromptsConfig((str(file),)), 0, notes.append)
    assert notes == [f"{file}: not read: context (2 rows), choices (1)"]
    read_prompts(file)
    assert caplog.messages == [f"{file}: not read: context (2 rows), choices (1)"], "benchmarks are told too"


def test_tools_of_a_row_without_messages_are_read(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    (prompt,) = read_prompts(write(tmp_path / "a.jsonl", {"prompt": "Call f.", "tools": [tool]}))
    assert prompt.tools == (tool,)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": "f"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        {"prompt_ids": [1, 2**40]},
        {"prompt": "a", "chat_template_kwargs": {"messages": []}},
        '{"prompt": "' + MAX_LINE_BYTES * "x" + '"}',
    ],
    ids=["calls as text", "a call without a name", "no token id", "other messages", "a long line"],
)
def test_a_row_that_a_template_could_not_take_is_counted(tmp_path: Path, row: Any) -> None:
    dropped = Dropped()
    file = write(tmp_path / "a.jsonl", row, {"prompt": "fine"})
    assert [prompt.turns for prompt in read_prompts(file, dropped=dropped)] == [("fine",)]
    assert dropped.counts.total() == 1


def test_a_name_that_no_file_takes_does_not_end_the_run(tmp_path: Path) -> None:
    """Answers are written under the row's name: half of a surrogate pair would make the whole shard fail."""
    file = write(tmp_path / "a.jsonl", {"id": "\ud800", "prompt": "Say hi."})
    config = RegenerateConfig(
        tmp_path / "run", target(tmp_path / "model"), PromptsConfig((str(file),)), AnswerConfig(4, 64)
    )
    assert regenerate(config, quiet()).num_answers == 1


def quiet() -> Any:
    from paceline.report.tables import Progress

    return Progress()


@pytest.mark.slow
def test_a_prompt_that_the_template_refuses_does_not_end_the_run(tmp_path: Path) -> None:
    rows = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]}, {"prompt": "Say hi."}
    file = write(tmp_path / "a.jsonl", *rows)
    config = RegenerateConfig(
        tmp_path / "run", target(tmp_path / "model"), PromptsConfig((str(file),)), AnswerConfig(4, 64)
    )
    done = regenerate(config, quiet())
    assert done.num_answers == 1 and done.refused.counts == {REFUSED: 1}
    assert f"{file}, line 1: " in done.refused.examples[REFUSED]
    strict = replace(config, out=tmp_path / "strict", prompting=replace(config.prompting, strict=True))
    with pytest.raises(PromptError, match="line 1: the model's chat template failed"):
        regenerate(strict, quiet())


def test_prompts_of_tokens_in_json_lines_are_asked(tmp_path: Path) -> None:
    rows = [
        {"prompt_ids": [10, 20, 30, number], "answer_ids": [5, 6], "text": "of another model"} for number in range(3)
    ]
    file = write(tmp_path / "a.jsonl", *rows, {"prompt_ids": [1, 99_999]})
    config = RegenerateConfig(
        tmp_path / "run", target(tmp_path / "model"), PromptsConfig((str(file),)), AnswerConfig(4, 64)
    )
    done = regenerate(config, quiet())
    assert done.num_answers == 3 and done.refused.counts == {"with tokens that the target does not have": 1}


def test_a_training_on_prompts_of_tokens_learns_from_the_targets_answers(tmp_path: Path) -> None:
    prompts, others = [[10, 20, 30, number] for number in range(3)], {"answer_ids": [5, 6], "text": "of another model"}
    file = write(tmp_path / "a.jsonl", *({"prompt_ids": prompt, **others} for prompt in prompts))
    source, answering = PromptsConfig((str(file),)), AnswerConfig(4, 64)
    config = TrainConfig(tmp_path / "run", target(tmp_path / "model"), source, answering=answering)
    assert make_plan(config).data.prompts == 3
    stages = _Stages(with_length(config), Ranks(), lambda: None, quiet(), Stop(quiet().say))
    answers, _, _ = stages._answers()
    documents = stages._corpus(answers, None).train
    llm = LLM(config.target.model, drafter="none", dtype="float32", device="cpu")
    generated = llm.generate_ids(prompts, SamplingParams(max_tokens=4, temperature=0.0))
    expected = [prompt + answer.token_ids for prompt, answer in zip(prompts, generated, strict=True)]
    assert sorted(document.tokens.tolist() for document in documents) == sorted(expected)
    assert {document.answer_start for document in documents} == {4}


def test_other_keys_of_prompts_of_tokens_are_counted(tmp_path: Path) -> None:
    """Columns of our own files are none of them."""
    from paceline.loop.store.incoming import STORED
    from paceline.serve.admin.traces import SCHEMA

    own = dict.fromkeys([*SCHEMA.names, *STORED.names, "id", "scorer", "origin"], "x") | {"prompt_ids": [1, 2]}
    other = {"prompt_ids": [1, 2], "system": "Be brief.", "context": "c", "tools": []}
    dropped = Dropped()
    assert len(read_prompts(write(tmp_path / "a.jsonl", own, other), dropped=dropped)) == 2
    assert dropped.unread == {"system": 1, "context": 1} and not dropped.counts
    with pytest.raises(PromptError, match="line 2: not read: system, context"):
        read_prompts(tmp_path / "a.jsonl", strict=True)


def test_a_base_model_is_asked_raw_or_refused_with_the_option(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"text": "Once upon a time"})
    base = target(tmp_path / "model", None)
    config = RegenerateConfig(tmp_path / "run", base, PromptsConfig((str(file),)), AnswerConfig(4, 64))
    with pytest.raises(ConfigError, match="no chat template: --raw asks"):
        regenerate(config, quiet())
    raw = replace(config, out=tmp_path / "raw", answering=replace(config.answering, raw=True))
    assert regenerate(raw, quiet()).num_answers == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"input_ids": [1, 40, 41, 42, 2], "loss_mask": [0] * 5},
        {"input_ids": [1, 40, 41, 42, 2], "loss_mask": [0, 1]},
        {"input_ids": [1.5, 2.0], "loss_mask": [1, 1]},
        {"input_ids": [1, 2, 2**31], "loss_mask": [1, 1, 1]},
        {"input_ids": [1, 2, -1], "loss_mask": [1, 1, 1]},
        '{"input_ids": [1, 40',
    ],
)
def test_a_bad_row_of_answers_is_counted_wherever_it_stands(tmp_path: Path, bad: Any) -> None:
    first = write(tmp_path / "first.jsonl", *[bad] * 9, *[GOOD] * 40)
    check_answers([first])
    assert read_corpus([first], 64).dropped.counts.total() == 9
    with pytest.raises(PromptError, match="line 1"):
        check_answers([first], strict=True)
    none = write(tmp_path / "none.jsonl", bad, bad)
    with pytest.raises(PromptError, match="there are no answers in .*2 rows left out"):
        check_answers([none])


def test_a_row_without_tokens_in_parquet_is_counted(tmp_path: Path) -> None:
    from paceline.data.answers import SCHEMA

    row = {"key": "a@0", "source": "s", "turn": 0, "temperature": 0.0, "prompt_ids": [1, 2], "answer_ids": [3, 4, 5]}
    row |= {"finish_reason": "stop", "text": "x"}
    file = tmp_path / "answers-r0-00000.parquet"
    parquet.write_table(pa.Table.from_pylist([row | {"key": "b@0", "prompt_ids": None}, row], SCHEMA), file)
    for source in (file, tmp_path):
        corpus = read_corpus([source], 64)
        assert len(corpus.train) == 1 and corpus.dropped.counts == {"without token ids": 1}


def test_one_document_with_an_unknown_token_is_left_out_many_are_another_models(tmp_path: Path) -> None:
    from paceline.train.documents.store import known_only

    odd = {"input_ids": [1, 40, 900, 42], "loss_mask": [0, 0, 1, 1]}
    corpus = known_only(read_corpus([write(tmp_path / "a.jsonl", odd, *[GOOD] * 20)], 64), 258)
    assert len(corpus.train) + len(corpus.heldout) == 20
    assert corpus.dropped.counts == {"with tokens that the target does not have": 1}
    with pytest.raises(PromptError, match="another model wrote these answers"):
        known_only(read_corpus([write(tmp_path / "b.jsonl", *[odd] * 5, *[GOOD] * 20)], 64), 258)


def test_a_plan_says_what_is_left_out_and_shows_a_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": "Say hi.", "context": "c"}, {"foo": 1}, {"prompt": "long " * 200}]
    rows += [{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]}]
    file = write(tmp_path / "a.jsonl", *rows)
    config = TrainConfig(tmp_path / "run", target(tmp_path / "model"), PromptsConfig((str(file),)))
    plan = make_plan(config)
    assert plan.data.prompts == 1 and plan.data.unread == {"context": 1}
    assert plan.data.left_out == {"of unknown shape": 1, TOO_LONG: 1, REFUSED: 1}
    assert "3 rows left out" in plan.text and "not read: context (1 rows)" in plan.text
    assert "'<|im_start|>user\\nSay hi.<|im_end|>\\n'" in plan.text
    with pytest.raises(PromptError, match="line 1: not read: context"):
        make_plan(replace(config, prompting=replace(config.prompting, strict=True)))
    refused = write(tmp_path / "b.jsonl", rows[3])
    with pytest.raises(PromptError, match="line 1: the model's chat template failed"):
        make_plan(replace(config, prompting=PromptsConfig((str(refused),), strict=True)))


@pytest.mark.slow
def test_a_dry_run_says_that_the_target_has_no_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, base = write(tmp_path / "a.jsonl", {"prompt": "Say hi."}), target(tmp_path / "model", None)
    words = ["train", "--target", base.model, "--prompts", str(file), "--dry-run"]
    app(words, prog_name="paceline", standalone_mode=False)
    assert "no chat template: --raw asks every prompt as it stands" in capsys.readouterr().err
    app([*words, "--raw"], prog_name="paceline", standalone_mode=False)
    assert "no chat template" not in (output := capsys.readouterr().err) and "'Say hi.'" in output


def test_a_dry_run_counts_answers_that_are_there(tmp_path: Path) -> None:
    answers = write(tmp_path / "a.jsonl", {"input_ids": [1]}, *[GOOD] * 3)
    plan = make_plan(TrainConfig(tmp_path / "run", target(tmp_path / "model"), answers=(answers,)), reads_answers=True)
    assert "answers that exist already: 3 documents, 1 rows left out: 1 without a loss mask" in plan.text


def test_max_len_has_room_for_the_longest_prompt_and_its_answer(tmp_path: Path) -> None:
    """Prompts longer than max_len would be answered, and the answers thrown away."""
    prompts = PromptsConfig(("a.jsonl",))
    wide = TrainConfig(tmp_path, prompting=prompts, answering=AnswerConfig(max_prompt_tokens=2000))
    config, why = fit_lengths(wide)
    assert config.max_len == 2256 and [*why] == ["max_len"]
    config, why = fit_lengths(TrainConfig(tmp_path, prompting=prompts, max_len=512))
    assert config.answering.max_prompt_tokens == 256 and [*why] == ["answering.max_prompt_tokens"]
    with pytest.raises(ConfigError, match="raise max_len to 2256, or lower max_prompt_tokens to 768"):
        fit_lengths(replace(wide, max_len=1000 + 24, given=("max_len", "answering.max_prompt_tokens")))
    config, why = fit_lengths(TrainConfig(tmp_path, prompting=prompts))
    assert config.max_len == 512 + 256 and why == {"max_len": "the longest prompt and its answer"}


def test_a_prompt_that_fills_the_longest_document_is_counted_as_such(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(80)), "labels": [-100] * 70 + list(range(70, 80))}, GOOD]
    corpus = read_corpus([write(tmp_path / "a.jsonl", *rows)], 64)
    assert (corpus.num_prompt_too_long, corpus.num_too_short, len(corpus.train)) == (1, 0, 1)
    assert "1 left out: prompt longer than the longest document (max_len)" in corpus.left_out_text
    with pytest.raises(PromptError, match="1 left out: prompt longer than the longest document"):
        read_corpus([write(tmp_path / "b.jsonl", rows[0])], 64)
