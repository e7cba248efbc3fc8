"""The log of `vllm serve --enable-log-requests --enable-log-outputs`, as exchanges.

    Received request chatcmpl-1: prompt: '...', params: SamplingParams(...), prompt_token_ids: [...], ...     until 0.10
    Request chatcmpl-1 details: prompt: '...', prompt_token_ids: [...], ...       since, with VLLM_LOGGING_LEVEL=DEBUG
    Received request chatcmpl-1: params: SamplingParams(...), lora_request: ...
    Generated response chatcmpl-1: output: '...', output_token_ids: [...], finish_reason: stop
    Generated response chatcmpl-1 (streaming complete): output: '...', output_token_ids: None, finish_reason: ...

(`vllm/entrypoints/logger.py`.) Other lines are left alone. A stream's tokens are not all logged, so its answer is read from its
text. What `--max-log-len` has cut is left out; without token ids that cannot be seen, so log without it.
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

TEXT = r"""(?:'(?:[^'\\]+|\\.)*'|"(?:[^"\\]+|\\.)*"|None)"""
IDS = r"(?:[\[(][\d, ]*[\])]|None)"
ASKED = re.compile(
    rf"(?:Received request|Request) (?P<id>\S+?)(?: details)?: prompt: (?P<prompt>{TEXT}), "
    rf"(?:params: (?P<params>.*?), )?prompt_token_ids: (?P<ids>{IDS}),"
)
PARAMS = re.compile(r"Received request (?P<id>\S+?): params: (?P<params>.*), lora_request: ")
SAID = re.compile(
    rf"Generated response (?P<id>\S+)(?P<stream> \(streaming (?:delta|complete)\))?: output: (?P<text>{TEXT}), "
    rf"(?:output_token_ids: (?P<ids>{IDS}), )?finish_reason: (?P<reason>\w+)"
)
BEGINS = re.compile(r"(?:Received request|Generated response) \S+?(?: \(streaming \w+\))?: |Request \S+ details: ")
STAMP = re.compile(r"\b(?:INFO|DEBUG) (\d\d-\d\d \d\d:\d\d:\d\d) ")
TAKEN = ("temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "max_tokens", "ignore_eos")
TAKEN += ("presence_penalty", "frequency_penalty", "repetition_penalty")
"""Of SamplingParams, which the API's fields are named as."""
MAX_WAITING = 100_000
"""Requests whose answer has not come: the oldest are forgotten."""


@dataclass(slots=True)
class _Asked:
    prompt: str | None = None
    ids: list[int] | None = None
    params: dict[str, Any] = field(default_factory=dict)
    began: float | None = None


def exchanges(path: Path, tokenizer: Tokenizer) -> Iterator[Exchange]:
    """What a log holds, in its order. Raises PromptError naming the line that is damaged, or when it logs no requests."""
    waiting: dict[str, _Asked] = {}
    num_asked = num_said = 0
    changed = path.stat().st_mtime
    with reraised(PromptError, f"cannot read {path}", "check --import", OSError), path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            line = raw.decode("utf-8", "replace")
            if not BEGINS.search(line):
                continue
            with reraised(
                PromptError, f"{path}, line {number}", "this is no request as vLLM logs it", ValueError, SyntaxError, IndexError
            ):
                if said := SAID.search(line):
                    num_said += 1
                    if asked := _answered(said, waiting):
                        exchange = _exchange(asked, said, _moment(line, changed), tokenizer, line)
                        yield from [exchange] if exchange else []
                else:
                    num_asked += 1
                    _request(line, waiting, _moment(line, changed))
    if not num_asked or not num_said:
        missing = "no requests" if not num_asked else "no answers"
        raise PromptError(
            f"{path} holds {missing}: start vLLM with --enable-log-requests --enable-log-outputs, and newer ones with "
            "VLLM_LOGGING_LEVEL=DEBUG too"
        )


def _request(line: str, waiting: dict[str, _Asked], began: float | None) -> None:
    found = ASKED.search(line) or PARAMS.search(line)
    if found is None:
        raise ValueError("its prompt or parameters cannot be read")
    parts = found.groupdict()
    asked = waiting.setdefault(parts["id"], _Asked(began=began))
    if parts.get("params"):
        asked.params = _params(parts["params"])
    if "prompt" in parts:
        asked.prompt, asked.ids = ast.literal_eval(parts["prompt"]), _ids(parts["ids"])
    if len(waiting) > MAX_WAITING:
        waiting.pop(next(iter(waiting)))


def _answered(said: re.Match[str], waiting: dict[str, _Asked]) -> _Asked | None:
    """The request of an answer that is whole. A completion's prompts are numbered in their requests' ids, not in its own."""
    if "delta" in (said["stream"] or ""):
        return None
    return waiting.pop(said["id"], None) or waiting.pop(f"{said['id']}-0", None)


def _exchange(asked: _Asked, said: re.Match[str], ended: float | None, tokenizer: Tokenizer, line: str) -> Exchange | None:
    """None when there is no prompt, several answers, or not all of them was logged."""
    text, ids = ast.literal_eval(said["text"]) or "", _ids(said["ids"])
    if (asked.prompt is None and not asked.ids) or asked.params.get("n", 1) != 1:
        return None
    if _is_cut(asked.prompt, asked.ids, tokenizer) or _is_cut(text, ids, tokenizer):
        return None
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": said["reason"]}
    if ids is not None:
        choice |= {"token_ids": ids, "text": ""}  # the text may be what vLLM made of them: a tool call, a thought
    elif "[tool_calls: " in text or "[reasoning: " in text:
        choice["message"] = {"reasoning": text}
    if said["stream"]:
        choice["finish_reason"] = "unknown"
    request = {**asked.params, "prompt": asked.ids or asked.prompt}
    if said["id"].startswith("chatcmpl"):
        request["add_special_tokens"] = False  # the template has written them
    total_s = None if ended is None or asked.began is None else ended - asked.began
    return Exchange(
        is_chat=False,
        asked=request,
        said=[{"choices": [choice]}],
        ended=ended,
        seconds={"total": total_s},
        logged_as=line.strip(),
    )


def _is_cut(text: str | None, ids: list[int] | None, tokenizer: Tokenizer) -> bool:
    """--max-log-len cuts so many characters, and so many tokens, which are longer."""
    return text is not None and ids is not None and len(ids) == len(text) < len(tokenizer.decode(ids, False))


def _ids(text: str | None) -> list[int] | None:
    ids = ast.literal_eval(text) if text else None
    return None if ids is None else list(ids)


def _params(text: str) -> dict[str, Any]:
    """The arguments of `SamplingParams(...)` that are plain values. Raises SyntaxError."""
    if not text.startswith("SamplingParams("):  # beam search, pooling
        return {"n": 0}
    call = ast.parse(re.sub(r"<[^>]*>", "None", text), mode="eval").body
    found: dict[str, Any] = {}
    for keyword in call.keywords if isinstance(call, ast.Call) else ():
        try:
            value = ast.literal_eval(keyword.value)
        except ValueError:
            continue
        name = str(keyword.arg)
        if name in TAKEN and value not in (None, []):
            found[name] = value
    return found


def _moment(line: str, changed: float) -> float | None:
    """Seconds since 1970. vLLM logs local time without a year: the last one in which the file was not written before."""
    found = STAMP.search(line)
    if found is None:
        return None
    for year in (time.localtime(changed + 86400).tm_year, time.localtime(changed).tm_year, time.localtime(changed).tm_year - 1):
        try:
            moment = time.mktime(time.strptime(f"{year}-{found[1]}", "%Y-%m-%d %H:%M:%S"))
        except ValueError:  # the 29th of February of another year
            continue
        if moment <= changed + 86400:
            return moment
    return None
