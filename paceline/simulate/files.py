"""Reads JSON files, with errors that say what to do, and checks the numbers in them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import ConfigError, PacelineError, reraised
from paceline.hardware import Machine

T = TypeVar("T")


def read_json(
    file: Path, remedy: str, missing: type[PacelineError] = ConfigError, damaged: type[PacelineError] = ConfigError
) -> Any:
    """Returns the content of a JSON file. Raises the error class `missing` if it cannot be read, `damaged` if it is not
    JSON. `remedy`: advice added to the message."""
    if not file.exists():
        raise missing(f"there is no {file}: {remedy}")
    unreadable = reraised(missing, f"cannot read {file}", "check its permissions", OSError)
    with unreadable, reraised(damaged, f"{file} is not JSON", remedy, ValueError, RecursionError):
        return json.loads(file.read_text(encoding="utf-8"))


def read_objects(file: Path, remedy: str) -> list[dict[str, Any]]:
    """Returns the JSON objects in a file: one, a list of them, or one per line; other values are ignored. Raises
    ConfigError if the file cannot be read or is not JSON. `remedy`: advice added to the message."""
    with reraised(ConfigError, f"cannot read {file}", remedy, OSError, UnicodeDecodeError, RecursionError):
        text = file.read_text(encoding="utf-8")
        try:
            whole = json.loads(text)
            values = whole if isinstance(whole, list) else [whole]
        except ValueError:
            with reraised(ConfigError, f"{file} is neither JSON nor JSON lines", remedy, ValueError):
                values = [json.loads(line) for line in text.split("\n") if line.strip()]
    return [value for value in values if isinstance(value, dict)]


def with_name(text: str) -> tuple[str, str]:
    """Splits the text of an option "FILE:NAME" into (file, name); NAME selects one drafter or model in the file. The
    name is "" if `text` has no colon or is itself an existing file."""
    path, _, name = text.rpartition(":") if not os.path.exists(text) and ":" in text else (text, "", "")
    return path, name


def is_amount(value: Any) -> bool:
    """True for a finite number of 0 or more."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def check_amounts(record: Any) -> None:
    """Checks the fields of a dataclass instance that are annotated with int or float. Raises ValueError unless each is
    a finite number of at least 0, and whole for int. A field annotated "or None" may be None."""
    for field in fields(record):
        value, (kind, *has_none) = getattr(record, field.name), str(field.type).split(" | ")
        if kind not in ("int", "float") or (value is None and has_none):
            continue
        if not is_amount(value) or (kind == "int" and not isinstance(value, int)):
            raise ValueError(f"{field.name} is {value!r:.40}, not a {'whole ' * (kind == 'int')}number of 0 or more")


def built(kind: type[T], content: Any) -> T:
    """Builds a dataclass of type `kind` from a JSON object. Fields of type int may be written as floats, such as 43.0.
    Raises TypeError or ValueError if `content` is not an object, has an unknown key, or lacks a field without
    default."""
    whole = {field.name for field in fields(kind) if str(field.type).startswith("int")}  # pyright: ignore[reportArgumentType]
    values = dict(content)
    for name in whole & values.keys():
        if isinstance(value := values[name], float) and value.is_integer() and value < 2**53:
            values[name] = int(value)
    return kind(**values)


def record_of(kind: type[T], content: Any) -> T:
    """Builds a dataclass of type `kind` from a JSON object. Other keys than its fields are ignored; a field without a
    key becomes None, not its default. Raises ValueError if an int or float field is not a finite number of 0 or more
    (or None, if its annotation has None)."""
    values = content if isinstance(content, dict) else {}
    record = built(kind, {field.name: values.get(field.name) for field in fields(kind)})  # pyright: ignore[reportArgumentType]
    check_amounts(record)
    return record


def read_machine(content: Any) -> Machine:
    """Builds a measured machine from a JSON object. Raises TypeError or ValueError for other keys than its fields, and
    ValueError for other values than finite numbers of 0 or more, or for a speed of 0."""
    machine = built(Machine, content)
    check_amounts(machine)
    for table in ({"": machine.bytes_per_s}, machine.flops_per_s, machine.cached_bytes_per_s):
        if not isinstance(table, dict) or not all(is_amount(each) and each for each in table.values()):
            raise ValueError("machine has a speed that is not a number above 0")
    if not all(size.isdecimal() for size in machine.cached_bytes_per_s):
        raise ValueError("machine has a size in cached_bytes_per_s that is not a whole number")
    return machine
