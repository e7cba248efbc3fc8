"""Admin API: lists, loads, drains and unloads drafters of the running server, and pins request classes to a drafter.

`serve/http/security.py` controls access."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from paceline.serve.http.failures import json_response
from paceline.serve.requests.protocol import LoadRequest
from paceline.serve.worker.drafters import Drafters
from paceline.serve.worker.worker import EngineWorker

PATH, CLUSTERS = "/admin/drafters", "/admin/clusters"


def add_admin(app: FastAPI, worker: EngineWorker) -> None:
    """Add the endpoints under /admin to the application."""
    drafters = Drafters(worker)

    @app.get(PATH, summary="Drafters, and statistics of each request class", tags=["admin"])
    async def show() -> Response:
        shown = {"drafters": await drafters.table(), "memory": await drafters.memory()}
        return json_response(shown | {"clusters": await drafters.clusters()})

    @app.post(f"{PATH}/{{name}}", summary="Load a drafter under this name, or replace it", tags=["admin"])
    async def load(name: str, body: LoadRequest) -> Response:
        return json_response(await drafters.load(name, body.drafter))

    @app.post(f"{PATH}/{{name}}/drain", summary="Give the drafter no new requests", tags=["admin"])
    async def drain(name: str) -> Response:
        return json_response(await drafters.drain(name))

    @app.delete(f"{PATH}/{{name}}", summary="Unload a drafter that no request uses", tags=["admin"])
    async def unload(name: str) -> Response:
        return json_response({"drafters": await drafters.unload(name)})

    @app.post(f"{CLUSTERS}/{{cluster}}", summary="Pin a request class to one drafter", tags=["admin"])
    async def pin(cluster: str, body: LoadRequest) -> Response:
        return json_response(await drafters.pin(cluster, body.drafter))

    @app.delete(f"{CLUSTERS}/{{cluster}}", summary="Unpin a request class: route its requests again", tags=["admin"])
    async def release(cluster: str) -> Response:
        return json_response(await drafters.pin(cluster, None))
