"""Reads prompts from benchmark files (JSON lines), chats, Parquet, a server's traces, or a hub data set.

    read_prompts("questions.jsonl", limit=20)  # rows with one of the keys question, text, prompt, turns, instruction,
                                               # messages, conversations
    read_prompts("traces")                     # a folder of Parquet files, or one of them
    read_prompts("openai/gsm8k/main:test")     # a hub data set: owner/name[/config][:split]

The format is inferred from each row's keys. Keys that are not read are counted (`Dropped.unread`), or rejected with
`strict`. Benchmarks get the wording of the DFlash paper's benchmark; a `question` whose `answer` contains "####" is
taken for GSM8K. Traces, and answers written by `regenerate`, are sent as their token ids (`prompt_ids`).

Rows of `messages` or ShareGPT's `conversations` may have `system`, `tools` and `chat_template_kwargs`. The user's turns
of a conversation are sent one after the other. A conversation with tool calls is sent once, up to its last message that
is not the assistant's, because the tool results belong to the recorded calls.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.data.messages import READ_KEYS, Message, MessageError, normalised
from paceline.data.rows import Dropped, Row, RowError, printable, rows_of
from paceline.data.tags import check_tags, has_tag
from paceline.errors import PromptError
from paceline.types import GrammarSpec

GSM8K = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
HUMANEVAL = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
WORDINGS = (("{}", "question"), (HUMANEVAL, "prompt", "entry_point"), ("{}", "prompt"), ("{}", "text"))
"""(wording of the prompt, key of the text, further keys that the row must have); the first that fits a row is used."""
METADATA_KEYS = (
    "id ids task_id question_id prompt_id conversation_id chat_id row_id uuid hash idx index key name sources "
    "data_source dataset dataset_name origin category subset split license url model app lang timestamp created "
    "created_at date metadata meta score scores rating quality num_tokens num_turns answer answers answer_idx "
    "answer_index output outputs response responses completion completions chosen rejected target targets label labels "
    "reference solution solutions canonical_solution entry_point is_classification correct_answer final_answer "
    "ground_truth gold explanation rationale scorer"
)
NO_PART_OF_PROMPTS = frozenset(METADATA_KEYS.split())
"""Row keys for names, origins and answers, which are ignored without notice."""
TOKEN_ROW_KEYS = (
    "prompt_ids answer_ids key source turn temperature finish_reason text top_ids top_logprobs tag ended sampling seed "
    "drafted accepted num_reused drafter cluster queue_s prefill_s first_token_s draft_s verify_s host_s total_s "
    "conversation prompt digest version"
)
BESIDE_TOKENS = NO_PART_OF_PROMPTS | frozenset(TOKEN_ROW_KEYS.split())
"""Row keys that are ignored in rows with `prompt_ids`: the tokens are the whole prompt."""
TASK_KEYS = ((frozenset({"test"}), ("entry_point",)), (frozenset({"code"}), ("test", "test_list")))
"""Keys with answers and tests of programming tasks: (ignored keys, keys of which the row must have one). In other rows
they may be part of the prompt."""
SPOKEN_KEYS = ("from", "role", "value", "content")
"""Keys that are read from an entry of a ShareGPT conversation."""
KNOWN_KEYS = "messages, conversations, turns, question, prompt, text, instruction"
CHATS = ("conversations", "conversation")
"""Row key of a ShareGPT conversation, and a common misspelling of it."""
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
"""ShareGPT's name of a speaker -> the message's role in OpenAI's API."""

log = logging.getLogger("paceline.data.prompts")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to send to the model, or a prompt given as exact token ids."""

    id: str
    messages: list[Message]
    """Messages before the model's first answer: usually an optional system message and the first user message. In a
    conversation with tool calls, all messages up to the last one that is not the assistant's."""
    turns: tuple[str, ...]
    """Texts of all user messages; the second is sent after the model's first answer, and so on. In a conversation with
    tool calls, only the last user message, which `messages` includes."""
    source: str
    """Name of the file or data set."""
    token_ids: tuple[int, ...] = ()
    """Exact token ids to send, in the target's vocabulary. If set, `messages` and `turns` are empty."""
    tools: tuple[Row, ...] = ()
    """Tools that the model may call, as in the API."""
    grammar: GrammarSpec | None = None
    """Grammar that the answer must match; None if the prompt has no grammar of its own."""
    variables: tuple[tuple[str, Any], ...] = ()
    """Chat-template variables of this row, e.g. (("enable_thinking", False),)."""
    where: str = field(default="", repr=False, compare=False)
    """File and line of the row, for messages. Ignored in comparisons."""

    def api_request(self) -> tuple[str, dict[str, Any]]:
        """Return (API path, request body) of the request for the first answer. User messages after it are not
        included."""
        if self.token_ids:
            return "/v1/completions", {"prompt": list(self.token_ids)}
        body: dict[str, Any] = {"messages": self.messages}
        if self.tools:
            body["tools"] = list(self.tools)
        if self.variables:
            body["chat_template_kwargs"] = dict(self.variables)
        return "/v1/chat/completions", body


def read_prompts(
    source: str | Path,
    limit: int | None = None,
    dropped: Dropped | None = None,
    *,
    strict: bool = False,
    tags: Sequence[str] = (),
) -> list[Prompt]:
    """Return the first `limit` prompts (None: all) of a file, a folder of Parquet files, or a hub data set.

    - `dropped`: if given, invalid rows are skipped and counted in it, by reason, as are ignored keys: those that are
      neither read nor known metadata. If None, an invalid row raises PromptError, and ignored keys are logged as a
      warning.
    - `strict`: with or without `dropped`, an invalid row or an ignored key raises PromptError.
    - `tags`: use only rows with one of these values in the column `tag` of a Parquet file; empty: all rows.

    Raises PromptError if there are no prompts, ConfigError if one of `tags` occurs in no row."""
    if limit is not None and limit < 1:
        raise PromptError(f"limit must be at least 1, not {limit}")
    name, rows = rows_of(source)
    check_tags(source, tags)
    prompts: list[Prompt] = []
    counted = Dropped() if dropped is None else dropped
    for index, (where, row) in enumerate(rows):
        try:
            if isinstance(row, RowError):
                raise row
            if not has_tag(row, tags):
                continue
            prompt, unread = _prompt_of(row, where, printable(name), index)
            if strict and unread:
                raise RowError(f"{where}: not read: {', '.join(unread)}: remove them, or write them into the prompt")
        except RowError as error:
            if dropped is None or strict:
                raise
            dropped.add(error.reason, str(error))
            continue
        prompts.append(prompt)
        counted.unread.update(unread)
        if limit is not None and len(prompts) >= limit:
            break
    if dropped is None and counted.unread:
        log.warning("%s: %s", source, counted.unread_text)
    if not prompts:
        raise PromptError(f"{source} holds no prompts: give at least one row" + (f"; {dropped}" if dropped else ""))
    return prompts


def _prompt_of(row: Row, where: str, source: str, index: int) -> tuple[Prompt, list[str]]:
    """Return the prompt of a row, and the row's keys that were not read."""
    token_ids = row.get("prompt_ids")
    is_chat = row.get("messages") is not None or any(isinstance(row.get(key), list) for key in CHATS)
    if token_ids is not None and not is_chat:  # a store's rows also have a `conversation`, which is a name
        return _traced(token_ids, where, source), unread_keys(row, BESIDE_TOKENS)
    messages, key = _messages_of(row, where)
    if messages is not None:
        first, turns, lost = _conversation(messages, where)
        known = READ_KEYS if key == "messages" else SPOKEN_KEYS
        lost += [f"{key}[].{name}" for entry in row[key] for name in unread_keys(entry, known)]
        read = {key}
    else:
        turns, read = _turns_of(row, where)
        first, lost = [{"role": "user", "content": turns[0]}], []
    if any(not turn.strip() for turn in turns):
        raise RowError(f"{where}: the prompt is empty", "empty prompt")
    system = row.get("system")
    if isinstance(system, str):
        has_system = first[0]["role"] == "system"
        if not system.strip() or not has_system or first[0]["content"] == system:
            read.add("system")
        if system.strip() and not has_system:
            first = [{"role": "system", "content": system}, *first]
    tools, variables = read_tools(row.get("tools"), where), read_variables(row.get("chat_template_kwargs"), where)
    read |= {"tools", "chat_template_kwargs"} | NO_PART_OF_PROMPTS
    for keys, signs in TASK_KEYS:
        read |= keys if any(row.get(key) is not None for key in signs) else set()
    name = next((row[key] for key in ("id", "task_id", "question_id") if row.get(key) is not None), index)
    prompt = Prompt(printable(name), first, turns, source, tools=tools, variables=variables, where=where)
    return prompt, [*unread_keys(row, read), *dict.fromkeys(lost)]


def unread_keys(row: Row, read: Iterable[str]) -> list[str]:
    """Return the row's keys that are not in `read`, the keys that the caller uses. Keys with an empty value are left
    out, because in Parquet files every row has all keys."""
    known = set(read)
    return [printable(key) for key, value in row.items() if key not in known and value not in (None, "", [], {})]


def read_variables(given: Any, where: str) -> tuple[tuple[str, Any], ...]:
    """Return a row's chat-template variables as (name, value) pairs sorted by name. Those with the value None are
    dropped, because in Parquet files every row has all keys. `where`: file and line, for error messages. Raises
    PromptError if `given` is not an object, or has a reserved name."""
    if given is None:
        return ()
    if not isinstance(given, dict):
        raise RowError(f"{where}: 'chat_template_kwargs' must be an object, as {{\"enable_thinking\": false}}")
    if taken := sorted({"messages", "tools", "add_generation_prompt"} & given.keys()):
        raise RowError(f"{where}: 'chat_template_kwargs' may not hold {taken[0]}: the row's own keys say it")
    return tuple(sorted((str(key), value) for key, value in given.items() if value is not None))


def _messages_of(row: Row, where: str) -> tuple[Any, str]:
    """Return (messages, their key), converted from ShareGPT's `conversations` if necessary; (None, "") without
    either."""
    key = next((key for key in ("messages", *CHATS) if row.get(key) is not None), "")
    entries = row.get(key)
    if entries is None or key == "messages":
        return entries, key
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RowError(f'{where}: \'conversations\' must be a list of {{"from": ..., "value": ...}}')
    return [_spoken(entry, where) for entry in entries], key


def _spoken(entry: Row, where: str) -> Message:
    """Convert one ShareGPT entry to a message."""
    speaker = entry.get("from", entry.get("role"))
    role = SPEAKERS.get(str(speaker).lower())
    if role is None:
        raise RowError(f"{where}: unknown speaker {speaker!r}: choose from {', '.join(SPEAKERS)}", "unknown speaker")
    content = entry.get("value", entry.get("content"))
    if str(speaker).lower() != "function_call":
        return {"role": role, "content": content}
    try:
        given: Any = json.loads(content) if isinstance(content, str) else content
        listed = given if isinstance(given, list) else [given]
        calls = [{"name": call["name"], "arguments": call["arguments"]} for call in listed]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RowError(f"{where}: a function_call must be a JSON object with name and arguments") from error
    return {"role": role, "content": "", "tool_calls": [{"type": "function", "function": one} for one in calls]}


def _traced(token_ids: Any, where: str, source: str) -> Prompt:
    """Return a prompt of token ids. Its id is their hash, since traces may be deleted before a run is resumed."""
    if not isinstance(token_ids, list) or not token_ids or not all(type(token) is int for token in token_ids):
        raise RowError(f"{where}: 'prompt_ids' must be a list of token ids, at least one")
    name = hashlib.blake2b(repr(token_ids).encode(), digest_size=8).hexdigest()
    if not all(0 <= token < 2**31 for token in token_ids):
        raise RowError(f"{where}: 'prompt_ids' holds a number that is no token id", "with an impossible token id")
    return Prompt(name, [], (), source, tuple(token_ids), where=where)


def digest(token_ids: Iterable[int]) -> str:
    """Return a hash of a prompt's token ids, in hexadecimal. In a server's traces (recorded requests), it is the part
    of a row's key that identifies the prompt."""
    return hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=8).hexdigest()


def read_tools(tools: Any, where: str) -> tuple[Row, ...]:
    """Return the tools of a row, given as a list or as its JSON text. `where`: file and line, for error messages.
    Raises PromptError if they do not have the API's format."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            tools = "no JSON"
    if not tools:
        return ()
    wrapped = []
    for tool in tools if isinstance(tools, list) else [None]:
        if isinstance(tool, dict) and "function" not in tool and "parameters" in tool:  # some files omit the wrapping
            tool = {"type": "function", "function": tool}
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f'{where}: \'tools\' must be a list of {{"type": "function", "function": {{"name": ...}}}}')
        wrapped.append(tool)
    return tuple(wrapped)


def _turns_of(row: Row, where: str) -> tuple[tuple[str, ...], set[str]]:
    """Return the texts of the user's turns, and the keys that were read, for a row without messages."""

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
        return tuple(turns), {"turns"}
    for form, *keys in WORDINGS:
        if has(*keys):
            form = GSM8K if keys == ["question"] and "####" in str(row.get("answer")) else form
            return (form.format(text(keys[0])),), {keys[0]}
    if has("instruction"):
        instances, given, read = row.get("instances"), row.get("input"), {"instruction"}
        if isinstance(instances, list) and instances and isinstance(instances[0], dict):
            given = instances[0].get("input")
            read |= {"instances"} if len(instances) == 1 else set()  # only the first instance is used
        elif given is None or isinstance(given, str):
            read.add("input")
        has_input = isinstance(given, str) and given.strip()
        return (text("instruction") + (f"\n\n{given}" if has_input else ""),), read
    present = ", ".join(map(printable, row)) or "nothing"
    raise RowError(f"{where}: none of the keys {KNOWN_KEYS} (found {present})", "of unknown shape")


def _conversation(messages: Any, where: str) -> tuple[list[Message], tuple[str, ...], list[str]]:
    """Split messages into (messages up to the first user turn, texts of all user turns, descriptions of dropped
    messages). With tool calls: (all messages before the last answer, the last user turn, [])."""
    conversation = read_messages(messages, where)
    turns = tuple(message["content"] for message in conversation if message["role"] == "user")
    if not turns:
        raise RowError(f"{where}: 'messages' holds no user message", "without a user's turn")
    if any(message["role"] == "tool" or "tool_calls" in message for message in conversation):
        last = max(index for index, message in enumerate(conversation) if message["role"] != "assistant")
        return conversation[: last + 1], turns[-1:], []
    first = next(index for index, message in enumerate(conversation) if message["role"] == "user")
    others = {message["role"] for message in conversation[first:]} - {"user", "assistant"}
    lost = [f"messages of role {printable(role)} after the first turn" for role in sorted(others)]
    return conversation[: first + 1], turns, lost


def read_messages(messages: Any, where: str) -> list[Message]:
    """Return the messages of a row as `normalised` does, but drop unknown keys. `where`: file and line, for error
    messages. Raises PromptError on invalid messages."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise RowError(f'{where}: \'messages\' must be a list of {{"role": ..., "content": ...}}')
    try:
        return normalised(
            {"content": None, "role": str(message.get("role"))}
            | {key: value for key, value in message.items() if key in READ_KEYS - {"role"}}
            for message in messages
        )
    except MessageError as error:
        if ".content" in error.field:
            raise RowError(f"{where}: a message's content must be text ({error})", "not text alone") from error
        raise RowError(f"{where}: {error}", "malformed message") from error
