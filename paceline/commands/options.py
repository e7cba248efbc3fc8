"""Turns the fields of frozen config dataclasses into command-line options, so that each setting is defined in one
place.

    @app.command()
    @options
    def generate(prompt: str, engine: EngineConfig, sampling: Annotated[SamplingParams, Only("seed", "top_k")]) -> None:
        from paceline.engine.llm import LLM  # heavy imports run with the command
        llm = LLM.of(engine)

`max_len: int | None = None` becomes `--max-len` with the field's type and default; its docstring is the help text.

- `tuple[int, ...]` and `tuple[float, ...]` are written `1,8`; `tuple[str, ...]` and `tuple[Path, ...]` by repeating the
  option.
- `Literal["a", "b"]`, or `Annotated[str, ("a", "b")]`, shows the choices. `Annotated[int, "bytes"]` accepts `512M`.
- A bool that is False by default is a flag; otherwise there is also `--no-...`. A field without a default is required.
- `Annotated[EngineConfig, Without("prefill_chunk"), Changed(max_len=Opt(default=1024), drafter=Opt("--draft-model",
  "-d"))]`:
  excluded fields keep their defaults; `Opt` changes a field's name, help, default or metavar in this command.
- Errors of the library name its parameters; here they are replaced by options: "max_batch must be at least 1" becomes
  "--max-batch must be at least 1".
- A command with `as_json: Json` that was given --json prints its return value as one JSON object.
- A call with dataclass instances, `generate(prompt="Hi", engine=EngineConfig(), ...)`, runs the plain function.

Modules that define such dataclasses must be quick to import. Fields of other types need a parameter of the command.
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
"""Matches a field's name in an error message, but not in a path or another name."""
WRITTEN = ("out", "save_results")
"""Parameters of commands that name a file or folder to be written."""
SECTIONS = {
    "EngineConfig": "Model",
    "PromptsConfig": "Prompts",
    "SamplingParams": "Sampling",
    "AnswerConfig": "Answers of the target",
    "RemoteConfig": "Remote target",
    "DrafterShape": "Drafter",
    "LoopConfig": "Training",
    "LossConfig": "Training",
    "OptimConfig": "Training",
    "CostsConfig": "Machine and costs",
}
"""Dataclass -> heading of its options in a command's help; others are listed under Options."""
WRITTEN_FILES = ("svg", "png", "columns", "columns_png")
"""Parameters of commands that name a file to be written."""
P = ParamSpec("P")
R = TypeVar("R")
_hints = functools.cache(functools.partial(get_type_hints, include_extras=True))


class Opt:
    """Change to the command-line option of one dataclass field: another name, help text, default or metavar."""

    def __init__(
        self,
        *names: str,
        help: str | None = None,
        default: Any = dataclasses.MISSING,
        metavar: str | None = None,
        comma: bool = False,
    ):
        """`names` as in typer.Option; `comma` reads a tuple of strings from `a,b` instead of a repeated option."""
        self.names, self.help, self.default, self.metavar, self.comma = names, help, default, metavar, comma


class Changed:
    """Annotation of a dataclass parameter of a command: `Changed(x=Opt(...))` changes the option of the field `x`."""

    def __init__(self, *fields: str, **opts: Opt) -> None:
        self.fields, self.opts = fields, opts


class Only(Changed):
    """Annotation of a dataclass parameter of a command: `Only("a", "b")` makes options of these fields alone."""


class Without(Changed):
    """Annotation of a dataclass parameter of a command: `Without("a", "b")` makes no options of these fields."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Type of an option's value."""

    base: type
    """The type of the value, or of a tuple's items."""
    is_optional: bool = False
    is_tuple: bool = False
    is_size: bool = False
    """True for a number of bytes, written 512M."""
    choices: tuple[str, ...] = ()

    @classmethod
    def of(cls, hint: Any, **known: Any) -> _Kind:
        """Parse a type annotation. Raises TypeError for one that cannot be an option."""
        origin, parts = get_origin(hint), get_args(hint)
        if origin is Annotated:
            choices = next((part for part in parts[1:] if isinstance(part, tuple)), ())
            return cls.of(parts[0], **{**known, "is_size": "bytes" in parts[1:], "choices": choices})
        if origin in (Union, UnionType) and len(parts) == 2 and NoneType in parts:
            return cls.of(next(part for part in parts if part is not NoneType), **{**known, "is_optional": True})
        if origin is tuple and parts[1:] == (...,):
            return cls.of(parts[0], **{**known, "is_tuple": True})
        if origin is Literal:
            return cls(str, **{**known, "choices": parts})
        if hint not in (str, int, float, bool, Path):
            raise TypeError(
                f"no option can be made of {hint}: leave the field out, or give the command a parameter of its own"
            )
        return cls(hint, **known)


@dataclass(frozen=True, slots=True)
class _Option:
    """One field as an option of a command."""

    field: str
    option: str
    """Name on the command line: --max-batch."""
    kind: _Kind
    is_comma: bool
    """True for a tuple written `a,b`."""
    parameter: inspect.Parameter
    """Parameter for typer, which passes comma-separated values and sizes as text."""

    @classmethod
    def of(cls, owner: type, field: dataclasses.Field[Any], hint: Any, opt: Opt) -> _Option:
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
        """Convert typer's value to the field's value. Raises ConfigError."""
        kind = self.kind
        if kind.is_tuple:
            if value is None:
                return None if kind.is_optional else ()
            return tuple(split(self.option, value, kind.base) if self.is_comma else value)
        if kind.is_size:
            return size(self.option, value)
        return value


def options(command: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a command: makes options of the fields of its dataclass parameters, with their defaults."""
    hints = get_type_hints(command, include_extras=True)
    flat: list[inspect.Parameter] = []
    configs: dict[str, tuple[type, list[_Option]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        owner, *markers = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(owner):
            assert isinstance(owner, type)
            configs[name] = owner, _options_of(owner, markers)
            flat += [option.parameter for option in configs[name][1]]
        else:
            flat.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))

    defaults = {parameter.name: parameter.default for parameter in flat}

    @functools.wraps(command)
    def run(*args: Any, **given: Any) -> Any:
        _check_written(given, defaults)
        if isinstance(threads := given.get("threads"), int):
            _note_threads(threads)
        if args or any(isinstance(given.get(name), owner) for name, (owner, _) in configs.items()):
            line = command(*args, **given)
        else:
            for name, (owner, members) in configs.items():
                given[name] = _build(owner, [(option, given.pop(option.parameter.name)) for option in members])
            with named(_names(option for _, members in configs.values() for option in members)):
                line = command(**given)  # pyright: ignore[reportCallIssue]
        if given.get("as_json") and isinstance(line, dict):
            print(json.dumps(plain(line)), flush=True)
        return line

    run.fields = {  # pyright: ignore[reportAttributeAccessIssue]
        option.parameter.name: f"{name}.{option.field}" for name, (_, members) in configs.items() for option in members
    }
    run.__signature__ = inspect.Signature(flat)  # pyright: ignore[reportAttributeAccessIssue]  # raises on a name taken twice
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def _check_written(given: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Check before the command runs that its output files and folders can be written; prints a note for new folders.
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
    """Print a note if there are more threads than cores."""
    cores = processor()["num_cores"]
    if isinstance(cores, int) and threads > cores:
        print(
            f"note: --threads {threads} is more than the {cores} cores here, which is slower: give {cores}",
            file=sys.stderr,
        )


def given(context: typer.Context, *sources: str) -> list[str]:
    """Return the names of parameters whose values come from one of `sources`. These are click's names: "COMMANDLINE",
    or "DEFAULT_MAP" for a --config file."""
    origins = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, origin in origins.items() if origin is not None and origin.name in sources]


def typed(command: Callable[..., Any], context: typer.Context) -> set[str]:
    """Return the fields that the user set on the command line, as "parameter.field", such as "shape.num_layers".
    `command`: function of the running command, decorated with `@options`."""
    fields: dict[str, str] = command.fields  # pyright: ignore[reportFunctionMemberAccess]
    return {fields[name] for name in given(context, "COMMANDLINE") if name in fields}


def size(option: str, text: str | None) -> int | None:
    """Convert a size like 512M to bytes (K to T: powers of 1024); None stays None. Raises ConfigError naming
    `option`."""
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


def _options_of(owner: type, markers: list[Changed]) -> list[_Option]:
    """Return the options of a dataclass, selected and changed by `markers`."""
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
    return [
        _Option.of(owner, fields[name], hints[name], opts[name]) if name in opts else _usual(owner, name)
        for name in chosen
    ]


@functools.cache
def _usual(owner: type, name: str) -> _Option:
    """Return the unchanged option of a field."""
    field = next(field for field in dataclasses.fields(owner) if field.name == name)
    return _Option.of(owner, field, _hints(owner)[name], Opt())


def _build(owner: type, values: list[tuple[_Option, Any]]) -> Any:
    """Create the dataclass; errors name the option."""
    fields = {
        option.field: option.read(value)
        for option, value in values
        if value is not None or option.kind.is_optional or option.kind.is_tuple  # else the field's default
    }
    with named(_names(option for option, _ in values), r"^\w+|"):  # its errors begin with the field
        return owner(**fields)


@contextlib.contextmanager
def named(names: dict[str, str], also: str = r"^\w+(?= means nothing | is .*, but )|") -> Iterator[None]:
    """Context manager that replaces names of dataclass fields by the user's options in messages of PacelineErrors.
    `names`: field -> option. A name with "_" is replaced everywhere except in file paths; another name, which may be an
    ordinary word, only where the regular expression `also` matches. `also` ends in "|": another pattern follows it."""
    try:
        yield
    except PacelineError as error:
        text = re.sub(also + IN_A_SENTENCE, lambda word: names.get(word[0], word[0]), str(error))
        raise type(error)(text) from error


def _names(options: Iterable[_Option]) -> dict[str, str]:
    return {name: option.option for option in options for name in (option.parameter.name, option.field)}


def _as_text(kind: _Kind, is_comma: bool, default: Any) -> Any:
    """Return a field's default as typer shows it."""
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
    """Convert "1,8" to [1, 8], a list of `base` values. Raises ConfigError, naming `option`, for an invalid value."""
    try:
        return [base(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        example = "1,8" if base is int else "0,0.7"
        raise ConfigError(f"{option} {text!r} is no list of numbers: write it as {example}") from None


@functools.cache
def _helps(owner: type) -> dict[str, str]:
    """Return each field's docstring as help text; `max_len` in it becomes --max-len."""
    names = {field.name for field in dataclasses.fields(owner)}
    literals = {name: text for base in reversed(owner.__mro__) for name, text in _literals(base).items()}

    def option(word: re.Match[str]) -> str:
        return "--" + word[1].replace("_", "-") if word[1] in names else word[1]

    return {name: re.sub(r"`([^`]+)`", option, " ".join(text.split())) for name, text in literals.items()}


@functools.cache
def _classes(file: str) -> dict[str, str]:
    """Return the source text of each class in a file."""
    source = Path(file).read_text(encoding="utf-8")
    return {match[1]: match[0] for match in re.finditer(r"^class (\w+).*\n(?:[ \t].*\n|\n)*", source, re.MULTILINE)}


def _literals(owner: type) -> dict[str, str]:
    """Return each field's docstring from the class's source; only the part before its methods is parsed."""
    file = getattr(sys.modules[owner.__module__], "__file__", None)
    if file is None or owner is object:  # built in
        return {}
    text = _classes(file).get(owner.__name__)
    body = ast.parse(re.split(r"\n    (?:def |@)", text)[0]).body[0] if text else None
    return {
        field.target.id: literal.value.value
        for field, literal in pairwise(body.body if isinstance(body, ast.ClassDef) else ())
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(literal, ast.Expr)
        and isinstance(literal.value, ast.Constant)
        and isinstance(literal.value.value, str)
    }
