"""Prompts from anywhere: JSON lines of the usual benchmark shapes, chats, Parquet, a server's traces, or a hub data set.

    read_prompts("questions.jsonl", limit=20)      # question | text | prompt | turns | instruction | messages | conversations
    read_prompts("traces")                         # a folder of Parquet files, or one of them
    read_prompts("openai/gsm8k/main:test")         # a hub data set: owner/name[/config][:split]

The shape is told from each row's keys. Benchmarks get the wording the DFlash paper's own benchmark gives them. Traces, and
answers that `regenerate` wrote, are asked again token by token (`prompt_ids`). A row of `messages`, or of ShareGPT's
`conversations`, may have `system`, `tools` as the API takes them, and `chat_template_kwargs`. Of a conversation the user's
turns are asked, one after the other; one in which tools were called is asked as it stands, up to its last message that is not
the assistant's, since its results belong to the calls that were made.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PromptError
from paceline.rows import Dropped, Row, RowError, rows_of
from paceline.types import GrammarSpec

GSM8K = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
HUMANEVAL = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
WORDINGS = ((GSM8K, "question"), (HUMANEVAL, "prompt", "entry_point"), ("{}", "prompt"), ("{}", "text"))
"""How the text of the first key is put, where a row has all of the keys."""
KNOWN_KEYS = "messages, conversations, turns, question, prompt, text, instruction"
CHATS = ("conversations", "conversation")
"""ShareGPT's key, and a common misspelling of it."""
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
"""Who speaks in ShareGPT's files, as the API says it."""

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
    variables: tuple[tuple[str, Any], ...] = ()
    """Variables of the chat template that are this row's own, as (("enable_thinking", False),)."""


def read_prompts(source: str | Path, limit: int | None = None, dropped: Dropped | None = None) -> list[Prompt]:
    """The first `limit` prompts of a JSON lines file, a Parquet file or folder, or a data set id; all without a limit.

    Raises PromptError naming file and line when a row is malformed, of unknown shape, or when there is none at all. With
    `dropped` such rows are left out, and counted there by reason.
    """
    if limit is not None and limit < 1:
        raise PromptError(f"limit must be at least 1, not {limit}")
    name, rows = rows_of(source)
    prompts: list[Prompt] = []
    for index, (where, row) in enumerate(rows):
        try:
            if isinstance(row, RowError):
                raise row
            prompts.append(_prompt_of(row, where, name, index))
        except RowError as error:
            if dropped is None:
                raise
            dropped.add(error.reason, str(error))
        if limit is not None and len(prompts) >= limit:
            break
    if not prompts:
        raise PromptError(f"{source} holds no prompts: give at least one row" + (f"; {dropped}" if dropped else ""))
    return prompts


def _prompt_of(row: Row, where: str, source: str, index: int) -> Prompt:
    token_ids = row.get("prompt_ids")
    is_chat = row.get("messages") is not None or any(isinstance(row.get(key), list) for key in CHATS)
    if token_ids is not None and not is_chat:  # a store's rows have the name of their conversation beside their tokens
        return _traced(token_ids, where, source)
    messages = _messages_of(row, where)
    tools: tuple[Row, ...] = ()
    if messages is not None:
        first, turns = _conversation(messages, where)
        tools = read_tools(row.get("tools"), where)
    else:
        turns = _turns_of(row, where)
        first = [{"role": "user", "content": turns[0]}]
    if any(not turn.strip() for turn in turns):
        raise RowError(f"{where}: the prompt is empty", "empty prompt")
    system = row.get("system")
    if isinstance(system, str) and system.strip() and first[0]["role"] != "system":
        first = [{"role": "system", "content": system}, *first]
    name = next((row[key] for key in ("id", "task_id", "question_id") if row.get(key) is not None), index)
    return Prompt(str(name), first, turns, source, tools=tools, variables=_variables(row.get("chat_template_kwargs"), where))


def _variables(given: Any, where: str) -> tuple[tuple[str, Any], ...]:
    """Parquet gives every row all keys of its column: those without a value are not the row's."""
    if given is None:
        return ()
    if not isinstance(given, dict):
        raise RowError(f"{where}: 'chat_template_kwargs' must be an object, as {{\"enable_thinking\": false}}")
    return tuple(sorted((str(key), value) for key, value in given.items() if value is not None))


def _messages_of(row: Row, where: str) -> Any:
    """`messages` as they are, or made from ShareGPT's `conversations`; None where a row has neither."""
    if row.get("messages") is not None:
        return row["messages"]
    said = next((row[key] for key in CHATS if row.get(key) is not None), None)
    if said is None:
        return None
    if not isinstance(said, list) or not all(isinstance(each, dict) for each in said):
        raise RowError(f'{where}: \'conversations\' must be a list of {{"from": ..., "value": ...}}')
    return [_spoken(each, where) for each in said]


def _spoken(each: Row, where: str) -> Message:
    """One of ShareGPT's entries as a message."""
    speaker = each.get("from", each.get("role"))
    role = SPEAKERS.get(str(speaker).lower())
    if role is None:
        raise RowError(f"{where}: nobody is called {speaker!r} here: speakers are {', '.join(SPEAKERS)}", "unknown speaker")
    content = each.get("value", each.get("content"))
    if str(speaker).lower() != "function_call":
        return {"role": role, "content": content}
    try:
        call: Any = json.loads(content) if isinstance(content, str) else content
        calls = [{"name": one["name"], "arguments": one["arguments"]} for one in (call if isinstance(call, list) else [call])]
    except (ValueError, KeyError, TypeError) as error:
        raise RowError(f"{where}: a function_call must be a JSON object with name and arguments") from error
    return {"role": role, "content": "", "tool_calls": [{"type": "function", "function": one} for one in calls]}


def _traced(token_ids: Any, where: str, source: str) -> Prompt:
    """Named by its content: traces come and go between a run and its resumption."""
    if not isinstance(token_ids, list) or not token_ids or not all(type(token) is int for token in token_ids):
        raise RowError(f"{where}: 'prompt_ids' must be a list of token ids, at least one")
    name = hashlib.blake2b(repr(token_ids).encode(), digest_size=8).hexdigest()
    return Prompt(name, [], (), source, tuple(token_ids))


def digest(token_ids: Iterable[int]) -> str:
    """Names a prompt by its tokens: traces carry it in their keys."""
    return hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=8).hexdigest()


def read_tools(tools: Any, where: str) -> tuple[Row, ...]:
    """Tools as a list, or as the JSON text of one. Raises PromptError when they are not what the API takes."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            tools = "no JSON"
    if not tools:
        return ()
    if isinstance(tools, list):  # some files leave the wrapping out
        tools = [{"type": "function", "function": each} if _is_bare(each) else each for each in tools]
    functions = (
        [tool.get("function") if isinstance(tool, dict) else None for tool in tools] if isinstance(tools, list) else [None]
    )
    if not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions):
        raise RowError(f'{where}: \'tools\' must be a list of {{"type": "function", "function": {{"name": ...}}}}')
    return tuple(tools)


def _is_bare(tool: Any) -> bool:
    return isinstance(tool, dict) and "function" not in tool and "parameters" in tool and isinstance(tool.get("name"), str)


def _turns_of(row: Row, where: str) -> tuple[str, ...]:
    """The texts of the user's turns, by the keys that the row has."""

    def has(*keys: str) -> bool:
        return all(row.get(key) is not None for key in keys)

    def text(key: str) -> str:
        if not isinstance(row[key], str):
            raise RowError(f"{where}: {key!r} must be text, not {type(row[key]).__name__}")
        return row[key]

    if has("turns"):
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise RowError(f"{where}: 'turns' must be a list of texts, one per user turn")
        return tuple(turns)
    for form, *keys in WORDINGS:
        if has(*keys):
            return (form.format(text(keys[0])),)
    if has("instruction"):
        instances, given = row.get("instances"), row.get("input")
        if isinstance(instances, list) and instances and isinstance(instances[0], dict):
            given = instances[0].get("input")
        return (f"{text('instruction')}\n\n{given}" if isinstance(given, str) and given.strip() else text("instruction"),)
    found = ", ".join(map(str, row)) or "nothing"
    raise RowError(f"{where}: none of the keys {KNOWN_KEYS} (found {found})", "of unknown shape")


def _conversation(messages: Any, where: str) -> tuple[list[Message], tuple[str, ...]]:
    """OpenAI-style messages: those up to the first user turn, and the texts of all user turns. Where tools were called: all
    that stand before the last answer, and the last turn."""
    said = read_messages(messages, where)
    turns = tuple(message["content"] for message in said if message["role"] == "user")
    if not turns:
        raise RowError(f"{where}: 'messages' holds no user message", "without a user's turn")
    if any(message["role"] == "tool" or "tool_calls" in message for message in said):
        last = max(index for index, message in enumerate(said) if message["role"] != "assistant")
        return said[: last + 1], turns[-1:]
    first = next(index for index, message in enumerate(said) if message["role"] == "user")
    return said[: first + 1], turns


def read_messages(messages: Any, where: str) -> list[Message]:
    """Messages with their contents as text. Raises PromptError on what are none."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise RowError(f'{where}: \'messages\' must be a list of {{"role": ..., "content": ...}}')
    kept = ("name", "tool_calls", "tool_call_id", "reasoning_content")
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
    raise RowError(f"{where}: a message's content must be text", "not text alone")
