"""run.yaml: a whole training run as one file, written into every run's folder and taken back by `paceline train --config`.

    shape:                       the fields of TrainConfig, part by part, each by its own name
      num_layers: 3
    loop:
      optim: {lr: 0.002}

What the file names counts as asked for, so a plan changes nothing of it. What is typed wins over the file. Unknown names are
refused with the nearest one. Only YAML's safe loader is used; JSON is read too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import ConfigError
from paceline.report.tables import ignore
from paceline.runs.folder import plain, write_whole
from paceline.runs.settings_file import read_settings_file
from paceline.train.config import TrainConfig

RUN_FILE = "run.yaml"
LEFT_OUT = {"given"}
"""Fields of TrainConfig that are no part of a file."""
REMOVED = ("plateau", "plateau_steps")
"""Fields of the loop that run files of earlier versions have."""


def write_run_file(config: TrainConfig) -> Path:
    """Write run.yaml into the run's folder. Raises CacheError."""
    import yaml

    head = "# A whole run; paceline train --config FILE --out FOLDER does the same again.\n"
    file = config.out / RUN_FILE
    write_whole(file, head + yaml.safe_dump(as_tree(config), sort_keys=False, allow_unicode=True, width=120))
    return file


def as_tree(config: TrainConfig) -> dict[str, Any]:
    """All fields, part by part, as YAML and JSON hold them; what is None is left out."""
    return _without_none({name: value for name, value in plain(config).items() if name not in LEFT_OUT})


def read_run_file(file: Path, notice: Callable[[str], None] = ignore) -> dict[str, Any]:
    """Part -> field -> value, names checked; `notice` gets a note on settings that only earlier versions had. Raises
    ConfigError."""
    tree = read_settings_file(file, f"give a {RUN_FILE} that a run has left, or one of that form")
    if isinstance(loop := tree.get("loop"), dict):
        drop_removed(file, loop, notice)
    _check_names(file, (TrainConfig, TrainConfig), tree, "")
    return tree


def drop_removed(file: Path, loop: dict[str, Any], notice: Callable[[str], None]) -> None:
    """Removes the fields of a stored LoopConfig that only earlier versions had, with a note. Raises ConfigError on one that
    says where blocks lie."""
    if loop.pop("round_starts", 0.0) != 0.0:
        raise ConfigError(f"{file}: this version has no loop.round_starts: remove it, blocks then begin at random places")
    if removed := [f"loop.{name}" for name in REMOVED if loop.pop(name, None) is not None]:
        notice(f"note: {file}: {' and '.join(removed)} are of an earlier version and have no effect")


def read_settings(file: Path, owner: type, remedy: str) -> dict[str, Any]:
    """The same of any dataclass of settings, whose fields may be dataclasses of settings. Raises ConfigError with the remedy
    where the file cannot be read, and the nearest name for one that is unknown."""
    tree = read_settings_file(file, remedy)
    _check_names(file, (owner, owner), tree, "")
    return tree


def config_of(tree: Mapping[str, Any], source: Path | str = RUN_FILE) -> TrainConfig:
    """The run that a tree of `read_run_file` describes; whatever it names is asked for. Raises ConfigError."""
    made = settings_of(TrainConfig, tree, source, "see paceline train --help")
    return dataclasses.replace(made, given=tuple(leaves(tree)))


def settings_of(owner: type, tree: Mapping[str, Any], source: Path | str, remedy: str) -> Any:
    """A dataclass of settings from a tree of `read_settings`. Raises ConfigError, with the remedy where a type is wrong."""
    return _made(owner, tree, "", (source, remedy))


def overlaid(tree: Mapping[str, Any], config: TrainConfig, names: set[str]) -> dict[str, Any]:
    """`tree` with the fields `names` (shape.num_layers) of `config`, which win."""
    values, changed = plain(config), _copied(tree)
    for name in names:
        at, value = changed, values
        *parts, last = name.split(".")
        for part in parts:
            at, value = at.setdefault(part, {}), value[part]
        at[last] = value[last]
    return changed


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The full names of what a tree holds: shape.num_layers."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def with_value(config: Any, name: str, value: Any) -> Any:
    """The config with one field, as shape.num_layers, changed."""
    first, _, rest = name.partition(".")
    return dataclasses.replace(config, **{first: with_value(getattr(config, first), rest, value) if rest else value})


def value_of(config: Any, name: str) -> Any:
    """The value of one field, as shape.num_layers."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, Mapping) else value for name, value in tree.items()}


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    kept = {name: _without_none(value) if isinstance(value, dict) else value for name, value in tree.items()}
    return {name: value for name, value in kept.items() if value is not None and value != {}}


def _fields(owner: type) -> dict[str, Any]:
    hints = get_type_hints(owner, include_extras=False)
    return {each.name: hints[each.name] for each in dataclasses.fields(owner) if each.init and each.name not in LEFT_OUT}


def _inner(hint: Any) -> type | None:
    return hint if dataclasses.is_dataclass(hint) and isinstance(hint, type) else None


def _part_of(hint: Any) -> type | None:
    """The dataclass of a part that may be left out, as GrammarSpec | None."""
    return next((part for part in map(_inner, get_args(hint)) if part), None)


def _every_name(owner: type, prefix: str = "") -> Iterator[str]:
    for name, hint in _fields(owner).items():
        inner = _inner(hint)
        yield from _every_name(inner, f"{prefix}{name}.") if inner else (prefix + name,)


def _check_names(file: Path, within: tuple[type, type], tree: Mapping[Any, Any], prefix: str) -> None:
    """`within`: the dataclass whose names these are, and the whole that it is a part of."""
    owner, whole = within
    fields = _fields(owner)
    for name, value in tree.items():
        if name not in fields:
            raise ConfigError(f"{file}: unknown setting {prefix}{name}{_nearest(within, str(name), prefix)}")
        inner = _inner(fields[name])
        if inner and not isinstance(value, Mapping):
            raise ConfigError(f"{file}: {prefix}{name} must hold settings by name, such as {next(iter(_fields(inner)))}")
        whole_part = inner or _part_of(fields[name]) if isinstance(value, Mapping) else None
        if whole_part:
            _check_names(file, (whole_part, whole), value, f"{prefix}{name}.")


def _nearest(within: tuple[type, type], name: str, prefix: str) -> str:
    """What may have been meant: of the same part, else of any; an option's name (layers) finds its field (num_layers)."""
    owner, whole = within
    word, every = name.replace("-", "_"), {full.rpartition(".")[2]: full for full in _every_name(whole)}
    if known := every.get(word) or every.get(f"num_{word}"):
        return f": did you mean {known}?"
    if near := get_close_matches(word, _fields(owner), n=1):
        return f": did you mean {prefix}{near[0]}?"
    near = get_close_matches(word, every, n=1)
    return f": did you mean {every[near[0]]}?" if near else f": choose from {', '.join(_fields(owner))}"


def _made(owner: type, tree: Mapping[str, Any], prefix: str, told: tuple[Path | str, str]) -> Any:
    """`told`: where the tree is from, and what helps where a value is of a wrong type."""
    values = {}
    for name, hint in _fields(owner).items():
        if name in tree:
            inner = _inner(hint)
            made = _made(inner, tree[name], f"{prefix}{name}.", told) if inner else _value(hint, tree[name])
            if made is _WRONG:
                raise ConfigError(f"{told[0]}: {prefix}{name} cannot be {tree[name]!r}: {told[1]}")
            values[name] = made
    return owner(**values)


_WRONG = object()


def _value(hint: Any, value: Any) -> Any:
    """As the field's type has it: lists become tuples, text paths; `_WRONG` when it is of another type."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _value(parts[0], value)
    if origin in (Union, UnionType):
        kinds = [part for part in parts if part is not NoneType]
        return None if value is None and NoneType in parts else _value(kinds[0], value)
    if origin is Literal:
        return value if value in parts else _WRONG
    if origin is tuple:
        values = [_value(parts[0], each) for each in (value if isinstance(value, list | tuple) else [value])]
        return _WRONG if any(each is _WRONG for each in values) else tuple(values)
    if (part := _inner(hint)) and isinstance(value, Mapping):  # a grammar, which has no parts
        fields = _fields(part)
        values = {name: _value(fields[name], each) if name in fields else _WRONG for name, each in value.items()}
        return _WRONG if any(each is _WRONG for each in values.values()) else part(**values)
    if hint is Path:
        return Path(value).expanduser() if isinstance(value, str) else _WRONG
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 2e-3 as text
        except ValueError:
            return _WRONG
    kind: Any = hint
    is_right = isinstance(value, kind) and isinstance(value, bool) == (hint is bool)
    return value if is_right else _WRONG
