"""Answers that no shard holds yet, line by line: a process that is killed loses only those that were being written.

    runs/x/answers/journal-r0-00003.jsonl     one answer a line, until answers-r0-00003.parquet takes its place

A line says whether its conversation is over. The answers of one that is not are no training data yet: the next run goes on with
the turn that is missing. A journal whose shard exists is a leftover, which is not looked at.
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
    """One answer of the target: everything it was given, and everything it said."""

    key: str
    """Names the conversation and the sample: source, prompt id, temperature. Turns of one conversation share it."""
    source: str
    turn: int
    """0 for the first answer of a conversation."""
    temperature: float
    """NaN when it is not known: of another server's answers."""
    prompt_ids: list[int]
    """All tokens before the answer, chat template and earlier turns included."""
    answer_ids: list[int]
    """The answer's tokens, the end token included when the target wrote one."""
    finish_reason: str
    text: str
    top_ids: list[list[int]] | None = None
    """Where they were asked for: the target's likeliest tokens at each place of the answer, best first."""
    top_logprobs: list[list[float]] | None = None
    """Their log-probabilities, in nats."""


class Journal:
    """The journal of one process; the file is there as soon as something is noted."""

    def __init__(self) -> None:
        self.begun: dict[str, list[Answer]] = {}
        """Key -> answers so far, of conversations that are not over."""

    def note(self, path: Path, answer: Answer, is_over: bool) -> None:
        """Add an answer to the journal at `path`. Raises CacheError when the disk refuses."""
        if is_over:
            self.begun.pop(answer.key, None)
        else:
            self.begun.setdefault(answer.key, []).append(answer)
        with reraised(CacheError, f"cannot write {path}", REMEDY, OSError):
            append_lines(path, [_line(answer, is_over)])

    def carry(self, path: Path) -> None:
        """Conversations that are not over go on in the journal at `path`."""
        if self.begun:
            with whole_file(path, REMEDY) as scratch:
                append_lines(scratch, (_line(each, False) for answers in self.begun.values() for each in answers))


def _line(answer: Answer, is_over: bool) -> dict[str, Any]:
    return {**{name: value for name, value in asdict(answer).items() if value is not None}, OVER: is_over}


def read_journals(paths: Iterable[Path]) -> tuple[list[Answer], dict[str, list[Answer]]]:
    """(answers of conversations that are over, by key the answers of those that are not); a line cut short is left out."""
    turns: dict[str, dict[int, Answer]] = {}
    over: set[str] = set()
    for path in paths:
        for answer, is_over in _read(path):
            turns.setdefault(answer.key, {})[answer.turn] = answer
            if is_over:
                over.add(answer.key)
    listed = {key: [answers[turn] for turn in sorted(answers)] for key, answers in turns.items()}
    whole = {key: answers for key, answers in listed.items() if [answer.turn for answer in answers] == [*range(len(answers))]}
    finished = [answer for key, answers in whole.items() if key in over for answer in answers]
    return finished, {key: answers for key, answers in whole.items() if key not in over}


def _read(path: Path) -> Iterator[tuple[Answer, bool]]:
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:  # the process it belongs to has just written its shard
        return
    for line in lines:
        try:
            told = json.loads(line)
            is_over = bool(told.pop(OVER))
            yield Answer(**told), is_over
        except (ValueError, TypeError, AttributeError, KeyError):
            continue  # a line that was cut short by a crash, and then written on
