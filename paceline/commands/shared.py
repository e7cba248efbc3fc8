"""Helpers shared by commands: common options, prompts and grammars, progress on stderr, the JSON line."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import Changed, Only, Opt, Without
from paceline.config import EngineConfig
from paceline.errors import ConfigError, PromptError, reraised
from paceline.hub import check_name
from paceline.lossy import Lossy
from paceline.report.tables import Progress
from paceline.runs.folder import plain
from paceline.types import GrammarSpec, SamplingParams

if TYPE_CHECKING:
    from paceline.engine.llm import LLM
    from paceline.report.tables import Advance, Table


REFUSED = 3
"""Exit status of a command that ran, but whose gate (a check of quality) rejected the result or could not decide."""


def say(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)


def finish(line: dict[str, Any], as_json: bool, status: int = 0) -> None:
    """End a command: print `line` as one JSON object if `as_json` is True (option --json), and exit with `status`
    unless it is 0."""
    if as_json:
        print(json.dumps(plain(line)), flush=True)
    if status:
        raise typer.Exit(status)


def starting(model: str) -> None:
    """Check a model's name before loading it; raises ModelNotFoundError for an invalid one. In a terminal also prints
    "loading MODEL"."""
    check_name(model)
    if sys.stderr.isatty():
        say(f"loading {model}")


def introduce(llm: LLM) -> str:
    """Return a text that describes the loaded model: the drafter, device and data types in use, and the memory."""
    from paceline.draft.pool import memory_of
    from paceline.model.backends import form_of
    from paceline.report.pages import render

    held = memory_of(llm.engine.pool.drafters, llm.target)
    return render("loaded.txt", llm=llm, held=held, form=form_of(llm.target)).rstrip()


class MinuteLines:
    """Progress report for output that is not a terminal: at most once a minute, a line with the share done and the
    minutes left."""

    EVERY_S = 60.0

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._began = self._printed = time.monotonic()
        self._first = 0.0

    def advance(self, text: str, share: float | None = None) -> None:
        """Count one finished item, and print a line if at least a minute has passed since the line before. `text`:
        description of the item. `share`: share of all work done, from 0 to 1; None: finished items over all items."""
        self._done += 1
        if self._done == 1 and share is not None:
            self._first = share  # an earlier run may have done a part
        now = time.monotonic()
        if now - self._printed < self.EVERY_S:
            return
        self._printed = now
        whole = self._done / max(1, self._total) if share is None else share
        done = f"{whole:.0%}" if share is not None else f"{self._done} of {self._total} ({whole:.0%})"
        since = whole - self._first
        left_s = (now - self._began) * max(0.0, 1.0 - whole) / since if since > 0 else 0.0
        say(f"{self._what}: {done}, {left_s / 60:.0f} min left" + (f"; {text}" if text != self._what else ""))


class TerminalProgress(Progress):
    """Prints the progress of a library call to stderr: a progress bar in a terminal, else one line per minute."""

    def say(self, text: str) -> None:
        say(text)

    def loaded(self, llm: LLM) -> None:
        say(introduce(llm))

    @contextlib.contextmanager
    def bar(self, what: str, total: int) -> Iterator[Advance]:
        if not sys.stderr.isatty():
            yield MinuteLines(what, total).advance
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)

            def advance(text: str, share: float | None = None) -> None:
                if share is None:
                    bar.update(task, advance=1, description=text)
                else:
                    bar.update(task, completed=share * total, description=text)

            yield advance

    def table(self, table: Table) -> None:
        table.show()


Json = Annotated[
    bool, typer.Option("--json", help="Last line of stdout is one JSON object; everything else goes to stderr.")
]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text without the chat template.")]
System = Annotated[str | None, typer.Option(help="System message.")]
PromptSource = Annotated[
    str | None, typer.Option(help="JSON lines, Parquet or data set id [default: a small built-in set].")
]
JsonSchema = Annotated[
    str | None,
    typer.Option(metavar="FILE|TEXT", help="JSON schema of the answer; {} for any object. Needs paceline[serve]."),
]
Regex = Annotated[
    str | None, typer.Option(help="Regular expression that the whole answer matches. Needs paceline[serve].")
]
Limit = Annotated[int | None, typer.Option(help="Only the first prompts.")]
TARGET_FIELDS = Only("model", "dtype", "backend", "isa", "weight_format", "device", "threads")
"""Engine settings that are options of commands which run a target model without a drafter."""
NO_MOCKS = Without("mocked_tokens_per_round", "mocked_survival", "mocked_marginals")
MOCK = Changed(mocked_tokens_per_round=Opt("--mock", metavar="TOKENS_PER_ROUND"))


LossyRule = Annotated[
    str | None,
    typer.Option(
        metavar="RULE:VALUES",
        help="NOT lossless: accept drafts that the model would reject, by typical:eps=0.09,delta=0.3, "
        "relaxed:n=10,delta=0.6, threshold:single=0.4, lenience:0.5 or mixture:0.8 (docs/explanation/lossless.md).",
    ),
]
MaxTV = Annotated[
    float | None,
    typer.Option(help="With --lossy: limit of the mean total variation; at the limit, verification is lossless."),
]


def lossy_of(text: str | None, max_tv: float | None) -> Lossy | None:
    """Parse the lossy acceptance rule `text` (option --lossy); None gives None. `max_tv` (option --max-tv) replaces the
    rule's own limit of the mean total variation. Raises SamplingError for an invalid rule, ConfigError for `max_tv`
    without a rule."""
    if text is None:
        if max_tv is not None:
            raise ConfigError("--max-tv is the budget of a lossy rule: give --lossy too, or leave it out")
        return None
    lossy = Lossy.of(text)
    return lossy if max_tv is None else replace(lossy, max_tv=max_tv)


def load(engine: EngineConfig, word: str | None = None, **more: Any) -> LLM:
    """Load the model for a command that runs one request at a time, and print what was loaded. `word`: the model's name
    as an argument of the command; ignored if the user chose a model with --model. `more`: further arguments of
    `LLM.of`. Raises ConfigError if mocked acceptance accepts more drafts per round than the drafter makes."""
    named = replace(engine, model=word if word and not is_named(engine) else engine.model, max_batch=1)
    starting(named.model)
    from paceline.engine.llm import LLM

    llm = LLM.of(named, **more)
    say(introduce(llm))
    if named.mocked is not None:
        from paceline.serve.worker.mock import check_yield

        check_yield(named.mocked, llm.drafter.num_drafted)
    return llm


def is_named(engine: EngineConfig) -> bool:
    """Return True if the user chose a model with --model. This is assumed if `engine.model` is not the default
    model."""
    return engine.model != EngineConfig().model


def prompt_of(word: str | None, example: str) -> str:
    """Return the prompt: `word`, or the text of standard input if `word` is "-". Raises PromptError without a prompt or
    for a blank one. `example`: a command to show in the error message."""
    if word is None:
        raise PromptError(f'there is no prompt: give one, as in {example} "Why is the sky blue?", or - for stdin')
    if word == "-":
        return not_empty(sys.stdin.buffer.read().decode("utf-8", "replace"))
    return not_empty(word.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


def not_empty(prompt: str) -> str:
    """Return the prompt. Raises PromptError if it is blank."""
    if not prompt.strip():
        raise PromptError("the prompt is empty: give some text")
    return prompt


def check_template(raw: bool, system: str | None) -> None:
    """Raises ConfigError for a system message with --raw, which uses no chat template."""
    if raw and system:
        raise ConfigError("--system needs the chat template: leave --raw out")


def grammar_of(json_schema: str | None, regex: str | None) -> GrammarSpec | None:
    """Return the grammar that the answer must follow, or None if both parameters are None. `json_schema`: a JSON schema
    or the path of a file with one; "{}" allows any JSON object. `regex`: a regular expression. Raises ConfigError if
    both are given, or if the file cannot be read."""
    if json_schema and regex:
        raise ConfigError("--json-schema and --regex exclude each other: leave one out")
    if regex:
        return GrammarSpec("regex", regex)
    if not json_schema:
        return None
    text = json_schema.strip()
    if not text.startswith("{"):
        neither = f"--json-schema {text!r} is neither a schema nor a file that can be read"
        with reraised(ConfigError, neither, "give one of them", OSError, UnicodeDecodeError):
            text = Path(text).read_text(encoding="utf-8").strip()
    return GrammarSpec("json_object") if text == "{}" else GrammarSpec("json_schema", text)


def note_without_effect(sampling: SamplingParams) -> None:
    """Print a note for sampling options that have no effect at temperature 0."""
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if sampling.is_greedy and getattr(sampling, name) != off:
            say(f"note: --{name.replace('_', '-')} has no effect at temperature 0")
