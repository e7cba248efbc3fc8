"""Converts a conversation to a prompt; used by server, library, training data, proxy and evals.

`chat_text` normalises messages and tools, formats tool calls and results for the model's template, and renders it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from paceline.data.messages import MessageError, normalised, normalised_tools
from paceline.errors import PromptError, shown
from paceline.model.text.tools import with_tools

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
"""Template variables that callers may not pass, as the conversation sets them."""


class Templated(Protocol):
    """Protocol of a tokenizer with a chat template."""

    def apply_chat_template(
        self, messages: Any, add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None
    ) -> str: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def chat_text(
    tokenizer: Templated,
    messages: Any,
    tools: Iterable[Any] = (),
    variables: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Render a conversation with the model's chat template; returns the prompt text.

    `tools`: tools that the model may call; `variables`: further variables for the template. `add_generation_prompt`:
    end with the beginning of an assistant message. `continue_final_message`: end with the last message's content, for
    the model to continue.

    Raises PromptError if the template fails, or `variables` is not a mapping of names to values. Raises MessageError, a
    PromptError that names the field, for malformed messages, for a last message that cannot be continued, and if
    `variables` contains messages, tools or add_generation_prompt.
    """
    if not isinstance(variables, Mapping | None) or not all(isinstance(name, str) for name in variables or ()):
        example = "as in {'enable_thinking': False}"
        raise PromptError(f"variables must be values of the chat template by name, {example}, not {shown(variables)}")
    if reserved := RESERVED & (variables or {}).keys():
        name = min(reserved)
        raise MessageError(f"chat_template_kwargs.{name}", "this is a field of the request itself: leave it out here")
    normal = normalised(messages)
    mark = f"[{secrets.token_hex(8)}]" if continue_final_message else ""
    if mark:
        _check_final(normal)
        normal[-1]["content"] += mark
    rendered, more = with_tools(normal, normalised_tools(tools), getattr(tokenizer, "chat_template", None))
    text = tokenizer.apply_chat_template(rendered, add_generation_prompt and not mark, {**(variables or {}), **more})
    if not mark:
        return text
    before, separator, _ = text.rpartition(mark)
    if not separator:
        raise PromptError("this model's chat template hides the last message, so it cannot be continued")
    return before


def _check_final(messages: list[dict[str, Any]]) -> None:
    if not messages or not messages[-1]["content"] or "tool_calls" in messages[-1]:
        field = f"messages[{max(len(messages) - 1, 0)}]"
        raise MessageError(field, "continue_final_message needs a last message with a content and without tool_calls")


def chat_ids(
    tokenizer: Templated,
    messages: Any,
    tools: Iterable[Any] = (),
    variables: Mapping[str, Any] | None = None,
    **options: bool,
) -> list[int]:
    """Render a conversation by `chat_text` and return its token ids. `options`: add_generation_prompt and
    continue_final_message. No bos is added, because the template writes the special tokens. Raises PromptError."""
    return tokenizer.encode(chat_text(tokenizer, messages, tools, variables, **options), add_special_tokens=False)
