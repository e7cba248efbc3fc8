"""Exception classes of paceline, and helpers that raise them.

Each class also inherits the standard-library error that a caller would expect. Its message is one line that says what
to do. The command line prints that line and exits with code 2; any other exception is a bug and keeps its traceback.

    PacelineError
    ├── ModelNotFoundError    (FileNotFoundError)  no such folder, file, built-in name or hub id
    ├── ModelFileError        (ValueError)         a truncated, damaged or unexpected model file
    ├── UnsupportedModelError (ValueError)         an architecture or option that is not implemented
    ├── DownloadError         (ConnectionError)    a server is unreachable, or rejects the request
    │   ├── UnreachableError                       a server does not answer now; a later try may succeed
    │   └── RejectedError                          a server rejects a request, or its response is unusable
    │       └── DeployError                        a drafter was not deployed, for a reason that is not its fault
    ├── CacheError            (OSError)            the cache folder cannot be written
    ├── DrafterMismatchError  (ValueError)         a drafter trained for another target
    ├── ContextLengthError    (ValueError)         prompt and answer exceed the context length
    ├── MemoryBudgetError     (MemoryError)        too little memory, or too small a memory limit
    ├── SamplingError         (ValueError)         invalid sampling parameters
    ├── PromptError           (ValueError)         a prompt or prompt file that cannot be read
    │   └── TemplateError                          a missing chat template, or one that rejects the messages
    ├── ConfigError           (ValueError)         an unknown or contradictory setting
    ├── NumericsError         (ArithmeticError)    a model with NaN or infinite values
    ├── TrainingError         (ArithmeticError)    a loss or gradient that is NaN or infinite
    ├── RolloutError          (RuntimeError)       an agent or reward that fails, so that there is nothing to train on
    ├── ProcessesError        (RuntimeError)       one of several processes died, is late, or differs from the others
    ├── EngineReplacedError   (RuntimeError)       an answer lost because its engine or request was replaced
    ├── NativeError           (RuntimeError)       the native library is missing or rejected a call
    ├── SandboxError          (RuntimeError)       untrusted code cannot be isolated
    └── JudgeError            (RuntimeError)       a judge that is down, or returns no usable verdict
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class PacelineError(Exception):
    """Base class of all paceline errors. Its message says what is wrong and how the user can correct it."""


class ModelNotFoundError(PacelineError, FileNotFoundError): ...


class ModelFileError(PacelineError, ValueError): ...


class UnsupportedModelError(PacelineError, ValueError): ...


class DownloadError(PacelineError, ConnectionError): ...


class UnreachableError(DownloadError): ...


class RejectedError(DownloadError): ...


class DeployError(RejectedError): ...


class CacheError(PacelineError, OSError): ...


class DrafterMismatchError(PacelineError, ValueError): ...


class ContextLengthError(PacelineError, ValueError): ...


class MemoryBudgetError(PacelineError, MemoryError): ...


class SamplingError(PacelineError, ValueError):
    def __init__(self, message: str, field: str | None = None) -> None:
        """`field`: name of the invalid sampling parameter, if there is one."""
        super().__init__(message)
        self.field = field


class PromptError(PacelineError, ValueError): ...


class TemplateError(PromptError):
    def __init__(self, fault: str, remedy: str = "", way_out: str = "") -> None:
        """`fault`: what is wrong. `remedy`: advice for every user interface (library, command line, server). `way_out`:
        advice for only one of them."""
        advice = " or ".join(filter(None, (remedy, way_out)))
        super().__init__(f"{fault}: {advice}" if advice else fault)
        self.fault, self.remedy = fault, remedy


class ConfigError(PacelineError, ValueError): ...


class NumericsError(PacelineError, ArithmeticError): ...


class TrainingError(PacelineError, ArithmeticError): ...


class ProcessesError(PacelineError, RuntimeError): ...


class RolloutError(PacelineError, RuntimeError): ...


class EngineReplacedError(PacelineError, RuntimeError): ...


class NativeError(PacelineError, RuntimeError): ...


class SandboxError(PacelineError, RuntimeError): ...


class JudgeError(PacelineError, RuntimeError): ...


@contextlib.contextmanager
def reraised(kind: type[PacelineError], what: str, remedy: str, *caught: type[Exception]) -> Iterator[None]:
    """Context manager that converts errors of the types `caught` to `kind`, with the message "WHAT (original message):
    REMEDY". A PacelineError passes unchanged, because its message is already for users. An out-of-memory error becomes
    a MemoryBudgetError, because `remedy` would not help."""
    try:
        yield
    except PacelineError:
        raise
    except caught as error:
        if kind is not MemoryBudgetError:
            check_memory(error)
        raise kind(f"{what} ({' '.join(str(error).split())}): {remedy}") from error


_NO_MEMORY = ("allocate memory", "out of memory")
"""Parts of out-of-memory messages of the C library and safetensors ("Cannot ...") and PyTorch ("can't ...")."""


def check_memory(error: Exception) -> None:
    """Raises MemoryBudgetError if the error was caused by too little memory. Error handlers call this first, because an
    out-of-memory error needs other advice."""
    words = " ".join(str(error).split())
    if isinstance(error, MemoryBudgetError):
        raise error
    if isinstance(error, MemoryError) or any(part in words for part in _NO_MEMORY):
        what = f"there is too little memory ({words})" if words else "there is too little memory"
        remedy = "end other programs, or raise the limit that is set (ulimit -v, a container's)"
        raise MemoryBudgetError(f"{what}: {remedy}") from error


@contextlib.contextmanager
def way_out(text: str) -> Iterator[None]:
    """Context manager that adds the advice `text` to the message of a TemplateError, which means that a prompt cannot
    be rendered by the model's chat template. `text`: how to send a prompt without a chat template, in the words of the
    caller's command or API, such as "use --raw"."""
    try:
        yield
    except TemplateError as error:
        raise TemplateError(error.fault, error.remedy, text) from error


TOKEN_PROMPTS = "give the prompts as token ids (prompt_ids)"
"""Advice in a TemplateError for prompts that were read from files."""


@contextlib.contextmanager
def needing(kind: type[PacelineError], text: str) -> Iterator[None]:
    """Context manager around imports of optional packages: converts an ImportError to `kind` with the message
    `text`."""
    try:
        yield
    except ImportError as error:
        raise kind(text) from error


def refuse(kind: type[PacelineError], *checks: tuple[bool, str]) -> None:
    """Raise `kind` for the first wrong input. `checks`: pairs (True if the input is wrong, error message)."""
    for is_wrong, text in checks:
        if is_wrong:
            raise kind(text)


def shown(value: Any) -> str:
    """Return a value for an error message: the first 80 characters of its repr. Python cannot print integers of more
    than 4,300 digits; if the value is or contains one, a description of it is returned."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        kind = type(value).__name__
        return f"one of more than {sys.get_int_max_str_digits()} digits" if kind == "int" else f"a {kind} that has one"
