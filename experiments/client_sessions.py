"""LangChain, litellm and instructor against a running server: chat, stream, a tool with its result, structured output.

python experiments/client_sessions.py URL MODEL     (in the environment of serving_clients_sessions_requirements.txt)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Literal

from pydantic import BaseModel, ConfigDict

QUESTION = "Where does it rain?"


class Place(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]


PARAMETERS = Place.model_json_schema()
TOOL = {"type": "function", "function": {"name": "Place", "description": "A city.", "parameters": PARAMETERS}}


def langchain(url: str, model: str) -> None:
    """Chats, and the same through /v1/responses."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    for is_responses in (False, True):
        chat = ChatOpenAI(
            model=model,
            base_url=f"{url}/v1",
            api_key="none",
            temperature=0,
            max_tokens=200,
            use_responses_api=is_responses,
        )
        short = chat.bind(max_tokens=16)
        whole = short.invoke(QUESTION).text
        assert whole and whole == "".join(chunk.text for chunk in short.stream(QUESTION)), "the stream differs"
        with_tool = chat.bind_tools([TOOL], tool_choice="Place")
        called = with_tool.invoke(QUESTION)
        (call,) = called.tool_calls
        assert Place.model_validate(call["args"])
        joined = None
        for chunk in with_tool.stream(QUESTION):
            joined = chunk if joined is None else joined + chunk
        assert joined is not None and [each["args"] for each in joined.tool_calls] == [call["args"]]
        history = [HumanMessage(QUESTION), called, ToolMessage("yes", tool_call_id=call["id"])]
        assert chat.bind(max_tokens=16).bind_tools([TOOL]).invoke(history).usage_metadata["output_tokens"] <= 16
        for method in ("json_schema", "function_calling"):
            assert isinstance(chat.with_structured_output(Place, method=method).invoke(QUESTION), Place)


def litellm(url: str, model: str) -> None:
    """Chats, and the same through /v1/messages."""
    import litellm as client

    for provider, base in (("openai", f"{url}/v1"), ("anthropic", url)):
        arguments = {
            "model": f"{provider}/{model}",
            "api_base": base,
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 200,
        }
        question = [{"role": "user", "content": QUESTION}]
        whole = client.completion(messages=question, **{**arguments, "max_tokens": 16})
        streamed = client.completion(
            messages=question, stream=True, stream_options={"include_usage": True}, **{**arguments, "max_tokens": 16}
        )
        chunks = list(streamed)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text and text == whole.choices[0].message.content, "the stream differs"
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        called = client.completion(messages=question, tools=[TOOL], tool_choice="required", **arguments).choices[0]
        (call,) = called.message.tool_calls
        assert called.finish_reason == "tool_calls" and Place.model_validate_json(call.function.arguments)
        history = [*question, called.message, {"role": "tool", "tool_call_id": call.id, "content": "yes"}]
        assert (
            client.completion(messages=history, tools=[TOOL], **{**arguments, "max_tokens": 16}).usage.completion_tokens
            <= 16
        )
        if provider == "openai":
            answer = client.completion(messages=question, response_format=Place, **arguments)
            assert Place.model_validate_json(answer.choices[0].message.content)


def instructor(url: str, model: str) -> None:
    """Its ways to a structure: calls, and schemas of the answer."""
    import instructor as client
    from openai import OpenAI

    arguments = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 200,
    }
    with OpenAI(base_url=f"{url}/v1", api_key="none") as plain:
        for mode in (client.Mode.TOOLS, client.Mode.JSON_SCHEMA):
            patched = client.from_openai(plain, mode=mode)
            assert isinstance(patched.chat.completions.create(response_model=Place, max_retries=0, **arguments), Place)
            *_, last = patched.chat.completions.create_partial(response_model=Place, max_retries=0, **arguments)
            assert last.city in ("Oslo", "Rome")
        assert plain.chat.completions.create(**arguments).choices[0].message.content
        chunks = list(plain.chat.completions.create(**arguments, stream=True))
        assert len(chunks) > 1


SESSIONS: dict[str, Callable[[str, str], None]] = {
    "langchain-openai": langchain,
    "litellm": litellm,
    "instructor": instructor,
}


def main(words: list[str]) -> int:
    if len(words) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    for package, session in SESSIONS.items():
        session(*words)
        print(f"{package} {version(package)}: ok", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
