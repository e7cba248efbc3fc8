"""The command line: `paceline.cli:main`. Files of `commands/` hold a command each, or several that belong together: options,
and what is printed.

They import what is heavy when their command runs, so that `paceline --help` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

import paceline
from paceline.commands.adapt import adapt_check, adapt_gate, adapt_log, adapt_replay, adapt_watch
from paceline.commands.advise import advise
from paceline.commands.audit import audit
from paceline.commands.bench import bench_decode, bench_latency, bench_lossy, bench_serving, bench_steps
from paceline.commands.chat import chat
from paceline.commands.checkpoints import export, inspect
from paceline.commands.compare import compare
from paceline.commands.distill import distill
from paceline.commands.drafters import drafters_drain, drafters_list, drafters_load, drafters_unload
from paceline.commands.evals import evals_compare, evals_make, evals_run
from paceline.commands.evaluate import evaluate, report
from paceline.commands.generate import generate
from paceline.commands.models import models
from paceline.commands.record import record
from paceline.commands.serve import serve
from paceline.commands.simulate import calculator, simulate, simulate_serving
from paceline.commands.store import store_add, store_forget, store_label, store_show, store_split
from paceline.commands.synthesize import synthesize
from paceline.commands.train import regenerate, train
from paceline.commands.turn import turn
from paceline.errors import PacelineError

app = typer.Typer(
    rich_markup_mode=None,  # rich takes longer to import than the rest of --help together
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Lossless speculative decoding: a small drafter goes ahead, the large model checks; same output, faster.",
)
bench_app = typer.Typer(rich_markup_mode=None, help="Measure speed in the real engine, the ceiling stated first.")
app.add_typer(bench_app, name="bench")
drafters_app = typer.Typer(rich_markup_mode=None, help="List, load, drain and unload the drafters of a running server.")
app.add_typer(drafters_app, name="drafters")
adapt_app = typer.Typer(rich_markup_mode=None, help="Keep a drafter fitted to its traffic: when, whether, and is it better.")
app.add_typer(adapt_app, name="adapt")
store_app = typer.Typer(
    rich_markup_mode=None, help="What was asked and answered, in one place: kept, split, described, forgotten."
)
app.add_typer(store_app, name="store")
evals_app = typer.Typer(rich_markup_mode=None, help="Is the answer right: suites, scores with intervals, gates.")
app.add_typer(evals_app, name="evals")


def _show_version(asked: bool) -> None:
    if asked:
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


for _each in (generate, chat, compare, train, regenerate, evaluate, report, serve, record, synthesize, export, inspect):
    app.command()(_each)
for _each in (distill, turn, advise, audit, simulate_serving, simulate, calculator, models):
    app.command()(_each)
for _each in (bench_decode, bench_serving, bench_latency, bench_steps, bench_lossy):
    bench_app.command(_each.__name__.removeprefix("bench_"))(_each)
for _each in (drafters_list, drafters_load, drafters_drain, drafters_unload):
    drafters_app.command(_each.__name__.removeprefix("drafters_"))(_each)
for _each in (adapt_watch, adapt_check, adapt_replay, adapt_log, adapt_gate):
    adapt_app.command(_each.__name__.removeprefix("adapt_"))(_each)
for _each in (store_add, store_show, store_split, store_label, store_forget):
    store_app.command(_each.__name__.removeprefix("store_"))(_each)
for _each in (evals_make, evals_run, evals_compare):
    evals_app.command(_each.__name__.removeprefix("evals_"))(_each)

_UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Typer carries its own click since 0.22; its base error has no public name."""


def main() -> NoReturn:
    """Run a command; errors made on purpose are one line and exit code 2, Ctrl-C is 130."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        code = app(prog_name="paceline", standalone_mode=False)
    except PacelineError as error:
        code = _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except _UsageError as error:
        code = _fail(error.format_message() + " (see --help)")  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> int:
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr)
    if "--json" in sys.argv:
        import json

        print(json.dumps({"error": line}))
    return 2
