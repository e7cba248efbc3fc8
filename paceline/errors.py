"""Every error paceline raises on purpose, in one tree.

Each one is also the standard-library error a caller would expect, and its message is one line that says what to do.
The command line prints that line and exits with code 2; anything else is a bug and keeps its traceback.

    PacelineError
    ├── ModelNotFoundError    (FileNotFoundError)  no such folder, file, built-in name or hub id
    ├── ModelFileError        (ValueError)         truncated, damaged, or not the bytes we expected
    ├── UnsupportedModelError (ValueError)         an architecture or option we do not implement
    ├── DownloadError         (ConnectionError)    the network, or the server behind it, did not answer
    ├── CacheError            (OSError)            the cache folder cannot be written
    ├── DrafterMismatchError  (ValueError)         a drafter made for another target
    ├── ContextLengthError    (ValueError)         prompt and answer do not fit the context
    ├── MemoryBudgetError     (MemoryError)        the KV cache does not fit the stated budget
    ├── SamplingError         (ValueError)         impossible sampling values
    ├── PromptError           (ValueError)         a prompt or prompt file that cannot be read
    ├── ConfigError           (ValueError)         an unknown or contradictory setting
    ├── NumericsError         (ArithmeticError)    a model whose numbers are not finite
    ├── TrainingError         (ArithmeticError)    a loss or gradient that is no number
    └── NativeError           (RuntimeError)       the native library is missing or refused a call
"""


class PacelineError(Exception):
    """Base of all errors raised on purpose; the message tells the user what to do next."""


class ModelNotFoundError(PacelineError, FileNotFoundError):
    """No such folder, file, built-in name or hub id."""


class ModelFileError(PacelineError, ValueError):
    """A model file is truncated, damaged, or not the bytes we expected."""


class UnsupportedModelError(PacelineError, ValueError):
    """An architecture or option that is not implemented."""


class DownloadError(PacelineError, ConnectionError):
    """The network, or the server behind it, did not answer."""


class CacheError(PacelineError, OSError):
    """The cache folder cannot be written."""


class DrafterMismatchError(PacelineError, ValueError):
    """A drafter made for another target."""


class ContextLengthError(PacelineError, ValueError):
    """Prompt and answer do not fit the context."""


class MemoryBudgetError(PacelineError, MemoryError):
    """The KV cache does not fit the stated budget."""


class SamplingError(PacelineError, ValueError):
    """Impossible sampling values."""


class PromptError(PacelineError, ValueError):
    """A prompt, or a file of prompts, that cannot be read."""


class ConfigError(PacelineError, ValueError):
    """An unknown or contradictory setting."""


class NumericsError(PacelineError, ArithmeticError):
    """A model's numbers are not finite: its weights are damaged, or too large for their dtype."""


class TrainingError(PacelineError, ArithmeticError):
    """A loss or gradient that is no number; the last good checkpoint stands."""


class NativeError(PacelineError, RuntimeError):
    """The native CPU library is missing, or refused what it was given."""
