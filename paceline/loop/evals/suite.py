"""A suite: cases, each with what is asked and how an answer is scored, as JSON lines.

    {"id": "gsm8k/0", "messages": [{"role": "user", "content": "..."}], "scorer": {"kind": "numeric", "answer": 18}}

A case without `messages` has `token_ids`, as traces know prompts, and `text`, what these say. `read_prompts` reads such a file
too. Suites are made from files and stores by `make.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.data.prompts import Message, Prompt, read_tools, read_variables
from paceline.errors import PromptError, reraised
from paceline.loop.evals.scorers import check_scorer
from paceline.runs.folder import whole_file

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One question, and what a right answer is."""

    id: str
    scorer: Row
    """As of `scorers.SCORERS`: its "kind", and what that kind needs."""
    messages: tuple[Message, ...] = ()
    token_ids: tuple[int, ...] = ()
    """In place of messages: the very tokens, of the vocabulary of the model that was recorded."""
    text: str = ""
    """What these tokens say, for people, judges and endpoints."""
    tools: tuple[Row, ...] = ()
    """What may be called, as the API takes it."""
    variables: tuple[tuple[str, Any], ...] = ()
    """Variables of the chat template, as of `Prompt`."""
    origin: Row = field(default_factory=dict)
    """Where it comes from: a file, or a store's version, key and conversation."""

    @property
    def question(self) -> str:
        """For people and judges."""
        return self.text or "\n\n".join(str(each.get("content") or "") for each in self.messages)

    @property
    def prompt(self) -> Prompt:
        return Prompt(self.id, list(self.messages), (), "", self.token_ids, self.tools, variables=self.variables)

    def as_row(self) -> Row:
        asked: Row = {"prompt_ids": list(self.token_ids), "text": self.text}
        if self.messages:
            asked = self.prompt.api_request()[1]
        return {"id": self.id, **asked, "scorer": self.scorer, "origin": self.origin}


@dataclass(frozen=True, slots=True)
class Suite:
    """Cases that are asked together."""

    name: str
    cases: tuple[Case, ...]

    def __len__(self) -> int:
        return len(self.cases)

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases)

    @property
    def digest(self) -> str:
        """Names what is asked and how it is scored: scores of suites with different digests are not compared."""
        return digest_of(self.cases)

    @property
    def runs_code(self) -> bool:
        return any(case.scorer["kind"] == "code" for case in self.cases)

    @property
    def needs_judge(self) -> bool:
        return any(case.scorer["kind"] == "judge" for case in self.cases)

    def first(self, limit: int | None) -> Suite:
        return Suite(self.name, self.cases[:limit])

    def write(self, file: str | Path) -> Path:
        """Raises CacheError when the disk refuses."""
        path = Path(file)
        with whole_file(path) as scratch:
            scratch.write_text("".join(json.dumps(case.as_row()) + "\n" for case in self.cases), encoding="utf-8")
        return path


def digest_of(cases: Iterable[Case]) -> str:
    named = hashlib.sha256()
    for case in cases:
        row = case.as_row()
        del row["origin"]
        named.update(json.dumps(row, sort_keys=True).encode())
    return named.hexdigest()[:16]


def read_suite(file: str | Path) -> Suite:
    """Raises PromptError naming file and line when a case is malformed, or an id stands twice."""
    path = Path(file)
    with reraised(PromptError, f"cannot read the suite {path}", "make one with paceline evals make", OSError, ValueError):
        lines = path.read_text(encoding="utf-8").splitlines()
    cases = [_case(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    return suite_of(path.stem, cases, str(path))


def suite_of(name: str, cases: list[Case], where: str) -> Suite:
    """Raises PromptError when there are none, or two of one id."""
    if not cases:
        raise PromptError(f"{where} holds no case: an eval needs at least one")
    seen: set[str] = set()
    for case in cases:
        if case.id in seen:
            raise PromptError(f"{where} has two cases with the id {case.id!r}: give each its own")
        seen.add(case.id)
    return Suite(name, tuple(cases))


def _case(line: str, where: str) -> Case:
    with reraised(PromptError, f"{where} is no case of a suite", "one JSON object a line, with id and scorer", ValueError):
        row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("scorer"), dict) or not isinstance(row.get("id"), str):
        raise PromptError(f"{where} is no case of a suite: it needs an id and a scorer (paceline evals make writes both)")
    messages, token_ids = row.get("messages") or [], row.get("prompt_ids") or []
    if bool(messages) == bool(token_ids):
        raise PromptError(f"{where}: a case has either messages or prompt_ids")
    check_scorer(row["scorer"], where)
    tools, variables = read_tools(row.get("tools"), where), read_variables(row.get("chat_template_kwargs"), where)
    given = (tuple(messages), tuple(token_ids), row.get("text") or "", tools, variables, row.get("origin") or {})
    return Case(row["id"], row["scorer"], *given)
