"""The name of a model on an OpenAI-compatible server, and the check of the server's key."""

from __future__ import annotations

import json

from paceline.errors import ConfigError, DownloadError, ModelNotFoundError
from paceline.net.streaming import Client


def served_name(client: Client, wanted: str | None) -> str:
    """Return the name of the model to use on an OpenAI-compatible server; see `served_model`."""
    return served_model(client, wanted)[0]


def served_model(client: Client, wanted: str | None, option: str = "--served-name") -> tuple[str, str]:
    """Return (name of the model to use on an OpenAI-compatible server, its owner by the server's list of models). The
    name is `wanted` or, if it is None, the first one in the list. `option`: option that sets it, for error messages.

    Raises DownloadError if the server does not answer, ConfigError if the key is wrong, and ModelNotFoundError if the
    list does not have `wanted`. If the server has no list, `wanted` is returned unchecked, with the owner "", and None
    raises ConfigError."""
    try:
        reply = client.get("/v1/models")
    except OSError as error:
        raise DownloadError(f"there is no server at {client.url} ({error}): start it, or check the address") from error
    check_key(client.url, reply.status, client.has_key)
    try:
        owners = {str(model["id"]): str(model.get("owned_by")) for model in json.loads(reply.body)["data"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        owners = {}
    if not wanted and not owners:
        raise ConfigError(
            f"{client.url}/v1/models answered with status {reply.status} and no model: is it an OpenAI-compatible "
            f"server? If so, name its model with {option}"
        )
    if wanted and owners and wanted not in owners:
        raise ModelNotFoundError(f"{client.url} does not serve {wanted!r}: choose {option} from {', '.join(owners)}")
    name = wanted or next(iter(owners))
    return name, owners.get(name, "")


def check_key(url: str, status: int, has_key: bool) -> None:
    """Raise ConfigError if a server rejected the API key: its HTTP status is 401 or 403. `url`: the server's address,
    for the message. `has_key`: True if a key was sent."""
    if status in (401, 403):
        had = "does not take this API key" if has_key else "wants an API key"
        raise ConfigError(f"{url} {had}: give the right one with --api-key-file, or set PACELINE_API_KEY")
