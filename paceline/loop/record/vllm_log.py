"""Reads the log of `vllm serve --enable-log-requests --enable-log-outputs` as exchanges.

    Received request chatcmpl-1: prompt: '...', params: SamplingParams(...), prompt_token_ids: [...], ...     until 0.10
    Request chatcmpl-1 details: prompt: '...', prompt_token_ids: [...], ...       since, with VLLM_LOGGING_LEVEL=DEBUG
    Received request chatcmpl-1: params: SamplingParams(...), lora_request: ...
    Generated response chatcmpl-1: output: '...', output_token_ids: [...], finish_reason: stop
    Generated response chatcmpl-1 (streaming complete): output: '...', output_token_ids: None, finish_reason: ...

(`vllm/entrypoints/logger.py`.) Other lines are ignored. Streams are logged without token ids, so their answers are
encoded from the text. Requests truncated by `--max-log-len` are skipped; without token ids truncation cannot be
detected, so do not set it.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import PromptError, reraised
from paceline.loop.record.exchange import Exchange
from paceline.model.text.tokenizer import Tokenizer

TEXT = r"""(?:'(?:[^'\\]++|\\.)*+'|"(?:[^"\\]++|\\.)*+"|None)"""
"""Python's repr of a text. Possessive (++): a line that is cut within it would be tried in 2 ** length ways."""
IDS = r"(?:[\[(][\d, ]*[\])]|None)"
REQUEST = re.compile(
    rf"(?:Received request|Request) (?P<id>\S+?)(?: details)?: prompt: (?P<prompt>{TEXT}), "
    rf"(?:params: (?P<params>.*?), )?prompt_token_ids: (?P<ids>{IDS}),"
)
PARAMS = re.compile(r"Received request (?P<id>\S+?): params: (?P<params>.*), lora_request: ")
RESPONSE = re.compile(
    rf"Generated response (?P<id>\S+)(?P<stream> \(streaming (?:delta|complete)\))?: output: (?P<text>{TEXT}), "
    rf"(?:output_token_ids: (?P<ids>{IDS}), )?finish_reason: (?P<reason>\w+)"
)
BEGINS = re.compile(r"(?:Received request|Generated response) \S+?(?: \(streaming \w+\))?: |Request \S+ details: ")
STAMP = re.compile(r"\b(?:INFO|DEBUG) (\d\d-\d\d \d\d:\d\d:\d\d) ")
PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "max_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields of SamplingParams that are read; the API's fields have the same names."""
MAX_WAITING = 100_000
"""Limit on the number of logged requests that wait for their answers; the oldest are dropped."""


@dataclass(slots=True)
class _Request:
    """A logged request that waits for its answer."""

    prompt: str | None = None
    ids: list[int] | None = None
    params: dict[str, Any] = field(default_factory=dict)
    began: float | None = None


def exchanges(path: Path, tokenizer: Tokenizer) -> Iterator[Exchange]:
    """Yields requests with their answers from a log of `vllm serve`, in the order of the answers. Skips requests for
    several answers, those whose prompt is not in the log, and those whose text is truncated there, which is checked
    with the model's `tokenizer`. Raises PromptError naming a damaged line, or if the log contains no requests or no
    answers."""
    waiting: dict[str, _Request] = {}
    num_requests = num_answers = 0
    changed = path.stat().st_mtime
    with reraised(PromptError, f"cannot read {path}", "check --import", OSError), path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            line = raw.decode("utf-8", "replace")
            if not BEGINS.search(line):
                continue
            where, remedy = f"{path}, line {number}", "this is no request as vLLM logs it"
            with reraised(PromptError, where, remedy, ValueError, SyntaxError, IndexError):
                if answer := RESPONSE.search(line):
                    num_answers += 1
                    if request := _answered(answer, waiting):
                        exchange = _exchange(request, answer, _moment(line, changed), tokenizer, line)
                        yield from [exchange] if exchange else []
                else:
                    num_requests += 1
                    _add_request(line, waiting, _moment(line, changed))
    if not num_requests or not num_answers:
        missing = "no requests" if not num_requests else "no answers"
        raise PromptError(
            f"{path} holds {missing}: start vLLM with --enable-log-requests --enable-log-outputs, and newer ones with "
            "VLLM_LOGGING_LEVEL=DEBUG too"
        )


def _add_request(line: str, waiting: dict[str, _Request], began: float | None) -> None:
    match = REQUEST.search(line) or PARAMS.search(line)
    if match is None:
        raise ValueError("its prompt or parameters cannot be read")
    parts = match.groupdict()
    request = waiting.setdefault(parts["id"], _Request(began=began))
    if parts.get("params"):
        request.params = _params(parts["params"])
    if "prompt" in parts:
        request.prompt, request.ids = ast.literal_eval(parts["prompt"]), _ids(parts["ids"])
    if len(waiting) > MAX_WAITING:
        waiting.pop(next(iter(waiting)))


def _answered(answer: re.Match[str], waiting: dict[str, _Request]) -> _Request | None:
    """Returns the request of a complete answer. A completion's request ids have the prompt's number appended."""
    if "delta" in (answer["stream"] or ""):
        return None
    return waiting.pop(answer["id"], None) or waiting.pop(f"{answer['id']}-0", None)


def _exchange(
    request: _Request, answer: re.Match[str], ended: float | None, tokenizer: Tokenizer, line: str
) -> Exchange | None:
    """Returns None if the prompt is missing, several answers were requested, or the log is truncated."""
    text, ids = ast.literal_eval(answer["text"]) or "", _ids(answer["ids"])
    if (request.prompt is None and not request.ids) or request.params.get("n", 1) != 1:
        return None
    if _is_cut(request.prompt, request.ids, tokenizer) or _is_cut(text, ids, tokenizer):
        return None
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": answer["reason"]}
    if ids is not None:
        choice |= {"token_ids": ids, "text": ""}  # the logged text may be parsed output: a tool call, reasoning
    elif "[tool_calls: " in text or "[reasoning: " in text:
        choice["message"] = {"reasoning": text}
    if answer["stream"]:
        choice["finish_reason"] = "unknown"
    body = {**request.params, "prompt": request.ids or request.prompt}
    if answer["id"].startswith("chatcmpl"):
        body["add_special_tokens"] = False  # the chat template has added them
    total_s = None if ended is None or request.began is None else ended - request.began
    return Exchange(
        is_chat=False,
        request=body,
        chunks=[{"choices": [choice]}],
        ended=ended,
        seconds={"total": total_s},
        has_sampling=bool(request.params),
        logged_as=line.strip(),
    )


def _is_cut(text: str | None, ids: list[int] | None, tokenizer: Tokenizer) -> bool:
    """True if --max-log-len truncated text and ids: it cuts both to the same length, in characters and in tokens."""
    return text is not None and ids is not None and len(ids) == len(text) < len(tokenizer.decode(ids, False))


def _ids(text: str | None) -> list[int] | None:
    ids = ast.literal_eval(text) if text else None
    return None if ids is None else list(ids)


def _params(text: str) -> dict[str, Any]:
    """Parses the literal arguments of `SamplingParams(...)`. Raises SyntaxError."""
    if not text.startswith("SamplingParams("):  # beam search, pooling
        return {"n": 0}
    call = ast.parse(re.sub(r"<[^>]*>", "None", text), mode="eval").body
    params: dict[str, Any] = {}
    for keyword in call.keywords if isinstance(call, ast.Call) else ():
        try:
            value = ast.literal_eval(keyword.value)
        except ValueError:
            continue
        name = str(keyword.arg)
        if name in PARAMETERS and value not in (None, []):
            params[name] = value
    return params


def _moment(line: str, changed: float) -> float | None:
    """Returns the line's time in seconds since 1970, or None. vLLM logs local time without a year: the latest year is
    used for which the line is not newer than the file."""
    stamp = STAMP.search(line)
    if stamp is None:
        return None
    newest, oldest = time.localtime(changed + 86400).tm_year, time.localtime(changed).tm_year - 1
    for year in range(newest, oldest - 1, -1):
        try:
            moment = time.mktime(time.strptime(f"{year}-{stamp[1]}", "%Y-%m-%d %H:%M:%S"))
        except ValueError:  # 29 February in a common year
            continue
        if moment <= changed + 86400:
            return moment
    return None
