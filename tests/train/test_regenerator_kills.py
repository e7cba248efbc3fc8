"""A regeneration that was killed, or that a fault ended, goes on and ends as an uninterrupted one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from regenerated import TURNS, Heard, by_place, prompts
from small_llm import Talker, fake_llm
from torch import Tensor

from paceline.data.answers import Answer, AnswerShards
from paceline.errors import CacheError, NumericsError, PromptError
from paceline.train.answers import conversation as module
from paceline.train.answers.regenerate import Regenerator
from paceline.train.config import AnswerConfig


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

    def _answer_of(self, *arguments: Any) -> Answer:
        if len(self.said) == self.moment:
            raise Killed
        self.said.append(super()._answer_of(*arguments))
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
