"""What a 400 says of a body that fits no model: the field as the client wrote it, and what it may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi.exceptions import RequestValidationError

from paceline.serve.dialects.messages import CountTokensRequest, MessagesRequest
from paceline.serve.dialects.responses import ResponsesRequest
from paceline.serve.http.failures import ApiError, RequestRefused
from paceline.serve.requests.fields import why_refused
from paceline.serve.requests.protocol import ChatRequest, Closed, CompletionRequest, DetokenizeRequest, TokenizeRequest

MOST_CHARACTERS = 500
OBJECT = "Input should be a valid object"


ENDPOINTS: dict[str, type[Closed]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
}


def invalid(error: RequestValidationError, content_type: str, endpoint: str = "") -> ApiError:
    """The first thing wrong with a request to this path, by the name of its field."""
    if "json" not in content_type.lower():  # required, since pages of other origins may send any other type unasked
        return RequestRefused("send the body as JSON, with the header Content-Type: application/json", code="invalid_json")
    errors: list[Any] = [*error.errors()]
    first = errors[0]
    if first["type"] == "json_invalid":
        return RequestRefused("the body is no valid JSON", code="invalid_json")
    if first["loc"][:1] != ("body",):
        return RequestRefused(f"{first['loc'][-1]}: {first['msg']}", param=str(first["loc"][-1]))
    written = [(_written(each["loc"][1:], error.body, each["type"]), each) for each in errors]
    same_field = [(path, each) for path, each in written if path[:1] == written[0][0][:1]]
    longest = max(len(path) for path, _ in same_field)
    path = next(path for path, _ in same_field if len(path) == longest)
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    message = f"{name or 'body'}: {_reason(path, [each for other, each in same_field if other == path], endpoint)}"
    return RequestRefused(message[:MOST_CHARACTERS], param=name or None)


def _written(loc: tuple[Any, ...], body: Any, kind: str) -> tuple[Any, ...]:
    """The parts of a pydantic location that stand in the body: names of a union's branches do not."""
    path: list[Any] = []
    for part in loc:
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int) and part < len(body)):
            body = body[part]
        elif kind != "missing" or part != loc[-1]:
            continue
        path.append(part)
    return tuple(path)


def _reason(path: tuple[Any, ...], errors: list[Any], endpoint: str) -> str:
    if errors[0]["type"] == "extra_forbidden":
        names, model = [part for part in path if isinstance(part, str)], ENDPOINTS.get(endpoint)
        if model is None or len(names) != 1:
            return why_refused(names, {}, known_fields(), nested=(model or Closed).nested)
        elsewhere = [path for path, other in ENDPOINTS.items() if names[0] in _held(other)]
        return why_refused(names, model.refused, _held(model), elsewhere)
    exact = [each for each in errors if not each["type"].endswith("_type") and each["type"] != "literal_error"]
    reasons = dict.fromkeys(_worded(each) for each in exact or errors)
    return ", or ".join(_continued(reasons))


def _worded(error: Any) -> str:
    message = str(error["msg"])
    return OBJECT if error["type"] in ("model_type", "dict_type", "model_attributes_type") else message


def _continued(reasons: Iterable[str]) -> list[str]:
    """Of several sentences only the first says "Input should be"."""
    first, *others = reasons
    return [first, *(each.removeprefix("Input should be ") for each in others)]


def known_fields() -> list[str]:
    """Names of all fields that requests may have, nested ones included."""
    models, names = [*Closed.__subclasses__()], dict[str, None]()
    for model in models:
        models += model.__subclasses__()
        names |= dict.fromkeys(_held(model))
    return [*names]


def _held(model: type[Closed]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]
