"""Journals answers that are not in a shard (Parquet file) yet, one JSON line each: they survive if the process is
killed.

    runs/x/answers/journal-r0-00003.jsonl     deleted once answers-r0-00003.parquet is written

Answers of an unfinished conversation are not used for training; the next run continues with the missing turn. A journal
whose shard exists is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CacheError, reraised
from paceline.runs.folder import append_lines, whole_file

REMEDY = "free space or choose another --out, then run again"
OVER = "is_over"


@dataclass(slots=True)
class Answer:
    """One answer of the target: its tokens and text, and the tokens of the prompt that it answers."""

    key: str
    """Identifies a conversation and its sample (source, prompt id, temperature); the same for all its answers."""
    source: str
    turn: int
    """Index of the answer in its conversation, from 0."""
    temperature: float
    """Sampling temperature; NaN if unknown, as for another server's answers."""
    prompt_ids: list[int]
    """All tokens before the answer, including the chat template and earlier turns."""
    answer_ids: list[int]
    """Tokens of the answer, including the end token if the target generated one."""
    finish_reason: str
    text: str
    top_ids: list[list[int]] | None = None
    """The target's most probable tokens at each position of the answer, best first; None if they were not requested."""
    top_logprobs: list[list[float]] | None = None
    """Log-probabilities of `top_ids`, in nats."""


class Journal:
    """Writes the journal of one process: a JSON Lines file of the answers that are not yet in a shard (Parquet file),
    so that a crash does not lose them. The first answer creates the file."""

    def __init__(self) -> None:
        self.begun: dict[str, list[Answer]] = {}
        """Key -> answers so far, for unfinished conversations."""

    def note(self, path: Path, answer: Answer, is_over: bool) -> None:
        """Append an answer to the journal at `path`. `is_over`: True for the last answer of its conversation. Raises
        CacheError if the disk cannot be written to."""
        if is_over:
            self.begun.pop(answer.key, None)
        else:
            self.begun.setdefault(answer.key, []).append(answer)
        with reraised(CacheError, f"cannot write {path}", REMEDY, OSError):
            append_lines(path, [_line(answer, is_over)])

    def carry(self, path: Path) -> None:
        """Write the noted answers of all unfinished conversations to a new journal file at `path`, so that the old file
        can be deleted."""
        if self.begun:
            with whole_file(path, REMEDY) as scratch:
                append_lines(scratch, (_line(answer, False) for answers in self.begun.values() for answer in answers))


def _line(answer: Answer, is_over: bool) -> dict[str, Any]:
    return {**{name: value for name, value in asdict(answer).items() if value is not None}, OVER: is_over}


def read_journals(paths: Iterable[Path]) -> tuple[list[Answer], dict[str, list[Answer]]]:
    """Read answers from journal files. Returns (answers of finished conversations, conversation key -> answers so far
    of each unfinished one). Truncated lines are skipped; conversations that lack an answer are left out."""
    turns: dict[str, dict[int, Answer]] = {}
    over: set[str] = set()
    for path in paths:
        for answer, is_over in _read(path):
            turns.setdefault(answer.key, {})[answer.turn] = answer
            if is_over:
                over.add(answer.key)
    whole = {
        key: [answers[turn] for turn in range(len(answers))]
        for key, answers in turns.items()
        if answers.keys() == {*range(len(answers))}
    }
    finished = [answer for key, answers in whole.items() if key in over for answer in answers]
    return finished, {key: answers for key, answers in whole.items() if key not in over}


def _read(path: Path) -> Iterator[tuple[Answer, bool]]:
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:  # its process has just written the shard
        return
    for line in lines:
        try:
            record = json.loads(line)
            is_over = bool(record.pop(OVER))
            yield Answer(**record), is_over
        except (ValueError, TypeError, AttributeError, KeyError):
            continue  # truncated by a crash, then appended to
