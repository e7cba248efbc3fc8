"""Run the server: one process, the engine in its own thread, a clean end on SIGTERM or Ctrl-C.

The port answers at once (/health); /ready says when the model is loaded. The first signal drains: nothing new is taken, answers
under way are finished. A second one ends at once.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn

from paceline.errors import ConfigError
from paceline.serve.app import create_app
from paceline.serve.connection import Connection
from paceline.serve.settings import ServeConfig
from paceline.serve.worker import EngineWorker, M

SWITCH_SECONDS = 0.0005
"""How long the event loop may keep the interpreter while the engine waits for it; the usual 5 ms would be felt in a round."""
CLOSE_SECONDS = 5


class Server(uvicorn.Server):
    """uvicorn, but a signal first drains the worker."""

    def __init__(self, config: uvicorn.Config, worker: EngineWorker) -> None:
        super().__init__(config)
        self._worker = worker
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining:
            self.force_exit = self.should_exit = True
            self._captured_signals.append(sig)
        else:
            asyncio.get_running_loop().call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Finish what is under way, then exit."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self._worker.drain(self._worker.config.drain_seconds)
        self.should_exit = True


def listen(config: ServeConfig) -> socket.socket:
    """A bound socket. Raises ConfigError when the address is taken or none of ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)  # asyncio sends small pieces at once only where the protocol is named
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
        return bound
    except OSError as error:
        where, why = f"{config.host}:{config.port}", error.strerror or error
        raise ConfigError(f"cannot listen on {where} ({why}): choose another --host or --port") from error


def make_server(worker: EngineWorker) -> Server:
    """The server, not yet running."""
    config = worker.config
    settings = uvicorn.Config(
        create_app(worker),
        host=config.host,
        port=config.port,
        http=cast(Any, partial(Connection, config)),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        h11_max_incomplete_event_size=64 * 1024,
        ws="none",
    )
    return Server(settings, worker)


def run(worker: EngineWorker[M], *, say: Callable[[str], None], introduce: Callable[[M], str]) -> None:
    """Serve until a signal comes. Raises what kept the model from loading, or the engine from coming back."""
    sys.setswitchinterval(SWITCH_SECONDS)
    with listen(worker.config) as bound:
        asyncio.run(_run(worker, bound, say, introduce))
    if worker.failure:
        raise worker.failure


async def _run(
    worker: EngineWorker[M], bound: socket.socket, say: Callable[[str], None], introduce: Callable[[M], str]
) -> None:
    server = make_server(worker)
    worker.start()
    tasks = [asyncio.create_task(_greet(worker, bound, say, introduce)), asyncio.create_task(_supervise(server, worker))]
    try:
        await server.serve(sockets=[bound])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _greet(
    worker: EngineWorker[M], bound: socket.socket, say: Callable[[str], None], introduce: Callable[[M], str]
) -> None:
    host, port = bound.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    say(f"listening on {address}, loading the model")
    await worker.loaded()
    say(await worker.call(introduce))
    say(f"ready: open {address}/ in a browser, or")
    key = ' -H "Authorization: Bearer $PACELINE_API_KEY"' if worker.config.api_keys else ""
    body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}'
    say(f"curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'")


async def _supervise(server: Server, worker: EngineWorker) -> None:
    """A server without an engine ends, for whoever supervises it to start again."""
    while worker.state != "failed":
        await asyncio.sleep(0.2)
    server.should_exit = True
