"""Answers and stores of a few rows, with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from doubles import ByteTokenizer

from paceline.data.answers import Answer, AnswerShards
from paceline.loop.store.config import SplitConfig
from paceline.loop.store.folder import Store

BYTES = cast(Any, ByteTokenizer())
HALF = SplitConfig(evals_share=0.5)


def answer(prompt: str, text: str, **more: Any) -> Answer:
    fields: dict[str, Any] = {
        "key": f"file/{prompt}@0",
        "source": "file",
        "turn": 0,
        "temperature": 0.0,
        "finish_reason": "stop",
        "text": text,
    }
    fields |= {"prompt_ids": BYTES.encode(prompt), "answer_ids": [*text.encode(), 257]}
    return Answer(**{**fields, **more})


def answered(folder: Path, *answers: Answer) -> Path:
    AnswerShards(folder).write(list(answers))
    return folder


def store_of(path: Path, *answers: Answer, split: SplitConfig = HALF) -> Store:
    """A store of these answers, with a tokenizer of bytes."""
    store = Store.create(path / "store", "tiny", split)
    store.add([answered(path / "answers", *answers)], BYTES)
    return store


def many(number: int, what: str = "order") -> list[Answer]:
    """Answers that have little in common."""
    return [
        answer(f"{chr(97 + at % 26) * 9} {what} {at * 7919:x}{at * 104729:x}", f"{at * 15485863:x}")
        for at in range(number)
    ]
