"""Fields of requests: what is asked for is held, and what is not is refused by its name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles import ByteTokenizer
from live_server import Live, serving
from small_llm import Parrot, fake_llm, tiny_model

from paceline import LLM, SamplingParams
from paceline.model.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "Say something."}]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position=2048)


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    def load() -> LLM:
        return LLM(str(folder), drafter="ngram", dtype="float32", device="cpu", max_batch=4, plan="fixed")

    with serving(load) as running:
        yield running


@pytest.fixture(scope="module")
def offline(folder: Path) -> LLM:
    return LLM(str(folder), drafter="none", dtype="float32", device="cpu")


def ask(live: Live, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    status, body, _ = live.post(path, ({"messages": MESSAGES} if path == CHAT else {"prompt": "x"}) | fields)
    assert status == 200, body
    return body


def text_of(body: dict[str, Any], index: int = 0) -> str:
    choice = body["choices"][index]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def refused(live: Live, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    status, body, _ = live.post(path, ({"messages": MESSAGES} if path == CHAT else {"prompt": "x"}) | fields)
    assert status == 400, body
    return body["error"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, [1, 2]),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, [1, 2]),
        ({"structured_outputs": {"regex": "[0-9]{3} m"}}, None),
        ({"structured_outputs": {"choice": ["yes", "no (really?)"]}}, ["yes", "no (really?)"]),
        ({"guided_choice": ["a|b", "c\\d"]}, ["a|b", "c\\d"]),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, [1, 2]),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, [1, 2]),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, [1, 2]),
        ({"response_format": {"type": "regex", "regex": "[0-9]{3} m"}}, None),
    ],
)
def test_an_answer_keeps_to_what_is_asked_for(live: Live, path: str, fields: dict[str, Any], answers: Any) -> None:
    for seed in range(3):
        body = ask(live, path, **fields, max_tokens=200, seed=seed)
        text, reason = text_of(body), body["choices"][0]["finish_reason"]
        assert reason == "stop"
        if answers is None:
            assert text[:3].isdecimal() and text[3:] == " m"
        else:
            assert (json.loads(text)["n"] if text.strip()[:1] == "{" else text) in answers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "regex": "a"}}, "response_format.regex"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.type"),
    ],
)
def test_a_grammar_that_cannot_hold_is_refused_by_the_name_of_its_field(
    live: Live, fields: dict[str, Any], param: str
) -> None:
    for path in (CHAT, TEXT):
        error = refused(live, path, **fields)
        assert error["param"] == param, error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"response_format": {"type": "regex", "regex": "("}}, "response_format"),
        (TEXT, {"guided_regex": "("}, "guided_regex"),
        (CHAT, {"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs"),
        (
            CHAT,
            {"tools": [{"function": {"name": "f"}}], "tool_choice": "required", "guided_regex": "a"},
            "guided_regex",
        ),
        (CHAT, {"lossy": "typical:eps=7"}, "lossy"),
        (CHAT, {"lossy": {"rule": "lenience", "l": "x"}}, "lossy"),
        (CHAT, {"logit_bias": {"999999": 1}}, "logit_bias"),
        (TEXT, {"prompt": [999_999]}, "prompt"),
        (TEXT, {"prompt": "x " * 3000}, "prompt"),
        (TEXT, {"prompt": "x" * 200_000}, "prompt"),
    ],
)
def test_the_field_at_fault_is_named_wherever_it_is_found(
    live: Live, path: str, fields: dict[str, Any], param: str
) -> None:
    error = refused(live, path, **fields)
    assert error["param"] == param, error


def test_a_top_p_of_zero_is_greedy(live: Live) -> None:
    greedy, sampled = (text_of(ask(live, max_tokens=24, temperature=each, seed=1)) for each in (0, 1))
    assert text_of(ask(live, max_tokens=24, temperature=1, seed=1, top_p=0)) == greedy != sampled


def test_both_names_of_one_limit_may_stand_together(live: Live) -> None:
    for names in (["max_tokens", "max_completion_tokens"], ["max_tokens"], ["max_completion_tokens"]):
        limits: dict[str, Any] = dict.fromkeys(names, 5)
        assert ask(live, ignore_eos=True, **limits)["usage"]["completion_tokens"] == 5


def test_seeds_are_kept_apart_and_minus_one_draws(live: Live) -> None:
    def answers(**fields: Any) -> list[str]:
        body = ask(live, max_tokens=24, **fields)
        return [text_of(body, index) for index in range(len(body["choices"]))]

    drawn = [*answers(seed=-1, n=3), *answers(seed=-1), *answers()]
    assert len(set(drawn)) == len(drawn)
    assert answers(seed=7, n=2) == [*answers(seed=7), *answers(seed=8)]
    assert answers(seed=0) != answers(seed=2**63 - 1)
    assert answers(seed=0) == answers(seed=0)


@pytest.mark.parametrize("seed", [2**63, -2, 2**64, True, "7", 1.5])
def test_a_seed_that_is_none_is_refused(live: Live, seed: Any) -> None:
    assert refused(live, seed=seed)["param"] == "seed"
    assert refused(live, seed=2**63 - 1, n=2)["param"] == "seed"


def test_equal_prompts_with_a_seed_have_equal_answers(live: Live) -> None:
    body = ask(live, TEXT, prompt=["ab", "ab", "cd"], seed=3, max_tokens=12, n=2)
    texts = [text_of(body, index) for index in range(6)]
    assert texts[:2] == texts[2:4] != texts[4:]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"stop": ["x"] * 20}, "stop", "at most 16 items"),
        ({"stop": 5}, "stop", "a valid string, or a valid list"),
        ({"stop": ["a", 5]}, "stop[1]", "a valid string"),
        ({"tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required', or a valid object"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "required"),
        ({"speculate": "maybe"}, "speculate", "'auto', 'full' or 'off', or a valid integer"),
        ({"temperature": "hot"}, "temperature", "a valid number"),
        ({"top_k": True}, "top_k", "a valid integer"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "reads text"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "needs a role and a content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"max_token": 5}, "max_token", "did you mean max_tokens"),
        ({"messages": [{"role": "user", "content": "x", "contnet": 1}]}, "messages[0].contnet", "did you mean content"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"use_beam_search": True}, "use_beam_search", "sampled or greedy"),
        ({"n_predict": 5}, "n_predict", "use max_tokens"),
        ({"echo": True}, "echo", "continue_final_message"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "template does not read it"),
        ({"documents": [{"text": "x"}]}, "documents", "template does not read it"),
        ({"stop": ["<|im_end|>\n\nx"]}, "stop", "give it alone"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "at most max_tokens"),
        ({"bad_words": [""]}, "bad_words", "no empty string"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens", "differ"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"prediction": "x"}, "prediction", "a valid object"),
        ({"prediction": {"content": "x"}}, "prediction.type", "required"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type", "'content'"),
        ({"prediction": {"type": "content"}}, "prediction.content", "required"),
        (
            {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
            "prediction.content[0]",
            "reads text",
        ),
        ({"prediction": {"type": "content", "content": "x" * 3000}}, "prediction", "more than the context of 2048"),
        ({"prediction": {"type": "content", "content": "x" * 200_000}}, "prediction", "the prediction has 200,000"),
    ],
)
def test_a_refusal_names_the_field_as_the_client_wrote_it(
    live: Live, fields: dict[str, Any], param: str, said: str
) -> None:
    error = refused(live, **fields)
    assert (error["param"], said in error["message"]) == (param, True), error


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        ("/tokenize", {"max_tokens": 5}, "max_tokens", "only at /v1/chat/completions and /v1/completions"),
        ("/detokenize", {"reasoning_effort": "high"}, "reasoning_effort", "only at /v1/chat/completions"),
        (TEXT, {"max_completion_tokens": 5}, "max_completion_tokens", "only at /v1/chat/completions"),
        (CHAT, {"prompt": "x"}, "prompt", "only at /v1/completions and /tokenize"),
        (TEXT, {"prediction": {"type": "content", "content": "x"}}, "prediction", "only at /v1/chat/completions"),
        (CHAT, {"tokens": [1]}, "tokens", "only at /detokenize"),
        (
            CHAT,
            {"tools": [{"function": {"name": "f"}, "defer_loading": True}]},
            "tools[0].defer_loading",
            "all tools go",
        ),
        (TEXT, {"tools": [{"function": {"name": "f"}}]}, "tools", "use /v1/chat/completions"),
        ("/tokenize", {"echo": True}, "echo", "only at /v1/completions"),
    ],
)
def test_a_field_of_another_endpoint_is_said_to_be_one(
    live: Live, path: str, fields: dict[str, Any], param: str, says: str
) -> None:
    base: dict[str, Any] = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "x"}, "/tokenize": {"prompt": "x"}}.get(
        path, {}
    )
    status, body, _ = live.post(path, (base or {"tokens": [1]}) | fields)
    assert (status, body["error"]["param"], says in body["error"]["message"]) == (400, param, True), body


LONG = "x" * 200_000


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "x", "reasoning_content": LONG}]},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "x", "reasoning": LONG}]},
        {"messages": [*MESSAGES, {"role": "assistant", "refusal": LONG}]},
        {"messages": [*MESSAGES, {"role": "assistant", "function_call": {"name": "f", "arguments": {"x": LONG}}}]},
        {
            "messages": [
                *MESSAGES,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": LONG}}}]},
            ]
        },
        {"tools": [{"function": {"name": "f", "description": LONG}}]},
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_unencoded(live: Live, fields: dict[str, Any]) -> None:
    error = refused(live, **fields)
    assert error["code"] == "context_length_exceeded" and "200," in error["message"], error


def test_neutral_values_of_other_servers_fields_are_taken(live: Live) -> None:
    plain = text_of(ask(live, temperature=0, max_tokens=8))
    neutral = {"use_beam_search": False, "length_penalty": 1.0, "mirostat": 0, "functions": None}
    unused = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "nothing": None}
    assert text_of(ask(live, temperature=0, max_tokens=8, **neutral, **unused)) == plain


def test_a_stop_string_that_is_a_special_token_is_a_stop_token(live: Live, folder: Path) -> None:
    start = Tokenizer.from_path(folder).backend.token_to_id("<|im_start|>")
    sure = {"logit_bias": {str(start): 100}, "temperature": 0, "max_tokens": 12}
    for stop in ("<|im_start|>", ["<|im_start|>", "q"], ["<|im_start|>\n"]):
        body = ask(live, **sure, stop=stop)
        assert (text_of(body), body["choices"][0]["finish_reason"]) == ("", "stop")
        assert body["usage"]["completion_tokens"] == 1
    assert ask(live, **sure)["choices"][0]["finish_reason"] == "length"
    shown = ask(live, **sure, skip_special_tokens=False)
    assert text_of(shown) == "<|im_start|>" * 12
    assert text_of(ask(live, **sure, skip_special_tokens=False, stop="im_start|><|im_s")) == "<|"


@pytest.mark.parametrize("number", [5, 16])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_up_to_sixteen_stop_strings_are_taken_and_the_last_one_holds(live: Live, path: str, number: int) -> None:
    plain = text_of(ask(live, path, temperature=0, max_tokens=12))
    stops = [f"never said {each}" for each in range(number - 1)]
    whole = ask(live, path, temperature=0, max_tokens=12, stop=stops)
    assert (text_of(whole), whole["choices"][0]["finish_reason"]) == (plain, "length")
    cut = ask(live, path, temperature=0, max_tokens=12, stop=[*stops, plain[3:5]])
    assert (text_of(cut), cut["choices"][0]["finish_reason"]) == (plain[: plain.index(plain[3:5])], "stop")


def test_logprobs_of_a_chat_have_the_bytes_of_pieces_of_characters(live: Live, folder: Path) -> None:
    piece = Tokenizer.from_path(folder).encode("\u00e9", add_special_tokens=False)[0]
    body = ask(live, logit_bias={str(piece): 100}, max_tokens=2, temperature=0, logprobs=True, top_logprobs=2)
    for token in body["choices"][0]["logprobs"]["content"]:
        assert token["bytes"] == [0xC3]
        assert all(isinstance(each["bytes"], list) and each["bytes"] for each in token["top_logprobs"])


def test_logprobs_of_a_completion_keep_pieces_of_characters_apart(live: Live, folder: Path) -> None:
    pieces = Tokenizer.from_path(folder).encode("\u00e9", add_special_tokens=False)
    bias = {str(piece): 100 for piece in pieces}
    logprobs = ask(live, TEXT, logit_bias=bias, max_tokens=1, temperature=0, logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"][0] in ("bytes:\\xc3", "bytes:\\xa9")
    assert len(logprobs["top_logprobs"][0]) == 2


@pytest.mark.parametrize("speculate", ["off", "full"])
def test_echo_with_logprobs_scores_the_prompt(live: Live, offline: LLM, speculate: str) -> None:
    prompt = "abcabcabcabc. Once upon a time there was a model, abcabc"
    ids = offline.tokenizer.encode(prompt)
    asked = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0, "speculate": speculate}
    for _ in range(2):  # the second time the prompt is in the cache
        body = ask(live, TEXT, **asked)
        logprobs = body["choices"][0]["logprobs"]
        assert text_of(body).startswith(prompt)
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(ids) + 3
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        scores = [
            offline.generate_ids(
                [ids[:place]], SamplingParams(max_tokens=1, logprobs=100, logit_bias={ids[place]: 1000.0})
            )[0]
            for place in range(1, len(ids))
        ]
        expected = [score.logprobs[0].logprob for score in scores]
        assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
        assert logprobs["text_offset"][:4] == [0, 1, 2, 3]


def test_prompt_scores_are_the_same_with_and_without_drafts_streamed_or_not(live: Live) -> None:
    asked = {"prompt": "abcabcabcabcabc", "echo": True, "logprobs": 1, "max_tokens": 6, "temperature": 0}
    bodies = [
        ask(live, TEXT, **asked, speculate=speculate)["choices"][0]["logprobs"] for speculate in ("off", "full", 2)
    ]
    assert bodies[0] == bodies[1] == bodies[2]
    status, body, _ = live.post(TEXT, asked | {"stream": True})
    chunks = [json.loads(line[6:]) for line in body.decode().split("\n\n") if line[6:7] == "{"]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert status == 200
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [each for part in streamed for each in part[name]] == bodies[0][name]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("speculate", ["off", "full"])
def test_min_tokens_holds_back_ends_and_stop_strings(
    live: Live, folder: Path, temperature: float, speculate: str
) -> None:
    end = str(Tokenizer.from_path(folder).eos_token_ids[0])
    asked = {"logit_bias": {end: 100}, "max_tokens": 20, "temperature": temperature, "seed": 1, "speculate": speculate}
    assert ask(live, **asked)["usage"]["completion_tokens"] == 1
    body = ask(live, **asked, min_tokens=7)
    assert body["usage"]["completion_tokens"] == 8 and body["choices"][0]["finish_reason"] == "stop"
    plain = text_of(ask(live, TEXT, max_tokens=20, temperature=0, speculate=speculate))
    stopped = text_of(ask(live, TEXT, max_tokens=20, temperature=0, speculate=speculate, stop=plain[0], min_tokens=5))
    assert stopped.startswith(plain[:1]) and stopped == plain[: len(stopped)] and len(stopped) >= 3
    assert text_of(ask(live, TEXT, max_tokens=20, temperature=0, stop=plain[0])) == ""


@pytest.mark.parametrize("speculate", ["off", "full"])
def test_bad_words_are_not_said(live: Live, speculate: str) -> None:
    asked = {"prompt": "ababababab", "max_tokens": 40, "temperature": 0, "speculate": speculate}
    plain = text_of(ask(live, TEXT, **asked))
    word = plain[3:5]
    without = text_of(ask(live, TEXT, **asked, bad_words=[word, plain[10]]))
    assert word in plain and word not in without and plain[10] not in without
    assert without == text_of(ask(live, TEXT, **(asked | {"speculate": 2}), bad_words=[word, plain[10]]))


def test_a_final_message_is_continued_and_tokenize_says_the_same(live: Live) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Hello, B"}]
    asked = {"messages": messages, "continue_final_message": True}
    ids = ask(live, **asked, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    text = live.post("/detokenize", {"tokens": ids})[1]["prompt"]
    assert text.endswith("<|im_start|>assistant\nHello, B")
    assert live.post("/tokenize", asked)[1]["tokens"] == ids
    assert refused(live, **asked, add_generation_prompt=True)["param"] == "continue_final_message"
    closed = {"messages": messages, "add_generation_prompt": False}
    ids = ask(live, **closed, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert live.post("/tokenize", closed)[1]["tokens"] == ids


@pytest.mark.parametrize(
    ("template", "fault"),
    [("{{ raise_exception('no user speaks here') }}", "no user speaks here"), (None, "no chat template")],
)
def test_a_template_that_refuses_is_told_in_words_of_http(template: str | None, fault: str) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    with serving(lambda: fake_llm(Parrot("assistant: ", [ByteTokenizer.eos_token_id]), tokenizer=tokenizer)) as live:
        answers = [live.post(path, {"messages": MESSAGES})[:2] for path in (CHAT, "/tokenize")]
    for status, body in answers:
        assert (status, body["error"]["param"]) == (400, "messages")
        assert fault in body["error"]["message"]
        assert "/v1/completions" in body["error"]["message"] and "--raw" not in body["error"]["message"]


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_variables_cannot_replace_the_conversation(live: Live, name: str) -> None:
    values = {"messages": [{"role": "user", "content": "Other."}], "tools": [], "add_generation_prompt": False}
    asked = {"messages": MESSAGES, "chat_template_kwargs": {name: values[name]}}
    for path in (CHAT, "/tokenize"):
        status, body, _ = live.post(path, asked)
        assert (status, body["error"]["param"]) == (400, f"chat_template_kwargs.{name}")


def test_tokenize_renders_as_the_chat_does(live: Live) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    asked = {"messages": MESSAGES, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    count = ask(live, **asked, max_tokens=1)["usage"]["prompt_tokens"]
    status, body, _ = live.post("/tokenize", asked | {"return_token_strs": True})
    assert (status, body["count"], len(body["token_strs"])) == (200, count, count)
    assert count > live.post("/tokenize", {"messages": MESSAGES})[1]["count"]
    assert live.post("/tokenize", {"prompt": "x", "tools": tools})[1]["error"]["param"] == "tools"


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_continuous_usage_counts_the_tokens_so_far(live: Live, path: str, include_usage: bool, n: int) -> None:
    options = {"include_usage": include_usage, "continuous_usage_stats": True}
    asked = ({"messages": MESSAGES} if path == CHAT else {"prompt": "x"}) | {"temperature": 0, "max_tokens": 20, "n": n}
    whole = live.post(path, asked)[1]["usage"]
    asked |= {"stream": True, "stream_options": options, "return_token_ids": True}
    status, body, _ = live.post(path, asked)
    *chunks, last = [json.loads(line[6:]) for line in body.decode().split("\n\n") if line[6:7] == "{"]
    if not include_usage:
        chunks.append(last)
    num_shown = 0
    for chunk in chunks:
        num_shown += len(chunk["choices"][0]["token_ids"])
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == whole["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        if n == 1:
            assert usage["completion_tokens"] == num_shown
        else:  # tokens of the other answer may wait for the rest of a character
            assert num_shown <= usage["completion_tokens"] <= whole["completion_tokens"]
    assert status == 200 and num_shown == whole["completion_tokens"]
    assert (last["choices"] == []) == include_usage and last["usage"]["completion_tokens"] == num_shown


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "high"},
        {"documents": [{"text": "Oslo is rainy."}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    ],
)
def test_tokenize_gives_the_tokens_of_the_chat(fields: dict[str, Any]) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = f"{{{{ reasoning_effort }}}} {{{{ documents }}}} {{{{ tools }}}}{tokenizer.chat_template}"
    answer = [ByteTokenizer.eos_token_id]
    with serving(lambda: fake_llm(Parrot("assistant: ", answer), tokenizer=tokenizer)) as live:
        asked: dict[str, Any] = {"messages": MESSAGES} | fields
        status, body, _ = live.post("/tokenize", asked)
        plain = live.post("/tokenize", {"messages": MESSAGES})[1]["tokens"]
        chat: dict[str, Any] = asked if fields.get("tool_choice") != "required" else asked | {"tool_choice": "auto"}
        ids = ask(live, **chat, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert status == 200, body
    assert body["tokens"] == ids
    assert (body["tokens"] == plain) == (fields.get("tool_choice") == "none")


def test_metrics_have_all_keys_of_vllm(live: Live) -> None:
    asked = {"temperature": 0, "max_tokens": 60, "return_metrics": True}
    figures = ask(live, **asked)["metrics"]["speculative_decoding"]
    histogram = figures["acceptance_histogram"]
    assert figures["num_accepted_draft_tokens"] == sum(place * count for place, count in enumerate(histogram))
    drafted = [each for source, each in figures["rounds_by_source"].items() if source != "none"]
    assert figures["num_draft_tokens"] == sum(each["num_drafted"] for each in drafted) > 0
    assert figures["num_spec_steps"] == sum(each["num_rounds"] for each in drafted) > 0
    assert figures["num_spec_tokens"] >= len(histogram) - 1 > 0
    assert math.isclose(
        figures["draft_acceptance_rate"], figures["num_accepted_draft_tokens"] / figures["num_draft_tokens"]
    )


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_histories_with_arguments_of_either_shape_are_one_prompt(live: Live, arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    expected = [
        *MESSAGES,
        {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'},
    ]
    counts = [live.post("/tokenize", {"messages": each})[1]["tokens"] for each in (history, expected)]
    assert counts[0] == counts[1]
    call["function"] = {"name": "f", "arguments": "{broken"}
    assert refused(live, messages=history)["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_of_a_stream_are_those_of_the_whole_answer(parallel: bool) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1.10}}</tool_call>'
    said = [*f"Sure.\n{call}\n{call}".encode(), ByteTokenizer.eos_token_id]
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 180,
        "temperature": 0,
        "tool_choice": "auto",
    }
    asked |= {"tools": tools, "parallel_tool_calls": parallel}
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = (
        f"{tokenizer.chat_template}{{# knows tools #}}"  # so that none are described in the prompt
    )
    with serving(lambda: fake_llm(Parrot("assistant: ", said), tokenizer=tokenizer)) as live:
        body = ask(live, **asked)
        status, streamed, _ = live.post(CHAT, asked | {"stream": True})
    message = body["choices"][0]["message"]
    chunks = [json.loads(line[6:])["choices"][0] for line in streamed.decode().split("\n\n") if line[6:7] == "{"]
    assert (status, message["content"], body["choices"][0]["finish_reason"]) == (200, "Sure.", "tool_calls")
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "Sure."
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert [each["function"] for each in calls] == [each["function"] for each in message["tool_calls"]]
    assert [each["function"]["arguments"] for each in calls] == ['{"a": 1.10}'] * (2 if parallel else 1)
    assert [each["index"] for each in calls] == list(range(len(calls)))
