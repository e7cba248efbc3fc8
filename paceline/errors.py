"""Every error paceline raises on purpose, in one tree.

Each one is also the standard-library error a caller would expect, and its message is one line that says what to do.
The command line prints that line and exits with code 2; anything else is a bug and keeps its traceback.

    PacelineError
    ├── ModelNotFoundError    (FileNotFoundError)  no such folder, file, built-in name or hub id
    ├── ModelFileError        (ValueError)         truncated, damaged, or not the bytes we expected
    ├── UnsupportedModelError (ValueError)         an architecture or option we do not implement
    ├── DownloadError         (ConnectionError)    the network, or the server behind it, did not answer, or refused
    │   ├── UnreachableError                       it does not answer now, which says nothing about what it would answer
    │   └── DeployError                            a drafter was not put in, for a reason that says nothing about it
    ├── CacheError            (OSError)            the cache folder cannot be written
    ├── DrafterMismatchError  (ValueError)         a drafter made for another target
    ├── ContextLengthError    (ValueError)         prompt and answer do not fit the context
    ├── MemoryBudgetError     (MemoryError)        memory does not suffice, or its stated budget
    ├── SamplingError         (ValueError)         impossible sampling values
    ├── PromptError           (ValueError)         a prompt or prompt file that cannot be read
    │   └── TemplateError                          no chat template, or one that refuses the messages
    ├── ConfigError           (ValueError)         an unknown or contradictory setting
    ├── NumericsError         (ArithmeticError)    a model whose numbers are not finite
    ├── TrainingError         (ArithmeticError)    a loss or gradient that is no number
    ├── RolloutError          (RuntimeError)       an agent or a judge that fails: nothing to learn from
    ├── ProcessesError        (RuntimeError)       one of several processes is gone, late, or differs from the others
    ├── EngineReplacedError   (RuntimeError)       an answer that is lost with its engine, or with its request
    ├── NativeError           (RuntimeError)       the native library is missing or refused a call
    ├── SandboxError          (RuntimeError)       code of a stranger cannot be kept apart from this machine
    └── JudgeError            (RuntimeError)       a judge of answers that is down, or says nothing of use
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class PacelineError(Exception):
    """Base of all errors raised on purpose; the message tells the user what to do next."""


class ModelNotFoundError(PacelineError, FileNotFoundError): ...


class ModelFileError(PacelineError, ValueError): ...


class UnsupportedModelError(PacelineError, ValueError): ...


class DownloadError(PacelineError, ConnectionError): ...


class UnreachableError(DownloadError): ...


class DeployError(DownloadError): ...


class CacheError(PacelineError, OSError): ...


class DrafterMismatchError(PacelineError, ValueError): ...


class ContextLengthError(PacelineError, ValueError): ...


class MemoryBudgetError(PacelineError, MemoryError): ...


class SamplingError(PacelineError, ValueError):
    def __init__(self, message: str, field: str | None = None) -> None:
        """`field`: the sampling parameter at fault, where it is one."""
        super().__init__(message)
        self.field = field


class PromptError(PacelineError, ValueError): ...


class TemplateError(PromptError):
    def __init__(self, fault: str, remedy: str = "", way_out: str = "") -> None:
        """`remedy`: what helps in every front end; `way_out`: what only this one offers (see `way_out`)."""
        told = " or ".join(each for each in (remedy, way_out) if each)
        super().__init__(f"{fault}: {told}" if told else fault)
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
    """Other libraries' errors of the types `caught` become "what (their own words): remedy"; ours pass through.

    Where memory does not suffice they become MemoryBudgetError: no file is at fault, and none is to be deleted for it.
    """
    try:
        yield
    except PacelineError:
        raise
    except caught as error:
        if kind is not MemoryBudgetError:
            check_memory(error)
        raise kind(f"{what} ({' '.join(str(error).split())}): {remedy}") from error


_NO_MEMORY = ("allocate memory", "out of memory")
"""In the words of the C library, safetensors ("Cannot allocate memory") and PyTorch ("can't allocate memory")."""


def check_memory(error: Exception) -> None:
    """Raises MemoryBudgetError where another error came of too little memory."""
    words = " ".join(str(error).split())
    if isinstance(error, MemoryBudgetError):
        raise error
    if isinstance(error, MemoryError) or any(each in words for each in _NO_MEMORY):
        remedy = "end other programs, or raise the limit that is set (ulimit -v, a container's)"
        raise MemoryBudgetError("there is too little memory" + (f" ({words})" if words else "") + f": {remedy}") from error


@contextlib.contextmanager
def way_out(text: str) -> Iterator[None]:
    """Around a front end's chat prompts: a TemplateError names this way to ask without a template, in place of another."""
    try:
        yield
    except TemplateError as error:
        raise TemplateError(error.fault, error.remedy, text) from error


TOKEN_PROMPTS = "give the prompts as token ids (prompt_ids)"
"""The way out where prompts come from files that only a template turns into tokens."""


@contextlib.contextmanager
def needing(kind: type[PacelineError], text: str) -> Iterator[None]:
    """Around imports of what an extra brings: `text` says what for, and how to install it."""
    try:
        yield
    except ImportError as error:
        raise kind(text) from error


def refuse(kind: type[PacelineError], *checks: tuple[bool, str]) -> None:
    """Raises `kind` with the text of the first check that is true."""
    for is_wrong, text in checks:
        if is_wrong:
            raise kind(text)
