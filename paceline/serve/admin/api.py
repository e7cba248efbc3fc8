"""The admin API: the drafters of the pool, listed, loaded, drained and unloaded while the server answers, and the clusters that
are pinned to one of them. `serve/http/security.py` says who may use it."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from paceline.serve.http.failures import json_response
from paceline.serve.requests.protocol import LoadRequest
from paceline.serve.worker.drafters import Drafters
from paceline.serve.worker.worker import EngineWorker

PATH, CLUSTERS = "/admin/drafters", "/admin/clusters"


def add_admin(app: FastAPI, worker: EngineWorker) -> None:
    drafters = Drafters(worker)

    @app.get(PATH, summary="Drafters, and what is known of each kind of request", tags=["admin"])
    async def show() -> Response:
        return json_response({"drafters": await drafters.table(), "clusters": await drafters.clusters()})

    @app.post(f"{PATH}/{{name}}", summary="Load a drafter under this name, or another in its place", tags=["admin"])
    async def load(name: str, body: LoadRequest) -> Response:
        return json_response(await drafters.load(name, body.drafter))

    @app.post(f"{PATH}/{{name}}/drain", summary="Give it to no new request", tags=["admin"])
    async def drain(name: str) -> Response:
        return json_response(await drafters.drain(name))

    @app.delete(f"{PATH}/{{name}}", summary="Forget a drafter that no request has any more", tags=["admin"])
    async def unload(name: str) -> Response:
        return json_response({"drafters": await drafters.unload(name)})

    @app.post(f"{CLUSTERS}/{{cluster}}", summary="Give requests of this kind one member, without a choice", tags=["admin"])
    async def pin(cluster: str, body: LoadRequest) -> Response:
        return json_response(await drafters.pin(cluster, body.drafter))

    @app.delete(f"{CLUSTERS}/{{cluster}}", summary="Choose a member for requests of this kind again", tags=["admin"])
    async def release(cluster: str) -> Response:
        return json_response(await drafters.pin(cluster, None))
