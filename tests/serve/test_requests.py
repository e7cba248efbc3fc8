"""Fields of requests: what is asked for is held, and what is not is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from live_server import Live
from request_calls import CHAT, MESSAGES, SCHEMA, TEXT, ask, text_of

from paceline import LLM, SamplingParams
from paceline.model.text.tokenizer import Tokenizer
from paceline.serve.replies.choices import TextReply
from paceline.serve.requests.protocol import CompletionRequest
from paceline.types import TokenLogprob

pytest_plugins = ("tiny_server",)

pytestmark = pytest.mark.slow


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
        ({"guided_regex": "[0-9]{3} m"}, None),
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
        assert [choice["index"] for choice in body["choices"]] == list(range(fields.get("n", 1)))
        return [text_of(body, index) for index in range(len(body["choices"]))]

    drawn = [*answers(seed=-1, n=3), *answers(seed=-1), *answers()]
    assert len(set(drawn)) == len(drawn)
    several = answers(seed=7, n=3)
    assert several == [*answers(seed=7), *answers(seed=8), *answers(seed=9)] and len(set(several)) == 3
    assert answers(seed=0) != answers(seed=2**63 - 1)
    assert answers(seed=0) == answers(seed=0)


def test_equal_prompts_with_a_seed_have_equal_answers(live: Live) -> None:
    body = ask(live, TEXT, prompt=["ab", "ab", "cd"], seed=3, max_tokens=12, n=2)
    texts = [text_of(body, index) for index in range(6)]
    assert texts[:2] == texts[2:4] != texts[4:]
    assert texts[0] != texts[1]


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


def test_offsets_of_sentencepiece_tokens_are_those_of_the_text() -> None:
    """Decoding drops the text's first space, and no other."""
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE({"▁ab": 0, "▁a": 1, "▁": 2}, []))
    steps = tokenizers.decoders
    pieces.decoder = steps.Sequence([steps.Replace("▁", " "), steps.Fuse(), steps.Strip(" ", 1, 0)])
    tokenizer, ids = Tokenizer(pieces), [0, 1, 2, 1]
    reply = TextReply(0, tokenizer, CompletionRequest(prompt="", logprobs=0), "")
    shown = [reply._shown_logprobs([TokenLogprob(token, -1.0) for token in part]) for part in (ids[:2], ids[2:])]
    names, offsets = ([each for part in shown for each in part[key]] for key in ("tokens", "text_offset"))
    assert "".join(names) == " " + tokenizer.decode(ids) == " ab a  a"
    assert offsets == [0, 2, 4, 5]


@pytest.mark.parametrize("speculate", ["off", "full"])
def test_echo_with_logprobs_scores_the_prompt(live: Live, offline: LLM, speculate: str) -> None:
    prompt = "abcabcabcabc. Once upon a time there was a model, abcabc"
    ids = offline.tokenizer.encode(prompt)
    request = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0, "speculate": speculate}
    for _ in range(2):  # the second time the prompt is in the cache
        body = ask(live, TEXT, **request)
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
    request = {"prompt": "abcabcabcabcabc", "echo": True, "logprobs": 1, "max_tokens": 6, "temperature": 0}
    bodies = [
        ask(live, TEXT, **request, speculate=speculate)["choices"][0]["logprobs"] for speculate in ("off", "full", 2)
    ]
    assert bodies[0] == bodies[1] == bodies[2]
    status, body, _ = live.post(TEXT, request | {"stream": True})
    chunks = [json.loads(line[6:]) for line in body.decode().split("\n\n") if line[6:7] == "{"]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert status == 200
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [each for part in streamed for each in part[name]] == bodies[0][name]


@pytest.mark.parametrize(("num_prompt", "num_answer"), [(2047, 1), (2033, 15), (2000, 16)])
def test_a_completion_without_a_limit_ends_with_the_context(live: Live, num_prompt: int, num_answer: int) -> None:
    body = ask(live, TEXT, prompt=[5] * num_prompt, ignore_eos=True)
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (num_answer, "length")


@pytest.mark.parametrize("skip", [True, False])
def test_an_echoed_prompt_keeps_its_special_tokens(live: Live, offline: LLM, skip: bool) -> None:
    prompt = "<|im_start|>user\nh\u00e9<|im_end|>"
    request = {"max_tokens": 2, "temperature": 0, "logit_bias": {"0": 100}, "skip_special_tokens": skip, "logprobs": 0}
    answer = text_of(ask(live, TEXT, prompt=prompt, **request))
    for given in (prompt, offline.tokenizer.encode(prompt)):
        choice = ask(live, TEXT, prompt=given, echo=True, **request)["choices"][0]
        assert choice["text"] == prompt + answer
        offsets, first = choice["logprobs"]["text_offset"], len("<|im_start|>")
        assert offsets[:3] == [0, first, first + 1] and choice["text"][first] == choice["logprobs"]["tokens"][1] == "u"


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("speculate", ["off", "full"])
def test_min_tokens_holds_back_ends_and_stop_strings(
    live: Live, folder: Path, temperature: float, speculate: str
) -> None:
    end = str(Tokenizer.from_path(folder).eos_token_ids[0])
    request = {
        "logit_bias": {end: 100},
        "max_tokens": 20,
        "temperature": temperature,
        "seed": 1,
        "speculate": speculate,
    }
    assert ask(live, **request)["usage"]["completion_tokens"] == 1
    body = ask(live, **request, min_tokens=7)
    assert body["usage"]["completion_tokens"] == 8 and body["choices"][0]["finish_reason"] == "stop"
    plain = text_of(ask(live, TEXT, max_tokens=20, temperature=0, speculate=speculate))
    stopped = text_of(ask(live, TEXT, max_tokens=20, temperature=0, speculate=speculate, stop=plain[0], min_tokens=5))
    assert stopped.startswith(plain[:1]) and stopped == plain[: len(stopped)] and len(stopped) >= 3
    assert text_of(ask(live, TEXT, max_tokens=20, temperature=0, stop=plain[0])) == ""


@pytest.mark.parametrize("speculate", ["off", "full"])
def test_bad_words_are_not_said(live: Live, speculate: str) -> None:
    request = {"prompt": "ababababab", "max_tokens": 40, "temperature": 0, "speculate": speculate}
    plain = text_of(ask(live, TEXT, **request))
    word = plain[3:5]
    without = text_of(ask(live, TEXT, **request, bad_words=[word, plain[10]]))
    assert word in plain and word not in without and plain[10] not in without
    assert without == text_of(ask(live, TEXT, **(request | {"speculate": 2}), bad_words=[word, plain[10]]))


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_continuous_usage_counts_the_tokens_so_far(live: Live, path: str, include_usage: bool, n: int) -> None:
    options = {"include_usage": include_usage, "continuous_usage_stats": True}
    request = ({"messages": MESSAGES} if path == CHAT else {"prompt": "x"}) | {
        "temperature": 0,
        "max_tokens": 20,
        "n": n,
    }
    whole = live.post(path, request)[1]["usage"]
    request |= {"stream": True, "stream_options": options, "return_token_ids": True}
    status, body, _ = live.post(path, request)
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
