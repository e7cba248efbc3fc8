"""Builds suites from a store's evals split, or from files of questions.

    make_suite(MakeConfig(("store",), scorer="json"))
    make_suite(MakeConfig(("gsm8k_test.jsonl",)))       # recognises GSM8K, HumanEval, MBPP and support tickets by keys

In cases from a store the recorded answer is the reference: its text, its last number, or the fields of its JSON.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paceline.bench.tasks import NUMBER, score_ticket
from paceline.data.prompts import GSM8K, HUMANEVAL, read_messages, read_tools, read_variables, unread_keys
from paceline.data.rows import Dropped, RowError, rows_of
from paceline.errors import ConfigError, PromptError, refuse
from paceline.loop.evals.config import MakeConfig
from paceline.loop.evals.scorers import check_scorer, object_in
from paceline.loop.evals.suite import Case, Suite, suite_of
from paceline.runs.folder import plain
from paceline.simulate.files import read_json

log = logging.getLogger("paceline.loop.evals")
Row = dict[str, Any]
ID_KEYS = ("id", "task_id", "question_id")
MBPP = "{}\nYour code should pass these tests:\n\n{}"


class Question(NamedTuple):
    """A question with its answer, parsed from one row of a file."""

    messages: list[Row]
    answer: str | None
    """The recorded answer, if the row has one."""
    scorer: Row | None
    """The scorer, if the row's keys determine it."""
    read: set[str]
    """Keys of the row that were used."""


def make_suite(config: MakeConfig, name: str = "suite", dropped: Dropped | None = None) -> Suite:
    """Builds a suite from the sources of `config`.

    `dropped`: object of the caller that receives two counts: rows that cannot become a case, by reason, and rows with
    keys that are not read, by key. If it is None, the first row that cannot become a case raises PromptError, and keys
    that are not read are logged as a warning. Raises ConfigError on contradictory settings, PromptError if the sources
    give no case.
    """
    counted = Dropped() if dropped is None else dropped
    cases = [case for source in config.sources for case in _cases(source, config, counted, raises=dropped is None)]
    if dropped is None and counted.unread:
        log.warning("%s: %s", ", ".join(config.sources), counted.unread_text)
    counts = f" ({dropped})" if dropped else ""
    refuse(PromptError, (not cases, f"{', '.join(config.sources)} holds nothing to ask: give at least one row{counts}"))
    if config.limit is not None and config.limit < len(cases):
        chosen = set(random.Random(config.seed).sample(range(len(cases)), config.limit))
        cases = [case for number, case in enumerate(cases) if number in chosen]
    return suite_of(name, cases, ", ".join(config.sources))


def _cases(source: str, config: MakeConfig, dropped: Dropped, *, raises: bool) -> Iterator[Case]:
    """Yields the cases of a source. An unusable row is counted in `dropped`, or its error is raised if `raises`."""
    if (Path(source) / "store.json").is_file():
        rows = _stored(source, config)
    else:
        refuse(ConfigError, (config.tag is not None, "tag chooses among a store's rows: leave it out with files"))
        rows = _of_file(source, config, dropped)
    for case in rows:
        if not isinstance(case, PromptError):
            yield case
        elif raises:
            raise case
        else:
            dropped.add(case.reason if isinstance(case, RowError) else "that cannot be scored", str(case))


def _of_file(source: str, config: MakeConfig, dropped: Dropped) -> Iterator[Case | PromptError]:
    """Yields a case or an error for each row; counts unused keys in `dropped`."""
    name, rows = rows_of(source)
    for number, (where, row) in enumerate(rows):
        if isinstance(row, RowError):
            yield row
            continue
        try:
            question = _question(row, where)
            scorer = question.scorer if question.scorer and config.scorer in ("auto", question.scorer["kind"]) else None
            scorer = scorer or _scorer(config, question.answer, where)
            check_scorer(scorer, where)
            tools = read_tools(row.get("tools"), where)
            variables = read_variables(row.get("chat_template_kwargs"), where)
        except PromptError as error:
            yield error
            continue
        id_of = next((row[key] for key in ID_KEYS if row.get(key) is not None), number)
        dropped.unread.update(unread_keys(row, {*question.read, *ID_KEYS, "tools", "chat_template_kwargs"}))
        origin, messages = {"file": name}, tuple(question.messages)
        yield Case(f"{name}/{id_of}", scorer, messages, tools=tools, variables=variables, origin=origin)


def _stored(source: str, config: MakeConfig) -> Iterator[Case | PromptError]:
    """Yields a case or an error for each distinct prompt of the evals split; its first recorded answer is the
    reference."""
    from paceline.loop.store.folder import Store

    store, seen = Store.open(source), set[tuple[int, ...]]()
    for row in store.rows("evals"):
        prompt = tuple(row["prompt_ids"])
        if prompt in seen or (config.tag is not None and row["tag"] != config.tag):
            continue
        seen.add(prompt)
        where = f"{source}, row {row['key']}"
        try:
            scorer = _scorer(config, row["text"], where)
            check_scorer(scorer, where)
        except PromptError as error:
            yield error
            continue
        origin = {"store": store.path.name, "version": store.version}
        origin |= {name: row[name] for name in ("digest", "conversation", "key")}
        yield Case(row["digest"], scorer, token_ids=prompt, text=row["prompt"], origin=origin)


def _question(row: Row, where: str) -> Question:
    if isinstance(row.get("scorer"), dict):
        return Question(read_messages(row.get("messages"), where), None, row["scorer"], {"messages", "scorer"})
    if row.get("messages") is not None:
        messages = read_messages(row["messages"], where)
        answer = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None
        return Question(messages, answer, _ticket({**row, "messages": messages}), {"messages"})
    if row.get("entry_point") and row.get("test"):
        scorer = {"kind": "code", "prompt": row["prompt"], "entry_point": row["entry_point"], "tests": row["test"]}
        read = {"prompt", "entry_point", "test", "canonical_solution"}
        return Question(_user(HUMANEVAL.format(row["prompt"])), None, scorer, read)
    if row.get("test_list"):
        tests = "\n".join([*filter(None, [row.get("test_setup_code")]), *row["test_list"]])
        key = "text" if row.get("text") else "prompt"
        read = {key, "test_list", "test_setup_code", "code", "challenge_test_list"}
        return Question(_user(MBPP.format(row.get(key), tests)), None, {"kind": "code", "tests": tests}, read)
    for key in ("question", "prompt", "text", "instruction"):
        if isinstance(row.get(key), str):
            answer_key = next((name for name in ("answer", "reference", "output") if row.get(name) is not None), None)
            answer = None if answer_key is None else row[answer_key]
            read = {key} if answer_key is None else {key, answer_key}
            if key == "question" and isinstance(answer, str) and "####" in answer:
                return Question(_user(GSM8K.format(row[key])), answer.rpartition("####")[2].strip(), None, read)
            return Question(_user(row[key]), None if answer is None else str(answer), None, read)
    raise PromptError(
        f"{where}: none of the keys messages, question, prompt, text, instruction: there is nothing to ask"
    )


def _user(text: str) -> list[Row]:
    return [{"role": "user", "content": text}]


def _ticket(row: Row) -> Row | None:
    """Returns the scorer of a support ticket, whose last line states the right policy and action; else None."""
    last = str(row["messages"][-1]["content"]) if row["messages"] else ""
    policy, _, action = last.rpartition("\nPolicy ")[2].partition(": ")
    fields = {"policy_id": policy, "action": action}
    is_one = "\nPolicy " in last and score_ticket(row, json.dumps(fields))
    return {"kind": "json", "fields": fields} if is_one else None


def _scorer(config: MakeConfig, answer: str | None, where: str) -> Row:
    """Returns the configured scorer for this recorded answer; auto chooses json or numeric by the answer."""
    kind = config.scorer
    if kind == "regex":
        return {"kind": kind, "pattern": config.pattern}
    if answer is None and kind == "json" and config.schema is not None:
        return {"kind": kind, "schema": read_json(config.schema, "give a JSON file")}
    if answer is None:
        raise PromptError(f"{where}: it has no answer to be held against: score it by regex, or by json with a schema")
    value, numbers = object_in(answer), NUMBER.findall(answer)
    if kind == "auto":
        kind = "json" if value is not None else "numeric" if len(numbers) == 1 and numbers[0] == answer.strip() else ""
        if not kind:
            raise PromptError(f"{where}: its answer is a text: say how it is scored, by exact or judge")
    if kind == "json":
        return _json(config, value, where)
    if kind == "numeric":
        if not numbers:
            raise PromptError(f"{where}: its answer has no number: choose another scorer")
        return {"kind": kind, "answer": float(numbers[-1].replace(",", "")), "tolerance": config.tolerance}
    if kind == "judge":
        return {"kind": kind, "reference": answer} | ({"criteria": config.criteria} if config.criteria else {})
    if kind == "code":
        raise PromptError(f"{where}: it has no tests: code needs test and entry_point, or test_list")
    return {"kind": kind, "answer": answer}


def _json(config: MakeConfig, value: Row | None, where: str) -> Row:
    if value is None:
        raise PromptError(f"{where}: its answer is no JSON object: choose another scorer")
    missing = [name for name in config.fields if name not in value]
    if missing:
        raise PromptError(f"{where}: its answer has no field {missing[0]!r}: check --field")
    fields = {name: value[name] for name in config.fields or value}
    schema = {} if config.schema is None else {"schema": read_json(config.schema, "give a JSON file")}
    return plain({"kind": "json", "fields": fields, **schema})


def without_leaks(suite: Suite, store: Path, dropped: Dropped) -> Suite:
    """Returns the suite without the cases whose questions nearly equal a prompt in the training split of a store.

    Counts the removed cases in `dropped`. Raises PromptError when no case remains.
    """
    from paceline.loop.evals.leaks import leaking
    from paceline.loop.store.folder import Store

    leaks = set(leaking(suite, Store.open(store)))
    for name in sorted(leaks):
        dropped.add(f"that {store.name} trains on", name)
    return suite_of(suite.name, [case for case in suite if case.id not in leaks], f"{suite.name}, apart from {store},")
