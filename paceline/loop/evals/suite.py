"""Suites: cases, each with a prompt and a scorer, stored as JSON lines.

    {"id": "gsm8k/0", "messages": [{"role": "user", "content": "..."}], "scorer": {"kind": "numeric", "answer": 18}}

A case has either `messages` or, if it comes from traces, `prompt_ids` and their `text`. `read_prompts` reads such a
file too. Suites are built from files and stores by `make.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.data.prompts import Message, Prompt, read_messages, read_tools, read_variables
from paceline.errors import PromptError, refuse, reraised
from paceline.loop.evals.scorers import check_scorer
from paceline.runs.folder import write_whole

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One eval question, with the scorer that rates answers to it."""

    id: str
    scorer: Row
    """Kind of scorer and its fields, as listed in `scorers`."""
    messages: tuple[Message, ...] = ()
    token_ids: tuple[int, ...] = ()
    """Prompt tokens in place of messages, in the vocabulary of the recorded model."""
    text: str = ""
    """Text of `token_ids`, shown to people and judges."""
    tools: tuple[Row, ...] = ()
    """Tool definitions in OpenAI's format."""
    variables: tuple[tuple[str, Any], ...] = ()
    """Names and values of variables for the chat template."""
    origin: Row = field(default_factory=dict)
    """Source of the case: a file, or a store's version, key and conversation."""

    @property
    def question(self) -> str:
        """The prompt as text, to show to a person or to the LLM judge."""
        return self.text or "\n\n".join(str(message.get("content") or "") for message in self.messages)

    @property
    def prompt(self) -> Prompt:
        return Prompt(self.id, list(self.messages), (), "", self.token_ids, self.tools, variables=self.variables)

    def as_row(self) -> Row:
        texts = {"prompt_ids": list(self.token_ids), "text": self.text}
        prompt: Row = self.prompt.api_request()[1] if self.messages else texts
        return {"id": self.id, **prompt, "scorer": self.scorer, "origin": self.origin}


@dataclass(frozen=True, slots=True)
class Suite:
    """A named list of eval cases."""

    name: str
    cases: tuple[Case, ...]

    def __len__(self) -> int:
        return len(self.cases)

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases)

    @property
    def digest(self) -> str:
        """Hash of all cases without their `origin`. Scores are compared only if their suites have equal digests."""
        named = hashlib.sha256()
        for case in self.cases:
            row = case.as_row()
            del row["origin"]
            named.update(json.dumps(row, sort_keys=True).encode())
        return named.hexdigest()[:16]

    @property
    def runs_code(self) -> bool:
        return any(case.scorer["kind"] == "code" for case in self.cases)

    @property
    def needs_judge(self) -> bool:
        return any(case.scorer["kind"] == "judge" for case in self.cases)

    def first(self, limit: int | None) -> Suite:
        """Returns a suite of the first `limit` cases; of all cases if it is None. Raises PromptError for a limit below
        1."""
        refuse(PromptError, (limit is not None and limit < 1, f"limit must be at least 1, not {limit}"))
        return Suite(self.name, self.cases[:limit])

    def write(self, file: str | Path) -> Path:
        """Writes the suite as JSON lines; returns the file's path. Raises CacheError when the disk cannot be
        written."""
        write_whole(Path(file), "".join(json.dumps(case.as_row()) + "\n" for case in self.cases))
        return Path(file)


def read_suite(file: str | Path) -> Suite:
    """Reads a suite from a file of JSON lines. Raises PromptError when the file cannot be read, a case is malformed, or
    two cases have the same id."""
    path = Path(file)
    with reraised(
        PromptError, f"cannot read the suite {path}", "make one with paceline evals make", OSError, ValueError
    ):
        lines = path.read_text(encoding="utf-8").split("\n")
    cases = [_case(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    return suite_of(path.stem, cases, str(path))


def suite_of(name: str, cases: list[Case], where: str) -> Suite:
    """Returns the cases as a suite. Raises PromptError if there is no case, or an id occurs twice. `where`: source of
    the cases, for the message."""
    if not cases:
        raise PromptError(f"{where} holds no case: an eval needs at least one")
    seen: set[str] = set()
    for case in cases:
        if case.id in seen:
            raise PromptError(f"{where} has two cases with the id {case.id!r}: give each its own")
        seen.add(case.id)
    return Suite(name, tuple(cases))


def _case(line: str, where: str) -> Case:
    with reraised(
        PromptError,
        f"{where} is no case of a suite",
        "one JSON object a line, with id and scorer",
        ValueError,
        RecursionError,
    ):
        row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("scorer"), dict) or not isinstance(row.get("id"), str):
        raise PromptError(
            f"{where} is no case of a suite: it needs an id and a scorer (paceline evals make writes both)"
        )
    messages, token_ids = row.get("messages") or [], row.get("prompt_ids") or []
    if bool(messages) == bool(token_ids):
        raise PromptError(f"{where}: a case has either messages or prompt_ids")
    if messages:
        read_messages(messages, where)
    elif not isinstance(token_ids, list) or not all(type(token) is int and token >= 0 for token in token_ids):
        raise PromptError(f"{where}: prompt_ids must be a list of token ids")
    if not isinstance(row.get("text") or "", str) or not isinstance(row.get("origin") or {}, dict):
        raise PromptError(f"{where}: text must be a text, and origin an object")
    check_scorer(row["scorer"], where)
    tools, variables = read_tools(row.get("tools"), where), read_variables(row.get("chat_template_kwargs"), where)
    prompt = (tuple(messages), tuple(token_ids), row.get("text") or "", tools, variables)
    return Case(row["id"], row["scorer"], *prompt, row.get("origin") or {})
