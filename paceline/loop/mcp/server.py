"""MCP server of `paceline mcp`: the tools of `Operations` over streamable HTTP on loopback, with a key and a log.

Every call is logged before and after its work; calls run one at a time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
from collections.abc import Callable
from typing import Any

from paceline import __version__
from paceline.errors import ConfigError, PacelineError, needing, refuse
from paceline.loop.mcp.calls import CallLog, Ending
from paceline.loop.mcp.config import McpConfig
from paceline.loop.mcp.operations import Operations
from paceline.runs.lock import only_run
from paceline.runs.ranks import Ranks

with needing(ConfigError, "paceline mcp needs the MCP SDK: pip install 'paceline[mcp]'"):
    import uvicorn
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
    from starlette.datastructures import Headers
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Receive, Scope, Send

    from paceline.serve.run import listen
    from paceline.serve.settings import ServeConfig

KEY = "PACELINE_MCP_KEY"
INSTRUCTIONS = (
    "Keeps a drafter of speculative decoding fitted. Order: traffic, propose, train, status until done, score, gate, "
    "status until done, roll_out with the gate's id, roll_back if the server gets worse. Only a drafter that passed "
    "the gate can be rolled out. read_log shows all calls."
)


class LoggedServer(MCPServer):
    """MCP server that logs every call, refuses unknown arguments, and runs one call at a time."""

    def __init__(self, operations: Operations) -> None:
        super().__init__("paceline", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
        self._calls, self._one_at_a_time = operations.log, asyncio.Lock()
        self._arguments: dict[str, set[str]] = {}
        for tool in operations.tools():
            self.add_tool(tool, structured_output=True)
            self._arguments[tool.__name__] = {*tool.__annotations__} - {"return"}

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        """Logs the call, runs the tool, and returns its result. Raises ToolError if the call is refused."""
        try:
            with self._calls.call(name, arguments) as ending:
                unknown = ", ".join(sorted({*arguments} - self._arguments.get(name, {*arguments})))
                refuse(ConfigError, (bool(unknown), f"{name} has no argument {unknown}: leave it out"))
                async with self._one_at_a_time:
                    return await self._run(name, arguments, context, ending)
        except PacelineError as error:
            raise ToolError(str(error)) from error

    async def _run(self, name: str, arguments: dict[str, Any], context: Any, ending: Ending) -> Any:
        try:
            result = await super().call_tool(name, arguments, context)
        except UnexpectedToolError as error:
            raise error.__cause__ or error from None
        except ToolError as error:  # an unknown tool, or arguments of other types
            raise ConfigError(" ".join(str(error).split())) from error
        ending.outcome = "ok"
        return result


class KeyRequired:
    """ASGI middleware that requires the server's key. Requests without it are answered with status 401 and logged."""

    def __init__(self, app: ASGIApp, key: str, log: CallLog) -> None:
        self._app, self._digest, self._log = app, hashlib.sha256(key.encode()).digest(), log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_valid(Headers(scope=scope).get("authorization", "")):
            await self._app(scope, receive, send)
            return
        with self._log.call(None, {}) as ending:
            ending.outcome, ending.why = "refused", "no key, or a wrong one"
        text = {"error": "send the key of this server: Authorization: Bearer KEY"}
        await JSONResponse(text, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_valid(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()
        return hmac.compare_digest(given, self._digest) and scheme.lower() == "bearer"


def app_of(operations: Operations, config: McpConfig) -> ASGIApp:
    """Returns the ASGI application of the MCP server. The server's key is `config.key`, or else the environment
    variable PACELINE_MCP_KEY. Raises ConfigError if neither is set, or if the key is too short."""
    key = (config.key or os.environ.get(KEY) or "").strip()
    refuse(ConfigError, (not key, f"set a key: export {KEY}=$(openssl rand -hex 16)"))
    McpConfig(key=key)  # checks its length
    app = LoggedServer(operations).streamable_http_app(host=config.host, stateless_http=True, json_response=True)
    return KeyRequired(app, key, operations.log)


def run(operations: Operations, config: McpConfig, say: Callable[[str], None]) -> None:
    """Runs the MCP server until SIGTERM or Ctrl-C; background jobs continue after its end. `say`: called with a text
    that has the server's address. Raises ConfigError if another server uses the same state folder."""
    app = app_of(operations, config)
    with only_run(operations.store.state, "serving MCP", Ranks(), say):
        bound: socket.socket = listen(ServeConfig(host=config.host, port=config.port))
        bound.listen(128)  # connections wait until uvicorn accepts
        host = f"[{config.host}]" if ":" in config.host else config.host
        say(f"mcp: http://{host}:{bound.getsockname()[1]}/mcp, log in {operations.log.folder}")
        settings = uvicorn.Config(app, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=5)
        uvicorn.Server(settings).run(sockets=[bound])
