"""Traces of vLLM's own: its request log, and OpenTelemetry spans."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_llm import tiny_model
from trace_files import rows

from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.loop.record.config import RecordConfig
from paceline.loop.record.run import read
from paceline.model.text.tokenizer import Tokenizer
from paceline.serve.settings import TraceConfig

HELLO = [{"role": "user", "content": 'It\'s "hi",\nparams: SamplingParams(n=2)'}]
PARAMS = (
    "SamplingParams(n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, temperature=0.7, "
    "top_p=0.9, top_k=0, min_p=0.0, seed=5, stop=[], stop_token_ids=[], bad_words=[], "
    "include_stop_str_in_output=False, ignore_eos=False, max_tokens=64, min_tokens=0, logprobs=None, "
    "skip_special_tokens=True, truncate_prompt_tokens=None, structured_outputs=StructuredOutputsParams(json=None, "
    "regex='a<b>'), extra_args=None)"
)


Importer = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def imported(model: Path, tmp_path: Path) -> Importer:
    """What a file of these lines becomes."""

    def load(*lines: str, name: str = "vllm.log") -> list[dict[str, Any]]:
        file = tmp_path / name
        file.write_text("".join(f"{line}\n" for line in lines))
        read(RecordConfig(str(model), imports=(file,)), TraceConfig(tmp_path / "store"))
        return rows(tmp_path / "store")

    return load


def at(level: str = "INFO", moment: str = "11-22 14:00:03") -> str:
    return f"(APIServer pid=7) {level} {moment} [logger.py:43] "


def request_lines(name: str, prompt: str, ids: list[int], params: str = PARAMS) -> list[str]:
    """As vLLM 0.11 and later log a request."""
    first = f"Request {name} details: prompt: {prompt!r}, prompt_token_ids: {ids}, prompt_embeds shape: None."
    return [at("DEBUG") + first, at() + f"Received request {name}: params: {params}, lora_request: None."]


def answered(name: str, text: str, ids: list[int] | None, reason: str = "stop", kind: str = "") -> str:
    moment = "11-22 14:00:05"
    return (
        at(moment=moment)
        + f"Generated response {name}{kind}: output: {text!r}, output_token_ids: {ids}, finish_reason: {reason}"
    )


def test_the_log_of_requests(imported: Importer, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.apply_chat_template(HELLO)
    ids, answer_ids = tokenizer.encode_chat(HELLO), [*tokenizer.encode("It's fine."), *tokenizer.eos_token_ids]
    old = (
        f"Received request chatcmpl-2: prompt: {prompt!r}, params: {PARAMS}, prompt_token_ids: {ids}, lora_request: "
        "None."
    )
    imported_rows = imported(
        "INFO 11-22 13:59:00 [api_server.py:1] Started server process",
        *request_lines("chatcmpl-1", prompt, ids),
        at() + old,
        '     INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        answered("chatcmpl-1", "It's fine.", answer_ids),
        answered("chatcmpl-2", "It's", [1], "None", " (streaming delta)"),
        answered("chatcmpl-2", "It's fine.", None, "streaming_complete", " (streaming complete)"),
        answered("chatcmpl-never-asked", "No.", [1, 2]),
    )
    whole, streamed = imported_rows
    assert whole["prompt_ids"] == streamed["prompt_ids"] == ids
    assert (whole["answer_ids"], whole["finish_reason"], whole["seed"]) == (answer_ids, "stop", 5)
    assert whole["temperature"] == pytest.approx(0.7) and whole["total_s"] == 2
    assert json.loads(whole["sampling"]) == {"temperature": 0.7, "top_p": 0.9, "seed": 5, "max_tokens": 64}
    assert (streamed["text"], streamed["finish_reason"]) == ("It's fine", "unknown"), "how it ended is not logged"


def test_what_was_imported_is_not_kept_twice(model: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """By what was logged: the file may have grown, moved, or be named twice. The same words said again are another
    answer."""
    prompt = tokenizer.encode("Once")
    lines = [*request_lines("cmpl-1-0", "Once", prompt), answered("cmpl-1", "Yes", tokenizer.encode("Yes"))]
    attributes = {"operation.name": "chat", "input.messages": [{"role": "user", "parts": text("Hi")}]}
    attributes["output.messages"] = [{"role": "assistant", "parts": text("Ho."), "finish_reason": "stop"}]
    first, second, spans = tmp_path / "a.log", tmp_path / "b.log", tmp_path / "spans.jsonl"
    first.write_text("\n".join(lines) + "\n")
    spans.write_text("\n".join(line(span(attributes, traceId="t", spanId=name)) for name in "ab") + "\n")
    tracing, config = TraceConfig(tmp_path / "store"), RecordConfig(str(model), imports=(first, first, spans))
    assert (done := read(config, tracing)).num_written == 3 and done.dropped == {"known": 1}
    assert (done := read(config, tracing)).num_written == 0 and done.dropped == {"known": 4}
    lines += [*request_lines("cmpl-2-0", "Once", prompt), answered("cmpl-2", "Yes", tokenizer.encode("Yes"))]
    second.write_text("\n".join(lines) + "\n")
    done = read(RecordConfig(str(model), imports=(second,)), tracing)
    assert done.num_written == 1 and done.dropped == {"known": 1} and len(rows(tmp_path / "store")) == 4


def test_completions_are_numbered_and_calls_keep_their_tokens(imported: Importer, tokenizer: Tokenizer) -> None:
    call = [*tokenizer.encode('<tool_call>{"name": "f"}</tool_call>'), *tokenizer.eos_token_ids]
    imported_rows = imported(
        *request_lines("cmpl-1-0", "Once", tokenizer.encode("Once")),
        answered("cmpl-1", "[tool_calls: f({})]", call, "tool_calls"),
        *request_lines("cmpl-2-0", "Once", tokenizer.encode("Once")),
        at() + "Generated response cmpl-2: output: '[reasoning: Hm.]', finish_reason: stop",
    )
    assert [row["answer_ids"] for row in imported_rows] == [call, []]


def test_what_the_log_has_cut_is_left_out(imported: Importer, tokenizer: Tokenizer) -> None:
    """--max-log-len 4: so many characters of a text, and so many tokens."""
    ids = tokenizer.encode("Once upon a time")
    imported_rows = imported(
        *request_lines("cmpl-1-0", "Once", tokenizer.encode("Once")),
        answered("cmpl-1", "Yes!", tokenizer.encode("Yes!")),
        *request_lines("cmpl-2-0", "<|im", [tokenizer.backend.token_to_id("<|im_start|>"), *ids[:3]]),
        answered("cmpl-2", "Yes", tokenizer.encode("Yes")),
        *request_lines("cmpl-3-0", "Once", tokenizer.encode("Once"), PARAMS.replace("n=1", "n=2")),
        answered("cmpl-3", "Yes", tokenizer.encode("Yes")),
    )
    assert len(imported_rows) == 1


def test_the_year_that_is_not_logged(imported: Importer, tmp_path: Path) -> None:
    """The last one in which the file was not written before its lines."""
    file = tmp_path / "vllm.log"
    file.write_text("\n".join([*request_lines("cmpl-1-0", "a", [1, 2]), answered("cmpl-1", "b", [3])]))
    when = time.mktime((2025, 1, 3, 0, 0, 0, 0, 0, -1))
    os.utime(file, (when, when))
    from paceline.loop.record import vllm_log

    (exchange,) = vllm_log.exchanges(file, Tokenizer.from_path(tiny_model(tmp_path / "other")))
    assert exchange.ended is not None and time.localtime(exchange.ended)[:5] == (2024, 11, 22, 14, 0)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (
            ["INFO nothing of interest", "Received request a: prompt: 'unended"],
            r"vllm.log, line 2 .*no request as vLLM logs it",
        ),
        (
            ["Received request a: params: SamplingParams(n=, lora_request: None."],
            r"line 1 .*no request as vLLM logs it",
        ),
        (["Generated response a: output: 'b"], r"line 1 .*no request as vLLM logs it"),
        (["Received request a: prompt: '" + "cut " * 9999], r"line 1 .*no request as vLLM logs it"),  # in 2**N steps
        (["a diary", "of other things"], "holds no requests: start vLLM with --enable-log-requests"),
        (
            [request_lines("a", "b", [1])[0]],
            "holds no answers: start vLLM with --enable-log-requests --enable-log-outputs",
        ),
        (['{"resourceSpans": []}', "{nonsense"], r"line 2 .*no OTLP JSON of spans"),
        (['{"messages": []}'], r"line 1 \(no resourceSpans but messages\)"),
        (
            ['{"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [{"key": 1}]}]}]}]}'],
            "line 1 .*no OTLP JSON of spans",
        ),
        (['{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}'], "holds 1 spans, none of an answered request"),
    ],
)
def test_a_broken_or_foreign_file_is_refused_and_nothing_is_kept(
    imported: Importer, tmp_path: Path, lines: list[str], text: str
) -> None:
    with pytest.raises(PromptError, match=text):
        imported(*lines)
    assert not rows(tmp_path / "store")


def test_a_file_that_is_not_there_and_impossible_settings(model: Path, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="cannot read"):
        read(RecordConfig(str(model), imports=(tmp_path / "none",)), TraceConfig(tmp_path / "store"))
    for settings in ({}, {"upstream": "http://a", "imports": (tmp_path,)}, {"upstream": "localhost:8000"}):
        with pytest.raises(PacelineError, match="--upstream"):
            RecordConfig("tiny", **settings)
    for upstream, text in (("http://a/v1", "ends in /v1"), ("http://me:key@a", "password"), ("http://a?x=1", "query")):
        with pytest.raises(PacelineError, match=text):
            RecordConfig("tiny", upstream=upstream)
    for upstream in ("http://a:99999", "http://a:x", "http://[::1", "http://..", f"http://{'a' * 70}"):
        with pytest.raises(ConfigError, match=r"--upstream .* is no address \(.*\): write http://HOST:PORT"):
            RecordConfig("tiny", upstream=upstream)  # they ended the proxy with a ValueError
    with pytest.raises(PacelineError, match="--out"):
        read(RecordConfig(str(model), imports=(tmp_path,)), TraceConfig())


def value(held: Any) -> dict[str, Any]:
    if isinstance(held, bool):
        return {"boolValue": held}
    if isinstance(held, int):
        return {"intValue": str(held)}
    if isinstance(held, dict):
        return {"kvlistValue": {"values": [{"key": name, "value": value(each)} for name, each in held.items()]}}
    if isinstance(held, list):
        return {"arrayValue": {"values": [value(each) for each in held]}}
    return {"doubleValue": held} if isinstance(held, float) else {"stringValue": held}


def span(fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    attributes = [{"key": f"gen_ai.{name}", "value": value(held)} for name, held in fields.items()]
    times = {"startTimeUnixNano": "1760000000000000000", "endTimeUnixNano": "1760000001500000000"}
    return {"name": "chat tiny", **times, "attributes": attributes, **more}


def line(*spans: dict[str, Any]) -> str:
    return json.dumps({"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": spans}]}]})


def text(content: str) -> list[dict[str, Any]]:
    return [{"type": "text", "content": content}]


def test_spans_of_the_genai_conventions(imported: Importer, tokenizer: Tokenizer) -> None:
    """Messages as JSON text and structured; a tool's definition, its call and its result; what failed, or is no
    answer."""
    messages = [{"role": "user", "parts": text("Weather?")}]
    output = [{"role": "assistant", "parts": text("Rainy."), "finish_reason": "stop"}]
    call = {"type": "tool_call", "id": "1", "name": "weather", "arguments": {"place": "Oslo"}}
    result = {"type": "tool_call_response", "id": "1", "response": "rainy"}
    talk = [*messages, {"role": "assistant", "parts": [call]}, {"role": "tool", "parts": [result]}]
    tool = {"type": "function", "name": "weather", "description": "It.", "parameters": {"type": "object"}}
    request = {"operation.name": "chat", "request.model": "tiny", "request.temperature": 0.5, "request.max_tokens": 9}
    num_prompt = len(
        tokenizer.encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}])
    )
    usage = {"usage.input_tokens": num_prompt, "usage.output_tokens": 7}
    plain = {
        **request,
        **usage,
        "system_instructions": text("Be brief."),
        "input.messages": messages,
        "output.messages": output,
    }
    packed = {name: json.dumps(held) if isinstance(held, list) else held for name, held in plain.items()}
    tools = {**request, "tool.definitions": [tool], "input.messages": talk, "output.messages": output}
    calls = {
        **request,
        "input.messages": messages,
        "output.messages": [{"role": "assistant", "parts": [call], "finish_reason": "tool_call"}],
    }
    failed, other = {**plain, "operation.name": "embeddings"}, span(plain, status={"code": 2})
    imported_rows = imported(
        line(span(plain), span({"request.model": "tiny", "usage.prompt_tokens": 3})),
        "",
        line(span(packed), span(tools), span(calls)),
        line(span(failed), other),
        name="spans.jsonl",
    )
    assert len(imported_rows) == 4
    for row in imported_rows[:2]:
        assert tokenizer.decode(row["prompt_ids"], False).startswith("<|im_start|>system\nBe brief.<|im_end|>")
        assert (row["text"], row["model"], row["total_s"], row["seed"]) == ("Rainy.", "tiny", 1.5, None)
        assert json.loads(row["sampling"]) == {"temperature": 0.5, "max_tokens": 9}
    rendered = tokenizer.decode(imported_rows[2]["prompt_ids"], False)
    assert (
        '"weather"' in rendered
        and '"Oslo"' in rendered
        and "rainy" in rendered
        and imported_rows[2]["text"] == "Rainy."
    )
    assert imported_rows[3]["answer_ids"] == [] and imported_rows[3]["finish_reason"] == "unknown"
