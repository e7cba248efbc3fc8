"""Answers chats of every API: checks the model, creates jobs, compiles grammars, submits them and builds the response.

Other APIs are translated to ChatRequests (`serve/dialects/base.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Header, Request
from starlette.responses import Response

from paceline.config import short_name
from paceline.serve.http.clock import Clock
from paceline.serve.http.failures import RequestRefused, json_response
from paceline.serve.replies.choices import ChatReply
from paceline.serve.replies.even import BODY, Pace
from paceline.serve.replies.events import EventStream, Exchange, unless_gone
from paceline.serve.requests.completions import chat_jobs
from paceline.serve.requests.prompts import chat_ids
from paceline.serve.requests.protocol import ChatRequest, CompletionRequest
from paceline.serve.requests.routing import DRAFTER, chosen_route, route_of
from paceline.serve.worker.engine import ModelInfo
from paceline.serve.worker.ticket import Job
from paceline.serve.worker.worker import EngineWorker
from paceline.types import Route

Tag = Annotated[
    str | None,
    Header(
        alias="x-paceline-tag",
        description="Class of the request: recorded in its trace, and used to choose among several drafters.",
    ),
]
Drafter = Annotated[
    str | None,
    Header(alias=DRAFTER, description="Drafter of the request: a name listed in /v1/models, or none."),
]


def names_of(worker: EngineWorker) -> tuple[str, ...]:
    """Return the model names for clients: the configured ones, else the last part of the model's path."""
    return worker.config.served_names or (short_name(worker.serving().name),)


def check_model(name: str | None, worker: EngineWorker) -> tuple[str, ModelInfo]:
    """Return (model name for clients, properties of the loaded model). `name`: the model that the request names, if
    any. Raises ApiError if the server has no such model, or accepts no requests now."""
    names = names_of(worker)
    if name is not None and name not in names:
        message = f"there is no model {name!r:.100} here: this server has {', '.join(names)}"
        raise RequestRefused(message, param="model", code="model_not_found", status=404)
    return name or names[0], worker.serving()


async def answer_chat(
    body: ChatRequest,
    http: Request,
    tag: str | None,
    worker: EngineWorker,
    exchange: Callable[..., Exchange],
    drafter: str | None = None,
) -> Response:
    """Queue a chat request in the engine and return the HTTP response. `tag`: value of the header x-paceline-tag, the
    client's label, also recorded in the trace. `drafter`: value of the header x-paceline-drafter. `exchange`: function
    or class that creates the Exchange, which converts the answers to the endpoint's format. Its arguments are the
    model's name, `body`, the Ticket, a list with one ChatReply per answer, and the keyword `lossless` (False if
    acceptance is mocked)."""
    name, model = check_model(body.model, worker)
    clock = Clock(http.scope)
    jobs = await asyncio.to_thread(chat_jobs, body, model, worker.config, clock)
    jobs = await compiled(jobs, worker, clock)
    replies: list[Any] = [ChatReply(index, model.tokenizer, body) for index in range(len(jobs))]
    ticket = worker.submit(jobs, tag, asked_route(body, http, tag, drafter, worker, model))
    return await respond(http, exchange(name, body, ticket, replies, lossless=model.lossless))


def asked_route(
    body: ChatRequest | CompletionRequest,
    http: Request,
    tag: str | None,
    drafter: str | None,
    worker: EngineWorker,
    model: ModelInfo,
) -> Route | None:
    """Return the route that selects the request's drafter; None selects the default drafter. `drafter`: value of the
    header x-paceline-drafter, which names the drafter; RequestRefused is raised for an unknown name. Without this
    header, the server's setting `route` decides (`route_of`). `tag`: value of the header x-paceline-tag, the client's
    label."""
    name = drafter and drafter.strip()
    return chosen_route(name, model.drafters) if name else route_of(worker.config.route, body, http.headers, tag)


async def count_chat(body: ChatRequest, worker: EngineWorker) -> int:
    """Return the number of prompt tokens of a chat. Raises ApiError for an unknown model, and for messages that are
    invalid or far longer than the context."""
    _, model = check_model(body.model, worker)
    return len(await asyncio.to_thread(chat_ids, body, model))


async def compiled(jobs: list[Job], worker: EngineWorker, clock: Clock) -> list[Job]:
    """Compile the grammar of one request's jobs in a thread, and measure this with `clock`. Returns copies of the jobs
    that contain `clock` and, if the request has a grammar, the compiled grammar. Raises RequestRefused for an invalid
    grammar."""
    clock.mark("dispatch")
    jobs = await worker.compiled(jobs)
    clock.mark("grammar")
    return [replace(job, clock=clock) for job in jobs]


async def respond(http: Request, exchange: Exchange) -> Response:
    """Return the HTTP response with the answers of `exchange`. If the client disconnects, the request is aborted."""
    pace: Pace | None = http.app.state.pace
    http.state.is_queued = True
    try:
        if not exchange.is_stream:
            return json_response(await unless_gone(http.receive, exchange.whole()), multiple=BODY if pace else 1)
        await unless_gone(http.receive, exchange.begin())
    except BaseException:
        exchange.close()
        raise
    return EventStream(exchange, pace)
