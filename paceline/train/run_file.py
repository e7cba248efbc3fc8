"""run.yaml: all settings of a training run, written into the run's folder and read by `paceline train --config`.

    shape:                       the fields of TrainConfig, part by part, each by its own name
      num_layers: 3
    loop:
      optim: {lr: 0.002}

Fields in the file count as given by the user, so a plan does not change them; command-line options override the file.
Unknown names are rejected, with the nearest known name. Accepts YAML (safe loader) and JSON.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import ConfigError
from paceline.report.tables import flat
from paceline.runs.folder import plain, write_whole
from paceline.runs.settings_file import read_settings_file
from paceline.train.config import TrainConfig

RUN_FILE = "run.yaml"
TRAINED = "trained.json"
"""File of a finished run: steps, blocks, eal, loss, and "prompts", the number of different prompts learned from."""
OWN_SIZES = ("num_layers", "intermediate_size", "num_heads", "num_kv_heads", "block_size", "num_taps", "tap_layers")
OWN_SIZES += ("attention_bias", "is_causal", "mask_token_id", "start", "eagle_version", "selector_rank", "codebooks")
"""Fields of DrafterShape that a drafter in `TrainConfig.init` keeps, whatever they are in a run's settings."""
OPTIONS = {
    "prompting.tags": "--tag",
    "answering.temperatures": "--temperature",
    "shape.num_layers": "--layers",
    "shape.num_heads": "--heads",
    "shape.num_kv_heads": "--kv-heads",
    "shape.num_taps": "--taps",
    "shape.start": "--first-layers",
    "shape.is_causal": "--causal/--bidirectional",
    "shape.mask_token_id": "--mask-token",
    "shape.kind": "--drafter-kind",
    "loop.autocast": "--autocast/--full-precision",
    "loop.loss.name": "--loss",
    "loop.loss.vocab": "--loss-vocab",
    "loop.loss.selector": "--selector-weight",
    "loop.optim.name": "--optimiser",
}
"""Fields whose option of `paceline train` has another name."""
LEFT_OUT = {"given"}
"""Fields of TrainConfig that are not written to run.yaml."""


def write_run_file(config: TrainConfig) -> Path:
    """Writes all settings of `config` to run.yaml in the run's folder; returns its path. Raises CacheError for disk
    errors."""
    import yaml

    head = "# A whole run; paceline train --config FILE --out FOLDER does the same again.\n"
    file = config.out / RUN_FILE
    write_whole(file, head + yaml.safe_dump(as_tree(config), sort_keys=False, allow_unicode=True, width=120))
    return file


def as_tree(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings of `config` as nested dicts of YAML and JSON types, for run.yaml. The field `given` and None
    values are left out. If `config.init` is set, sizes of the drafter that the user did not give are left out too,
    since `init` determines them."""
    tree = _without_none({name: value for name, value in plain(config).items() if name not in LEFT_OUT})
    if config.init is not None:
        methods = {"dflash": ("kind",), "eagle3": ("draft_vocab",), "mtp": ("draft_vocab",)}
        for name in (*OWN_SIZES, *methods.get(config.shape.kind, ())):
            if not config.is_given(f"shape.{name}"):
                tree["shape"].pop(name, None)
    return tree


def read_run_file(file: Path) -> dict[str, Any]:
    """Reads a run.yaml, the settings of a training run, as nested dicts: group of settings -> field -> value. Raises
    ConfigError if the file cannot be read or has an unknown setting."""
    return read_settings(file, TrainConfig, f"give a {RUN_FILE} that a run has left, or one of that form")


def read_settings(file: Path, owner: type, remedy: str) -> dict[str, Any]:
    """Reads a YAML file of settings as nested dicts, whose keys are the fields of the dataclass `owner`. Raises
    ConfigError if the file cannot be read, with the advice `remedy`, or for an unknown key, with the nearest known
    one."""
    tree = read_settings_file(file, remedy)
    _check_names(file, (owner, owner), tree, "")
    return tree


def config_of(tree: dict[str, Any], source: Path | str = RUN_FILE) -> TrainConfig:
    """Returns the TrainConfig with the values of `tree`, nested dicts as from `read_run_file`. Its fields count as
    given by the user. `source`: the tree's file, for error messages. Raises ConfigError for a value of a wrong type or
    out of its range."""
    config = settings_of(TrainConfig, tree, source, "see paceline train --help")
    return dataclasses.replace(config, given=tuple(leaves(tree)))


def settings_of(owner: type, tree: Mapping[str, Any], source: Path | str, remedy: str, prefix: str = "") -> Any:
    """Creates an instance of the dataclass `owner` from `tree`, nested dicts as from `read_settings`. Raises
    ConfigError for a value of a wrong type. `source` (the tree's file), `prefix` (text before the field's name) and
    `remedy` (advice at the end) are used only in its message."""
    values = {}
    for name, hint in _fields(owner).items():
        if name not in tree:
            continue
        if inner := _inner(hint):
            values[name] = settings_of(inner, tree[name], source, remedy, f"{prefix}{name}.")
        else:
            values[name] = _value(hint, tree[name])
        if values[name] is _WRONG:
            raise ConfigError(f"{source}: {prefix}{name} cannot be {tree[name]!r}: {remedy}")
    return owner(**values)


def overlaid(tree: Mapping[str, Any], config: TrainConfig, names: set[str]) -> dict[str, Any]:
    """Returns a copy of `tree` (nested dicts of a run file), updated from `config`: the fields in `names`, such as
    shape.num_layers, have the values that they have in `config`."""
    values = plain(config)
    merged = copy.deepcopy(dict(tree))
    for name in names:
        at, value = merged, values
        *parts, last = name.split(".")
        for part in parts:
            at, value = at.setdefault(part, {}), value[part]
        at[last] = value[last]
    return merged


def leaves(tree: dict[str, Any]) -> Iterator[str]:
    """Yields the full names of the values in a tree (nested dicts), such as shape.num_layers."""
    return (name for name, _ in flat(tree))


def with_given(config: TrainConfig) -> TrainConfig:
    """Returns the config with its field `given`, the names of the fields that the user set. If it is None, it is filled
    in with all fields that differ from their defaults. Call this before a plan changes fields: afterwards, the plan's
    values would also count as set by the user."""
    if config.given is not None:
        return config
    return dataclasses.replace(config, given=tuple(filter(config.is_given, _every_name(TrainConfig))))


def with_value(config: Any, name: str, value: Any) -> Any:
    """Returns a copy of the config in which the field `name`, such as shape.num_layers, is `value`."""
    first, _, rest = name.partition(".")
    return dataclasses.replace(config, **{first: with_value(getattr(config, first), rest, value) if rest else value})


def value_of(config: Any, name: str) -> Any:
    """Returns the value of the config's field `name`, such as shape.num_layers."""
    return attrgetter(name)(config)


def option_of(name: str) -> str:
    """Returns the option of `paceline train` for a config field, such as --draft-vocab for shape.draft_vocab, or
    --causal/--bidirectional for shape.is_causal."""
    return OPTIONS.get(name, "--" + name.rpartition(".")[2].replace("_", "-"))


def with_defaults(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Returns the config with the fields in `values` (such as shape.num_layers) set, except those that the user
    gave."""
    for name, value in values.items():
        if not config.is_given(name):
            config = with_value(config, name, value)
    return config


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    inner = {name: _without_none(value) if isinstance(value, dict) else value for name, value in tree.items()}
    return {name: value for name, value in inner.items() if value is not None and value != {}}


def _fields(owner: type) -> dict[str, Any]:
    hints = get_type_hints(owner)
    fields = [field for field in dataclasses.fields(owner) if field.init and field.name not in LEFT_OUT]
    return {field.name: hints[field.name] for field in fields}


def _inner(hint: Any) -> type | None:
    return hint if dataclasses.is_dataclass(hint) and isinstance(hint, type) else None


def _every_name(owner: type, prefix: str = "") -> Iterator[str]:
    for name, hint in _fields(owner).items():
        inner = _inner(hint)
        yield from _every_name(inner, f"{prefix}{name}.") if inner else (prefix + name,)


def _check_names(file: Path, within: tuple[type, type], tree: Mapping[Any, Any], prefix: str) -> None:
    """Raises ConfigError for an unknown name. `within`: the dataclass with these names, and the outermost one around
    it."""
    owner, whole = within
    fields = _fields(owner)
    for name, value in tree.items():
        if name not in fields:
            raise ConfigError(f"{file}: unknown setting {prefix}{name}{_nearest(within, str(name), prefix)}")
        inner = _inner(fields[name])
        if inner and not isinstance(value, Mapping):
            raise ConfigError(
                f"{file}: {prefix}{name} must hold settings by name, such as {next(iter(_fields(inner)))}"
            )
        if isinstance(value, Mapping):
            parts = (inner, *map(_inner, get_args(fields[name])))  # also that of GrammarSpec | None
            if part := next(filter(None, parts), None):
                _check_names(file, (part, whole), value, f"{prefix}{name}.")


def _nearest(within: tuple[type, type], name: str, prefix: str) -> str:
    """Returns a hint with the nearest known name, preferably of the same part. An option's name (layers) finds its
    field."""
    owner, whole = within
    word, every = name.replace("-", "_"), {full.rpartition(".")[2]: full for full in _every_name(whole)}
    if known := every.get(word) or every.get(f"num_{word}"):
        return f": did you mean {known}?"
    if near := get_close_matches(word, _fields(owner), n=1):
        return f": did you mean {prefix}{near[0]}?"
    near = get_close_matches(word, every, n=1)
    return f": did you mean {every[near[0]]}?" if near else f": choose from {', '.join(_fields(owner))}"


_WRONG = object()


def _value(hint: Any, value: Any) -> Any:
    """Converts a value to its field's type: lists to tuples, text to paths. Returns `_WRONG` for another type."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _value(parts[0], value)
    if origin in (Union, UnionType):
        kinds = [part for part in parts if part is not NoneType]
        return None if value is None and NoneType in parts else _value(kinds[0], value)
    if origin is Literal:
        return value if value in parts else _WRONG
    if origin is tuple:
        values = [_value(parts[0], item) for item in (value if isinstance(value, list | tuple) else [value])]
        return _WRONG if any(item is _WRONG for item in values) else tuple(values)
    if (part := _inner(hint)) and isinstance(value, Mapping):  # a grammar: the only optional part, and it has no parts
        fields = _fields(part)
        values = {name: _value(fields[name], item) if name in fields else _WRONG for name, item in value.items()}
        return _WRONG if any(item is _WRONG for item in values.values()) else part(**values)
    if hint is Path:
        return Path(os.path.expanduser(value)) if isinstance(value, str) else _WRONG
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 2e-3 as text
        except ValueError:
            return _WRONG
    kind: Any = hint
    is_right = isinstance(value, kind) and isinstance(value, bool) == (hint is bool)
    return value if is_right else _WRONG
