"""`paceline drafters`: the drafters of a running server, listed, loaded, drained and unloaded while it answers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from paceline.commands.options import options
from paceline.commands.shared import Json, say
from paceline.errors import ConfigError
from paceline.report.tables import Column, Table

if TYPE_CHECKING:
    from paceline.net.streaming import Client, Stream

PATH = "/admin/drafters"
Server = Annotated[str, typer.Option("--server", help="The server's address.")]
Key = Annotated[
    str | None, typer.Option(help="The server's admin key [default: PACELINE_ADMIN_KEY]; on its own machine it may need none.")
]
Name = Annotated[str, typer.Argument(help="A drafter's name, as of `paceline drafters list`.")]
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

    Shows the state, quality and memory of each; the last line is one JSON object. States: loading; ready; draining
    (gets no new requests); leaving (replaced or unloaded, its last requests finish).

    Examples:
      paceline drafters list --server http://127.0.0.1:8000
    """
    with _Admin.of(server, admin_key) as admin:
        return _shown(admin.ask("GET", PATH), as_json)


@options
def drafters_load(
    drafter: Annotated[str, typer.Argument(metavar="NAME=DRAFTER", help="A folder as the server sees it, or a hub id.")],
    server: Server = HERE,
    admin_key: Key = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Load a drafter, or replace one, while the server answers.

    The drafter is checked beside the traffic: it fits the target, its weights are finite, it drafts after a short
    text. Then new requests may use it; running requests keep theirs. A drafter that is refused changes nothing.

    Examples:
      paceline drafters load tickets=runs/tickets/drafter
    """
    name, _, folder = drafter.partition("=")
    if not name or not folder:
        raise ConfigError(f"give the drafter a name, as in tickets={drafter.strip('=') or 'runs/tickets'}")
    with _Admin.of(server, admin_key) as admin:
        admin.ask("POST", f"{PATH}/{quote(name, safe='')}", {"drafter": folder})
        say(f"{name} is loaded")
        return _shown(admin.ask("GET", PATH), as_json)


@options
def drafters_drain(name: Name, server: Server = HERE, admin_key: Key = None, as_json: Json = False) -> dict[str, Any]:
    """Give a drafter no new requests; running ones finish.

    Examples:
      paceline drafters drain tickets
    """
    with _Admin.of(server, admin_key) as admin:
        admin.ask("POST", f"{PATH}/{quote(name, safe='')}/drain", {})
        return _shown(admin.ask("GET", PATH), as_json)


@options
def drafters_unload(name: Name, server: Server = HERE, admin_key: Key = None, as_json: Json = False) -> dict[str, Any]:
    """Free the memory of a drafter that serves no request.

    Examples:
      paceline drafters unload tickets
    """
    with _Admin.of(server, admin_key) as admin:
        admin.ask("DELETE", f"{PATH}/{quote(name, safe='')}")
        return _shown(admin.ask("GET", PATH), as_json)


class _Admin:
    """The admin API of one server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @classmethod
    @contextlib.contextmanager
    def of(cls, server: str, key: str | None) -> Iterator[_Admin]:
        from paceline.net.streaming import Client

        with contextlib.closing(
            Client(server, key or os.environ.get("PACELINE_ADMIN_KEY") or None, option="--server")
        ) as client:
            yield cls(client)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer's JSON. Raises ConfigError with what the server says, or why there is no answer."""
        stream = self._client.ask(method, path, None if body is None else json.dumps(body).encode())
        if stream.failure:
            raise ConfigError(f"{self._client.url} does not answer: {stream.failure}; is this where the server runs?")
        answer = _read(stream)
        if stream.status != 200:
            error = answer.get("error")
            told = error.get("message") if isinstance(error, dict) else None
            raise ConfigError(told or f"{self._client.url} answers with status {stream.status}: is it a paceline server?")
        return answer


def _read(stream: Stream) -> dict[str, Any]:
    try:
        answer = json.loads(stream.body)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _shown(answer: dict[str, Any], as_json: bool) -> dict[str, Any]:
    """Prints a table, and the answer as one JSON object; with --json `options` prints that."""
    Table(COLUMNS, answer["drafters"]).show()
    if not as_json:
        print(json.dumps(answer), flush=True)
    return answer
