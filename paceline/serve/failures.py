"""What a client is told when a request fails: OpenAI's shape, no paths, no traceback.

ApiError                       status  code
├── RequestRefused             400     invalid_value, context_length_exceeded, ...: the request is at fault
├── QueueFull                  429     queue_full, with Retry-After
├── NotServing                 503     loading, draining, failed
├── RequestFailed              500     request_failed: the engine failed on this request alone
├── EngineCrashed              500     engine_crashed: the engine failed under this request and is built anew
└── DeadlinePassed             504     deadline_exceeded
"""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import Response

from paceline.errors import ContextLengthError, PacelineError

KINDS = {401: "authentication_error", 429: "rate_limit_error"}
"""OpenAI's types of errors by status, where they are not those of all others."""


class ApiError(Exception):
    """An answer that is an error."""

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

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class RequestRefused(ApiError):
    """The request asks for something impossible, or for something that this server does not do."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(status, message, param=param, code=code)

    @classmethod
    def of(cls, error: PacelineError) -> RequestRefused:
        """A request that the tokenizer, the template or the engine refused."""
        is_length = isinstance(error, ContextLengthError)
        return cls(str(error), code="context_length_exceeded" if is_length else "invalid_value")


class QueueFull(ApiError):
    """As many requests wait as may."""

    def __init__(self, retry_after_s: int) -> None:
        message = f"too many requests wait already: try again in {retry_after_s} s"
        super().__init__(429, message, code="queue_full", headers={"retry-after": str(retry_after_s)})


class NotServing(ApiError):
    """The model is not loaded yet, the server is going down, or the engine could not be built again."""

    MESSAGES = {  # noqa: RUF012
        "loading": "the model is still loading: try again in a moment",
        "aborted": "the request was aborted",
        "failed": "the engine failed and could not be started again",
    }

    def __init__(self, state: str) -> None:
        message = self.MESSAGES.get(state, "the server is shutting down")
        code = "draining" if state == "stopped" else state
        super().__init__(503, message, code=code, headers={"retry-after": "2"})


class RequestFailed(ApiError):
    """A fault ended this request, and no other. Exceptions that are not our own may tell more than a client should know."""

    def __init__(self, error: Exception | None = None) -> None:
        message = str(error) if isinstance(error, PacelineError) else "the server failed on this request: its log says why"
        super().__init__(500, message, code="request_failed")


class EngineCrashed(ApiError):
    """A step of the engine failed; this request and those beside it are lost, the next ones are not."""

    def __init__(self) -> None:
        message = "the engine failed while it answered this request and is being restarted: send the request again"
        super().__init__(500, message, code="engine_crashed")


class DeadlinePassed(ApiError):
    """The request took longer than the server allows."""

    def __init__(self, seconds: float) -> None:
        message = f"the request was not finished within {seconds:g} s: ask for fewer tokens, or try when there is less traffic"
        super().__init__(504, message, code="deadline_exceeded")


def dump(value: Any) -> bytes:
    """JSON as UTF-8; half surrogates, which no encoding has, stay escapes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "backslashreplace")


def compact(value: Any) -> str:
    """JSON as text. Raises RequestRefused when it is nested beyond reason."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise RequestRefused("the JSON is nested too deeply: flatten it") from None


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body, error.status, error.headers)
