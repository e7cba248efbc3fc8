"""What is known of another server's answer, and what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doubles import ByteTokenizer
from small_llm import tiny_model
from upstream import completion

from paceline.loop.record.exchange import Exchange
from paceline.loop.record.reader import Reader
from paceline.model.text.tokenizer import Tokenizer
from paceline.serve.admin.traces import Lost, Trace

HELLO = [{"role": "user", "content": "Say hello."}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def reader(tokenizer: Tokenizer) -> Reader:
    return Reader(tokenizer)


def read(reader: Reader, *answer: dict[str, Any], is_chat: bool = True, **fields: Any) -> list[Trace]:
    return list(reader.traces(Exchange(is_chat, ({"messages": HELLO} if is_chat else {}) | fields, list(answer))))


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
    }


def test_a_text_becomes_tokens_where_their_number_agrees(reader: Reader, tokenizer: Tokenizer) -> None:
    prompt, text, end = tokenizer.encode_chat(HELLO), tokenizer.encode("Hi."), tokenizer.eos_token_ids[0]
    (whole,) = read(reader, completion("Hi.", **usage(len(prompt), 4)))
    assert (whole.prompt_ids, whole.answer_ids, whole.finish_reason) == (prompt, [*text, end], "stop")
    assert whole.temperature is None and "temperature" not in whole.sampling and whole.num_reused == 4
    (cut,) = read(reader, completion("Hi.", "length", **usage(len(prompt), 3)), temperature=0.0, max_tokens=3)
    assert (cut.answer_ids, cut.finish_reason) == (text[:-1], "length"), "the last token may have been cut"
    assert cut.temperature == 0.0 and cut.sampling == {"max_tokens": 3}
    (other,) = read(reader, completion("Hi.", **usage(len(prompt), 9)))
    assert (other.prompt_ids, other.answer_ids, other.finish_reason) == (prompt, [], "unknown")
    with pytest.raises(Lost, match="mismatch"):
        read(reader, completion("Hi.", **usage(len(prompt) + 1, 4)))


def test_tokens_that_the_server_tells_are_taken(reader: Reader, tokenizer: Tokenizer) -> None:
    """vLLM's return_token_ids, whole and streamed, a call that it parsed included."""
    ids, end = tokenizer.encode("Hi."), tokenizer.eos_token_ids[0]
    tokens = {"prompt_token_ids": [1, 2, 3], "choice": {"token_ids": [*ids, end]}}
    (one,) = read(reader, completion("Hi.", **tokens), documents=[{"text": "more"}])
    assert (one.prompt_ids, one.answer_ids) == ([1, 2, 3], [*ids, end])
    first = completion("", None, is_delta=True, prompt_token_ids=[1, 2, 3])
    more = [
        completion(letter, None, is_delta=True, choice={"token_ids": [token]})
        for letter, token in zip("Hi.", ids, strict=True)
    ]
    last = completion("", is_delta=True, choice={"token_ids": [end]})
    assert read(reader, first, *more, last)[0].answer_ids == [*ids, end]
    call = completion("", "tool_calls", prompt_token_ids=[1], choice={"token_ids": ids})
    call["choices"][0]["message"]["tool_calls"] = [{"function": {"name": "weather", "arguments": "{}"}}]
    assert read(reader, call, tools=[TOOL])[0].answer_ids == ids
    for wrong in ([999_999], tokenizer.encode("Other")):
        with pytest.raises(Lost, match="mismatch"):
            read(reader, completion("Hi.", prompt_token_ids=[1], choice={"token_ids": wrong}))


def test_what_the_server_has_parsed_leaves_a_prompt(reader: Reader, tokenizer: Tokenizer) -> None:
    for part in ({"tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]}, {"reasoning_content": "Hm."}):
        answer = completion("Hi.", "tool_calls" if "tool_calls" in part else "stop")
        answer["choices"][0]["message"] |= part
        (one,) = read(reader, answer)
        assert (one.prompt_ids, one.answer_ids, one.finish_reason) == (tokenizer.encode_chat(HELLO), [], "unknown")


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"another_servers": 1}},
        {"logprobs": 5, "top_logprobs": 50},
        {"return_token_ids": "yes"},
    ],
)
def test_how_an_answer_is_sent_loses_no_exchange(reader: Reader, tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    (one,) = read(reader, completion("Hi."), **fields)
    assert one.prompt_ids == tokenizer.encode_chat(HELLO)


def test_tools_and_variables_are_rendered(reader: Reader, tokenizer: Tokenizer) -> None:
    (one,) = read(reader, completion("Hi."), tools=[TOOL])
    assert '"weather"' in tokenizer.decode(one.prompt_ids)
    (none,) = read(reader, completion("Hi."), tools=[TOOL], tool_choice="none")
    assert none.prompt_ids == tokenizer.encode_chat(HELLO)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"reasoning_effort": "high"}, "high|user: Say hello.;assistant:"),
        ({"documents": [{"text": "x"}]}, "|xuser: Say hello.;assistant:"),
        ({"add_generation_prompt": False}, "|user: Say hello.;"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "|user: Say hello."),
    ],
)
def test_fields_that_the_template_reads_are_rendered(fields: dict[str, Any], prompt: str) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = (
        "{{ reasoning_effort }}|{% for each in documents or [] %}{{ each.text }}{% endfor %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% "
        "endif %}"
    )
    (one,) = read(Reader(tokenizer), completion("Hi."), **fields)
    assert tokenizer.decode(one.prompt_ids) == prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ messages }}"},
        {"continue_final_message": True, "add_generation_prompt": True},
        {"reasoning_effort": "high"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "assistant", "content": "a", "audio": {"id": "b"}}, *HELLO]},
        {"messages": "nonsense"},
        {"temperature": -1},
        {"echo": True},
    ],
)
def test_what_is_not_followed_is_left_out(reader: Reader, fields: dict[str, Any]) -> None:
    with pytest.raises(Lost, match="unsupported"):
        read(reader, completion("Hi."), **fields)


def test_several_answers_and_prompts(reader: Reader, tokenizer: Tokenizer) -> None:
    answer = completion("One.")
    answer["choices"].append({**answer["choices"][0], "index": 1, "message": {"content": "Two."}})
    one, two = read(reader, answer, n=2, seed=4)
    assert one.prompt_ids == two.prompt_ids and one.seed is None
    assert [tokenizer.decode(each.answer_ids) for each in (one, two)] == ["One.", "Two."]
    texts = {
        "choices": [
            {"index": 0, "text": "b", "finish_reason": "stop"},
            {"index": 1, "text": "d", "finish_reason": "stop"},
        ]
    }
    first, second = read(reader, texts, is_chat=False, prompt=["a", "c"])
    assert (first.prompt_ids, second.prompt_ids) == (tokenizer.encode("a"), tokenizer.encode("c"))
    assert tokenizer.decode(second.answer_ids) == "d"


def test_stop_strings_leave_the_end_open(reader: Reader, tokenizer: Tokenizer) -> None:
    (one,) = read(reader, completion("Hello"), stop=["!"])
    assert one.answer_ids == tokenizer.encode("Hell"), "the last token may have been cut by the stop string"
    assert json.loads(json.dumps(one.sampling)) == {"stop": ["!"]}


@pytest.mark.parametrize("is_delta", [False, True])
def test_what_the_server_calls_lossy_is_left_out(reader: Reader, is_delta: bool) -> None:
    """`paceline serve --mock` says it in every piece: neither the answer nor its prompt becomes a trace."""
    with pytest.raises(Lost, match="lossy"):
        read(reader, completion("Hi.", is_delta=is_delta, lossless=False))


def test_only_the_named_model(tokenizer: Tokenizer) -> None:
    reader = Reader(tokenizer, ["tiny"])
    assert read(reader, completion("Hi."), model="tiny")
    with pytest.raises(Lost, match="model"):
        read(reader, completion("Hi."), model="tiny-lora")


@pytest.mark.parametrize("answer", [{}, {"choices": [3]}, {"choices": "no"}, {"choices": [{"index": "x"}]}])
def test_odd_answers_are_lost_quietly(reader: Reader, answer: dict[str, Any]) -> None:
    with pytest.raises(Lost, match=r"unreadable|failed"):
        read(reader, answer)


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    """A tokenizer without a template can read completions, and no conversations."""
    folder = tiny_model(tmp_path / "tiny")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    reader = Reader(Tokenizer.from_path(folder))
    with pytest.raises(Lost, match="unsupported"):
        read(reader, completion("Hi."))
    assert read(reader, {"choices": [{"text": "b", "finish_reason": "stop"}]}, is_chat=False, prompt="a")
