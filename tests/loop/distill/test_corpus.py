"""The answers that a student is trained and judged on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_teacher import END, SHAPE, write_answers, write_teacher, write_untaught

from paceline.config import EngineConfig
from paceline.errors import PromptError
from paceline.loop.distill import price as pricing
from paceline.loop.distill.config import DistillConfig, StudentConfig, TeachingConfig
from paceline.loop.distill.corpus import corpus_of

pytestmark = pytest.mark.slow


def distill_config(teacher: Path, answers: Path, **student: Any) -> DistillConfig:
    engine = EngineConfig(str(teacher), dtype="float32")
    return DistillConfig(Path("run"), engine, (answers,), student=StudentConfig(**student), teaching=TeachingConfig())


@pytest.mark.parametrize("num_prompts", [9, 10, 11])
def test_fewer_than_six_held_out_prompts_are_an_error(tmp_path: Path, num_prompts: int) -> None:
    """Ten and eleven prompts held out five, which may all agree by chance."""
    config = distill_config(*write_teacher(tmp_path, num_prompts))
    held_out = 0 if num_prompts < 10 else 5
    with pytest.raises(PromptError, match=f"{held_out} of {num_prompts} different prompts.*at least 12"):
        corpus_of(config, config.answers)
    with pytest.raises(PromptError, match="at least 12"):
        pricing.price(config)


@pytest.mark.parametrize(("num_prompts", "held_out"), [(12, 6), (24, 8)])
def test_at_least_six_prompts_are_held_out(tmp_path: Path, num_prompts: int, held_out: int) -> None:
    config = distill_config(*write_teacher(tmp_path, num_prompts))
    corpus = corpus_of(config, config.answers)
    assert (len(corpus.heldout), len(corpus.train)) == (held_out, num_prompts - held_out)


def test_documents_end_at_the_shorter_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dry run read answers of `max_len` tokens from a teacher with 128; a smaller model's context did not count."""
    teacher, _ = write_teacher(tmp_path)
    answers = write_answers(tmp_path / "long", teacher, [""] * 20, [*range(3, 200), END])
    monkeypatch.setitem(SHAPE, "max_position_embeddings", 96)
    smaller = write_untaught(tmp_path / "smaller.gguf")
    assert max(map(len, corpus_of(distill_config(teacher, answers), (answers,)).train)) == 128
    config = distill_config(teacher, answers, student=str(smaller))
    assert max(map(len, corpus_of(config, (answers,)).train)) == 96
    figures = pricing.price(distill_config(teacher, answers, layers=2)).figures
    assert figures["answers"] == 12 and figures["heldout"] == 8 and figures["read_s"] > 0
