"""Sampling of requests that leave fields out: what vLLM and SGLang then do, and what is unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_llm import tiny_model
from trace_files import rows
from upstream import completion

from paceline.errors import ConfigError, PacelineError
from paceline.loop.record import vllm_log
from paceline.loop.record.config import RecordConfig
from paceline.loop.record.defaults import defaults_of, described
from paceline.loop.record.exchange import Exchange
from paceline.loop.record.reader import Reader
from paceline.loop.record.run import read
from paceline.model.text.tokenizer import Tokenizer
from paceline.serve.admin.traces import Lost, Trace
from paceline.serve.settings import TraceConfig

HELLO = [{"role": "user", "content": "Say hello."}]
QWEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    more = {"do_sample": True, "bos_token_id": 1, "min_p": None}
    (folder / "generation_config.json").write_text(json.dumps(QWEN | more))
    return folder


def one(tokenizer: Tokenizer, defaults: dict[str, float] | None, answer: dict[str, Any], **request: Any) -> Trace:
    is_chat = "prompt" not in request
    body = ({"messages": HELLO} if is_chat else {}) | request
    (trace,) = Reader(tokenizer, defaults=defaults).traces(Exchange(is_chat, body, [answer]))
    return trace


def test_where_they_come_from(model: Path, tmp_path: Path) -> None:
    assert defaults_of("model", model) == QWEN
    assert defaults_of("engine", model) == {} and defaults_of("none", model) is None
    defaults = defaults_of("temperature=0.7, top_k=-1,top_p=0.8,repetition_penalty=1.05", model)
    assert defaults == {"temperature": 0.7, "top_k": 0, "top_p": 0.8, "repetition_penalty": 1.05}
    assert defaults_of("model", tiny_model(tmp_path / "plain")) == {}, "this model has none of its own"
    assert described(QWEN) == "temperature 0.6, top_p 0.95, top_k 20" and described({}) == "temperature 1"
    assert described(None).startswith("unknown")
    (tmp_path / "file.gguf").write_bytes(b"GGUF")
    (tmp_path / "tokenizer").mkdir()
    for path in (tmp_path / "file.gguf", tmp_path / "tokenizer"):
        assert defaults_of("model", path) is None, "the served model may have some"


@pytest.mark.parametrize(
    ("defaults", "text"),
    [
        ("auto", "write model, engine, none, or values such as temperature=0.6"),
        ("temperature=warm", "write model, engine, none"),
        ("temperature=0.6,seed=3", "write model, engine, none"),
        ("temperature=-1", "temperature must be"),
        ("top_p=0", "top_p must be"),
        ("top_k=nan", "--sampling-defaults"),
    ],
)
def test_impossible_values(model: Path, defaults: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        defaults_of(defaults, model)


@pytest.mark.parametrize("wrong", [{"temperature": "0.6"}, {"temperature": -1}, {"top_p": True}, {"top_k": 1e400}])
def test_a_damaged_generation_config(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    with pytest.raises(PacelineError, match=r"generation_config.json: .*--sampling-defaults"):
        defaults_of("model", tmp_path)


def test_each_field_that_is_left_out(tokenizer: Tokenizer) -> None:
    trace = one(tokenizer, QWEN, completion("Hi."))
    assert trace.temperature == 0.6 and trace.sampling == QWEN
    trace = one(tokenizer, QWEN, completion("Hi."), temperature=0.2, top_k=-1)
    assert trace.temperature == 0.2 and trace.sampling == {"temperature": 0.2, "top_p": 0.95}
    assert one(tokenizer, QWEN, completion("Hi."), temperature=0).temperature == 0.0
    trace = one(tokenizer, {}, completion("Hi."))
    assert trace.temperature == 1.0 and trace.sampling == {"temperature": 1.0}
    trace = one(tokenizer, None, completion("Hi."), top_p=0.5)
    assert trace.temperature is None and trace.sampling == {"top_p": 0.5}


def test_completions_of_sglang_have_defaults_of_their_own(tokenizer: Tokenizer) -> None:
    """Its text completions are at temperature 1 whatever the model's are; its answers have `matched_stop`."""
    text = {"index": 0, "text": "b", "finish_reason": "stop"}
    assert one(tokenizer, QWEN, {"choices": [text]}, prompt="a").sampling == QWEN
    assert one(tokenizer, QWEN, {"choices": [{**text, "matched_stop": 257}]}, prompt="a").sampling == {
        "temperature": 1.0
    }
    assert one(tokenizer, QWEN, completion("Hi.", choice={"matched_stop": 257})).sampling == QWEN


def test_beam_search_is_no_sampling(tokenizer: Tokenizer) -> None:
    with pytest.raises(Lost, match="unsupported"):
        one(tokenizer, QWEN, completion("Hi."), use_beam_search=True)


@pytest.mark.parametrize(("defaults", "expected"), [("model", 0.6), ("engine", 1.0), ("none", None)])
def test_imported_requests(model: Path, tmp_path: Path, defaults: str, expected: float | None) -> None:
    parts = [{"type": "text", "content": "Hi"}]
    messages = {
        "input": [{"role": "user", "parts": parts}],
        "output": [{"role": "assistant", "parts": parts, "finish_reason": "stop"}],
    }
    attributes = [
        {"key": f"gen_ai.{name}.messages", "value": {"stringValue": json.dumps(value)}}
        for name, value in messages.items()
    ]
    file = tmp_path / "spans.jsonl"
    file.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": attributes}]}]}]}))
    read(RecordConfig(str(model), imports=(file,), sampling_defaults=defaults), TraceConfig(tmp_path / "store"))
    (row,) = rows(tmp_path / "store")
    assert row["temperature"] == (None if expected is None else pytest.approx(expected))


def test_a_log_without_parameters_is_unknown(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The client may have set what is not in this log; vLLM's parameters hold the defaults that it applied."""
    ids, answer = tokenizer.encode("Once"), tokenizer.encode("Yes")
    lines = [f"Request cmpl-1-0 details: prompt: 'Once', prompt_token_ids: {ids}, prompt_embeds shape: None."]
    lines += [f"Generated response cmpl-1: output: 'Yes', output_token_ids: {answer}, finish_reason: stop"]
    known = (
        "Received request cmpl-1-0: params: SamplingParams(n=1, temperature=0.3, top_p=1.0, top_k=0), lora_request: "
    )
    for more, temperature, sampling in (([], None, {}), ([known], 0.3, {"temperature": 0.3})):
        file = tmp_path / "vllm.log"
        file.write_text("\n".join([*more, *lines]) + "\n")
        (exchange,) = vllm_log.exchanges(file, tokenizer)
        (trace,) = Reader(tokenizer, defaults=QWEN).traces(exchange)
        assert (trace.temperature, trace.sampling) == (temperature, sampling)
