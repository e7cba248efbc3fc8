"""Determines the route of a request: the drafter that it names, or its request class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.plan.clusters import LOOKED_AT, RAW, TEMPLATE, clusters_of
from paceline.serve.http.failures import RequestRefused
from paceline.serve.requests.prompts import text_of
from paceline.serve.requests.protocol import ChatRequest, CompletionRequest
from paceline.types import NONE, Route

LONGEST = 4 * max(TEMPLATE, LOOKED_AT)
"""Characters at both ends of a message that are used to classify the request."""
AUTO, TAG = "auto", "tag"
DRAFTER = "x-paceline-drafter"
"""Header that names a drafter; it overrides `ServeConfig.route`."""


def chosen_route(name: str, drafters: Sequence[str]) -> Route:
    """Return the route to the drafter `name`; "none" is plain decoding. Raises RequestRefused for an unknown one."""
    if name not in (*drafters, NONE):
        message = f"there is no drafter {name!r:.100} here: {DRAFTER} names one of {', '.join([*drafters, NONE])}"
        raise RequestRefused(message, param=DRAFTER, code="drafter_not_found")
    return Route(name)


def route_of(
    how: str, body: ChatRequest | CompletionRequest, headers: Mapping[str, str], tag: str | None
) -> Route | None:
    """Return the route that selects a request's drafter, by the server's setting `how` (`ServeConfig.route`).

    - "tag": `tag` (the client's label) is the name of the drafter.
    - "header:NAME": the value of the header NAME is the name of the drafter.
    - "auto": the router chooses by the classes of similar requests that this one belongs to, computed from `body` and
      `tag`.

    Returns None, which selects the default drafter, if the label or header that should name it is missing.
    """
    if how != AUTO:
        name = tag if how == TAG else headers.get(how.partition(":")[2])
        return Route(name.strip()) if name else None
    form = body.response_format.model_dump_json(exclude_none=True) if body.response_format else ""
    form += f"{body.guided_regex or ''}{body.guided_json or ''}{body.guided_choice or ''}"
    form += body.structured_outputs.model_dump_json(exclude_none=True) if body.structured_outputs else ""
    tools = body.tools or [] if isinstance(body, ChatRequest) else []
    called = " ".join(tool.function.name for tool in tools)
    return Route(clusters=clusters_of(_texts(body), tag=tag and tag.strip()[:128], schema=form, tools=called))


def _texts(body: ChatRequest | CompletionRequest) -> list[tuple[str, str]]:
    """Return (role, text) of each message, or of the first prompt; long texts are shortened."""
    if isinstance(body, ChatRequest):
        return [(message.role, _ends(text_of(message))) for message in body.messages]
    first = body.prompt if isinstance(body.prompt, str) else body.prompt[0] if body.prompt else ""
    return [(RAW, _ends(first) if isinstance(first, str) else "")]


def _ends(text: str) -> str:
    return text if len(text) <= 2 * LONGEST else text[:LONGEST] + text[-LONGEST:]
