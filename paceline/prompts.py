"""Prompts from anywhere: JSON lines of the usual benchmark shapes, Parquet, a server's traces, or a Hugging Face data set.

    read_prompts("questions.jsonl", limit=20)      # question | text | prompt | turns | instruction | messages
    read_prompts("traces")                         # a folder of Parquet files, or one of them
    read_prompts("openai/gsm8k/main:test")         # owner/name[/config][:split], needs the `datasets` package

The shape is told from each row's keys. Benchmarks get the wording the DFlash paper's own benchmark gives them. Traces, and
answers that `regenerate` wrote, are asked again token by token (`prompt_ids`). A row of `messages` may have `tools`, as the API
takes them. Of a conversation the user's turns are asked, one after the other; one in which tools were called is asked as it
stands, up to its last message that is not the assistant's, since its results belong to the calls that were made.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.errors import DownloadError, PromptError, needing, reraised
from paceline.types import GrammarSpec

GSM8K = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
HUMANEVAL = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
WORDINGS = ((GSM8K, "question"), (HUMANEVAL, "prompt", "entry_point"), ("{}", "prompt"), ("{}", "text"))
"""How the text of the first key is put, where a row has all of the keys."""
KNOWN_KEYS = "messages, turns, question, prompt, text, instruction"

Row = dict[str, Any]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be had."""

    id: str
    messages: list[Message]
    """What comes before the model's first answer: a system message perhaps, and the first user turn."""
    turns: tuple[str, ...]
    """All user turns; those after the first follow the model's own answers."""
    source: str
    """Name of the file or data set."""
    token_ids: tuple[int, ...] = ()
    """The very tokens to be sent, of the target's own vocabulary; then there are no messages and no turns."""
    tools: tuple[Row, ...] = ()
    """What may be called, as the API takes it."""
    grammar: GrammarSpec | None = None
    """What the answer has to be, where this prompt is asked for another than the others are."""


def read_prompts(source: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a JSON lines file, a Parquet file or folder, or a data set id; all without a limit.

    Raises PromptError naming file and line when a row is malformed, of unknown shape, or when there is none at all.
    """
    if limit is not None and limit < 1:
        raise PromptError(f"limit must be at least 1, not {limit}")
    path = Path(source)
    name = str(source)
    if path.is_dir():
        rows = _folder_rows(path)
        name = path.name
    elif path.is_file():
        rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
        name = path.name
    elif _looks_like_a_path(name):
        raise PromptError(f"there is no prompt file {path}: check --prompts")
    else:
        rows = _dataset_rows(name)
    prompts = [_prompt_of(row, where, name, index) for index, (where, row) in enumerate(islice(rows, limit))]
    if not prompts:
        raise PromptError(f"{source} holds no prompts: give at least one row")
    return prompts


def _looks_like_a_path(name: str) -> bool:
    is_id = re.fullmatch(r"[\w.-]+(/[\w.-]+){0,2}(:[\w.-]+)?", name) and not name.startswith((".", "/"))
    return not is_id or Path(name).suffix in (".jsonl", ".json", ".parquet", ".txt", ".csv", ".gz")


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    with reraised(PromptError, f"cannot read {path}", "check --prompts", OSError), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            remedy = "write one object per line"
            with reraised(PromptError, f"{where}: not a line of JSON", remedy, ValueError, RecursionError):
                row = json.loads(line.decode("utf-8-sig"))
            if not isinstance(row, dict):
                raise PromptError(f"{where}: expected an object with one of {KNOWN_KEYS}, not {type(row).__name__}")
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    with needing(PromptError, f"reading {path} needs pyarrow: pip install pyarrow, or give a .jsonl file"):
        from pyarrow import ArrowException, parquet
    remedy = "give a .jsonl file, or a whole Parquet file"
    with reraised(PromptError, f"{path} is not a readable Parquet file", remedy, ArrowException, OSError):
        batches = parquet.ParquetFile(path).iter_batches(batch_size=256)
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
            yield f"{path}, row {number}", row


def _folder_rows(folder: Path) -> Iterator[tuple[str, Row]]:
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise PromptError(f"{folder} is a folder without .parquet files: name a .jsonl file in it, or a folder of traces")
    for file in files:
        if file.exists():  # a server that goes on deletes its oldest traces
            yield from _parquet_rows(file)


def _dataset_rows(name: str) -> Iterator[tuple[str, Row]]:
    remedy = "to read it as a Hugging Face data set, pip install datasets, else give a .jsonl or .parquet file"
    with needing(PromptError, f"there is no file {name!r}; {remedy}"):
        import datasets  # pyright: ignore[reportMissingImports]
    repo, _, split = name.partition(":")
    parts = repo.split("/")
    config = parts.pop() if len(parts) == 3 else None
    unreached = reraised(
        DownloadError, f"cannot reach the data set {name}", "check the network, or give a .jsonl file", ConnectionError
    )
    unread = reraised(PromptError, f"cannot read the data set {name}", "check its id and split", OSError, ValueError)
    with unread, unreached:
        rows = datasets.load_dataset("/".join(parts), config, split=split or "train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield f"{name}, row {number}", dict(row)


def _prompt_of(row: Row, where: str, source: str, index: int) -> Prompt:
    messages, token_ids = row.get("messages"), row.get("prompt_ids")
    if messages is None and token_ids is not None:
        return _traced(token_ids, where, source)
    tools: tuple[Row, ...] = ()
    if messages is not None:
        first, turns = _conversation(messages, where)
        tools = read_tools(row.get("tools"), where)
    else:
        turns = _turns_of(row, where)
        first = [{"role": "user", "content": turns[0]}]
    if any(not turn.strip() for turn in turns):
        raise PromptError(f"{where}: the prompt is empty")
    name = next((row[key] for key in ("id", "task_id", "question_id") if row.get(key) is not None), index)
    return Prompt(str(name), first, turns, source, tools=tools)


def _traced(token_ids: Any, where: str, source: str) -> Prompt:
    """Named by its content: traces come and go between a run and its resumption."""
    if not isinstance(token_ids, list) or not token_ids or not all(type(token) is int for token in token_ids):
        raise PromptError(f"{where}: 'prompt_ids' must be a list of token ids, at least one")
    name = hashlib.blake2b(repr(token_ids).encode(), digest_size=8).hexdigest()
    return Prompt(name, [], (), source, tuple(token_ids))


def digest(token_ids: Iterable[int]) -> str:
    """Names a prompt by its tokens: traces carry it in their keys."""
    return hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=8).hexdigest()


def read_tools(tools: Any, where: str) -> tuple[Row, ...]:
    """Raises PromptError when they are not what the API takes."""
    if not tools:
        return ()
    functions = (
        [tool.get("function") if isinstance(tool, dict) else None for tool in tools] if isinstance(tools, list) else [None]
    )
    if not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions):
        raise PromptError(f'{where}: \'tools\' must be a list of {{"type": "function", "function": {{"name": ...}}}}')
    return tuple(tools)


def _turns_of(row: Row, where: str) -> tuple[str, ...]:
    """The texts of the user's turns, by the keys that the row has."""

    def has(*keys: str) -> bool:
        return all(row.get(key) is not None for key in keys)

    def text(key: str) -> str:
        if not isinstance(row[key], str):
            raise PromptError(f"{where}: {key!r} must be text, not {type(row[key]).__name__}")
        return row[key]

    if has("turns"):
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise PromptError(f"{where}: 'turns' must be a list of texts, one per user turn")
        return tuple(turns)
    for form, *keys in WORDINGS:
        if has(*keys):
            return (form.format(text(keys[0])),)
    if has("instruction"):
        instances, given = row.get("instances"), row.get("input")
        if isinstance(instances, list) and instances and isinstance(instances[0], dict):
            given = instances[0].get("input")
        return (f"{text('instruction')}\n\n{given}" if isinstance(given, str) and given.strip() else text("instruction"),)
    raise PromptError(f"{where}: none of the keys {KNOWN_KEYS} (found {', '.join(map(str, row)) or 'nothing'})")


def _conversation(messages: Any, where: str) -> tuple[list[Message], tuple[str, ...]]:
    """OpenAI-style messages: those up to the first user turn, and the texts of all user turns. Where tools were called: all
    that stand before the last answer, and the last turn."""
    said = read_messages(messages, where)
    turns = tuple(message["content"] for message in said if message["role"] == "user")
    if not turns:
        raise PromptError(f"{where}: 'messages' holds no user message")
    if any(message["role"] == "tool" or "tool_calls" in message for message in said):
        last = max(index for index, message in enumerate(said) if message["role"] != "assistant")
        return said[: last + 1], turns[-1:]
    first = next(index for index, message in enumerate(said) if message["role"] == "user")
    return said[: first + 1], turns


def read_messages(messages: Any, where: str) -> list[Message]:
    """Messages with their contents as text. Raises PromptError on what are none."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise PromptError(f'{where}: \'messages\' must be a list of {{"role": ..., "content": ...}}')
    kept = ("name", "tool_calls", "tool_call_id")
    return [
        {"role": str(message.get("role")), "content": _content(message.get("content"), where)}
        | {key: message[key] for key in kept if message.get(key)}
        for message in messages
    ]


def _content(content: Any, where: str) -> str:
    """A message's text; OpenAI's list of parts is joined, anything but text refused."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Iterable) and not isinstance(content, dict):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        if texts and all(isinstance(text, str) for text in texts):
            return "".join(text for text in texts if text)
    raise PromptError(f"{where}: a message's content must be text")
