"""Error messages for invalid request bodies: the client's field name and its valid values."""

from __future__ import annotations

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
    """Return the error response for a request that pydantic rejected. Its message names the first invalid field. If the
    body's `content_type` is not JSON, the message names only this problem. `endpoint`: the request's path."""
    if "json" not in content_type.lower():  # other origins' pages can send other types without a preflight request
        return RequestRefused(
            "send the body as JSON, with the header Content-Type: application/json", code="invalid_json"
        )
    errors: list[Any] = [*error.errors()]
    first = errors[0]
    if first["type"] == "json_invalid":
        return RequestRefused("the body is no valid JSON", code="invalid_json")
    if first["loc"][:1] != ("body",):
        return RequestRefused(f"{first['loc'][-1]}: {first['msg']}", param=str(first["loc"][-1]))
    written = [(_written(one["loc"][1:], error.body, one["type"]), one) for one in errors]
    same_field = [(path, one) for path, one in written if path[:1] == written[0][0][:1]]
    path = max((path for path, _ in same_field), key=len)  # the first of the longest
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    message = f"{name or 'body'}: {_reason(path, [one for other, one in same_field if other == path], endpoint)}"
    return RequestRefused(message[:MOST_CHARACTERS], param=name or None)


def _written(loc: tuple[Any, ...], body: Any, kind: str) -> tuple[Any, ...]:
    """Return the parts of a pydantic location that are in the body, without the names of union branches."""
    path: list[Any] = []
    for part in loc:
        if (isinstance(body, dict) and part in body) or (
            isinstance(body, list) and isinstance(part, int) and part < len(body)
        ):
            body = body[part]
        elif kind != "missing" or part != loc[-1]:
            continue
        path.append(part)
    return tuple(path)


def _reason(path: tuple[Any, ...], errors: list[Any], endpoint: str) -> str:
    """Return the message for all pydantic errors of one field."""
    if errors[0]["type"] == "extra_forbidden":
        names, model = [part for part in path if isinstance(part, str)], ENDPOINTS.get(endpoint)
        if model is None or len(names) != 1:
            return why_refused(names, {}, known_fields(), nested=(model or Closed).nested)
        others = [path for path, other in ENDPOINTS.items() if names[0] in _fields(other)]
        return why_refused(names, model.refused, _fields(model), others)
    exact = [one for one in errors if not one["type"].endswith("_type") and one["type"] != "literal_error"]
    is_object = ("model_type", "dict_type", "model_attributes_type")
    reasons = dict.fromkeys(OBJECT if one["type"] in is_object else str(one["msg"]) for one in exact or errors)
    first, *more = reasons
    return ", or ".join([first, *(reason.removeprefix("Input should be ") for reason in more)])


def known_fields() -> list[str]:
    """Return the names of all fields in all request formats, also of nested objects; error messages suggest them."""
    models, names = [*Closed.__subclasses__()], dict[str, None]()
    for model in models:
        models += model.__subclasses__()
        names |= dict.fromkeys(_fields(model))
    return [*names]


def _fields(model: type[Closed]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]
