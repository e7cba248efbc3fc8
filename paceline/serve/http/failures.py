"""Error responses in OpenAI's or Anthropic's format, without paths and tracebacks."""

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
        """Return the error with this code in failures.json. `values`: for the placeholders in its message and
        headers."""
        entry = FAILURES[code]
        headers = {name: text.format(**values) for name, text in entry.get("headers", {}).items()}
        return cls(entry["status"], entry["message"].format(**values), code=entry.get("code", code), headers=headers)

    @classmethod
    def failed(cls, error: Exception | None) -> ApiError:
        """Return the response (status 500) for a request that failed in the engine. It has the message of `error` if
        this is a PacelineError, else a fixed message, because messages of other errors may contain private data."""
        if isinstance(error, PacelineError):
            return cls(500, str(error), code="request_failed")
        return cls.known("request_failed")

    @property
    def body(self) -> dict[str, Any]:
        """Error object in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, other)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """Error object in Anthropic's format. If the prompt is too long, the message begins with "prompt is too long":
        clients recognise this text and shorten the conversation."""
        message = self.message
        if self.param and self.param not in message:
            message = f"{self.param}: {message}"
        if self.code == "context_length_exceeded":
            too_long = "input length and `max_tokens` exceed" if self.param == "max_tokens" else "prompt is too long"
            message = f"{too_long}: {message}"
        kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


class RequestRefused(ApiError):
    """Error response for a request that is invalid or not supported by this server; status 400 by default."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(status, message, param=param, code=code)

    @classmethod
    def of(cls, error: PacelineError, param: str | None = None) -> RequestRefused:
        """Convert an error of the tokenizer, chat template or engine to an error response with status 400. `param`: the
        invalid field, used if `error` does not name a field itself."""
        is_length, text = isinstance(error, ContextLengthError), str(error)
        param = getattr(error, "field", None) or param or ("max_tokens" if is_length else None)
        if isinstance(error, TemplateError):
            text = f"{error.fault}: check the messages' roles and contents, or send the text itself to /v1/completions"
        return cls(text, param=param, code="context_length_exceeded" if is_length else "invalid_value")


def dump(value: Any) -> bytes:
    """Encode a value as JSON without spaces, in UTF-8; lone surrogates become escapes. Raises ValueError for NaN and
    infinities."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "backslashreplace"
    )


def json_response(
    value: Any, status: int = 200, headers: dict[str, str] | None = None, *, multiple: int = 1
) -> Response:
    """Return a JSON response, padded with spaces to a multiple of `multiple` bytes. With serve --even-chunks, this
    hides the exact length of an answer."""
    body = dump(value)
    return Response(body + b" " * (-len(body) % multiple), status, headers, media_type="application/json")


def error_response(error: ApiError, path: str = "") -> Response:
    """Return `error` as a response: in Anthropic's format if `path` begins with /v1/messages, else in OpenAI's."""
    body = error.anthropic_body if path.startswith(ANTHROPIC) else error.body
    return json_response(body, error.status, error.headers)
