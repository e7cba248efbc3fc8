"""From what came over the wire to figures: an answer's times and counts.

Times to the first token and to the end count from when a request was due. A chunk is what a server sends at once: with
speculation it holds several tokens, so the time between chunks and the time between tokens are two things.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from paceline.bench.client import Stream

DONE = b"[DONE]"


@dataclass(slots=True)
class Answer:
    """One request's fate."""

    error: str | None = None
    """Why it failed; then the other fields mean nothing."""
    first_s: float = 0.0
    """Time to the first text."""
    total_s: float = 0.0
    due_s: float = 0.0
    """When it was due, after the pass began."""
    late_s: float = 0.0
    """How long after its time the request was sent: the client's own delay."""
    chunk_gaps_s: list[float] = field(default_factory=list)
    """Between two chunks of text."""
    num_prompt: int = 0
    num_reused: int = 0
    """Prompt tokens whose work the server had done before."""
    num_tokens: int = 0
    num_accepted: int | None = None
    """Drafts that stood; None where the server does not tell."""
    num_drafted: int | None = None
    num_rounds: int | None = None
    accepted_histogram: list[int] = field(default_factory=list)
    """accepted_histogram[n]: rounds in which exactly n drafts stood."""
    rounds_by_source: dict[str, Any] = field(default_factory=dict)
    """As the server tells them: source of drafts -> num_rounds, num_drafted and accepted_histogram of its rounds."""
    text: str = ""

    @property
    def inter_token_s(self) -> float | None:
        """Mean time between two tokens after the first; None for an answer of one."""
        return sum(self.chunk_gaps_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


def read_answer(stream: Stream, began_s: float = 0.0) -> Answer:
    """A streamed chat or text completion of a pass that began at `began_s`."""
    if stream.failure:
        return Answer(error=stream.failure)
    if stream.status != 200:
        return Answer(error=f"status {stream.status}: {_error_of(stream.body)}")
    events = list(stream.events())
    if not events or events[-1][1] != DONE:
        return Answer(error="the stream ended early")
    due_s = stream.due_s
    answer = Answer(total_s=stream.ended_s - due_s, due_s=due_s - began_s, late_s=stream.sent_s - due_s)
    times: list[float] = []
    has_ended = False
    for when, data in events[:-1]:
        try:
            chunk = json.loads(data)
        except ValueError:
            return Answer(error="an event of the stream is no JSON")
        if "error" in chunk:
            return Answer(error=_error_of(data))
        for choice in chunk.get("choices") or ():
            has_ended = has_ended or choice.get("finish_reason") is not None
            if text := _text(choice):
                answer.text += text
                times.append(when)
        _count(answer, chunk)
    if not has_ended:
        return Answer(error="the stream ended without a finish reason")
    answer.num_tokens = answer.num_tokens or len(times)
    answer.first_s = (times[0] if times else stream.ended_s) - stream.due_s
    answer.chunk_gaps_s = [later - sooner for sooner, later in pairwise(times)]
    return answer


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or choice.get("text") or ""


def _count(answer: Answer, chunk: dict[str, Any]) -> None:
    usage = chunk.get("usage")
    if usage:
        answer.num_prompt, answer.num_tokens = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        answer.num_reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        details = usage.get("completion_tokens_details") or {}
        answer.num_accepted = details.get("accepted_prediction_tokens")
        if answer.num_accepted is not None and details.get("rejected_prediction_tokens") is not None:
            answer.num_drafted = answer.num_accepted + details["rejected_prediction_tokens"]
    speculation = (chunk.get("metrics") or {}).get("speculative_decoding")
    if speculation:
        answer.accepted_histogram = list(speculation.get("acceptance_histogram") or ())
        answer.num_rounds = sum(answer.accepted_histogram)
        answer.rounds_by_source = speculation.get("rounds_by_source") or {}


def _error_of(body: bytes) -> str:
    """The message of an error in OpenAI's shape, or whatever there is."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return " ".join(body.decode("utf-8", "replace").split())[:200] or "no message"


def tokens_per_round(answers: Sequence[Answer]) -> float | None:
    """Accepted drafts plus the target's own token, per round; None where the server does not tell."""
    told = [(each.num_accepted, each.num_rounds) for each in answers if each.num_accepted is not None and each.num_rounds]
    num_rounds = sum(rounds for _, rounds in told)
    return 1 + sum(accepted for accepted, _ in told) / num_rounds if num_rounds else None
