"""Recovers the tokens of an answer of which the server parsed the reasoning or the tool calls.

The model's own chat template writes the message again, behind the request's conversation. The caller compares the
length of the result with the engine's `usage.completion_tokens`."""

from __future__ import annotations

from pydantic import ValidationError

from paceline.errors import PacelineError
from paceline.loop.record.response import Choice
from paceline.model.text.tokenizer import Tokenizer
from paceline.serve.http.failures import ApiError
from paceline.serve.requests.prompts import encode_request
from paceline.serve.requests.protocol import ChatRequest, CompletionRequest, Message

WHOLE = ("stop", "tool_calls")
"""Finish reasons of an answer that the model ended itself."""


def rendered_ids(
    request: ChatRequest | CompletionRequest, choice: Choice, prompt_ids: list[int], tokenizer: Tokenizer
) -> list[int] | None:
    """Recovers the token ids of a chat answer from which the server has parsed reasoning or tool calls, so that its
    original text is unknown. Renders the conversation again with the model's chat template, with the answer as the last
    message. The result includes the end token.

    Returns None if this is not reliable:
    - The model did not end the answer itself.
    - The rendered tokens do not begin with the prompt.
    - A parsed part (text, reasoning, call) is not in the rendered answer."""
    is_whole = choice.finish_reason in WHOLE and choice.stop_reason is None
    if not isinstance(request, ChatRequest) or request.continue_final_message or not choice.is_rendered or not is_whole:
        return None
    try:
        message = Message.model_validate(choice.message())
        changes = {"messages": [*request.messages, message], "add_generation_prompt": False}
        ids = encode_request(request.model_copy(update=changes), tokenizer)
    except (ValidationError, ApiError, PacelineError):
        return None
    after = ids[len(prompt_ids) :]
    end = next((place for place, token in enumerate(after) if token in tokenizer.eos_token_ids), None)
    if ids[: len(prompt_ids)] != prompt_ids or end is None:
        return None
    text = tokenizer.decode(after[:end], False)
    parts = [choice.text, choice.reasoning]
    parts += [call[name] for call in choice.calls.values() for name in ("name", "arguments")]
    return after[: end + 1] if all(part in text for part in parts) else None
