"""Prompts the target writes itself: where the user speaks, what is dropped, how a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doubles import ByteTokenizer
from small_llm import EOS, Parrot, Talker, fake_llm, tiny_model

from paceline.data.prompts import read_prompts
from paceline.errors import CacheError, PromptError, SamplingError, UnsupportedModelError
from paceline.model.text.tokenizer import Tokenizer
from paceline.train.answers import self_written
from paceline.train.answers.self_written import PromptWriter, UserTurn, read_openers, rejection_reason, user_turn


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def chatml(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_path(tiny_model(tmp_path / "model"))


def test_the_prefix_is_what_the_template_puts_before_the_user(chatml: Tokenizer) -> None:
    turn = user_turn(chatml)
    assert turn == UserTurn("<|im_start|>user\n", stop_token_ids=(257,))
    assert chatml.apply_chat_template([{"role": "user", "content": "Hi"}]).startswith(turn.prefix + "Hi<|im_end|>")
    chatml.chat_template = "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}" + str(chatml.chat_template)
    chatml._compiled = None
    assert user_turn(chatml).prefix == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"


def test_an_opening_makes_them_the_applications_users(chatml: Tokenizer) -> None:
    chatml.chat_template = "{{ mood }}\n" + str(chatml.chat_template)
    opening = [{"role": "system", "content": "Answer tickets."}]
    prefix = user_turn(chatml, opening, {"mood": "grave"}).prefix
    assert prefix == "grave\n<|im_start|>system\nAnswer tickets.<|im_end|>\n<|im_start|>user\n"


def test_what_ends_the_users_turn(chatml: Tokenizer) -> None:
    """A special token, which no stop string could find, else a text, else the model's own end."""
    assert user_turn(ByteTokenizer()) == UserTurn("user: ", stop=("\nassistant:",))  # pyright: ignore[reportArgumentType]
    for template, turn in [
        ("[INST] {{ messages[0].content }} [/INST]", UserTurn("[INST] ", stop=(" [/INST]",))),
        ("{{ messages[0].content }}\n<|im_end|>\nassistant", UserTurn("", stop_token_ids=(257,))),
        ("<|im_start|>{{ messages[0].content }}\n", UserTurn("<|im_start|>")),
    ]:
        chatml.chat_template, chatml._compiled = template, None
        assert user_turn(chatml) == turn


def test_templates_that_cannot_be_continued(chatml: Tokenizer) -> None:
    chatml.chat_template = "always the same"
    with pytest.raises(UnsupportedModelError, match="give prompts with --prompts"):
        user_turn(chatml)
    chatml.chat_template = None
    with pytest.raises(PromptError, match="no chat template"):
        user_turn(chatml)


@pytest.mark.parametrize("answer", [b" ask you a thing?\nassistant: Yes, of course.", b" ask you a thing?"])
def test_the_answer_that_follows_is_not_part_of_the_prompt(tmp_path: Path, answer: bytes) -> None:
    llm = fake_llm(Parrot("Can I", [*answer, EOS]))
    (prompt,) = PromptWriter(llm, tmp_path / "own.jsonl", openers=("Can I",)).write(1).prompts
    assert prompt == "Can I ask you a thing?"


@pytest.mark.slow
def test_prompts_are_varied_seeded_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_written, "MAX_TOKENS", 40)
    file, heard = tmp_path / "deep" / "own.jsonl", []
    done = PromptWriter(fake_llm(), file, openers=("", "How do I"), seed=7).write(8, heard.append)
    assert heard == done.prompts == [row["prompt"] for row in lines(file)]
    assert [row["id"] for row in lines(file)] == [f"self-{n}" for n in range(8)]
    assert len(set(done.prompts)) == 8 and any(prompt.startswith("How do I") for prompt in done.prompts)
    assert all(rejection_reason(prompt, True, set()) is None for prompt in done.prompts)
    assert set(done.dropped) <= {"unfinished", "too short", "duplicate", "repeats itself"} and done.dropped.total() > 0
    again = PromptWriter(fake_llm(), tmp_path / "again.jsonl", openers=("", "How do I"), seed=7).write(8)
    other = PromptWriter(fake_llm(), tmp_path / "other.jsonl", openers=("", "How do I"), seed=10**6).write(8)
    assert (again.prompts, again.dropped) == (done.prompts, done.dropped)
    assert not set(other.prompts) & set(done.prompts)
    assert [prompt.turns[0] for prompt in read_prompts(file)] == done.prompts


def test_the_engine_is_left_as_it_was(tmp_path: Path) -> None:
    llm = fake_llm()

    def stop(prompt: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PromptWriter(llm, tmp_path / "own.jsonl").write(3, stop)
    llm.engine.check_integrity()
    assert not llm.engine.has_work
    assert len(lines(tmp_path / "own.jsonl")) == 1, "what was written before stays"


@pytest.mark.parametrize(
    ("prompt", "is_finished", "reason"),
    [
        ("Tell me a story about bees.", True, None),
        ("Tell me a story about bees.", False, "unfinished"),
        ("Tell me more.", True, "too short"),
        ("What is\nTWO plus two???", True, "duplicate"),
        ("go on and on and on and on and on and on and on and on", True, "repeats itself"),
        ("What does \x00 mean here?", True, "control characters"),
        ("What does \ufffd mean here?", True, "broken characters"),
        ("Sort:\n\t3 1 2 please.", True, None),
    ],
)
def test_faults(prompt: str, is_finished: bool, reason: str | None) -> None:
    assert rejection_reason(prompt, is_finished, {"what is two plus two"}) == reason


@pytest.mark.slow
@pytest.mark.parametrize("tail", [b"", b'{"id": "self-2", "pro', '{"id": "self-2", "prompt": "caf\u00e9'.encode()[:-1]])
def test_a_run_goes_on_after_its_last_whole_line(tmp_path: Path, tail: bytes) -> None:
    file = tmp_path / "own.jsonl"
    before = ["Was ist ein\u2028Caf\u00e9, und wo?", "What is the sky made of?"]
    rows = [json.dumps({"id": f"self-{n}", "prompt": prompt}, ensure_ascii=False) for n, prompt in enumerate(before)]
    file.write_bytes("\n".join([*rows, ""]).encode() + tail)
    heard: list[str] = []
    done = PromptWriter(fake_llm(), file).write(5, heard.append)
    assert heard == done.prompts and done.prompts[:2] == before and len(done.prompts) == 5
    assert [prompt.turns[0] for prompt in read_prompts(file)] == done.prompts
    assert [prompt.id for prompt in read_prompts(file)] == [f"self-{n}" for n in range(5)]
    content = file.read_bytes()
    assert PromptWriter(fake_llm(), file).write(4).prompts == done.prompts, "enough already: nothing is written"
    assert file.read_bytes() == content


@pytest.mark.slow
def test_a_prompt_of_an_earlier_run_is_not_written_again(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"id": "self-0", "prompt": "Can I ask you a thing?"}\n')
    llm = fake_llm(Parrot("Can I", [*b" ask you a thing?", EOS]))
    with pytest.raises(PromptError, match=r"only 0 of \d+ prompts .*'duplicate'.*--prompts, or openers with --openers"):
        PromptWriter(llm, file, openers=("Can I",)).write(2)
    assert len(lines(file)) == 1
    assert not llm.engine.has_work


def test_a_target_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_written, "MAX_TOKENS", 8)
    monkeypatch.setattr(self_written, "EXTRA_TRIES", 2)
    llm = fake_llm(Talker(eos_bonus=-60.0))
    with pytest.raises(
        PromptError, match="only 0 of 17 prompts the target wrote were usable, 1000 are wanted .*'unfinished': 17"
    ):
        PromptWriter(llm, tmp_path / "own.jsonl").write(1000)


def test_bad_files(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    for text in (
        '{"id": "self-0", "prompt": "fine"}\nnot json\n',
        '{"prompt": "fine"}\n{"id": 3}\n',
        '{"prompt": "fine"}\n[]\n',
    ):
        file.write_text(text)
        with pytest.raises(PromptError, match=r"own.jsonl, line 2: "):
            PromptWriter(fake_llm(), file).write(3)
    with pytest.raises(CacheError, match="choose another folder with --out"):
        PromptWriter(fake_llm(), tmp_path).write(1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="free space or choose another --out"):
        PromptWriter(fake_llm(), tmp_path / "file" / "own.jsonl").write(1)


def test_openers(tmp_path: Path) -> None:
    file = tmp_path / "openers.txt"
    file.write_text("How do I\n\n  \nWrite a \n")
    assert read_openers(file) == ("How do I", "Write a ")
    file.write_text("\n")
    with pytest.raises(PromptError, match="holds no openers"):
        read_openers(file)
    file.write_bytes(b"\xff")
    with pytest.raises(PromptError, match="cannot read openers"):
        read_openers(file)
    with pytest.raises(PromptError, match="cannot read openers"):
        read_openers(tmp_path)


def test_impossible_seed(tmp_path: Path) -> None:
    with pytest.raises(SamplingError, match="seed must be"):
        PromptWriter(fake_llm(), tmp_path / "own.jsonl", seed=-1)
