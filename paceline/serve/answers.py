"""From the worker's events to what a client reads: one JSON object, or server-sent events as the tokens come.

An `Exchange` holds one API request: its ticket and a `Reply` for each answer, which speaks the words of its endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.engine.llm import GenerationStats
from paceline.model.tokenizer import Tokenizer
from paceline.serve.failures import ApiError, RequestFailed, dump
from paceline.serve.protocol import Sampling
from paceline.serve.ticket import Event, Ticket
from paceline.types import Sequence, TokenLogprob

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token that cannot be; JSON has no infinity."""
T = TypeVar("T")
log = logging.getLogger("paceline.serve")


class Reply(ABC):
    """One answer as it grows."""

    def __init__(self, index: int, tokenizer: Tokenizer, *, tells_tokens: bool = False) -> None:
        self.index, self.tokenizer = index, tokenizer
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.sequence: Sequence | None = None
        """Set when the answer is complete."""
        self._unsent: list[TokenLogprob] = []
        self._pieces: list[dict[str, Any]] = []
        self._detokenizer = tokenizer.stream() if tells_tokens else None

    def take(self, event: Event) -> None:
        """Add an event."""
        self.text += event.text
        self.logprobs += event.logprobs
        self._unsent += event.logprobs
        if event.finish_reason is not None:
            self.sequence = event.sequence
        if self._detokenizer:
            texts = [self._detokenizer.push([token]) for token in event.token_ids]
            self._pieces += [{"text": text, "drafted": place < event.num_drafted} for place, text in enumerate(texts)]

    def unsent_logprobs(self) -> list[TokenLogprob]:
        """Those of the tokens since the last call."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def unsent_pieces(self) -> list[dict[str, Any]]:
        """Text and origin of each token since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def token_text(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special=False)

    @abstractmethod
    def delta(self, event: Event) -> dict[str, Any] | None:
        """The streamed choice for an event just taken; None when there is nothing to show yet."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The finished choice."""


class Exchange:
    """One API request and its answers."""

    def __init__(
        self, kind: str, prefix: str, model: str, request: Sampling, ticket: Ticket, replies: list[Reply], num_prompts: int = 1
    ) -> None:
        """`kind` is the object's type in OpenAI's words, `prefix` begins its id."""
        self._ticket, self._replies, self._request = ticket, replies, request
        self._num_each = len(replies) // num_prompts
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
        self._first: list[Event] = []

    def close(self) -> None:
        """Abort what is unfinished."""
        self._ticket.close()

    async def begin(self) -> None:
        """Wait for the first tokens, so that what is wrong with a request becomes the status of its response."""
        self._first = await self._ticket.read()

    async def whole(self) -> dict[str, Any]:
        """The finished answers as one object."""
        try:
            while events := await self._ticket.read():
                for event in events:
                    self._replies[event.index].take(event)
            body = self._head | {"choices": [reply.whole() for reply in self._replies], "usage": self._usage()}
            if self._request.return_metrics:
                body["metrics"] = self._metrics()
            if self._request.paceline_timings:
                told = [_origin(reply) | _timings(reply) for reply in self._replies]
                body["paceline"] = told[0] if len(told) == 1 else told
            return body
        finally:
            self.close()

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events, several in one piece when they came together."""
        options = self._request.stream_options
        with_usage = bool(options and options.include_usage)
        head = self._head | {"object": self._head["object"] + (".chunk" if self._head["object"] == "chat.completion" else "")}
        try:
            events = self._first
            while events:
                yield b"".join(self._chunk(head, event, with_usage) for event in events)
                events = await self._ticket.read()
            if with_usage or self._request.return_metrics:
                last = head | {"choices": []} | ({"usage": self._usage()} if with_usage else {})
                yield _event(last | ({"metrics": self._metrics()} if self._request.return_metrics else {}))
        except ApiError as error:
            yield _event(error.body)
        except Exception:
            log.exception("a stream failed")
            yield _event(RequestFailed().body)
        finally:
            self.close()
        yield DONE

    def _chunk(self, head: dict[str, Any], event: Event, with_usage: bool) -> bytes:
        reply = self._replies[event.index]
        reply.take(event)
        choice = reply.delta(event)
        if choice is None:
            return b""
        chunk = head | {"choices": [choice]}
        if with_usage:
            chunk["usage"] = None
        if self._request.paceline_timings:
            pieces = reply.unsent_pieces()
            told = {"drafted": sum(piece["drafted"] for piece in pieces), "tokens": pieces}
            chunk["paceline"] = told | (_timings(reply) if reply.sequence else {})
        return _event(chunk)

    def _usage(self) -> dict[str, Any]:
        """The prompt counts once, however many answers it got."""
        sequences = [reply.sequence for reply in self._replies if reply.sequence]
        firsts = sequences[:: self._num_each]
        num_prompt, num_output = sum(seq.prompt_len for seq in firsts), sum(seq.num_output for seq in sequences)
        accepted = sum(seq.num_accepted for seq in sequences)
        rejected = sum(seq.num_drafted for seq in sequences) - accepted
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(seq.num_reused for seq in firsts)},
            "completion_tokens_details": {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected},
        }

    def _metrics(self) -> dict[str, Any]:
        """vLLM's block of speculation figures, over all answers of the request."""
        sequences = [reply.sequence for reply in self._replies if reply.sequence]
        num_rounds, num_drafted = sum(seq.num_rounds for seq in sequences), sum(seq.num_drafted for seq in sequences)
        num_accepted = sum(seq.num_accepted for seq in sequences)
        longest = max((len(seq.accepted_histogram) for seq in sequences), default=0)
        histograms = [seq.accepted_histogram + [0] * (longest - len(seq.accepted_histogram)) for seq in sequences]
        figures = {
            "mean_acceptance_length": 1.0 + num_accepted / num_rounds if num_rounds else 1.0,
            "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
            "acceptance_histogram": [sum(counts) for counts in zip(*histograms, strict=True)],
        }
        return {"speculative_decoding": figures}


def _origin(reply: Reply) -> dict[str, Any]:
    assert reply.sequence is not None
    return {"drafted": reply.sequence.num_accepted, "tokens": reply.sequence.num_output}


def _timings(reply: Reply) -> dict[str, Any]:
    """Where an answer's time went. Seconds; `first_token_s` counts from the request's arrival at the engine."""
    assert reply.sequence is not None
    stats, times = GenerationStats.of(reply.sequence), reply.sequence.timings
    return {
        **{name: getattr(times, name) for name in ("queue_s", "prefill_s", "draft_s", "verify_s", "host_s")},
        "first_token_s": stats.time_to_first_token_s,
        "total_s": stats.total_s + times.queue_s,
        "tokens_per_s": stats.tokens_per_s,
        "tokens_per_round": stats.tokens_per_round,
        "lossless": stats.lossless,
    }


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + dump(value) + b"\n\n"


class ClientGone(Exception):
    """The client hung up; nobody is left to answer."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; it is cancelled and ClientGone raised when the client hangs up first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events that ends when the client hangs up."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._pieces, self._close = pieces, close
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(receive, self._send(send))
        except ClientGone:
            return
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        async for piece in self._pieces:
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
