"""Commands of `paceline drafters`: manage the drafters of a running server through its admin API."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Annotated, Any
from urllib.parse import quote

import typer

from paceline.commands.options import options
from paceline.commands.shared import Json, say
from paceline.errors import ConfigError
from paceline.report.tables import Column, Table

PATH = "/admin/drafters"
Server = Annotated[str, typer.Option("--server", help="The server's address.")]
Key = Annotated[
    str | None,
    typer.Option(
        help="The server's admin key [default: PACELINE_ADMIN_KEY]. The server's own machine may not need one."
    ),
]
Name = Annotated[str, typer.Argument(help="A drafter's name, as listed by `paceline drafters list`.")]
HERE = "http://127.0.0.1:8000"
COLUMNS = (
    Column("drafter", lambda each: each["name"]),
    Column("state", lambda each: each["state"]),
    Column("rows", lambda each: each["rows"], align="right"),
    Column("tokens/round", lambda each: each["tokens_per_round"], "{:.2f}", align="right"),
    Column("tokens/s", lambda each: each["tokens_per_s"], "{:.1f}", align="right"),
    Column("memory", lambda each: each["memory_bytes"] / 1e6, "{:.0f} MB", align="right"),
)


@options
def drafters_list(server: Server = HERE, admin_key: Key = None, as_json: Json = False) -> dict[str, Any]:
    """List the drafters of a running server.

    Shows the state, acceptance length and memory of each. The last line of the output is one JSON object.

    States: loading; ready; draining (gets no new requests); leaving (replaced or unloaded, but its last requests still
    run); released (not in memory, loaded from disk when needed, see serve --loaded-drafters); failed (released, and its
    files could not be loaded).

    Examples:
      paceline drafters list --server http://127.0.0.1:8000
    """
    return _list(server, admin_key, as_json)


@options
def drafters_load(
    drafter: Annotated[str, typer.Argument(metavar="NAME=DRAFTER", help="A folder on the server, or a hub id.")],
    server: Server = HERE,
    admin_key: Key = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Load a drafter, or replace one, while the server answers.

    The server first checks the new drafter: it must fit the target, have finite weights and draft for a short text. If
    it passes, new requests may use it; running requests keep the drafter that they began with. If it fails, nothing
    changes.

    Examples:
      paceline drafters load tickets=runs/tickets/drafter
    """
    name, _, folder = drafter.partition("=")
    if not name or not folder:
        raise ConfigError(f"give the drafter a name, as in tickets={drafter.strip('=') or 'runs/tickets'}")
    _request(server, admin_key, "POST", f"{PATH}/{quote(name, safe='')}", {"drafter": folder})
    say(f"{name} is loaded")
    return _list(server, admin_key, as_json)


@options
def drafters_drain(name: Name, server: Server = HERE, admin_key: Key = None, as_json: Json = False) -> dict[str, Any]:
    """Give a drafter no new requests; running ones finish.

    The drafter stays loaded until it is unloaded.

    Examples:
      paceline drafters drain tickets
    """
    _request(server, admin_key, "POST", f"{PATH}/{quote(name, safe='')}/drain", {})
    return _list(server, admin_key, as_json)


@options
def drafters_unload(name: Name, server: Server = HERE, admin_key: Key = None, as_json: Json = False) -> dict[str, Any]:
    """Free the memory of a drafter that serves no request.

    Removes the drafter from the server. If running requests still use it, the command fails: drain it first.

    Examples:
      paceline drafters unload tickets
    """
    _request(server, admin_key, "DELETE", f"{PATH}/{quote(name, safe='')}")
    return _list(server, admin_key, as_json)


def _request(
    server: str, key: str | None, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Send a request to a server's admin API; returns the JSON response. Raises ConfigError with the server's error
    message."""
    from paceline.net.streaming import Client

    key = key or os.environ.get("PACELINE_ADMIN_KEY") or None
    with contextlib.closing(Client(server, key, option="--server")) as client:
        stream = client.ask(method, path, None if body is None else json.dumps(body).encode())
    if stream.failure:
        raise ConfigError(f"{client.url} does not answer: {stream.failure}; is this where the server runs?")
    try:
        answer = json.loads(stream.body)
    except ValueError:
        answer = None
    answer = answer if isinstance(answer, dict) else {}
    if stream.status != 200:
        error = answer.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        raise ConfigError(message or f"{client.url} answers with status {stream.status}: is it a paceline server?")
    return answer


def _list(server: str, key: str | None, as_json: bool) -> dict[str, Any]:
    """Print the server's drafters as a table and one JSON object; with --json `options` prints the object."""
    answer = _request(server, key, "GET", PATH)
    Table(COLUMNS, answer["drafters"]).show()
    if not as_json:
        print(json.dumps(answer), flush=True)
    return answer
