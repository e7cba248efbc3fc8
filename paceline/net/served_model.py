"""The name of a model on an OpenAI-compatible server, and the check of the server's key."""

from __future__ import annotations

import json

from paceline.errors import ConfigError, DownloadError, ModelNotFoundError
from paceline.net.streaming import Client


def served_name(client: Client, wanted: str | None) -> str:
    """Return the name of the model to use on an OpenAI-compatible server. This is `wanted` or, if it is None, the first
    name in the server's list of models.

    Raises DownloadError if the server does not answer, ConfigError if the key is wrong, and ModelNotFoundError if the
    list does not have `wanted`. If the server has no list, `wanted` is returned unchecked, and None raises
    ConfigError."""
    try:
        reply = client.get("/v1/models")
    except OSError as error:
        raise DownloadError(f"there is no server at {client.url} ({error}): start it, or check the address") from error
    check_key(client.url, reply.status, client.has_key)
    try:
        names = [str(model["id"]) for model in json.loads(reply.body)["data"]]
    except (ValueError, KeyError, TypeError):
        names = []
    if wanted is None and not names:
        raise ConfigError(
            f"{client.url}/v1/models answered with status {reply.status} and no model: is it an OpenAI-compatible "
            "server? If so, name its model with --served-name"
        )
    if wanted is not None and names and wanted not in names:
        raise ModelNotFoundError(
            f"{client.url} does not serve {wanted!r}: choose --served-name from {', '.join(names)}"
        )
    return wanted or names[0]


def check_key(url: str, status: int, has_key: bool) -> None:
    """Raise ConfigError if a server rejected the API key: its HTTP status is 401 or 403. `url`: the server's address,
    for the message. `has_key`: True if a key was sent."""
    if status in (401, 403):
        had = "does not take this API key" if has_key else "wants an API key"
        raise ConfigError(f"{url} {had}: give the right one with --api-key or --api-key-file, or set PACELINE_API_KEY")
