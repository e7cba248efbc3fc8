"""Entry point of the command line: `paceline.cli:main`.

`commands/catalogue.py` lists the commands. Modules of `commands/` define one or several related commands and are
imported when such a command runs, so that `paceline --help` is fast.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import paceline
from paceline.commands.catalogue import SECTIONS, Entry
from paceline.errors import PacelineError

MOST_IN_ONE_LIST = 25
"""A command with more options than this shows them in sections."""
FIRST_SECTIONS = ("Model", "Prompts")
"""Sections that come first in a command's help; the others follow in the order of its parameters."""
HELP = (
    "Lossless speculative decoding: a small drafter proposes tokens, the large model verifies them; same output, "
    "faster."
)


class LazyCommands(Mapping[str, Any]):
    """Maps command names to commands; a command's module is imported when the command is looked up."""

    def __init__(self, entries: Mapping[str, Entry], prefix: str = "") -> None:
        """`entries`: the commands' entries in the catalogue, by name. `prefix`: beginning of their functions' names,
        such as `bench_` for the group `bench`."""
        self.entries, self.prefix = entries, prefix
        self._built: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            entry = self.entries[name]
            self._built[name] = self._command(name, entry) if entry.members is None else _group(name, entry)
        return self._built[name]

    def _command(self, name: str, entry: Entry) -> Any:
        module = importlib.import_module(f"paceline.commands.{entry.module}")
        function = getattr(module, self.prefix + name.replace("-", "_"))
        alone = typer.Typer(rich_markup_mode=None, add_completion=False)
        alone.command(name, cls=Command, help=keep_example_lines(inspect.getdoc(function) or ""))(function)
        return typer.main.get_command(alone)


class Command(TyperCommand):
    """A command whose help groups the options in sections if there are more than 25 (MOST_IN_ONE_LIST)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        params = [
            (param, record) for param in self.get_params(ctx) if (record := param.get_help_record(ctx)) is not None
        ]
        has_many = sum(param.param_type_name != "argument" for param, _ in params) > MOST_IN_ONE_LIST
        sections: dict[str, list[Any]] = {title: [] for title in ("Arguments", *FIRST_SECTIONS)}
        for param, record in params:
            title = (getattr(param, "rich_help_panel", None) if has_many else None) or "Options"
            sections.setdefault("Arguments" if param.param_type_name == "argument" else title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def keep_example_lines(text: str) -> str:
    """Mark the section `Examples:` of a command's docstring so that click keeps its line breaks; returns the new
    docstring. The mark is click's \\b."""
    return text.replace("\n\nExamples:\n", "\n\n\b\nExamples:\n")


class Group(TyperGroup):
    """A command group whose help lists commands and summaries in sections, without importing the commands' modules."""

    sections: Mapping[str, Mapping[str, Entry]]
    """Heading of a section -> its commands."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = [name for entries in self.sections.values() for name in entries]
        width = max(len(name) for name in names)  # one column in all sections
        for title, entries in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), entry.summary) for name, entry in entries.items()])


class Root(Group):
    """The top-level command group `paceline`."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.sections = SECTIONS
        self.commands = LazyCommands(  # pyright: ignore[reportAttributeAccessIssue]  # read only
            {name: entry for entries in SECTIONS.values() for name, entry in entries.items()}
        )


def _group(name: str, entry: Entry) -> Group:
    group = Group(name=name, help=entry.summary, rich_markup_mode=None)
    group.sections = {"Commands": entry.members or {}}
    group.commands = LazyCommands(group.sections["Commands"], f"{name}_")  # pyright: ignore[reportAttributeAccessIssue]
    return group


# Rich takes longer to import than the rest of --help together.
UNREACHABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Errors of the operating system for a path in an option that is too long, or that the user may not read."""
app = typer.Typer(cls=Root, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False, help=HELP)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {paceline.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


_UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""click's base error. Typer has its own copy of click since 0.22 and does not export the class."""
_MissingParameter = next(kind for kind in typer.BadParameter.__subclasses__() if kind.__name__ == "MissingParameter")


def main() -> NoReturn:
    """Run the command that the program's arguments name, and exit with its status. A PacelineError, a usage error or a
    path that cannot be reached is printed as one line; for any other exception the traceback is printed too. The exit
    status is then 2. Ctrl-C exits with 130, a closed pipe with 141, as in a shell."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        code = app(prog_name="paceline", standalone_mode=False)
    except PacelineError as error:
        code = _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except _UsageError as error:
        code = _fail(_usage(error))
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        code = 141  # Typer's own status is 1, a verdict of `paceline audit`
    except Exception as error:  # noqa: BLE001 (Python's own exit status 1 is a verdict of `paceline audit`)
        if isinstance(error, OSError) and error.errno in UNREACHABLE and error.filename is not None:
            code = _fail(f"cannot reach {error.filename!s:.200} ({error.strerror}): check the path and its permissions")
        else:
            traceback.print_exc()
            fault = f"unexpected {type(error).__name__}, a fault of paceline: report it with the lines above"
            code = _fail((str(error) or type(error).__name__) if isinstance(error, OSError) else fault)
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Any) -> str:
    """Returns the message of a usage error. A missing argument adds the first example of the command's help."""
    message, example = error.format_message(), None
    if isinstance(error, _MissingParameter) and error.ctx is not None:
        example = _first_example(error.ctx.command.help or "")
    return f"{message.rstrip('.')}, as in {example} (see --help)" if example else f"{message} (see --help)"


def _first_example(text: str) -> str | None:
    """Return the first command line under `Examples:`, with its continuation lines joined."""
    _, _, examples = text.replace("\\\n", " ").partition("\nExamples:\n")
    return next((" ".join(line.split()) for line in examples.splitlines() if line.strip()), None)


def _fail(message: str) -> int:
    """Print an error as one line, and with --json also as a JSON object; returns the exit code."""
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr)
    if "--json" in sys.argv:
        import json

        print(json.dumps({"error": line}))
    return 2
