"""Has the target write prompts: it continues the chat template at the user's message (Magpie, arXiv 2406.08464).

A drafter for general use needs many kinds of prompts. The target samples user messages from its training distribution;
`openers` (beginnings of a user message) add kinds that it would rarely sample. Near-duplicates, loops and unfinished
messages are dropped and counted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.data.prompts import Message, read_prompts
from paceline.engine.llm import LLM
from paceline.errors import CacheError, PromptError, UnsupportedModelError, reraised
from paceline.model.text.chat import chat_text
from paceline.model.text.tokenizer import Tokenizer
from paceline.runs.folder import drop_cut_line
from paceline.types import SamplingParams

MARK = "\u2042"
"""Placeholder for the user's text while the template is rendered."""
MIN_WORDS, MAX_TOKENS = 4, 160
MAX_TRIES_PER_PROMPT = 8
EXTRA_TRIES = 32
"""The run fails after more than MAX_TRIES_PER_PROMPT * (new usable prompts + EXTRA_TRIES) unusable prompts."""


@dataclass(slots=True)
class SelfWritten:
    """Prompts written by the target, and counts of unusable ones by reason."""

    prompts: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class UserTurn:
    """The text and tokens around the user's message in a chat template. A target that continues `prefix` writes a user
    message; the stop texts and tokens show where it ends."""

    prefix: str
    """The rendered text before the user's message."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Special token with which the template ends the message, at most one. A template may end it with ordinary text
    instead, which is then in `stop`."""


class PromptWriter:
    """Has the target write prompts, as user messages of its chat template, to a JSON lines file. An interrupted run
    resumes after the last complete line. Raises UnsupportedModelError if the chat template omits the user's text,
    PromptError if the target has no template."""

    def __init__(
        self,
        llm: LLM,
        file: Path,
        *,
        openers: tuple[str, ...] = ("",),
        seed: int = 0,
        opening: Sequence[Message] = (),
        variables: Mapping[str, Any] | None = None,
        fill: Callable[[str, int], str] = lambda opener, seed: opener,
    ) -> None:
        """`openers`: texts with which prompts begin. `opening`: messages at the start of every conversation, such as an
        application's system message. `fill`: (opener, number) -> the beginning to use; the number differs for every
        prompt."""
        self.llm, self.file, self.openers, self.seed = llm, file, openers or ("",), seed
        self._fill = fill
        self._turn = user_turn(llm.tokenizer, opening, variables)
        self._params = SamplingParams(
            temperature=1.0,
            top_p=0.98,
            max_tokens=MAX_TOKENS,
            seed=seed,
            stop=self._turn.stop,
            stop_token_ids=self._turn.stop_token_ids,
        )

    def write(self, num_prompts: int, on_prompt: Callable[[str], None] = lambda prompt: None) -> SelfWritten:
        """Writes usable prompts until the file holds `num_prompts`; returns all prompts in the file. `on_prompt`, given
        by the caller, is called with the text of every prompt, also of those that an earlier run wrote. Raises
        PromptError for a damaged file, or if too many new prompts are unusable (more than 256, plus 8 for each new
        usable one); CacheError for disk errors."""
        drop_cut_line(self.file)
        has_some = self.file.exists() and self.file.stat().st_size
        done = SelfWritten([prompt.turns[0] for prompt in read_prompts(self.file)] if has_some else [])
        for prompt in done.prompts:
            on_prompt(prompt)
        num_found = len(done.prompts)
        seen = {_normalised(prompt) for prompt in done.prompts}
        with contextlib.closing(self._tries(num_found * MAX_TRIES_PER_PROMPT)) as tries:
            while len(done.prompts) < num_prompts:
                prompt, is_finished = next(tries)
                if reason := rejection_reason(prompt, is_finished, seen):
                    done.dropped[reason] += 1
                    self._check_try_budget(done, num_found, num_prompts)
                    continue
                line = {"id": f"self-{len(done.prompts)}", "prompt": prompt}
                with reraised(CacheError, f"cannot write {self.file}", "free space or choose another --out", OSError):
                    self.file.parent.mkdir(parents=True, exist_ok=True)
                    with self.file.open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps(line, ensure_ascii=False) + "\n")
                seen.add(_normalised(prompt))
                done.prompts.append(prompt)
                on_prompt(prompt)
        return done

    def _check_try_budget(self, done: SelfWritten, num_found: int, num_prompts: int) -> None:
        num_new, num_dropped = len(done.prompts) - num_found, done.dropped.total()
        if num_dropped > MAX_TRIES_PER_PROMPT * (num_new + EXTRA_TRIES):
            raise PromptError(
                f"only {num_new} of {num_new + num_dropped} prompts the target wrote were usable, {num_prompts} are "
                f"wanted ({dict(done.dropped)}): give prompts with --prompts, or openers with --openers"
            )

    def _tries(self, first: int) -> Generator[tuple[str, bool]]:
        """Yields (prompt, whether the target finished it); keeps every cache row busy."""
        engine = self.llm.engine
        in_progress: dict[int, str] = {}
        numbers = itertools.count(first)
        try:
            while True:
                while len(in_progress) < self.llm.target.cache.num_rows:
                    number = next(numbers)
                    opener = self._fill(self.openers[number % len(self.openers)], self.seed + number)
                    ids = self.llm.tokenizer.encode(self._turn.prefix + opener, add_special_tokens=False)
                    in_progress[engine.add(ids, replace(self._params, seed=self.seed + number))] = opener
                with engine.whole_chunks():
                    chunks = engine.step()
                for chunk in chunks:
                    request_id = chunk.sequence.request_id
                    in_progress[request_id] += chunk.text
                    if chunk.finish_reason is not None:
                        yield in_progress.pop(request_id).strip(), chunk.finish_reason == "stop"
        finally:
            for request_id in in_progress:
                engine.abort(request_id)


def user_turn(
    tokenizer: Tokenizer, opening: Sequence[Message] = (), variables: Mapping[str, Any] | None = None
) -> UserTurn:
    """Finds out how the tokenizer's chat template begins and ends a user message that follows the messages `opening`.
    Raises UnsupportedModelError if the template omits the user's text, PromptError for a tokenizer without a
    template."""
    messages = [*opening, {"role": "user", "content": MARK}]
    before, mark, after = chat_text(tokenizer, messages, variables=variables).partition(MARK)
    if not mark:  # not in the rendered text
        raise UnsupportedModelError("this model's chat template hides the user's turn: give prompts with --prompts")
    end = after[: len(after) - len(after.lstrip())] + "".join(after.lstrip().splitlines()[:1]).rstrip()
    if not end.strip():
        return UserTurn(before)
    first = tokenizer.encode(end.lstrip(), add_special_tokens=False)[:1]
    is_special = not tokenizer.decode(first) and tokenizer.decode(first, skip_special=False).strip()
    return UserTurn(before, stop_token_ids=tuple(first)) if is_special else UserTurn(before, stop=(end,))


def rejection_reason(prompt: str, is_finished: bool, seen: set[str]) -> str | None:
    """Returns the reason why a prompt is unusable, such as "too short"; None if it is usable. `is_finished`: True if
    the target ended the prompt itself. `seen`: normalised texts of earlier prompts, to find duplicates."""
    words = prompt.split()
    checks = (
        (not is_finished, "unfinished"),
        ("\ufffd" in prompt, "broken characters"),
        (len(words) < MIN_WORDS, "too short"),
        (_normalised(prompt) in seen, "duplicate"),
        (len(set(words)) < 0.4 * len(words), "repeats itself"),
        (sum(char.isprintable() or char in "\n\t" for char in prompt) < len(prompt), "control characters"),
    )
    return next((reason for is_so, reason in checks if is_so), None)


def read_openers(file: Path) -> tuple[str, ...]:
    """Reads beginnings of prompts from a text file, one per line. Raises PromptError for an unreadable or empty
    file."""
    remedy = "give a text file, one beginning a line"
    with reraised(PromptError, f"cannot read openers from {file}", remedy, OSError, UnicodeDecodeError):
        openers = tuple(line.rstrip("\n") for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    if not openers:
        raise PromptError(f"{file} holds no openers: write one beginning of a user's turn a line")
    return openers


def _normalised(prompt: str) -> str:
    return " ".join(re.findall(r"\w+", prompt.lower()))
