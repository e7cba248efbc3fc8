"""The web application: HTTP endpoints backed by one EngineWorker."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response

import paceline
from paceline.report.pages import LOOK
from paceline.serve.admin.metrics import Metrics
from paceline.serve.dialects.messages import add_messages
from paceline.serve.dialects.responses import add_responses
from paceline.serve.http.clock import Clock
from paceline.serve.http.failures import ApiError, RequestRefused, error_response, json_response
from paceline.serve.http.features import add_features
from paceline.serve.http.security import Gate
from paceline.serve.http.validation import invalid as invalid_body
from paceline.serve.replies.choices import TextReply
from paceline.serve.replies.even import Pace
from paceline.serve.replies.events import Exchange
from paceline.serve.requests.chats import (
    Drafter,
    Tag,
    answer_chat,
    asked_route,
    check_model,
    compiled,
    names_of,
    respond,
)
from paceline.serve.requests.completions import completion_jobs
from paceline.serve.requests.prompts import check_ids, tokenize_ids
from paceline.serve.requests.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    ErrorAnswer,
    LoadRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from paceline.serve.worker.drafters import Drafters
from paceline.serve.worker.worker import EngineWorker

FOLDER = Path(__file__).parents[1] / "page"
API_PAGE = FOLDER / "api.html"
MEDIA = {".css": "text/css", ".js": "text/javascript", ".LICENSE": "text/plain"}
PAGES = {"/": FOLDER / "index.html", "/docs": API_PAGE, "/page/look.css": LOOK}
PAGES |= {f"/page/{part.relative_to(FOLDER).as_posix()}": part for part in FOLDER.rglob("*.*") if part.suffix in MEDIA}
DRAFTERS, CLUSTERS = "/admin/drafters", "/admin/clusters"
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "frame-ancestors 'none'",  # the rest of the policy is in each page
    "x-content-type-options": "nosniff",
}


def create_app(worker: EngineWorker) -> FastAPI:
    """Create the application with all endpoints; the caller (`serve/run.py`) starts and drains the worker."""
    config = worker.config
    middleware = [Middleware(Gate, config=config, refused=worker.metrics.refused)]
    if config.cors_origins:
        # It must be the outermost, because a browser's preflight request has no key.
        cors = Middleware(
            CORSMiddleware, allow_origins=list(config.cors_origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
        middleware.insert(0, cors)
    app = FastAPI(
        title="paceline",
        version=paceline.__version__,
        summary="An OpenAI-compatible endpoint with lossless speculative decoding.",
        middleware=middleware,
        docs_url=None,  # FastAPI's page loads scripts from other sites
        redoc_url=None,
        responses={
            status: {"model": ErrorAnswer} for status in (400, 401, 403, 404, 408, 409, 413, 421, 429, 500, 503, 504)
        },
    )
    app.state.pace = Pace(config.even_interval_s) if config.even_chunks else None
    _add_failures(app, worker.metrics)
    _add_system(app, worker)
    _add_tokens(app, worker)
    _add_answers(app, worker)
    add_messages(app, worker)
    add_responses(app, worker)
    _add_admin(app, worker)
    add_features(app, worker)
    return app


def _add_failures(app: FastAPI, metrics: Metrics) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        # Probes (GET) are no requests, and a 503 after a request was queued is the engine's.
        is_refusal = error.status < 500 or (error.status == 503 and not getattr(request.state, "is_queued", False))
        if request.method == "POST" and is_refusal:
            metrics.refused(error.code or "invalid_http")
        return error_response(error, request.url.path)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # the client is gone

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        content_type = request.headers.get("content-type", "")
        return await refused(request, invalid_body(error, content_type, request.url.path))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        status, path, code = error.status_code, request.url.path, None
        message = f"{request.method} is not for {path}" if status == 405 else str(error.detail)
        if status == 404:
            message, code = f"there is nothing at {path}", "not_found"
        if status == 400:  # FastAPI's "There was an error parsing the body"
            message, code = (
                "the body cannot be read as JSON in UTF-8: correct or simplify it",
                "invalid_json",
            )
        return await refused(request, ApiError(status, message, code=code, headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return error_response(ApiError.known("request_failed"), request.url.path)


def _add_system(app: FastAPI, worker: EngineWorker) -> None:
    @app.get("/health", summary="Liveness: the process runs", tags=["system"])
    async def health() -> Response:
        if worker.state == "failed":
            raise ApiError.known("failed")
        return json_response({"status": "ok"})

    @app.get("/ready", summary="Readiness: the server accepts requests", tags=["system"])
    async def ready() -> Response:
        worker.serving()
        return json_response({"status": worker.state})

    @app.get("/version", summary="Version of paceline", tags=["system"])
    async def version() -> Response:
        return json_response({"version": paceline.__version__})

    @app.get("/metrics", summary="Prometheus metrics", tags=["system"])
    async def show_metrics() -> Response:
        body, content_type = worker.metrics.render()
        return Response(body, headers={"content-type": content_type})

    @app.get("/steps", summary="Time of each phase of the engine's steps, by size", tags=["system"])
    async def steps() -> Response:
        rows = [[*key, *spent] for key, spent in worker.metrics.step_times.copy().items()]
        return json_response({"steps": rows} | ({} if worker.metrics.lossless else {"lossless": False}))

    for path, file in PAGES.items():
        app.add_route(path, partial(_show, file), include_in_schema=False)


async def _show(file: Path, request: Request) -> Response:
    return FileResponse(file, media_type=MEDIA.get(file.suffix, "text/html"), headers=PAGE_HEADERS)


def _add_tokens(app: FastAPI, worker: EngineWorker) -> None:
    @app.get("/v1/models", summary="Served model names and drafters", tags=["OpenAI"])
    async def models() -> Response:
        return json_response({"object": "list", "data": [_described(name, worker) for name in names_of(worker)]})

    @app.get("/v1/models/{name:path}", summary="One model name and its drafters", tags=["OpenAI"])
    async def model(name: str) -> Response:
        return json_response(_described(check_model(name, worker)[0], worker))

    @app.post("/tokenize", summary="Encode a text or conversation", tags=["tokens"], response_model=TokenizeAnswer)
    async def tokenize(body: TokenizeRequest) -> Response:
        _, model = check_model(body.model, worker)
        tokens = await asyncio.to_thread(tokenize_ids, body, model)
        answer: dict[str, object] = {"count": len(tokens), "max_model_len": model.max_len, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = [model.tokenizer.decode([token], skip_special=False) for token in tokens]
        return json_response(answer)

    @app.post("/detokenize", summary="Decode token ids", tags=["tokens"], response_model=DetokenizeAnswer)
    async def detokenize(body: DetokenizeRequest) -> Response:
        _, model = check_model(body.model, worker)
        ids = check_ids(body.tokens, model, "tokens")
        return json_response({"prompt": await asyncio.to_thread(model.tokenizer.decode, ids, False)})


def _described(name: str, worker: EngineWorker) -> dict[str, object]:
    """Return OpenAI's model object with the context length and the drafters."""
    model = worker.serving()
    entry = {"id": name, "object": "model", "created": 0, "owned_by": "paceline"}
    mocked = {"lossless": False, "mocked": model.mocked} if model.mocked else {}
    drafters = {"drafters": model.drafters} if len(model.drafters) > 1 else {}
    return entry | {"max_model_len": model.max_len, "drafter": model.drafter} | drafters | mocked


def _add_answers(app: FastAPI, worker: EngineWorker) -> None:
    @app.post("/v1/chat/completions", summary="Answer a conversation", tags=["OpenAI"])
    async def chat(body: ChatRequest, http: Request, tag: Tag = None, drafter: Drafter = None) -> Response:
        return await answer_chat(body, http, tag, worker, partial(Exchange, "chat.completion", "chatcmpl"), drafter)

    @app.post("/v1/completions", summary="Continue a text", tags=["OpenAI"])
    async def complete(body: CompletionRequest, http: Request, tag: Tag = None, drafter: Drafter = None) -> Response:
        name, model = check_model(body.model, worker)
        route = asked_route(body, http, tag, drafter, worker, model)
        clock = Clock(http.scope)
        jobs, echoes = await asyncio.to_thread(completion_jobs, body, model, worker.config, clock)
        jobs = await compiled(jobs, worker, clock)
        replies = [TextReply(index, model.tokenizer, body, echo) for index, echo in enumerate(echoes)]
        num_prompts = len(jobs) // (body.n or 1)
        ticket = worker.submit(jobs, tag, route)
        answering = Exchange("text_completion", "cmpl", name, body, ticket, [*replies], num_prompts, model.lossless)
        return await respond(http, answering)

    @app.post(
        "/v1/embeddings", summary="Not supported: this server only generates text", tags=["OpenAI"], status_code=400
    )
    async def embeddings() -> Response:
        message = "this server has no embeddings: it generates text, at /v1/chat/completions and /v1/completions"
        raise RequestRefused(message, code="unsupported_endpoint")


def _add_admin(app: FastAPI, worker: EngineWorker) -> None:
    """Add the endpoints that manage drafters; `Gate` checks the admin key."""
    drafters = Drafters(worker)

    @app.get(DRAFTERS, summary="Drafters, and statistics of each request class", tags=["admin"])
    async def show() -> Response:
        shown = {"drafters": await drafters.table(), "memory": await drafters.memory()}
        return json_response(shown | {"clusters": await drafters.clusters()})

    @app.post(f"{DRAFTERS}/{{name}}", summary="Load a drafter under this name, or replace it", tags=["admin"])
    async def load(name: str, body: LoadRequest) -> Response:
        return json_response(await drafters.load(name, body.drafter))

    @app.post(f"{DRAFTERS}/{{name}}/drain", summary="Give the drafter no new requests", tags=["admin"])
    async def drain(name: str) -> Response:
        return json_response(await drafters.drain(name))

    @app.delete(f"{DRAFTERS}/{{name}}", summary="Unload a drafter that no request uses", tags=["admin"])
    async def unload(name: str) -> Response:
        return json_response({"drafters": await drafters.unload(name)})

    @app.post(f"{CLUSTERS}/{{cluster}}", summary="Pin a request class to one drafter", tags=["admin"])
    async def pin(cluster: str, body: LoadRequest) -> Response:
        return json_response(await drafters.pin(cluster, body.drafter))

    @app.delete(f"{CLUSTERS}/{{cluster}}", summary="Unpin a request class: route its requests again", tags=["admin"])
    async def release(cluster: str) -> Response:
        return json_response(await drafters.pin(cluster, None))
