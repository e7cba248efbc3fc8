"""Regeneration: the answers are those of LLM.chat one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from regenerated import Heard, by_place, prompts
from small_llm import CHATML, EOS, Parrot, fake_llm, tiny_model, write_tokenizer

from paceline.data.answers import Answer, AnswerShards
from paceline.data.prompts import Prompt
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, SamplingError
from paceline.model.text.tokenizer import Tokenizer
from paceline.train.answers.prompt_tokens import REFUSED
from paceline.train.answers.regenerate import Regenerator
from paceline.train.config import AnswerConfig
from paceline.types import GrammarSpec, SamplingParams


def chatted(
    llm: LLM, prompt: Prompt, temperature: float, config: AnswerConfig
) -> list[tuple[list[int], list[int], str]]:
    """The same conversation through LLM.chat, one request at a time: prompt ids, answer ids and text of each turn."""
    key = f"test/{prompt.id}#{crc32(repr(prompt.turns).encode()):08x}@{temperature:g}"
    params = SamplingParams(
        temperature=temperature, max_tokens=config.max_tokens, seed=config.seed ^ crc32(key.encode())
    )
    messages, turns = list(prompt.messages), []
    for turn in (*prompt.turns[1:], ""):
        (answer,) = llm.chat([messages], params)
        turns.append((answer.prompt_token_ids, answer.token_ids, answer.text))
        if answer.finish_reason != "stop":
            break
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": turn}]
    return turns


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fake", "real"])
def test_answers_are_those_of_chat_one_by_one(kind: str, tmp_path: Path) -> None:
    if kind == "fake":
        llm = fake_llm()
    else:
        llm = LLM(str(tiny_model(tmp_path / "model")), drafter="none", dtype="float32", device="cpu", max_batch=3)
    config = AnswerConfig(max_tokens=12, max_prompt_tokens=200, temperatures=(0.0, 0.9), seed=3)
    shards = AnswerShards(tmp_path / "answers")
    done = Regenerator(llm, shards, config).run(prompts())
    by_key: dict[str, list[Answer]] = {}
    for answer in shards:
        by_key.setdefault(answer.key, []).append(answer)
    assert len(by_key) == 8 and done.num_answers == sum(map(len, by_key.values()))
    assert done.num_tokens == sum(len(answer.answer_ids) for answer in shards)
    for prompt in prompts():
        for temperature in config.temperatures:
            (key,) = [
                key for key in by_key if key.startswith(f"test/{prompt.id}#") and key.endswith(f"@{temperature:g}")
            ]
            assert [answer.turn for answer in by_key[key]] == list(range(len(by_key[key])))
            answers = [(answer.prompt_ids, answer.answer_ids, answer.text) for answer in by_key[key]]
            assert answers == chatted(llm, prompt, temperature, config)
    assert llm.target.cache.num_free == llm.target.cache.num_rows
    if kind == "fake":
        assert {answer.finish_reason for answer in shards} == {"stop", "length"}
        assert any(answer.turn == 2 for answer in shards), "some conversation should come to its third turn"
        ends = {
            (answer.finish_reason, answer.answer_ids[-1] == EOS, EOS in answer.answer_ids[:-1]) for answer in shards
        }
        assert ends == {("stop", True, False), ("length", False, False)}, "the end token belongs to the answer"


def test_a_later_turn_follows_the_targets_own_answer(tmp_path: Path) -> None:
    llm, shards = fake_llm(Parrot("assistant: ", [*b"I see.", EOS])), AnswerShards(tmp_path)
    done = Regenerator(llm, shards, AnswerConfig(20, 100)).run(prompts(("Hello", "More"), system="Be brief."))
    first, second = shards
    tokenizer = llm.tokenizer
    assert tokenizer.decode(first.prompt_ids) == "system: Be brief.\nuser: Hello\nassistant: "
    assert first.answer_ids == [*b"I see.", EOS] and first.text == "I see."
    assert tokenizer.decode(second.prompt_ids).endswith("user: Hello\nassistant: I see.\nuser: More\nassistant: ")
    assert (first.turn, second.turn, first.key) == (0, 1, second.key)
    assert (done.num_answers, done.num_tokens, done.num_cut_short) == (2, 14, 0)


def test_a_conversation_ends_when_the_next_turn_does_not_fit(tmp_path: Path) -> None:
    llm, shards = fake_llm(Parrot("assistant: ", [*b"I see.", EOS])), AnswerShards(tmp_path)
    done = Regenerator(llm, shards, AnswerConfig(20, 30)).run(prompts(("Hello", "More")))
    assert (done.num_answers, done.num_cut_short, done.num_too_long) == (1, 1, 0)


def test_an_end_token_that_is_not_marked_special_is_no_text(tmp_path: Path) -> None:
    """GGUF files often say so of <|im_end|>; here the letter z ends an answer."""
    llm, shards = fake_llm(Parrot("assistant: ", [*b"I see.z"])), AnswerShards(tmp_path)
    llm.engine.eos_token_ids = (ord("z"),)
    Regenerator(llm, shards, AnswerConfig(20, 100)).run(prompts(("Hello",)))
    (answer,) = shards
    assert (answer.text, answer.answer_ids[-1]) == ("I see.", ord("z"))


def test_prompts_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    llm, heard = fake_llm(), Heard()
    regenerator = Regenerator(llm, AnswerShards(tmp_path), AnswerConfig(8, 40))
    all_prompts = prompts(("short",), ("x" * 50,), ("y" * 60,), ("brief",))
    done = regenerator.run([*all_prompts, all_prompts[0]], heard)
    assert (done.num_answers, done.num_too_long) == (2, 2)
    assert done.num_tokens_too_long == len(llm.encode_chat(all_prompts[2].messages)) == 78
    assert heard.totals == [len(heard.texts)] == [4]
    assert {answer.key.split("#")[0] for answer in regenerator.shards} == {"test/0", "test/3"}


def test_several_samples_of_a_prompt(tmp_path: Path) -> None:
    shards, questions = AnswerShards(tmp_path), prompts(("Hi.",), ("Sing!",))
    one = AnswerConfig(max_tokens=12, max_prompt_tokens=150, temperatures=(0.0, 0.9))
    Regenerator(fake_llm(), shards, one).run(questions)
    first = by_place(shards)
    done = Regenerator(fake_llm(), AnswerShards(tmp_path), replace(one, samples=3)).run(questions)
    answers = by_place(AnswerShards(tmp_path))
    assert done.num_found == 4 and done.num_answers == 4 and first.items() <= answers.items(), (
        "greedy answers have one sample"
    )
    texts = {
        answer.text for answer in AnswerShards(tmp_path) if answer.key.startswith("test/0#") and answer.temperature
    }
    assert len(texts) == 3
    assert {key.rsplit("@")[1] for key, _ in answers} == {"0", "0.9", "0.9~1", "0.9~2"}


def test_keys_tell_conversations_apart(tmp_path: Path) -> None:
    """The same question under another system message is another conversation; equal ones are answered once."""
    shards = AnswerShards(tmp_path)
    regenerator = Regenerator(fake_llm(), shards, AnswerConfig(4, 100))
    regenerator.run(
        [*prompts(("Hi.",)), *prompts(("Hi.",)), *prompts(("Hi.",), system="A"), *prompts(("Hi.",), system="B")]
    )
    keys = shards.keys()
    assert len(keys) == len(list(shards)) == 3
    assert f"test/0#{crc32(repr(('Hi.',)).encode()):08x}@0" in keys, "long runs resume: the format of keys stays"


def test_a_prompt_that_the_template_refuses_is_left_out_and_counted(tmp_path: Path) -> None:
    llm = LLM(str(tiny_model(tmp_path / "model")), drafter="none", dtype="float32", device="cpu", max_batch=2)
    llm.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    llm.tokenizer.chat_template += "{{ m.content }}{% endfor %}"
    shards = AnswerShards(tmp_path / "answers")
    all_prompts = [*prompts(("Hi.",)), *prompts(("Hi.",), system="A")]
    done = Regenerator(llm, shards, AnswerConfig(4, 100)).run([*reversed(all_prompts)])
    assert done.num_answers == 1 and done.refused.counts == {REFUSED: 1}
    assert "test, prompt 0: the model's chat template failed (no system" in done.refused.examples[REFUSED]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": (1, 2, 900)}, "with tokens that the target does not have"),
        ({"messages": [{"role": "user", "content": "half a pair: \ud800"}]}, REFUSED),
        ({"variables": (("things", 3),)}, REFUSED),
    ],
)
def test_no_prompt_ends_the_run_of_the_others(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    shards, llm = AnswerShards(tmp_path), fake_llm()
    if "variables" in changes:
        llm.tokenizer = tiny_tokenizer(tmp_path / "words", "{% for t in things %}{% endfor %}{{ messages[0].content }}")
    (good,) = prompts(("Hi.",))
    done = Regenerator(llm, shards, AnswerConfig(4, 100)).run([replace(good, id="odd", **changes), good])
    assert done.num_answers == 1 and done.refused.counts == {reason: 1}


def test_raw_prompts_are_asked_as_they_stand(tmp_path: Path) -> None:
    """A base model has no template: its prompts are texts."""
    llm = fake_llm(tokenizer=tiny_tokenizer(tmp_path / "words", None))
    shards = AnswerShards(tmp_path / "answers")
    talk = prompts(("Hi.", "And?"), ("Hi.",), system="A")
    done = Regenerator(llm, shards, AnswerConfig(4, 100, raw=True)).run([*prompts(("Once upon a time",)), *talk])
    (answer,) = shards
    assert answer.prompt_ids == llm.tokenizer.encode("Once upon a time") and done.refused.counts == {REFUSED: 2}
    with pytest.raises(ConfigError, match="leave --raw out"):
        Regenerator(llm, shards, AnswerConfig(4, 100, raw=True, system="Be brief."))


def tiny_tokenizer(folder: Path, template: str | None) -> Tokenizer:
    folder.mkdir()
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_path(folder)
    tokenizer.chat_template = template
    return tokenizer


def test_impossible_values() -> None:
    for values, error, message in [
        ({"max_tokens": 0}, ConfigError, "at least 1"),
        ({"temperatures": ()}, ConfigError, "at least one temperature"),
        ({"temperatures": (0.5, -1.0)}, SamplingError, "temperature must be between 0"),
        ({"temperatures": (0.5, 0.5)}, ConfigError, "temperatures must differ"),
        ({"seed": -1}, SamplingError, "seed must be"),
    ]:
        with pytest.raises(error, match=message):
            AnswerConfig(**values)  # pyright: ignore[reportArgumentType]


def test_an_application_s_own_form(tmp_path: Path) -> None:
    """Its system message and examples before, its tools and variables in the template, its grammar for the answer."""
    llm = LLM(str(tiny_model(tmp_path / "tiny")), drafter="none", device="cpu", dtype="float32", max_batch=4)
    llm.tokenizer.chat_template = (
        f"{{% if tools %}}{{{{ tools[0].function.name }}}} {{% endif %}}{{{{ mood }}}}\n{CHATML}"
    )
    llm.tokenizer._compiled = None
    (tmp_path / "before.json").write_text(
        '[{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]'
    )
    (tmp_path / "tools.json").write_text('[{"type": "function", "function": {"name": "count"}}]')
    grammar = GrammarSpec("regex", "[0-9]{2}")
    config = AnswerConfig(
        max_tokens=8,
        system="Be exact.",
        before=tmp_path / "before.json",
        tools=tmp_path / "tools.json",
        variables=("mood=grave", 'other={"a": 1}'),
        grammar=grammar,
    )
    assert config.template_variables() == {"mood": "grave", "other": {"a": 1}}
    own = Prompt(
        "own", [{"role": "system", "content": "My own."}, {"role": "user", "content": "Two?"}], ("Two?",), "test"
    )
    letters = replace(prompts(("Three?",))[0], grammar=GrammarSpec("regex", "[a-z]{2}"), id="letters")
    shards = AnswerShards(tmp_path / "answers")
    Regenerator(llm, shards, config).run([*prompts(("Two?",)), own, letters])
    answers = {answer.key.split("#")[0]: answer for answer in shards}
    texts = {name: llm.tokenizer.decode(answer.prompt_ids, False) for name, answer in answers.items()}
    opening = "count grave\n<|im_start|>system\nBe exact.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
    assert texts["test/0"].startswith(opening + "<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\nTwo?")
    assert texts["test/own"].startswith("count grave\n<|im_start|>system\nMy own.<|im_end|>\n<|im_start|>user\nTwo?")
    assert answers["test/0"].text.isdecimal() and answers["test/letters"].text.isalpha()


def test_a_conversation_with_calls_is_answered_once(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "count", "arguments": '{"to": 3}'}}
    messages = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1 2 3", "tool_call_id": "1"},
    ]
    llm, shards = fake_llm(), AnswerShards(tmp_path)
    Regenerator(llm, shards, AnswerConfig(max_tokens=8)).run(
        [
            Prompt("a", messages, ("Count.",), "test"),
            Prompt("a", [*messages[:2], {**messages[2], "content": "4"}], ("Count.",), "test"),
        ]
    )
    first, second = sorted((answer for answer in shards), key=lambda answer: len(answer.prompt_ids))
    assert first.key != second.key, "their last results differ"
    assert '"arguments": {"to": 3}' in llm.tokenizer.decode(second.prompt_ids) and "1 2 3" in llm.tokenizer.decode(
        second.prompt_ids
    )
