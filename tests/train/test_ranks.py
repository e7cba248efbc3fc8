"""Processes share the work out: nothing twice, nothing left."""

from __future__ import annotations

import pytest
from small_llm import fake_llm

from paceline.prompts import Prompt
from paceline.train.answers import AnswerShards
from paceline.train.ranks import Ranks
from paceline.train.regenerate import RegenerateConfig, Regenerator


def test_alone_and_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Ranks.here() == Ranks(0, 1, 0)
    assert Ranks.here().is_first
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert Ranks.here() == Ranks(5, 8, 1)
    assert not Ranks.here().is_first


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shares_are_disjoint_and_complete(tmp_path, world: int) -> None:
    texts = ["one", "two", "three", "four", "five", "two"]  # a repeated one belongs to one process only
    prompts = [Prompt(text, [{"role": "user", "content": text}], (text,), "test") for text in texts]
    config = RegenerateConfig(max_tokens=6, max_prompt_tokens=64, temperatures=(0.0, 0.7))
    shares = []
    for rank in range(world):
        regenerator = Regenerator(fake_llm(), AnswerShards(tmp_path / str(rank), rank), config, Ranks(rank, world))
        done = regenerator.run(prompts)
        shares.append([answer.key for answer in regenerator.shards])
        assert done.num_answers == len(shares[-1]) == regenerator.num_conversations(prompts)
    keys = [key for share in shares for key in share]
    assert len(set(keys)) == len(keys) == 10
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
