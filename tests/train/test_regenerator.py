"""Regeneration: the answers are those of LLM.chat one by one, and a killed run ends as an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from pyarrow import parquet
from small_llm import CHATML, EOS, Parrot, Talker, fake_llm, tiny_model, write_tokenizer
from torch import Tensor

from paceline.data.answers import Answer, AnswerShards
from paceline.data.prompts import Prompt
from paceline.engine.llm import LLM
from paceline.errors import CacheError, ConfigError, NumericsError, PromptError, SamplingError
from paceline.model.text.tokenizer import Tokenizer
from paceline.report.tables import Progress
from paceline.train.answers import regenerate as module
from paceline.train.answers.prompt_tokens import REFUSED
from paceline.train.answers.regenerate import Regenerator
from paceline.train.config import AnswerConfig
from paceline.types import GrammarSpec, SamplingParams

TURNS = [("Hi.", "And then?", "Why?"), ("Name a colour.", "Another one."), ("Sing!",), ("Count to ten.", "Go on.")]


class Heard(Progress):
    """Is told of each conversation that is over."""

    def __init__(self, on_one: Callable[[int], None] = lambda number: None) -> None:
        self.totals, self.texts, self._on_one = list[int](), list[str](), on_one

    @contextmanager
    def bar(self, what: str, total: int) -> Iterator[Callable[[str], None]]:
        self.totals.append(total)
        yield self._one_more

    def _one_more(self, text: str) -> None:
        self.texts.append(text)
        self._on_one(len(self.texts))


def prompts(*turns: tuple[str, ...], system: str | None = None) -> list[Prompt]:
    opening = [{"role": "system", "content": system}] if system else []
    return [
        Prompt(str(n), [*opening, {"role": "user", "content": each[0]}], each, "test")
        for n, each in enumerate(turns or TURNS)
    ]


def by_place(answers: AnswerShards) -> dict[tuple[str, int], tuple[Any, ...]]:
    return {(answer.key, answer.turn): astuple(answer) for answer in answers}


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
    given = prompts(("short",), ("x" * 50,), ("y" * 60,), ("brief",))
    done = regenerator.run([*given, given[0]], heard)
    assert (done.num_answers, done.num_too_long) == (2, 2)
    assert done.num_tokens_too_long == len(llm.encode_chat(given[2].messages)) == 78
    assert heard.totals == [len(heard.texts)] == [4]
    assert {answer.key.split("#")[0] for answer in regenerator.shards} == {"test/0", "test/3"}


@pytest.mark.slow
@pytest.mark.parametrize("num_heard", [1, 4, 7])
def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_heard: int) -> None:
    monkeypatch.setattr(module, "CONVERSATIONS_PER_SHARD", 2)
    config = AnswerConfig(max_tokens=16, max_prompt_tokens=150, temperatures=(0.0, 0.8))
    whole = AnswerShards(tmp_path / "whole")
    Regenerator(fake_llm(Talker(num_rows=2)), whole, config).run(prompts())

    class Killed(Exception):
        pass

    def kill(number: int) -> None:
        if number == num_heard:
            raise Killed

    llm, parts = fake_llm(Talker(num_rows=2)), AnswerShards(tmp_path / "parts")
    with pytest.raises(Killed):
        Regenerator(llm, parts, config).run(prompts(), Heard(kill))
    llm.engine.check_integrity()
    assert not llm.engine.has_work
    kept = by_place(parts)
    files = {path: path.read_bytes() for path in parts.folder.glob("*.parquet")}
    assert len(parts.keys()) < 8 and kept.items() <= by_place(whole).items()

    done = Regenerator(llm, AnswerShards(tmp_path / "parts"), config).run(prompts())
    assert by_place(parts) == by_place(whole)
    assert len(list(parts)) == len(list(whole)), "nothing twice"
    assert (done.num_found, done.num_answers) == (len({key for key, _ in kept}), len(list(whole)) - len(kept))
    assert all(path.read_bytes() == content for path, content in files.items()), "what was written stays as it is"
    assert Regenerator(llm, AnswerShards(tmp_path / "parts"), config).run(prompts()).num_answers == 0


class Killed(BaseException):
    pass


class Mortal(Regenerator):
    """Dies before its `moment`-th answer as SIGKILL has it: nothing is written behind it."""

    moment: float = float("inf")

    def __init__(self, folder: Path, config: AnswerConfig, moment: float = float("inf")) -> None:
        super().__init__(fake_llm(Talker(num_rows=2)), AnswerShards(folder), config)
        self.moment, self.said = moment, list[Answer]()

    def _answer_of(self, *given: Any) -> Answer:
        if len(self.said) == self.moment:
            raise Killed
        self.said.append(super()._answer_of(*given))
        return self.said[-1]

    def _write(self) -> None:
        if self.moment == float("inf"):
            super()._write()


@pytest.mark.slow
@pytest.mark.parametrize("moment", [1, 3, 5, 8, 11])
def test_a_process_killed_at_any_moment_loses_one_answer_a_row(tmp_path: Path, moment: int) -> None:
    """Finished answers, also turns of unfinished conversations, are not generated again."""
    config = AnswerConfig(max_tokens=16, max_prompt_tokens=150, temperatures=(0.0, 0.8))
    whole, folder = AnswerShards(tmp_path / "whole"), tmp_path / "run"
    Regenerator(fake_llm(Talker(num_rows=2)), whole, config).run(prompts())
    first = Mortal(folder, config, moment)
    with pytest.raises(Killed):
        first.run(prompts())
    with next(folder.glob("journal-*")).open("a") as cut:
        cut.write('{"key": "cut sh')
    assert by_place(AnswerShards(folder)).items() <= by_place(whole).items(), "what is over can be learned from"
    again = Mortal(folder, config)
    again.run(prompts())
    assert by_place(AnswerShards(folder)) == by_place(whole) and len(list(AnswerShards(folder))) == len(list(whole))
    assert len(first.said) == moment and moment + len(again.said) == len(list(whole)), "nothing was said twice"
    assert not list(folder.glob("journal-*"))
    assert any(answer.turn for answer in again.said)


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


@pytest.mark.slow
def test_a_conversation_at_which_the_model_fails_is_asked_again(tmp_path: Path) -> None:
    """Not written as if it were finished, neither the answer that broke off nor the turns before it."""

    class Damaged(Talker):
        def logits_after(self, tokens: Sequence[int]) -> Tensor:
            is_bad = bytes(token for token in tokens if token < 256).rstrip().endswith(b"Another one.\nassistant:")
            return super().logits_after(tokens) * (float("nan") if is_bad else 1.0)

    config = AnswerConfig(max_tokens=16, max_prompt_tokens=150)
    whole = AnswerShards(tmp_path / "whole")
    Regenerator(fake_llm(Talker(num_rows=2)), whole, config).run(prompts())
    assert any(answer.key.startswith("test/1#") and answer.turn == 1 for answer in whole), (
        "it should come to its second turn"
    )
    llm, shards = fake_llm(Damaged(num_rows=2)), AnswerShards(tmp_path / "answers")
    with pytest.raises(NumericsError):
        Regenerator(llm, shards, config).run(prompts())
    assert not llm.engine.has_work
    assert by_place(shards).items() <= by_place(whole).items()
    assert not any(answer.key.startswith("test/1#") or answer.finish_reason == "error" for answer in shards)
    Regenerator(fake_llm(Talker(num_rows=2)), shards, config).run(prompts())
    assert by_place(shards) == by_place(whole)


def test_a_slow_target_is_written_down_every_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_EVERY_S", -1.0)
    Regenerator(fake_llm(), AnswerShards(tmp_path), AnswerConfig(4, 100)).run(prompts())
    assert len(list(tmp_path.glob("*.parquet"))) == len(TURNS)


@pytest.mark.slow
def test_a_full_disk_keeps_what_was_said_for_the_next_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONVERSATIONS_PER_SHARD", 1)
    config, shards = AnswerConfig(8, 100), AnswerShards(tmp_path / "answers")
    regenerator = Regenerator(fake_llm(), shards, config)
    (tmp_path / "answers").write_text("a file where the folder should be")
    with pytest.raises(CacheError, match="free space or choose another --out"):
        regenerator.run(prompts())
    assert not regenerator.llm.engine.has_work
    (tmp_path / "answers").unlink()
    done = regenerator.run(prompts())
    assert len(shards.keys()) == len(TURNS) and done.num_answers == len(list(shards))
    assert len({(answer.key, answer.turn) for answer in shards}) == len(list(shards))


def test_a_damaged_shard_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "answers-r1-00000.parquet").write_bytes(b"PAR1")
    llm = fake_llm()
    with pytest.raises(PromptError, match="delete it and run regenerate again"):
        Regenerator(llm, AnswerShards(tmp_path), AnswerConfig(8, 100)).run(prompts())
    assert not llm.engine.has_work


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
    given = [*prompts(("Hi.",)), *prompts(("Hi.",), system="A")]
    done = Regenerator(llm, shards, AnswerConfig(4, 100)).run([*reversed(given)])
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
        ({"temperatures": (0.5, -1.0)}, SamplingError, "temperature must be 0"),
        ({"temperatures": (0.5, 0.5)}, ConfigError, "differ from each other"),
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


@pytest.mark.slow
def test_likely_tokens_are_the_targets_and_survive_a_kill(tmp_path: Path) -> None:
    llm, config = fake_llm(), AnswerConfig(max_tokens=12, temperatures=(0.0, 0.8), top_k=5)
    shards = AnswerShards(tmp_path / "answers")
    Regenerator(llm, shards, config).run(prompts())
    rows = parquet.read_table(next((tmp_path / "answers").glob("*.parquet"))).to_pylist()
    assert rows and {answer.key for answer in shards} == {row["key"] for row in rows}
    for row in rows:
        assert len(row["top_ids"]) == len(row["top_logprobs"]) == len(row["answer_ids"])
        for at, (ids, logprobs) in enumerate(zip(row["top_ids"], row["top_logprobs"], strict=True)):
            logits_V = llm.target.logits_after(row["prompt_ids"] + row["answer_ids"][:at])
            expected = logits_V.log_softmax(-1)[ids].tolist()
            assert logprobs == pytest.approx(expected, abs=1e-4) and len(ids) == 5
            assert row["temperature"] > 0 or row["answer_ids"][at] == ids[0]
    journalled = AnswerShards(tmp_path / "other")
    one = Answer(**rows[0])
    journalled.note(one, is_over=False)
    assert AnswerShards(tmp_path / "other").recover()[one.key] == [one]
