"""Encodes the prompts of requests: conversations with the chat template and tools, texts, and token ids.

Rendering and encoding are slow: run these functions in a thread. All of them raise RequestRefused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from paceline.data.messages import MessageError, content_text
from paceline.errors import PacelineError
from paceline.model.text.chat import chat_text
from paceline.model.text.tokenizer import Tokenizer
from paceline.model.text.tools import compact
from paceline.sampling import SURROGATE
from paceline.serve.http.clock import Clock
from paceline.serve.http.failures import RequestRefused
from paceline.serve.requests.protocol import ChatRequest, ChosenTool, CompletionRequest, Message, TokenizeRequest, Tool
from paceline.serve.worker.engine import ModelInfo

MAX_TOKEN_CHARACTERS = 64
"""Upper bound of the mean characters per token: a prompt above it is rejected without being encoded."""
TEMPLATE_FIELDS = ("reasoning_effort", "documents")
"""Fields of a chat that are passed to the chat template, which must use them."""
CHAT_ONLY = (
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    *TEMPLATE_FIELDS,
    "add_generation_prompt",
    "continue_final_message",
)
"""Fields of /tokenize that are valid only with messages."""


def chat_ids(request: ChatRequest, model: ModelInfo, clock: Clock | None = None) -> list[int]:
    """Return the token ids of a chat request's prompt. `clock` measures the template and the tokenizer. Raises
    RequestRefused for invalid messages or tools, and for texts that are far longer than the context."""
    check_characters(_texts(request), model, "messages")
    return encode_request(request, model.tokenizer, clock)


def prediction_ids(request: ChatRequest, model: ModelInfo) -> tuple[int, ...]:
    """Return the token ids of the request's prediction (the answer that the client expects), or () for a request
    without a prediction. Raises RequestRefused if the prediction is not text, or longer than the context."""
    if request.prediction is None:
        return ()
    if request.prediction.content is None:
        message = "prediction.content: must be the expected answer, a text or a list of text parts, not null"
        raise RequestRefused(message, param="prediction.content")
    try:
        text = content_text(request.prediction.content, "prediction.content")
        check_characters([text], model, "prediction")
        ids = model.tokenizer.encode(text, add_special_tokens=False)
    except PacelineError as error:
        raise RequestRefused.of(error, param="prediction") from error
    if len(ids) > model.max_len:
        message = f"the prediction has {len(ids)} tokens, more than the context of {model.max_len}: shorten it"
        raise RequestRefused(message, param="prediction", code="context_length_exceeded")
    return tuple(ids)


def _texts(request: ChatRequest) -> Iterator[str]:
    """Yield all texts of the prompt, with about their rendered lengths."""
    for place, message in enumerate(request.messages):
        yield text_of(message, f"messages[{place}]")
        sent = message.as_sent()
        yield from (
            text for name in ("reasoning_content", "reasoning", "refusal") if isinstance(text := sent.get(name), str)
        )
        yield from (compact(sent[name], RequestRefused) for name in ("tool_calls", "function_call") if sent.get(name))
    others = (plain_tools(tools_of(request)), request.documents)
    yield from (compact(value, RequestRefused) for value in others if value)


def encode_request(
    request: ChatRequest | TokenizeRequest, tokenizer: Tokenizer, clock: Clock | None = None
) -> list[int]:
    """Return the token ids of a request's conversation, rendered by the chat template. `clock` measures the template
    and the tokenizer. Raises RequestRefused for invalid messages or tools, for options that exclude each other, and for
    `reasoning_effort` or `documents` that the template does not use."""
    variables = dict(request.chat_template_kwargs or {})
    for name in TEMPLATE_FIELDS:
        value = getattr(request, name)
        if value is None:
            continue
        if not re.search(rf"\b{name}\b", getattr(tokenizer, "chat_template", None) or ""):
            raise RequestRefused(f"{name}: this model's chat template does not read it: leave it out", param=name)
        variables.setdefault(name, value)
    tools = plain_tools(tools_of(request))
    if request.continue_final_message and request.add_generation_prompt:
        message = "continue_final_message goes on with the last message, add_generation_prompt opens a new one: choose"
        raise RequestRefused(message, param="continue_final_message")
    opens, goes_on = request.add_generation_prompt is not False, bool(request.continue_final_message)
    clock = clock or Clock()
    try:
        plain = [message.as_sent() for message in request.messages or []]
        text = chat_text(
            tokenizer, plain, tools, variables, add_generation_prompt=opens, continue_final_message=goes_on
        )
        clock.mark("template")
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        clock.mark("tokenizer")
        return token_ids
    except PacelineError as error:
        if field := _not_unicode(request, tools):
            message = f"{field}: a lone surrogate is not valid Unicode: re-encode the text as UTF-8"
            raise RequestRefused(message, param=field) from error
        raise RequestRefused.of(error, param="messages") from error


def _not_unicode(request: ChatRequest | TokenizeRequest, tools: list[dict[str, Any]]) -> str | None:
    """Return the first field of the prompt that has a lone surrogate, or None."""
    fields: list[tuple[str, Any]] = []
    for place, message in enumerate(request.messages or []):
        sent = message.as_sent()
        fields += [(f"messages[{place}].content", sent.pop("content", None)), (f"messages[{place}]", sent)]
    fields += [(f"tools[{place}]", tool) for place, tool in enumerate(tools)]
    fields += [(name, getattr(request, name)) for name in ("chat_template_kwargs", *TEMPLATE_FIELDS)]
    return next((field for field, value in fields if SURROGATE.search(compact(value, RequestRefused))), None)


def tokenize_ids(request: TokenizeRequest, model: ModelInfo) -> list[int]:
    """Return the token ids for a request to /tokenize. A `prompt` is encoded as in a text completion, `messages` as in
    a chat. Raises RequestRefused unless the request has exactly one of these two fields, and for options that apply
    only to the other one."""
    if (request.prompt is None) == (request.messages is None):
        raise RequestRefused("give either prompt or messages", param="prompt")
    if request.messages is None:
        wrong = next((name for name in CHAT_ONLY if getattr(request, name) is not None), None)
        if wrong:
            raise RequestRefused(f"{wrong}: a prompt is no chat: give messages", param=wrong)
        return encode_text(request.prompt or "", model.tokenizer, request.add_special_tokens is not False)
    if request.add_special_tokens:
        raise RequestRefused("add_special_tokens: a chat template brings its own", param="add_special_tokens")
    return encode_request(request, model.tokenizer)


def completion_ids(request: CompletionRequest, model: ModelInfo) -> list[list[int]]:
    """Return the token ids of each prompt of a text completion request. Raises RequestRefused for empty, far too long
    or otherwise invalid prompts."""
    with_special, encoded = request.add_special_tokens is not False, list[list[int]]()
    for text_or_ids in prompts_of(request):
        check_characters([text_or_ids] if isinstance(text_or_ids, str) else [], model, "prompt")
        ids = encode_text(text_or_ids, model.tokenizer, with_special) if isinstance(text_or_ids, str) else text_or_ids
        encoded.append(check_ids(ids, model, "prompt"))
    if not encoded or not all(encoded):
        raise RequestRefused("the prompt is empty: give some text", param="prompt")
    return encoded


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts of a text completion request, each a text or its token ids."""
    prompt = request.prompt
    is_one = isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], int))
    return cast("list[str | list[int]]", [prompt] if is_one else prompt)


def encode_text(text: str, tokenizer: Tokenizer, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text, without a chat template. `add_special_tokens`: also add those that the tokenizer
    puts around a text, such as BOS. Raises RequestRefused if the tokenizer rejects the text."""
    try:
        return tokenizer.encode(text, add_special_tokens)
    except PacelineError as error:
        raise RequestRefused.of(error, param="prompt") from error


def check_ids(ids: list[int], model: ModelInfo, field: str) -> list[int]:
    """Return `ids` unchanged. Raises RequestRefused, naming `field`, if one of them is not in the vocabulary."""
    wrong = next((token for token in ids if not 0 <= token < model.vocab_size), None)
    if wrong is not None:
        raise RequestRefused(f"token {wrong} is outside the model's vocabulary of {model.vocab_size}", param=field)
    return ids


def check_characters(texts: Iterable[str], model: ModelInfo, field: str) -> None:
    """Rejects texts that are far too long for the context without encoding them, which would be slow. Raises
    RequestRefused, naming `field`, if the texts together have more than 64 (MAX_TOKEN_CHARACTERS) characters per token
    of the context."""
    num_characters = sum(map(len, texts))
    if num_characters > MAX_TOKEN_CHARACTERS * model.max_len:
        noun = "prediction" if field == "prediction" else "prompt"
        message = f"the {noun} has {num_characters:,} characters, far more than {model.max_len} tokens hold: shorten it"
        raise RequestRefused(message, param=field, code="context_length_exceeded")


def tools_of(request: ChatRequest | TokenizeRequest) -> list[Tool]:
    """Return the tools that the answer may call; none if tool_choice is "none". Raises RequestRefused if two tools have
    one name, or if tool_choice names an unknown tool, or is "required" without tools."""
    tools, choice = request.tools or [], request.tool_choice
    count_by_name = Counter(tool.function.name for tool in tools)
    if twice := next((name for name, count in count_by_name.items() if count > 1), None):
        raise RequestRefused(f"tools: {twice!r:.80} is the name of several: rename all but one", param="tools")
    if isinstance(choice, ChosenTool) and choice.function.name not in count_by_name:
        raise RequestRefused(
            f"tool_choice names {choice.function.name!r}, which is not among the tools", param="tool_choice"
        )
    if choice == "required" and not tools:
        raise RequestRefused("tool_choice is required, but there are no tools", param="tool_choice")
    return [] if choice == "none" else tools


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools as JSON objects with exactly the fields that the client sent."""
    return [tool.model_dump(exclude_unset=True) for tool in tools]


def text_of(message: Message, field: str = "messages") -> str:
    """Return a message's text. Raises RequestRefused, naming `field`, if its content has a part without text."""
    try:
        return content_text(message.content, f"{field}.content")
    except MessageError as error:
        raise RequestRefused.of(error) from error
