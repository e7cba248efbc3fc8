"""The run `regenerate`: prompts in, a run folder of answers out; run again, it goes on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from regenerated import questions
from small_llm import Talker, fake_llm, tiny_model

from paceline import train
from paceline.commands import train as command
from paceline.commands.shared import TerminalProgress
from paceline.config import EngineConfig
from paceline.data.answers import AnswerShards
from paceline.errors import CacheError, ConfigError, PromptError
from paceline.runs.folder import plain
from paceline.train import config as config_module
from paceline.train.answers import regenerate as regenerate_run
from paceline.train.answers import self_written
from paceline.train.answers.regenerate import Regenerator
from paceline.train.config import AnswerConfig, PromptsConfig, RegenerateConfig
from paceline.types import SamplingParams

CONFIG = AnswerConfig(max_tokens=10, max_prompt_tokens=60)


@pytest.fixture
def talking(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Instead of loading a model, a talker; the engines that were asked for."""
    configs: list[EngineConfig] = []

    def load(engine: EngineConfig) -> Any:
        configs.append(engine)
        assert engine.max_len is not None
        return fake_llm(Talker(max_len=engine.max_len))

    monkeypatch.setattr(regenerate_run, "_load", load)
    return configs


FAKE = EngineConfig(model="fake", device="cpu", dtype="float32")


def ask(
    out: Path,
    *prompts: str,
    target: EngineConfig = FAKE,
    answering: AnswerConfig = CONFIG,
    max_batch: int = 32,
    **options: Any,
) -> RegenerateConfig:
    return RegenerateConfig(out, target, PromptsConfig(prompts, **options), answering, max_batch=max_batch)


def regenerate(config: RegenerateConfig) -> dict[str, Any]:
    """The figures, while the terminal shows the run."""
    return plain(train.regenerate(config, progress=TerminalProgress()))


@pytest.mark.slow
def test_a_model_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = EngineConfig(str(tiny_model(tmp_path / "model")), device="cpu", dtype="float32")
    answering = AnswerConfig(max_tokens=10, max_prompt_tokens=60, temperatures=(0.0, 1.0), seed=5)
    line = regenerate(
        ask(tmp_path / "run", questions(tmp_path), target=target, answering=answering, limit=4, max_batch=3)
    )
    answers = list(AnswerShards(tmp_path / "run" / "answers"))
    assert len(answers) == line["num_answers"] == 8
    assert sum(len(answer.answer_ids) for answer in answers) == line["num_tokens"]
    assert line["answers"] == str(tmp_path / "run" / "answers") and line["tokens_per_s"] > 0 == line["num_too_long"]
    captured = capsys.readouterr()
    assert "KV cache" in captured.err
    assert re.search(rf"8 answers, {line['num_tokens']} tokens in \d+ s: \d+ tokens/s", captured.err)
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["what"] == "regenerate" and written["regenerate"]["temperatures"] == [0.0, 1.0]
    assert (tmp_path / "run" / "command.txt").is_file()
    (figures,) = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert figures["num_answers"] == 8 and figures["stage"] == "regenerate"


@pytest.mark.slow
def test_the_engine_it_asks_for(tmp_path: Path, talking: list[EngineConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    file = questions(tmp_path)
    regenerate(ask(tmp_path / "one", file))
    assert talking[-1] == replace(FAKE, drafter="none", max_batch=32, max_len=80)
    monkeypatch.setenv("WORLD_SIZE", "2")
    regenerate(ask(tmp_path / "two", file, max_batch=5))
    assert (talking[-1].threads, talking[-1].max_batch) == (1, 5)
    regenerate(ask(tmp_path / "three", file, target=replace(FAKE, threads=4)))
    assert talking[-1].threads == 4


def test_files_are_shuffled_together(tmp_path: Path, talking: list[EngineConfig]) -> None:
    first, second = questions(tmp_path, "a.jsonl", 12), questions(tmp_path, "b.jsonl", 12, "Riddle")
    regenerate(ask(tmp_path / "run", first, second, limit=10))
    sources = [answer.source for answer in AnswerShards(tmp_path / "run" / "answers")]
    assert sorted(sources) == ["a.jsonl"] * 10 + ["b.jsonl"] * 10
    assert 2 <= sources[:10].count("a.jsonl") <= 8, "an interrupted run should have answered a mixture"


@pytest.mark.slow
def test_the_same_command_goes_on(
    tmp_path: Path, talking: list[EngineConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = questions(tmp_path)
    begun = ask(tmp_path / "run", file)
    step, steps = Regenerator._finish, []

    def killed(*arguments: Any) -> None:
        steps.append(arguments)
        if len(steps) == 4:
            raise KeyboardInterrupt
        step(*arguments)

    monkeypatch.setattr(Regenerator, "_finish", killed)
    with pytest.raises(KeyboardInterrupt):
        regenerate(begun)
    config = (tmp_path / "run" / "config.json").read_text()
    line = regenerate(begun)
    assert (line["num_found"], line["num_answers"]) == (3, 3)
    assert "3 conversations had been answered before" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.json").read_text() == config
    regenerate(ask(tmp_path / "whole", file))
    whole, parts = (
        sorted(answer.key + answer.text for answer in AnswerShards(tmp_path / run / "answers"))
        for run in ("whole", "run")
    )
    assert parts == whole
    # what does not change the answers may change
    assert regenerate(replace(begun, max_batch=2))["num_answers"] == 0


def test_other_settings_are_refused_and_shown(tmp_path: Path, talking: list[EngineConfig]) -> None:
    file = questions(tmp_path)
    regenerate(ask(tmp_path / "run", file))
    for changes, message in [
        ({"answering": AnswerConfig(12, 60)}, "max_tokens: 10 there, 12 now"),
        (
            {"answering": AnswerConfig(10, 60, (0.0, 0.7), 3)},
            "seed: 0 there, 3 now",
        ),
        ({"target": replace(FAKE, model="other")}, "target: 'fake' there, 'other' now"),
        ({"answering": AnswerConfig(10, 60, (0.7,))}, r"temperatures: \[0.0\] there, \[0.7\] now"),
        ({"limit": 3}, "limit: None there, 3 now"),
    ]:
        with pytest.raises(ConfigError, match=rf"run was begun with other settings \(.*{message}.*use the same"):
            regenerate(ask(tmp_path / "run", file, **changes))
    assert len(talking) == 1, "refused before a model is loaded"
    (tmp_path / "run" / "config.json").write_text('{"what": "bench-decode"}')
    with pytest.raises(ConfigError, match=r"the folder of another run \(bench-decode\)"):
        regenerate(ask(tmp_path / "run", file))
    for damaged in ("{", "[]"):
        (tmp_path / "run" / "config.json").write_text(damaged)
        with pytest.raises(ConfigError, match="cannot be read"):
            regenerate(ask(tmp_path / "run", file))


@pytest.mark.slow
def test_a_run_may_be_extended(tmp_path: Path, talking: list[EngineConfig], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = questions(tmp_path, "a.jsonl", 6), questions(tmp_path, "b.jsonl", 3, "Riddle")
    begun = ask(tmp_path / "run", first, limit=4)
    assert regenerate(begun)["num_answers"] == 4
    more = [
        ({"limit": 6}, (4, 2)),
        ({"prompts": (first, second), "limit": None}, (6, 3)),
        ({"temperatures": (0.0, 0.9)}, (9, 9)),
        ({"samples": 2}, (18, 9)),
        ({"self_written": 2}, (27, 6)),
    ]
    for changes, (num_found, new) in more:
        prompt_changes = {name: changes.pop(name) for name in ("limit", "prompts", "self_written") if name in changes}
        answering = replace(begun.answering, max_prompt_tokens=60, **changes)
        begun = replace(begun, prompting=replace(begun.prompting, **prompt_changes), answering=answering)
        line = regenerate(begun)
        assert (line["num_found"], line["num_answers"]) == (num_found, new), changes
        assert "the run is extended" in capsys.readouterr().err
    assert regenerate(begun)["num_answers"] == 0 and "the run is extended" not in capsys.readouterr().err
    with pytest.raises(ConfigError, match="samples: 2 there, None now"):
        regenerate(replace(begun, answering=replace(begun.answering, samples=1)))


@pytest.mark.slow
def test_without_prompts_the_target_writes_them(
    tmp_path: Path, talking: list[EngineConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "DEFAULT_SELF_WRITTEN", 7)
    (tmp_path / "openers.txt").write_text("How do I\nPlease write\n")
    answering = AnswerConfig(max_tokens=10, max_prompt_tokens=200)
    begun = ask(tmp_path / "run", answering=answering, openers=tmp_path / "openers.txt")
    line = regenerate(begun)
    assert line["num_answers"] == 7 and (talking[-1].max_len or 0) >= 200 + self_written.MAX_TOKENS
    rows = [json.loads(row) for row in (tmp_path / "run" / "self-written-r0.jsonl").read_text().splitlines()]
    assert len(rows) == 7 and any(row["prompt"].startswith(("How do I", "Please write")) for row in rows)
    assert {answer.source for answer in AnswerShards(tmp_path / "run" / "answers")} == {"self-written-r0.jsonl"}
    assert "self-written prompts dropped: " in capsys.readouterr().err
    assert regenerate(begun)["num_found"] == 7


@pytest.mark.slow
def test_two_processes_share_the_work(
    tmp_path: Path, talking: list[EngineConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = questions(tmp_path)
    both = ask(
        tmp_path / "run", file, file, answering=AnswerConfig(max_tokens=10, max_prompt_tokens=200), self_written=3
    )
    lines = []
    for rank in (1, 0):  # any of them may be first
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(value))
        lines.append(regenerate(both))
        command.regenerate(
            config=both,
            target=both.target,
            prompting=both.prompting,
            answering=both.answering,
            remote=both.remote,
            as_json=True,
        )
        assert (tmp_path / "run" / "config.json").is_file() == (rank == 0)
    answers = list(AnswerShards(tmp_path / "run" / "answers"))
    assert [line["num_answers"] for line in lines] == [4, 5]
    assert len({answer.key for answer in answers}) == len(answers) == 9, "a file given twice is answered once"
    own = [(tmp_path / "run" / f"self-written-r{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
    assert [len(rows) for rows in own] == [2, 1]
    assert len({json.loads(row)["prompt"] for row in own[0] + own[1]}) == 3
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 1
    captured = capsys.readouterr()
    assert "process 1: 4 answers" in captured.err and captured.out.count("\n") == 1, "only the first one prints JSON"
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="processes: 2 there, 3 now"):
        regenerate(both)


def test_what_cannot_be_answered(
    tmp_path: Path, talking: list[EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(json.dumps({"prompt": "x" * 100}) + '\n{"turns": ["Hi", "' + "y" * 80 + '"]}\n')
    answering = AnswerConfig(max_tokens=40, max_prompt_tokens=60)
    line = regenerate(ask(tmp_path / "mixed", str(mixed), answering=answering))
    assert (line["num_answers"], line["num_too_long"], line["num_cut_short"]) == (1, 1, 1)
    output = capsys.readouterr().err
    assert "1 conversations left out: prompt longer than 60 tokens, the longest 118" in output
    assert "1 conversations ended early" in output
    mixed.write_text(json.dumps({"prompt": "x" * 100}) + "\n")
    with pytest.raises(
        PromptError, match="1 have a prompt longer than 60 tokens, the longest 118: raise max_prompt_tokens"
    ):
        regenerate(ask(tmp_path / "long", str(mixed), answering=answering))


def test_messages_count_conversations_and_not_prompts(
    tmp_path: Path, talking: list[EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """At three temperatures, one prompt that is too long and one with unknown tokens were counted three times."""
    mixed = tmp_path / "mixed.jsonl"
    rows = {"prompt": "x" * 100}, {"prompt_ids": [1, 10**6]}, {"prompt": "Hi"}
    mixed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answering = AnswerConfig(max_tokens=10, max_prompt_tokens=60, temperatures=(0.0, 0.5, 1.0))
    line = regenerate(ask(tmp_path / "run", str(mixed), answering=answering))
    assert (line["num_answers"], line["num_too_long"]) == (3, 3)
    output = capsys.readouterr().err
    assert "3 conversations left out: prompt longer than 60 tokens" in output
    assert "3 conversations left out: 3 with tokens that the target does not have (" in output


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(PromptError, match="holds no prompts"):
        regenerate(ask(tmp_path / "run", str(empty)))
    empty.write_text('{"prompt": "fine"}\n{"prompt": 3}\n')
    with pytest.raises(PromptError, match="line 2: 'prompt' must be text"):
        regenerate(ask(tmp_path / "run", str(empty), strict=True))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="0 or more"):
        ask(tmp_path / "run", self_written=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="choose another folder with --out"):
        regenerate(ask(tmp_path / "file" / "run", questions(tmp_path)))
    model = str(tiny_model(tmp_path / "model", max_position=64))
    with pytest.raises(ConfigError, match=r"beyond the model's 64 tokens: .* lower max_prompt_tokens or max_tokens"):
        regenerate(ask(tmp_path / "short", questions(tmp_path), target=replace(FAKE, model=model)))


def test_rows_left_out_are_told_and_logged(
    tmp_path: Path, talking: list[EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mixed.jsonl"
    file.write_text('{"prompt": "fine"}\n{"prompt": 3}\n{half\n')
    assert regenerate(ask(tmp_path / "run", str(file)))["num_answers"] == 1
    assert "2 rows left out: 1 malformed (" in capsys.readouterr().err
    (figures,) = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert figures["rows_dropped"] == {"malformed": 1, "not JSON": 1}


@pytest.mark.parametrize(
    ("has_prompts", "options", "message"),
    [
        (True, {"openers": Path("openers.txt")}, "openers means nothing without self_written prompts"),
        (False, {"limit": 5}, "limit means nothing without prompts to read"),
        (False, {"strict": True}, "strict means nothing without prompts to read"),
        (False, {"tags": ("acme",)}, "tags means nothing without prompts to read"),
    ],
)
def test_settings_of_prompts_that_select_nothing_are_refused(
    has_prompts: bool, options: dict[str, Any], message: str, tmp_path: Path, talking: list[EngineConfig]
) -> None:
    """--limit 5 without --prompts let the target write a thousand prompts."""
    with pytest.raises(ConfigError, match=message):
        regenerate(ask(tmp_path / "run", *([questions(tmp_path)] if has_prompts else []), **options))


@pytest.mark.slow
def test_answers_at_a_temperature_are_those_of_its_seed(tmp_path: Path) -> None:
    """The figures above come from fakes; here the engine itself is asked again for each stored answer."""
    target = replace(FAKE, model=str(tiny_model(tmp_path / "model")))
    answering = AnswerConfig(max_tokens=10, max_prompt_tokens=60, temperatures=(0.8,))
    regenerate(ask(tmp_path / "run", questions(tmp_path), target=target, answering=answering, max_batch=4))
    llm = regenerate_run._load(replace(target, drafter="none", max_len=80))
    from zlib import crc32

    for answer in AnswerShards(tmp_path / "run" / "answers"):
        params = SamplingParams(temperature=0.8, max_tokens=10, seed=crc32(answer.key.encode()))
        (again,) = llm.generate_ids([answer.prompt_ids], params)
        assert again.token_ids == answer.answer_ids
