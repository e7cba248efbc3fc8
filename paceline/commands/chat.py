"""`paceline chat`: a conversation in the terminal, or one user message per line of standard input."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import Changed, Opt, Without, named, options
from paceline.commands.shared import NO_MOCKS, Json, System, load, note_without_effect, say
from paceline.config import EngineConfig
from paceline.errors import ContextLengthError, PromptError, way_out
from paceline.types import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.llm import LLM

HELP = "/reset forgets the conversation, /exit leaves; Ctrl-C stops an answer, Ctrl-D leaves"
NO_OPTIONS = Without(
    *("presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "ignore_eos", "logprobs"),
    *("prompt_logprobs", "max_drafted", "grammar", "lossy", "scaled_logprobs", "prediction"),
)
"""Sampling parameters that are not options of `chat`."""


@options
def chat(
    engine: Annotated[EngineConfig, Without("max_batch", "prefill_chunk", "weights"), NO_MOCKS],
    sampling: Annotated[SamplingParams, NO_OPTIONS, Changed(max_tokens=Opt(default=512))],
    name: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")] = None,
    system: System = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Chat with a model in the terminal.

    /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.

    Examples:
      paceline chat --temperature 0.7 --system "Answer in one sentence."
    """
    note_without_effect(sampling)
    llm = load(engine, name)
    opening = [{"role": "system", "content": system}] if system else []
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        messages = _conversation(llm, opening, sampling)
    return {"model": llm.config.model, "drafter": llm.drafter.name, "messages": messages}


def _conversation(llm: LLM, opening: list[dict[str, str]], sampling: SamplingParams) -> list[dict[str, str]]:
    """Run the conversation until the user leaves; returns its messages."""
    messages = list(opening)
    for line in _lines():
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(opening)
            say("forgotten")
        elif line in ("/help", "/?"):
            say(HELP)
        elif line.startswith("/") and " " not in line:
            say(f"no such command {line}: {HELP}")
        else:
            messages = _answered(llm, messages, line, sampling)
    return messages


def _answered(llm: LLM, messages: list[dict[str, str]], line: str, params: SamplingParams) -> list[dict[str, str]]:
    """Return the conversation with this user message and its answer, or unchanged if it does not fit the context."""
    question = [*messages, {"role": "user", "content": line}]
    try:
        with (
            named({"max_tokens": "--max-tokens", "max_len": "--max-len"}),
            way_out("continue texts with paceline generate --raw"),
        ):
            text = _answer(llm, question, params)
    except (ContextLengthError, PromptError) as error:
        say(f"error: {error} (/reset forgets the conversation)")
        return messages
    return [*question, {"role": "assistant", "content": text}]


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print one answer as it streams; returns its text, also the part before Ctrl-C."""
    from paceline.engine.completion import GenerationStats

    texts, stats = [], None
    with _interruptible() as is_interrupted, contextlib.closing(llm.stream(messages, params)) as chunks:
        for chunk in chunks:
            texts.append(chunk.text)
            print(chunk.text, end="", flush=True)
            stats = GenerationStats.of(chunk.sequence)
            if is_interrupted():
                break
    print(flush=True)
    if stats and sys.stdin.isatty():
        say(f"[{stats.tokens_per_s:.1f} tokens/s, {stats.tokens_per_round:.2f} tokens per round]")
    return "".join(texts)


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Defer the first Ctrl-C: yields a function that returns True after it. A second Ctrl-C raises
    KeyboardInterrupt."""
    pressed = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """Yield the user's lines; skips blank ones."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() a history and editing
        say(HELP)
    while True:
        try:
            line = input("> ") if is_terminal else next(sys.stdin)
        except (EOFError, StopIteration):
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            say("")
            continue
        if line.strip():
            yield line.strip()
