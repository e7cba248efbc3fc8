"""Converts the worker's events to responses: one JSON object, or a stream of server-sent events.

An `Exchange` is one API request: its ticket, and for each answer a `Reply` in the format of its endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.engine.completion import GenerationStats
from paceline.model.text.tokenizer import IncrementalDetokenizer, Tokenizer
from paceline.report.statistics import Rounds
from paceline.serve.http.clock import Clock
from paceline.serve.http.failures import ApiError, dump
from paceline.serve.replies.even import FRAME, LOGPROB, Pace, paced, single
from paceline.serve.requests.protocol import Sampling
from paceline.serve.worker.ticket import Event, Ticket
from paceline.types import PREDICTION, Round, Sequence, TokenLogprob

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""Log-probability sent instead of -inf, which JSON does not have, as in OpenAI's API."""
T = TypeVar("T")
log = logging.getLogger("paceline.serve")


class Reply(ABC):
    """One answer while it is generated. `take` adds an event from the worker; `choice` returns the text added since its
    last call."""

    def __init__(self, index: int, tokenizer: Tokenizer, request: Sampling, *, has_logprobs: bool) -> None:
        self.index, self.tokenizer = index, tokenizer
        self.sequence: Sequence | None = None
        """The engine's record of the request, set when the answer is complete."""
        self._text = ""
        self._logprobs: list[TokenLogprob] = []
        self.pieces: list[dict[str, Any]] = []
        """Tokens not sent yet, as {"text", "drafted"}; only for requests with `paceline_timings`."""
        self._has_logprobs, self._has_ids = has_logprobs, bool(request.return_token_ids)
        self._ids: list[int] = []
        """Unsent token ids."""
        self.prompt_ids: list[int] | None = None
        """Token ids of the prompt; None once they are sent."""
        self.num_output = 0
        """Tokens of the answer so far."""
        self._detokenizer: IncrementalDetokenizer | None = None
        if request.paceline_timings and request.stream:
            self._detokenizer = tokenizer.stream(request.skip_special_tokens is not False)

    def take(self, event: Event) -> None:
        """Add the new text, tokens and log-probabilities of one event."""
        chunk = event.chunk
        self._text += chunk.text
        self._logprobs += event.logprobs
        self.num_output += len(chunk.token_ids)
        if self._has_ids:
            self._ids += chunk.token_ids
        if chunk.finish_reason is not None:
            self.sequence = chunk.sequence
        if self._detokenizer:
            texts = [self._detokenizer.push([token]) for token in chunk.token_ids]
            self.pieces += [{"text": text, "drafted": place < event.num_accepted} for place, text in enumerate(texts)]

    def choice(self, *, is_stream: bool) -> dict[str, Any] | None:
        """Return the text since the last call as an entry of OpenAI's `choices`; None if there is nothing to send yet.
        `is_stream`: use the format of a stream's chunk."""
        text, self._text = self._text, ""
        choice = self._shown(text, is_stream)
        if choice is None:
            return None
        logprobs, self._logprobs = self._logprobs, []
        shown = self._shown_logprobs(logprobs) if self._has_logprobs else None
        choice = {"index": self.index, **choice, "logprobs": shown, "finish_reason": self._reason()}
        if not self._has_ids:
            return choice
        prompt, self.prompt_ids = self.prompt_ids, None
        ids, self._ids = self._ids, []
        return choice | {"token_ids": ids} | ({} if prompt is None else {"prompt_token_ids": prompt})

    def token_text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode(errors="replace")

    def _reason(self) -> str | None:
        return self.sequence.finish_reason if self.sequence else None

    @abstractmethod
    def _shown(self, text: str, is_stream: bool) -> dict[str, Any] | None:
        """Return the part of a choice with its text; None if there is nothing to send yet."""

    @abstractmethod
    def _shown_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """Return log-probabilities in the endpoint's format."""


class Exchange:
    """One API request and its answers. Converts the worker's events to one response object or to a stream."""

    end = DONE
    """Bytes sent after the last event of a stream."""

    def __init__(
        self,
        kind: str,
        prefix: str,
        model: str,
        request: Sampling,
        ticket: Ticket,
        replies: list[Reply],
        num_prompts: int = 1,
        lossless: bool = True,
    ) -> None:
        """`kind`: type of OpenAI's response object ("chat.completion"); `prefix`: prefix of its id. `num_prompts`:
        number of prompts that the replies answer, equally many each. Without `lossless`, responses have the field
        lossless: false."""
        self._ticket, self._replies, self._request = ticket, replies, request
        self.is_stream = bool(request.stream)
        self._with_each = bool(request.stream_options and request.stream_options.continuous_usage_stats)
        self._num_each = len(replies) // num_prompts
        for reply, job in zip(replies, ticket.jobs, strict=True):
            reply.prompt_ids = job.prompt_ids
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
        if not lossless or any(job.params.lossy for job in ticket.jobs):
            self._head["lossless"] = False
        self._first: list[Event] = []
        self._is_even = False

    @property
    def _clock(self) -> Clock:
        return self._ticket.jobs[0].clock

    def close(self) -> None:
        """Abort unfinished answers."""
        self._ticket.close()

    async def begin(self) -> None:
        """Wait for the first tokens. If the request fails before them, raises its error, so that the response can still
        have an HTTP error status."""
        self._first = await self._ticket.read()
        self._clock.answered()

    async def whole(self) -> dict[str, Any]:
        """Wait for all answers and return them as one response object."""
        try:
            while events := await self._ticket.read():
                for event in events:
                    self._replies[event.index].take(event)
            choices = [reply.choice(is_stream=False) for reply in self._replies]
            body = self._head | {"choices": choices} | self._last(with_usage=True)
            if costs := [_lossy_cost(seq) for seq in self._sequences if seq.ledger]:
                body["lossy"] = costs[0] if len(costs) == 1 else costs
            if self._request.paceline_timings:
                timings = [
                    {"drafted": Rounds.counted(seq.rounds).num_accepted, "tokens": seq.num_output} | _timings(seq)
                    for seq in self._sequences
                ]
                body["paceline"] = timings[0] if len(timings) == 1 else timings
            return body
        finally:
            self.close()

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the answers as encoded server-sent events. Events that are ready at the same time are joined. An error
        is sent as the last event."""
        try:
            async for chunks in self.chunks():
                pieces = [self.written(chunk) if chunk else b"" for chunk in chunks]
                for piece in pieces if self._is_even else [b"".join(pieces)]:
                    if piece or self._is_even:
                        yield piece
        except ApiError as error:
            yield self.failed(error)
        except Exception:
            log.exception("a stream failed")
            yield self.failed(ApiError.known("request_failed"))
        finally:
            self.close()
        if self.end:
            yield self.end

    def even_stream(self, pace: Pace) -> AsyncIterator[bytes]:
        """Yield the stream as frames of equal size at a steady rate, to hide accepted drafts and lengths of tokens from
        network listeners. `pace`: interval between frames for one answer; with n answers, it is n times shorter."""
        self._is_even, top = True, self._ticket.jobs[0].params.logprobs
        size = FRAME + (0 if top is None else LOGPROB * (1 + top))
        return paced(self.stream(), size, pace.interval_s / len(self._replies))

    async def chunks(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the chunks of the stream as JSON objects, in one list for each batch of events that arrived together.
        The last list has the usage, metrics and timings, if requested. If the stream is read by `even_stream`, each
        token has its own chunk, which is {} if there is no text to send for it yet."""
        options = self._request.stream_options
        with_usage = bool(options and options.include_usage)
        is_chat = self._head["object"] == "chat.completion"
        head = self._head | ({"object": "chat.completion.chunk"} if is_chat else {})
        events = self._first
        while events:
            if self._is_even:
                events = [one for event in events for one in single(event, self._replies[event.index].token_text)]
            chunks = [self._chunk(head, event, with_usage) or {} for event in events]
            yield [chunk for chunk in chunks if chunk or self._is_even]
            events = await self._ticket.read()
        if more := self._last(with_usage):
            yield [head | {"choices": []} | more]

    def written(self, chunk: dict[str, Any]) -> bytes:
        """Encode a chunk as a server-sent event."""
        return sse(chunk)

    def failed(self, error: ApiError) -> bytes:
        """Encode an error as a server-sent event, the last one of a stream."""
        return sse(error.body)

    def _last(self, with_usage: bool) -> dict[str, Any]:
        """Return the requested fields of the last chunk: usage, metrics and timings."""
        extras = {"usage": self._usage()} if with_usage else {}
        if self._request.return_metrics:
            extras["metrics"] = self._metrics()
        if self._request.return_timings and self._sequences:
            extras["timings"] = self._clock.timings(self._sequences)
        return extras

    def _chunk(self, head: dict[str, Any], event: Event, with_usage: bool) -> dict[str, Any] | None:
        """Return the chunk for an event; None if there is nothing to send yet."""
        reply = self._replies[event.index]
        reply.take(event)
        choice = reply.choice(is_stream=True)
        if choice is None:
            return None
        chunk = head | {"choices": [choice]}
        if self._with_each:
            chunk["usage"] = self._num_tokens()
        elif with_usage:
            chunk["usage"] = None
        if reply.sequence and reply.sequence.ledger:
            chunk["lossy"] = _lossy_cost(reply.sequence)
        if self._request.paceline_timings:
            pieces, reply.pieces = reply.pieces, []
            tokens = {"drafted": sum(piece["drafted"] for piece in pieces), "tokens": pieces}
            chunk["paceline"] = tokens | (_timings(reply.sequence) if reply.sequence else {})
        return chunk

    @property
    def _sequences(self) -> list[Sequence]:
        return [reply.sequence for reply in self._replies if reply.sequence]

    @property
    def token_s(self) -> list[float]:
        """Mean seconds per token after the first, for each finished answer of more than one token."""
        times = [seq.timings.token_s for seq in self._sequences]
        return [(each[-1] - each[0]) / (len(each) - 1) for each in times if len(each) > 1]

    @property
    def _rounds(self) -> list[Round]:
        return [one for seq in self._sequences for one in seq.rounds]

    def _num_tokens(self) -> dict[str, int]:
        """Return the numbers of tokens so far; each prompt counts once, even with several answers."""
        num_prompt = sum(len(job.prompt_ids) for job in self._ticket.jobs[:: self._num_each])
        num_output = sum(reply.num_output for reply in self._replies)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}

    def _usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object of the whole request, with cached tokens and drafts from its prediction."""
        firsts = self._sequences[:: self._num_each]
        rounds = Rounds.counted(one for one in self._rounds if one.source == PREDICTION)
        drafted = {
            "accepted_prediction_tokens": rounds.num_accepted,
            "rejected_prediction_tokens": rounds.num_drafted - rounds.num_accepted,
        }
        return {
            **self._num_tokens(),
            "prompt_tokens_details": {"cached_tokens": sum(seq.num_reused for seq in firsts)},
            "completion_tokens_details": drafted,
        }

    def _metrics(self) -> dict[str, Any]:
        """Return vLLM's speculation metrics over all answers of the request."""
        rounds = Rounds.counted(self._rounds)
        drafted = [one.num_drafted for one in self._rounds if one.num_drafted]
        figures = {
            "mean_acceptance_length": rounds.tokens_per_round,
            "draft_acceptance_rate": rounds.acceptance_rate,
            "acceptance_histogram": list(rounds.accepted_histogram),
            "num_spec_steps": len(drafted),
            "num_accepted_draft_tokens": rounds.num_accepted,
            "num_draft_tokens": rounds.num_drafted,
            "num_spec_tokens": max(drafted, default=0),
            "drafter": ", ".join(sorted({seq.drafter for seq in self._sequences})),
            "rounds_by_source": {source: asdict(part) for source, part in Rounds.by_source(self._rounds).items()},
        }
        return {"speculative_decoding": figures}


def _timings(seq: Sequence) -> dict[str, Any]:
    """Return the durations of an answer's phases in seconds; `first_token_s` is measured from arrival at the engine."""
    stats, arrival_s = GenerationStats.of(seq), seq.timings.arrival_s
    shown = ("queue_s", "prefill_s", "draft_s", "verify_s", "host_s", "plain_s", "num_plain")
    return {
        **{name: getattr(seq.timings, name) for name in shown},
        "first_token_s": stats.time_to_first_token_s,
        "total_s": max(seq.timings.token_s, default=arrival_s) - arrival_s,
        "tokens_per_s": stats.tokens_per_s,
        "tokens_per_round": stats.tokens_per_round,
        "lossless": stats.lossless,
        "drafter": seq.drafter,
    }


def _lossy_cost(seq: Sequence) -> dict[str, Any] | None:
    """Return the cost of an answer's lossy rule."""
    cost = GenerationStats.of(seq).lossy
    return asdict(cost) if cost else None


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def sse(value: dict[str, Any], name: str = "") -> bytes:
    """Encode a JSON value as a server-sent event. `name`: its event name, or ""."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + dump(value) + b"\n\n"


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientDisconnect.
    `receive`: ASGI function that returns the client's next message."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A response of server-sent events. If the client disconnects, its unfinished answers are aborted."""

    def __init__(self, exchange: Exchange, pace: Pace | None = None) -> None:
        """With `pace`, all chunks have one size and leave at its rate."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        stream = exchange.even_stream(pace) if pace else exchange.stream()
        super().__init__(stream, headers=headers, media_type="text/event-stream")
        self._exchange, self._pace = exchange, pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.close()
            if self._pace:
                self._pace.observe(self._exchange.token_s)
