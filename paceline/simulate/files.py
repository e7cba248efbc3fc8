"""What JSON files hold, with errors that say what to do, and checks of the numbers in them."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import ConfigError, PacelineError, reraised

T = TypeVar("T")


def read_json(
    file: Path, remedy: str, missing: type[PacelineError] = ConfigError, damaged: type[PacelineError] = ConfigError
) -> Any:
    """What a JSON file holds. Raises `missing` when it cannot be read and `damaged` when it is no JSON, both with `remedy`."""
    if not file.exists():
        raise missing(f"there is no {file}: {remedy}")
    unreadable = reraised(missing, f"cannot read {file}", "check its permissions", OSError)
    with unreadable, reraised(damaged, f"{file} is not JSON", remedy, ValueError):
        return json.loads(file.read_text(encoding="utf-8"))


def read_objects(file: Path, remedy: str) -> list[dict[str, Any]]:
    """The objects of a JSON file: one, a list of them, or one a line. Raises ConfigError with `remedy`."""
    with reraised(ConfigError, f"cannot read {file}", remedy, OSError, UnicodeDecodeError):
        text = file.read_text(encoding="utf-8")
    try:
        whole = json.loads(text)
        values = whole if isinstance(whole, list) else [whole]
    except ValueError:
        with reraised(ConfigError, f"{file} is neither JSON nor JSON lines", remedy, ValueError):
            values = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [value for value in values if isinstance(value, dict)]


def is_amount(value: Any) -> bool:
    """Whether it is a finite number of 0 or more."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def check_amounts(record: Any) -> None:
    """Raises ValueError for a field that should be a number of 0 or more and is not."""
    for field in fields(record):
        value = getattr(record, field.name)
        if field.type in ("int", "float") and not is_amount(value):
            raise ValueError(f"{field.name} is {value!r}, not a number of 0 or more")


def record_of(kind: type[T], told: Any) -> T:
    """A dataclass from a JSON object that must have all of its numbers. Raises ValueError."""
    values = told if isinstance(told, dict) else {}
    record = kind(**{field.name: values.get(field.name) for field in fields(kind)})  # pyright: ignore[reportArgumentType]
    check_amounts(record)
    return record
