"""Reading JSON files with errors that say what to do, and one check of numbers that were read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, PacelineError


def read_json(
    file: Path, remedy: str, missing: type[PacelineError] = ConfigError, damaged: type[PacelineError] = ConfigError
) -> Any:
    """What a JSON file holds. Raises `missing` when it cannot be read and `damaged` when it is no JSON, both with `remedy`."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise missing(f"there is no {file}: {remedy}") from error
    except OSError as error:
        raise missing(f"cannot read {file} ({error.strerror or error}): check its permissions") from error
    except ValueError as error:
        raise damaged(f"{file} is not JSON ({error}): {remedy}") from error


def is_amount(value: Any) -> bool:
    """Whether it is a finite number of 0 or more."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
