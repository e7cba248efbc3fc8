"""Answers of a server elsewhere: those that the target would have given here, or none; and a server that has its bad
days."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from elsewhere_server import Elsewhere, served
from regenerated import by_place, questions

from paceline import train
from paceline.commands.shared import TerminalProgress
from paceline.config import EngineConfig
from paceline.data.answers import AnswerShards
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, DownloadError
from paceline.net import retrying as client_module
from paceline.net.retrying import KEY, Client
from paceline.train.answers.remote_target import remote_target_of
from paceline.train.config import AnswerConfig, PromptsConfig, RegenerateConfig, RemoteConfig

WORDS = ["alpha", "be", "gamma ray", "delta", "Épsilon", "{zeta}", "\n", "42"]
CONFIG = AnswerConfig(max_tokens=24, max_prompt_tokens=120, temperatures=(0.0, 0.8), seed=5)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), drafter="none", dtype="float32", device="cpu", max_batch=4)


@pytest.fixture
def fake(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", KEY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(client_module, "LONGEST_PAUSE_S", 0.05)
    with served(Elsewhere(llm)) as one:
        yield one


def ask(
    out: Path,
    model: Path,
    file: str,
    url: str | None,
    config: AnswerConfig = CONFIG,
    patience: float = 5.0,
    **more: Any,
) -> RegenerateConfig:
    """`patience`: in minutes."""
    target = EngineConfig(str(model), device="cpu", dtype="float32")
    elsewhere = RemoteConfig(answers_from=url, patience_minutes=patience, **more) if url else RemoteConfig()
    return RegenerateConfig(out, target, PromptsConfig((file,)), config, remote=elsewhere)


def in_words(tokenizer: Any) -> Any:
    """Text that encodes to itself, other for each prompt and seed."""

    def reply(prompt_ids: list[int], body: dict[str, Any]) -> list[int]:
        number = crc32(repr((prompt_ids, body["seed"], body["temperature"])).encode())
        text = " ".join(WORDS[(number >> shift) % 8] for shift in (0, 3, 6))
        ids = tokenizer.encode(text, add_special_tokens=False)
        return [*ids, *tokenizer.eos_token_ids] if number % 5 else ids

    return reply


@pytest.mark.slow
def test_its_tokens_are_those_of_this_machine(tmp_path: Path, model: Path, fake: Elsewhere) -> None:
    """And so are the keys and shards: what is trained on them is the same to the bit."""
    file = questions(tmp_path, number=7)
    train.regenerate(ask(tmp_path / "here", model, file, None))
    fake.gathers = 3
    done = train.regenerate(ask(tmp_path / "there", model, file, fake.url + "/v1"))
    here, there = (AnswerShards(tmp_path / name / "answers") for name in ("here", "there"))
    assert by_place(here) == by_place(there) and done.num_answers == 14 and not done.lost
    assert fake.most_at_once >= 3 and {body["model"] for body in fake.bodies} == {"the-model"}
    assert train.regenerate(ask(tmp_path / "there", model, file, fake.url)).num_found == 14


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ids", "plain ids", "text", "chat", "chat without ids"])
def test_ways_of_asking(tmp_path: Path, model: Path, llm: LLM, fake: Elsewhere, way: str) -> None:
    fake.reply = in_words(llm.tokenizer)
    fake.takes_extras, fake.takes_ids = way in ("ids", "chat"), "ids" in way and "chat" not in way
    fake.takes_text, fake.tells_ids = "chat" not in way, way in ("ids", "chat")
    done = train.regenerate(ask(tmp_path / "run", model, questions(tmp_path), fake.url))
    answers = list(AnswerShards(tmp_path / "run" / "answers"))
    assert done.num_answers == len(answers) == 12 and not done.lost
    for answer in answers:
        body = {"seed": 5 ^ crc32(answer.key.encode()), "temperature": answer.temperature}
        assert answer.answer_ids == fake.reply(answer.prompt_ids, body), "the end token too"
        assert answer.text == llm.tokenizer.decode(answer.answer_ids)
    last = fake.bodies[-1]
    assert ("messages" in last) == ("chat" in way) and isinstance(last.get("prompt", ""), str) == (
        way not in ("ids", "plain ids")
    )


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["counts", "prompt", "unreadable", "another tokenizer", "form"])
def test_answers_whose_tokens_are_not_known_are_left_out_and_counted(
    tmp_path: Path, model: Path, llm: LLM, fake: Elsewhere, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = in_words(llm.tokenizer)
    wrong = {3, 4}
    seen: list[int] = []

    def sometimes(prompt_ids: list[int], body: dict[str, Any]) -> list[int]:
        seen.append(1)
        is_wrong = len(seen) in wrong
        fake.off_by = 3 if is_wrong and fault == "counts" else 0
        return [0x80 ^ 7] * 5 if is_wrong and fault == "unreadable" else reply(prompt_ids, body)

    answer = fake._completed

    def completed(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        status, data = answer(path, body)
        content = json.loads(data)
        if len(seen) in wrong:
            if fault == "prompt":
                content["usage"]["prompt_tokens"] += 1
            elif fault == "form":
                content.pop("choices")
            elif fault == "another tokenizer":
                content["choices"][0]["token_ids"] = [5, 6, 7]
        return status, json.dumps(content).encode()

    fake.reply, fake._completed, fake.tells_ids = sometimes, completed, False
    greedy = replace(CONFIG, temperatures=(0.0,))
    done = train.regenerate(
        ask(tmp_path / "run", model, questions(tmp_path), fake.url, greedy, at_once=1), progress=TerminalProgress()
    )
    assert (done.num_answers, sum(done.lost.values())) == (4, 2) and "answers left out: 2 " in capsys.readouterr().err
    assert train.regenerate(ask(tmp_path / "run", model, questions(tmp_path), fake.url, greedy)).num_found == 4, (
        "asked again"
    )


@pytest.mark.slow
def test_a_server_that_is_down_for_a_while_costs_that_while(tmp_path: Path, model: Path, fake: Elsewhere) -> None:
    file = questions(tmp_path)
    fake.failures = [429, 503, 500]
    train.regenerate(ask(tmp_path / "whole", model, file, fake.url))
    reply = fake._generated

    def dying(prompt_ids: list[int], body: dict[str, Any]) -> list[int]:
        if len(fake.bodies) >= 5 and not fake.num_refused:
            fake.refuses = 8
        return reply(prompt_ids, body)

    fake.reply = dying
    fake.bodies.clear()
    done = train.regenerate(ask(tmp_path / "run", model, file, fake.url, at_once=2))
    assert fake.num_refused >= 8
    assert done.num_answers == 12 and not done.lost
    assert by_place(AnswerShards(tmp_path / "run" / "answers")) == by_place(
        AnswerShards(tmp_path / "whole" / "answers")
    )


@pytest.mark.slow
def test_patience_has_an_end_and_what_was_said_stays(tmp_path: Path, model: Path, fake: Elsewhere) -> None:
    file, reply = questions(tmp_path), fake._generated

    def dying(prompt_ids: list[int], body: dict[str, Any]) -> list[int]:
        if len(fake.bodies) >= 5:
            fake.refuses = 10**9
        return reply(prompt_ids, body)

    fake.reply = dying
    with pytest.raises(DownloadError, match="has not answered for 0.02 minutes .*: start it and run the same command"):
        train.regenerate(ask(tmp_path / "run", model, file, fake.url, patience=0.02, at_once=2))
    num_answers = len(list(AnswerShards(tmp_path / "run" / "answers")))
    assert 3 <= num_answers < 12
    fake.reply, fake.refuses = reply, 0
    assert train.regenerate(ask(tmp_path / "run", model, file, fake.url)).num_found == num_answers


@pytest.mark.slow
def test_the_key_comes_from_the_environment_alone(
    tmp_path: Path, model: Path, fake: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.key = "secret-key"
    file = questions(tmp_path, number=2)
    with pytest.raises(ConfigError, match=f"(set {KEY}|give served_name)"):
        train.regenerate(ask(tmp_path / "without", model, file, fake.url))
    monkeypatch.setenv(KEY, "secret-key")
    train.regenerate(ask(tmp_path / "run", model, file, fake.url))
    assert fake.keys[-1] == "Bearer secret-key"
    kept = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and b"secret-key" in path.read_bytes()]
    assert kept == [], "it is written nowhere"
    with pytest.raises(ConfigError, match="holds a password"):
        Client("http://me:secret@127.0.0.1:1", "answers_from", 1.0)
    for wrong in ("127.0.0.1:80", "ftp://host", "http://", "http://host:port", "http://host/?key=1"):
        with pytest.raises(ConfigError, match="is no address"):
            Client(wrong, "answers_from", 1.0)


def test_a_server_that_is_not_lossless_teaches_nothing(tmp_path: Path, model: Path, fake: Elsewhere) -> None:
    def mocked(method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes] | None:
        return (
            (200, json.dumps({"lossless": False, "choices": [{"text": "x"}]}).encode())
            if "completions" in path
            else None
        )

    fake.other = mocked
    with pytest.raises(ConfigError, match="says lossless: false, so its answers are not the model's own"):
        train.regenerate(ask(tmp_path / "run", model, questions(tmp_path, number=2), fake.url))


def test_redirects_are_not_followed(fake: Elsewhere) -> None:
    fake.other = lambda method, path, body: (302, b"elsewhere still")
    with pytest.raises(client_module.Refused, match="status 302"):
        Client(fake.url, "answers_from", 1.0).json("GET", "/v1/models")


def test_a_longer_answer_than_the_limit_is_refused_and_not_retried(fake: Elsewhere) -> None:
    paths: list[str] = []

    def answer(method: str, path: str, body: object) -> tuple[int, bytes]:
        paths.append(path)
        return 200, b"x" * 100

    fake.other = answer
    client = Client(fake.url, "answers_from", 1.0)
    assert client.bytes("GET", "/v1/models", None, 100) == b"x" * 100
    with pytest.raises(client_module.Refused, match="status 413: the answer has more than 99 bytes"):
        client.bytes("GET", "/v1/models", None, 99)
    assert paths == 2 * ["/v1/models"]


def test_the_local_batch_size_is_refused_next_to_a_server(tmp_path: Path) -> None:
    config = replace(ask(tmp_path, tmp_path, "p.jsonl", "http://127.0.0.1:9"), max_batch=4)
    with pytest.raises(ConfigError, match="max_batch means nothing for answers_from, whose requests at_once limits"):
        remote_target_of(config)


def test_likely_tokens_are_not_asked_of_another_server(tmp_path: Path) -> None:
    config = ask(tmp_path, tmp_path, "p.jsonl", "http://127.0.0.1:9", AnswerConfig(top_k=32))
    with pytest.raises(ConfigError, match="leave top_k out"):
        remote_target_of(config)
