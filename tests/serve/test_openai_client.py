"""The official `openai` client, unmodified, against a real server with a real (tiny, random) model."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from live_server import Live

from paceline import LLM, SamplingParams

pytest_plugins = ("tiny_server",)
MESSAGES = [{"role": "user", "content": "Say something."}]
MODEL = "tiny"
PLACE = {"place": {"enum": ["Oslo", "Rome"]}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": PLACE, "required": ["place"], "additionalProperties": False},
    },
}


@pytest.mark.slow
def test_greedy_chat_is_the_offline_answer(client: openai.OpenAI, offline: LLM) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=40)
    expected = offline.chat([MESSAGES], SamplingParams(max_tokens=40))[0]
    choice = answer.choices[0]
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 40}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert len(texts) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_n_answers_stream_side_by_side(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "messages": MESSAGES, "seed": 3, "n": 2, "max_tokens": 12}
    whole = client.chat.completions.create(**request)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**request, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_stop_strings_end_the_answer(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "prompt": "abc", "temperature": 0, "max_tokens": 30}
    whole = client.completions.create(**request).choices[0]
    stop = whole.text[4:6]
    cut = client.completions.create(**request, stop=[stop, "never said"]).choices[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**request, stop=stop, stream=True))
    assert streamed == cut.text


def test_logprobs_of_a_chat(client: openai.OpenAI, offline: LLM) -> None:
    request = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 5}
    answer = client.chat.completions.create(**request, logprobs=True, top_logprobs=3)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    expected = offline.chat([MESSAGES], SamplingParams(max_tokens=5, logprobs=3))[0].logprobs
    assert [token.logprob for token in content] == pytest.approx([each.logprob for each in expected], abs=1e-4)
    assert all(len(token.top_logprobs) == 3 for token in content)
    assert all(token.top_logprobs[0].logprob == pytest.approx(token.logprob) for token in content)
    streamed = []
    for chunk in client.chat.completions.create(**request, logprobs=True, stream=True):
        logprobs = chunk.choices[0].logprobs
        streamed += (logprobs.content if logprobs else None) or []
    assert [token.token for token in streamed] == [token.token for token in content]


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="abc", temperature=0, max_tokens=6, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) == len(logprobs.text_offset or []) == 6
    assert all(len(top) <= 2 for top in logprobs.top_logprobs or [])


def test_several_prompts_and_token_ids(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    apart = [client.completions.create(**request, prompt=prompt).choices[0].text for prompt in ("abc", "xyz")]
    together = client.completions.create(**request, prompt=["abc", "xyz"])
    assert [choice.text for choice in together.choices] == apart
    ids = client.post("/../tokenize", body={"prompt": "abc"}, cast_to=object)
    assert isinstance(ids, dict)
    assert client.completions.create(**request, prompt=ids["tokens"]).choices[0].text == apart[0]
    assert client.completions.create(**request, prompt="abc", echo=True).choices[0].text == "abc" + apart[0]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_tool_call_parses(client: openai.OpenAI, choice: object, stream: bool) -> None:
    request = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": [WEATHER],
        "tool_choice": choice,
        "max_tokens": 200,
        "seed": 1,
    }
    if stream:
        chunks = list(client.chat.completions.create(**request, stream=True))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        reason = chunks[-1].choices[0].finish_reason
    else:
        answer = client.chat.completions.create(**request).choices[0]
        calls, reason = answer.message.tool_calls or [], answer.finish_reason
        assert answer.message.content is None
    assert reason == "tool_calls"
    assert [call.function.name for call in calls] == ["weather"]
    assert json.loads(calls[0].function.arguments)["place"] in ("Oslo", "Rome")
    assert calls[0].id


def test_tools_and_their_results_reach_the_prompt(client: openai.OpenAI) -> None:
    conversation = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "snow"},
    ]
    plain = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1).usage
    usage = client.chat.completions.create(model=MODEL, messages=conversation, max_tokens=1).usage
    with_tools = client.chat.completions.create(model=MODEL, messages=conversation, tools=[WEATHER], max_tokens=1).usage
    without = client.chat.completions.create(
        model=MODEL, messages=conversation, tools=[WEATHER], tool_choice="none", max_tokens=1
    ).usage
    assert plain
    assert usage
    assert with_tools
    assert without
    assert plain.prompt_tokens < usage.prompt_tokens == without.prompt_tokens < with_tools.prompt_tokens


def test_speculation_is_accounted_for(client: openai.OpenAI) -> None:
    extra = {"return_metrics": True, "paceline_timings": True}
    request = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 120}
    answer = client.chat.completions.create(**request, extra_body=extra)
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0), "it predicted nothing"
    figures = answer.model_extra["metrics"]["speculative_decoding"]
    rounds, accepted = sum(figures["acceptance_histogram"]), figures["num_accepted_draft_tokens"]
    by_source = figures["rounds_by_source"].values()
    drafted = [each for source, each in figures["rounds_by_source"].items() if source != "none"]
    assert (
        sum(each["num_rounds"] for each in by_source)
        == sum(sum(each["accepted_histogram"]) for each in by_source)
        == rounds
    )
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / rounds)
    assert figures["draft_acceptance_rate"] == pytest.approx(accepted / figures["num_draft_tokens"])
    assert accepted == sum(number * count for number, count in enumerate(figures["acceptance_histogram"]))
    assert sum(each["num_drafted"] for each in by_source) == figures["num_draft_tokens"] > 0
    assert sum(each["num_drafted"] for each in drafted) == figures["num_draft_tokens"]
    assert sum(each["num_rounds"] for each in drafted) == figures["num_spec_steps"] > 0
    assert figures["num_spec_tokens"] >= len(figures["acceptance_histogram"]) - 1 > 0
    timings = answer.model_extra["paceline"]
    assert timings["tokens"] == 120
    assert timings["drafted"] == accepted > 0
    assert timings["total_s"] >= timings["verify_s"] > 0
    assert (
        timings["num_plain"]
        == figures["rounds_by_source"]["none"]["num_rounds"]
        > 0
        < timings["plain_s"]
        < timings["total_s"]
    )
    streamed = list(client.chat.completions.create(**request, extra_body=extra, stream=True))
    extras = [chunk.model_extra["paceline"] for chunk in streamed if chunk.choices]
    assert sum(len(each["tokens"]) for each in extras) == 120
    assert sum(each["drafted"] for each in extras) == timings["drafted"]
    assert "".join(token["text"] for each in extras for token in each["tokens"]) == answer.choices[0].message.content
    assert extras[-1]["verify_s"] > 0
    assert streamed[-1].model_extra["metrics"]["speculative_decoding"] == figures


@pytest.mark.parametrize(("speculate", "most"), [("off", 0), (0, 0), (2, 2), ("auto", 99), ("full", 99)])
def test_a_request_says_how_much_is_drafted(client: openai.OpenAI, speculate: object, most: int) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="abcabcabc",
        temperature=0,
        max_tokens=60,
        extra_body={"speculate": speculate, "return_metrics": True},
    )
    figures = answer.model_extra["metrics"]["speculative_decoding"]
    histogram = figures["acceptance_histogram"]
    assert sum(count for accepted, count in enumerate(histogram) if accepted > most) == 0
    assert figures["num_draft_tokens"] if most else len(histogram) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{}, {"n": 2}, {"temperature": 1, "seed": 3}, {"logprobs": True}, {"tools": [WEATHER]}]
)
def test_a_prediction_is_drafted_from_and_changes_no_answer(client: openai.OpenAI, more: dict[str, Any]) -> None:
    chat: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 80} | more
    plain = client.chat.completions.create(**chat)
    text = plain.choices[0].message.content or ""
    half = [{"type": "text", "text": text[:20]}, {"type": "text", "text": "And otherwise from here on."}]
    counts = []
    for content in (text, half):
        answer = client.chat.completions.create(**chat, prediction={"type": "content", "content": content})
        assert answer.choices == plain.choices
        assert answer.usage
        details = answer.usage.completion_tokens_details
        assert details and details.accepted_prediction_tokens
        counts.append(details.accepted_prediction_tokens)
    assert counts[0] >= counts[1]
    off = client.chat.completions.create(
        **chat, prediction={"type": "content", "content": text}, extra_body={"speculate": "off"}
    )
    assert off.choices == plain.choices
    assert off.usage and off.usage.completion_tokens_details
    assert off.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.model_extra["drafter"]) == (MODEL, "ngram")
    with pytest.raises(openai.NotFoundError, match="this server has tiny"):
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)


def test_a_refusal_has_openais_form(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    assert isinstance(caught.value.body, dict) and set(caught.value.body) == {"message", "type", "param", "code"}


def test_embeddings_are_refused_clearly(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model=MODEL, input="x")


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_roles_of_openai_are_taken(live: Live, role: str) -> None:
    messages = [{"role": role, "content": "x"}, *MESSAGES]
    assert live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})[0] == 200


def test_absurd_numbers_do_no_harm(client: openai.OpenAI) -> None:
    extra = {"top_k": 10**30, "min_p": 1e-300, "repetition_penalty": 0.01}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=1e-300,
        top_p=1e-300,
        frequency_penalty=-100,
        max_tokens=20,
        extra_body=extra,
        seed=2**63 - 1,
    )
    assert answer.choices[0].finish_reason in ("stop", "length")
    hot = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=2, max_tokens=20)
    assert hot.choices[0].finish_reason in ("stop", "length")
    with pytest.raises(openai.BadRequestError, match="stop_token_ids names token"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"stop_token_ids": [10**20]})


def test_half_surrogates_are_no_text(live: Live) -> None:
    status, body, _ = live.post("/v1/completions", b'{"model": "\\ud800", "prompt": "x"}')
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert live.post("/v1/completions", b'{"prompt": "\\ud800"}')[0] == 400
    assert live.post("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}')[0] == 400
    assert live.post("/v1/completions", b'{"prompt": "x", "max_tokens": 2, "stop": "\\ud800"}')[0] in (200, 400)
    assert live.post("/v1/completions", b'{"prompt": "x", "max_tokens": 2, "guided_regex": "\\ud800"}')[0] == 400
