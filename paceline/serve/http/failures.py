"""Error responses in OpenAI's or Anthropic's format, without paths and tracebacks.

`ApiError.known` creates the errors of failures.json by their code; `RequestRefused` is an invalid request: status 400
and invalid_value, context_length_exceeded, ...
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastapi.responses import Response

from paceline.errors import ContextLengthError, PacelineError, TemplateError

FAILURES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ANTHROPIC = "/v1/messages"
"""Path prefix of Anthropic's API."""
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> type in Anthropic's error object."""


class ApiError(Exception):
    """An error response: HTTP status, message, error code and invalid field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}

    @classmethod
    def known(cls, code: str, **values: Any) -> ApiError:
        """Return the error with this code in failures.json; `values` are inserted into its message."""
        entry = FAILURES[code]
        headers = {name: text.format(**values) for name, text in entry.get("headers", {}).items()}
        return cls(entry["status"], entry["message"].format(**values), code=entry.get("code", code), headers=headers)

    @classmethod
    def failed(cls, error: Exception | None) -> ApiError:
        """Return the error response (status 500) for one request that failed with `error` (None if unknown). It has the
        message of a PacelineError; messages of other exceptions, which may contain private data, are hidden."""
        return (
            cls(500, str(error), code="request_failed")
            if isinstance(error, PacelineError)
            else cls.known("request_failed")
        )

    @property
    def body(self) -> dict[str, Any]:
        """Error object in OpenAI's format."""
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, other)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """Error object in Anthropic's format. For a prompt beyond the context the message begins with "prompt is too
        long", by which clients know that a conversation must be shortened."""
        message = self.message
        if self.param and self.param not in message:
            message = f"{self.param}: {message}"
        if self.code == "context_length_exceeded":
            too_long = "input length and `max_tokens` exceed" if self.param == "max_tokens" else "prompt is too long"
            message = f"{too_long}: {message}"
        kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


class RequestRefused(ApiError):
    """An invalid request, or one that this server does not support."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(status, message, param=param, code=code)

    @classmethod
    def of(cls, error: PacelineError, param: str | None = None) -> RequestRefused:
        """Convert an error of the tokenizer, template or engine to an error response. `param` is the request's invalid
        field, used if the error names no field."""
        is_length, text = isinstance(error, ContextLengthError), str(error)
        param = getattr(error, "field", None) or param or ("max_tokens" if is_length else None)
        if isinstance(error, TemplateError):
            text = f"{error.fault}: check the messages' roles and contents, or send the text itself to /v1/completions"
        return cls(text, param=param, code="context_length_exceeded" if is_length else "invalid_value")


def dump(value: Any) -> bytes:
    """Encode a value as JSON without spaces, in UTF-8; lone surrogates become escapes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "backslashreplace"
    )


def compact(value: Any) -> str:
    """Return a value of a request as JSON text. Raises RequestRefused if it is nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise RequestRefused("the JSON is nested too deeply: flatten it") from None


def json_response(
    value: Any, status: int = 200, headers: dict[str, str] | None = None, *, multiple: int = 1
) -> Response:
    """Return a JSON response. Its body is padded with spaces, which parsers ignore, to a multiple of `multiple` bytes,
    so that its length reveals an answer's length only roughly (serve --even-chunks)."""
    body = dump(value)
    return Response(body + b" " * (-len(body) % multiple), status, headers, media_type="application/json")


def error_response(error: ApiError, path: str = "") -> Response:
    """Return the error response in the format of the API that `path` belongs to."""
    body = error.anthropic_body if path.startswith(ANTHROPIC) else error.body
    return json_response(body, error.status, error.headers)
