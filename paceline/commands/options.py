"""Options of a command from frozen config dataclasses: one option a field, so that each setting is described in one place.

    @app.command()
    @options
    def generate(prompt: str, engine: EngineConfig, sampling: Annotated[SamplingParams, Only("seed", "top_k")]) -> None:
        from paceline.engine.llm import LLM  # what is heavy is imported when the command runs
        llm = LLM.of(engine)

`max_len: int | None = None` becomes `--max-len`: type and default are the field's, the help is the string literal under it.

- `tuple[int, ...]` and `tuple[float, ...]` are written `1,8`; `tuple[str, ...]` and `tuple[Path, ...]` by repeating the option.
- `Literal["a", "b"]`, or `Annotated[str, ("a", "b")]`, shows the choices. `Annotated[int, "bytes"]` takes `512M`.
- A bool that is False by default is a flag; else there is also `--no-...`. A field without a default must be given.
- `Annotated[EngineConfig, Without("prefill_chunk"), Changed(max_len=Opt(default=1024), drafter=Opt("--draft-model", "-d"))]`:
  fields that are no options keep their defaults; `Opt` gives a field another name, help, default or metavar in this command.
- Errors name the option: "max_batch must be at least 1" becomes "--max-batch must be at least 1", and "raise max_len", whoever
  raised it while the command ran, "raise --max-len". The library says the names of its parameters.
- What a command returns is printed as its one JSON object when it has `as_json: Json` and was given --json.
- Called with the dataclasses themselves, `generate(prompt="Hi", engine=EngineConfig(), ...)` is the plain function.

Modules that hold such dataclasses must be quick to import. Fields of other types need a parameter of the command's own.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import json
import keyword
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from paceline.errors import ConfigError, PacelineError
from paceline.hardware import processor
from paceline.runs.folder import check_file, check_place, plain

IN_A_SENTENCE = r"(?<![\w/.-])[a-z]+_\w+(?![\w/-]|\.\w)"
"""A field's name, but no part of a path or of another name."""
WRITTEN = ("out", "save_results")
"""Parameters of commands that name a file or a folder to be written."""
SECTIONS = {
    "EngineConfig": "Model",
    "PromptsConfig": "Prompts",
    "SamplingParams": "Sampling",
    "AnswerConfig": "Answers of the target",
    "ElsewhereConfig": "A target elsewhere",
    "DrafterShape": "Drafter",
    "LoopConfig": "Training",
    "LossConfig": "Training",
    "OptimConfig": "Training",
    "CostsConfig": "Machine and costs",
}
"""Heading in a command's help of the options that a dataclass gives; those of others stand under Options."""
WRITTEN_FILES = ("svg", "png", "columns", "columns_png")
P = ParamSpec("P")
R = TypeVar("R")
_hints = functools.cache(functools.partial(get_type_hints, include_extras=True))


class Opt:
    """How a command asks for one field, where the field's own name, docstring and default are not what it needs."""

    def __init__(
        self,
        *names: str,
        help: str | None = None,
        default: Any = dataclasses.MISSING,
        metavar: str | None = None,
        comma: bool = False,
    ):
        """`names` as in typer.Option; `comma` writes a tuple of strings as `a,b` in place of repeating the option."""
        self.names, self.help, self.default, self.metavar, self.comma = names, help, default, metavar, comma


class Changed:
    """The named fields are asked for in another way."""

    def __init__(self, *fields: str, **opts: Opt) -> None:
        self.fields, self.opts = fields, opts


class Only(Changed):
    """Only these fields become options."""


class Without(Changed):
    """These fields become no options."""


@dataclass(frozen=True, slots=True)
class _Kind:
    base: type
    """The type of the value, or of a tuple's items."""
    is_optional: bool = False
    is_tuple: bool = False
    is_size: bool = False
    choices: tuple[str, ...] = ()

    @classmethod
    def of(cls, hint: Any, **known: Any) -> _Kind:
        origin, parts = get_origin(hint), get_args(hint)
        if origin is Annotated:
            choices = next((each for each in parts[1:] if isinstance(each, tuple)), ())
            return cls.of(parts[0], **{**known, "is_size": "bytes" in parts[1:], "choices": choices})
        if origin in (Union, UnionType) and len(parts) == 2 and NoneType in parts:
            return cls.of(next(part for part in parts if part is not NoneType), **{**known, "is_optional": True})
        if origin is tuple and parts[1:] == (...,):
            return cls.of(parts[0], **{**known, "is_tuple": True})
        if origin is Literal:
            return cls(str, **{**known, "choices": parts})
        if hint not in (str, int, float, bool, Path):
            raise TypeError(f"no option can be made of {hint}: leave the field out, or give the command a parameter of its own")
        return cls(hint, **known)


@dataclass(frozen=True, slots=True)
class _Asked:
    field: str
    option: str
    """As it is typed: --max-batch."""
    kind: _Kind
    is_comma: bool
    parameter: inspect.Parameter
    """For typer: comma-separated values and sizes are still text."""

    @classmethod
    def of(cls, owner: type, field: dataclasses.Field[Any], hint: Any, opt: Opt) -> _Asked:
        kind = _Kind.of(hint)
        is_comma = kind.is_tuple and (opt.comma or kind.base in (int, float))
        default = field.default if opt.default is dataclasses.MISSING else opt.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        own = "--" + field.name.replace("_", "-")
        names = opt.names or (f"{own}/--no-{own[2:]}" if kind.base is bool and default is not False else own,)
        option = next(part for name in names for part in name.split("/") if part.startswith("--"))
        text = opt.help or _helps(owner).get(field.name, "")
        name = option[2:].replace("-", "_")
        base = str if is_comma or kind.is_size else kind.base
        parameter = inspect.Parameter(
            name + "_" * keyword.iskeyword(name),
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is dataclasses.MISSING else _as_text(kind, is_comma, default),
            annotation=Annotated[
                list[base] | None if kind.is_tuple and not is_comma else base | None,
                typer.Option(
                    *names,
                    help=text + " May be repeated." if kind.is_tuple and not is_comma else text,
                    metavar=opt.metavar or _metavar(kind, is_comma),
                    rich_help_panel=SECTIONS.get(owner.__name__),
                ),
            ],
        )
        return cls(field.name, option, kind, is_comma, parameter)

    def read(self, value: Any) -> Any:
        """The field's value from what typer read. Raises ConfigError."""
        kind = self.kind
        if kind.is_tuple:
            if value is None:
                return None if kind.is_optional else ()
            return tuple(split(self.option, value, kind.base) if self.is_comma else value)
        if kind.is_size:
            return size(self.option, value)
        return value


def options(command: Callable[P, R]) -> Callable[P, R]:
    """Make each field of the dataclasses among a command's parameters an option; see the top of this file."""
    hints = get_type_hints(command, include_extras=True)
    flat: list[inspect.Parameter] = []
    configs: dict[str, tuple[type, list[_Asked]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        owner, *markers = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(owner):
            assert isinstance(owner, type)
            configs[name] = owner, _asked(owner, markers)
            flat += [each.parameter for each in configs[name][1]]
        else:
            flat.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))

    defaults = {each.name: each.default for each in flat}

    @functools.wraps(command)
    def run(*args: Any, **given: Any) -> Any:
        _check_written(given, defaults)
        if isinstance(threads := given.get("threads"), int):
            _note_threads(threads)
        if args or any(isinstance(given.get(name), owner) for name, (owner, _) in configs.items()):
            line = command(*args, **given)
        else:
            for name, (owner, asked) in configs.items():
                given[name] = _build(owner, [(each, given.pop(each.parameter.name)) for each in asked])
            with named(_names(each for _, asked in configs.values() for each in asked)):
                line = command(**given)  # pyright: ignore[reportCallIssue]
        if given.get("as_json") and isinstance(line, dict):
            print(json.dumps(plain(line)), flush=True)
        return line

    run.fields = {  # pyright: ignore[reportAttributeAccessIssue]
        each.parameter.name: f"{name}.{each.field}" for name, (_, asked) in configs.items() for each in asked
    }
    run.__signature__ = inspect.Signature(flat)  # pyright: ignore[reportAttributeAccessIssue]  # raises on a name taken twice
    run.__annotations__ = {each.name: each.annotation for each in flat}
    return run


def _check_written(given: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Check, before the work, that every file or folder that is asked for can be written; say which folders will be made.

    Raises CacheError."""
    for name in (*WRITTEN, *WRITTEN_FILES):
        if not isinstance(path := given.get(name), Path):
            continue
        option = "--" + name.replace("_", "-")
        check = check_file if name in WRITTEN_FILES else check_place
        new = check(path, f"choose another place with {option}")
        if new is not None and path != defaults.get(name):
            rest = "" if new == path.absolute().parent else ", with those in it"
            print(f"note: there is no folder {new}: it will be made{rest}, for {option} {path}", file=sys.stderr)


def _note_threads(threads: int) -> None:
    cores = processor()["num_cores"]
    if isinstance(cores, int) and threads > cores:
        print(f"note: --threads {threads} is more than the {cores} cores here, which is slower: give {cores}", file=sys.stderr)


def typed(command: Callable[..., Any], context: typer.Context) -> set[str]:
    """The fields that were asked for on the command line of a command of `options`, as parameter.field: shape.num_layers."""
    fields: dict[str, str] = command.fields  # pyright: ignore[reportFunctionMemberAccess]
    told = {name: context.get_parameter_source(name) for name in fields}
    return {fields[name] for name, source in told.items() if source is not None and source.name == "COMMANDLINE"}


def size(option: str, text: str | None) -> int | None:
    """512M -> 536870912; K, M, G and T are powers of 1024. Raises ConfigError."""
    if text is None:
        return None
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    scale = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(number[-1:], 1)
    try:
        value = float(number.rstrip("KMGT")) * scale
        if not 1 <= value < 2**63:
            raise ValueError
    except ValueError:
        raise ConfigError(f"{option} {text} is no size: write it as 512M, 2G or a number of bytes") from None
    return int(value)


def _asked(owner: type, markers: list[Changed]) -> list[_Asked]:
    hints = _hints(owner)
    fields = {field.name: field for field in dataclasses.fields(owner) if field.init}
    chosen, opts = list(fields), {}
    for marker in markers:
        if unknown := {*marker.fields, *marker.opts} - set(fields):
            raise TypeError(f"{owner.__name__} has no field {', '.join(sorted(unknown))}")
        if isinstance(marker, Only):
            chosen = list(marker.fields)
        chosen = [name for name in chosen if not (isinstance(marker, Without) and name in marker.fields)]
        opts |= marker.opts
    return [_Asked.of(owner, fields[name], hints[name], opts[name]) if name in opts else _usual(owner, name) for name in chosen]


@functools.cache
def _usual(owner: type, name: str) -> _Asked:
    """As a field is asked for by most commands that have it."""
    field = next(each for each in dataclasses.fields(owner) if each.name == name)
    return _Asked.of(owner, field, _hints(owner)[name], Opt())


def _build(owner: type, values: list[tuple[_Asked, Any]]) -> Any:
    """The dataclass; in its error, if it raises one, the first word is a field too."""
    given = {
        each.field: each.read(value)
        for each, value in values
        if value is not None or each.kind.is_optional or each.kind.is_tuple  # else the field's default
    }
    with named(_names(each for each, _ in values), r"^\w+|"):
        return owner(**given)


@contextlib.contextmanager
def named(names: dict[str, str], also: str = "") -> Iterator[None]:
    """Errors of ours with options in place of fields (`names`: field -> option): of words with an underscore, because "model"
    may be just a word, and not in a path; `also` is a pattern of more words."""
    try:
        yield
    except PacelineError as error:
        text = re.sub(also + IN_A_SENTENCE, lambda word: names.get(word[0], word[0]), str(error))
        raise type(error)(text) from error


def _names(asked: Iterable[_Asked]) -> dict[str, str]:
    return {name: each.option for each in asked for name in (each.parameter.name, each.field)}


def _as_text(kind: _Kind, is_comma: bool, default: Any) -> Any:
    if default is None or (kind.is_tuple and not default):
        return None
    if is_comma:
        return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in default)
    if kind.is_size:
        power = max(power for power in range(5) if default % 1024**power == 0)
        return f"{default // 1024**power}{'KMGT'[power - 1] if power else ''}"
    return list(default) if kind.is_tuple else default


def _metavar(kind: _Kind, is_comma: bool) -> str | None:
    if is_comma:
        return f"<{kind.base.__name__},...>"
    if kind.is_size:
        return "<size>"
    return "|".join(kind.choices) or None


def split(option: str, text: str, base: type) -> list[Any]:
    """`1,8` -> [1, 8]. Raises ConfigError."""
    try:
        return [base(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        example = "1,8" if base is int else "0,0.7"
        raise ConfigError(f"{option} {text!r} is no list of numbers: write it as {example}") from None


@functools.cache
def _helps(owner: type) -> dict[str, str]:
    """Of each field the string literal under it; `max_len` in it becomes --max-len."""
    names = {each.name for each in dataclasses.fields(owner)}
    literals = {name: text for each in reversed(owner.__mro__) for name, text in _literals(each).items()}

    def option(word: re.Match[str]) -> str:
        return "--" + word[1].replace("_", "-") if word[1] in names else word[1]

    return {name: re.sub(r"`([^`]+)`", option, " ".join(text.split())) for name, text in literals.items()}


@functools.cache
def _classes(file: str) -> dict[str, str]:
    """The source of each class of a file."""
    source = Path(file).read_text(encoding="utf-8")
    return {found[1]: found[0] for found in re.finditer(r"^class (\w+).*\n(?:[ \t].*\n|\n)*", source, re.MULTILINE)}


def _literals(owner: type) -> dict[str, str]:
    """The string literal under each field of a class, from its source; only what stands before its methods is parsed."""
    file = getattr(sys.modules[owner.__module__], "__file__", None)
    if file is None or owner is object:  # built in
        return {}
    text = _classes(file).get(owner.__name__)
    body = ast.parse(re.split(r"\n    (?:def |@)", text)[0]).body[0] if text else None
    return {
        field.target.id: literal.value.value
        for field, literal in pairwise(body.body if isinstance(body, ast.ClassDef) else ())
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(literal, ast.Expr) and isinstance(literal.value, ast.Constant) and isinstance(literal.value.value, str)
    }
