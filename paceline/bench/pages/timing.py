"""Records when each token was generated, with speculation off and on, in the real engine, and replays both for
`paceline compare`.

    timing = record(llm, prompt_ids, SamplingParams(max_tokens=128), prompt="Why is the sky blue?")
    run.write_json(NAME, timing)        # and back: read_timing(folder)

Times are the engine's, in seconds from the request's arrival; all tokens of a round have the same time. Both settings
alternate in one process. The repetition of median duration is used for each.

`page` replays them in one self-contained file. Prompts and answers are embedded as JSON and shown as text only; the
content security policy allows only the script with its hash, and no downloads. `svg` is a picture with two columns that
fill up in a loop: CSS animation without script, so that it also works inside an <img>. With reduced motion it is static
and complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from paceline.bench.config import WARM_UP_TOKENS
from paceline.bench.passes import Engines
from paceline.draft.base import NoDrafter
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, reraised
from paceline.report.pages import render
from paceline.report.statistics import Tone, doubt, first_difference, possible_speedup, tone_of
from paceline.report.tables import ignore, printable
from paceline.runs.folder import plain
from paceline.simulate.calculator_page import embedded, hash_of
from paceline.simulate.files import read_json
from paceline.types import SamplingParams, Sequence

NAME = "timing.json"
VERSION = 1
SPEEDS, LEAST_S = (1.0, 0.5, 0.25, 0.1), 3.0
"""Replay speeds (1.0 is real time), and the minimum duration of a replay in seconds. The default is the fastest speed
with at least this duration."""
MOST_TOKENS = 20_000
"""Maximum tokens of an answer that `read_timing` accepts: a page with more would be too slow."""
CELLS = 55
"""Number of monospaced characters in a line of the picture's columns."""
MOST_LINES = 26
MOST_TICKS = 90
"""Maximum number of updates of the clock in the picture; each is shown for at least 0.1 s."""
HOLD_S = 3.0
"""Seconds for which the finished answers are shown before the replay restarts."""


@dataclass(frozen=True, slots=True)
class TimedToken:
    text: str
    """Text of the token; "" for the end token, and for an incomplete character, which is shown with a later token."""
    at_s: float
    """Seconds after the request's arrival."""
    round: int
    """Index of the round; 0 is prefill. All tokens of a round have the same time."""
    is_drafted: bool
    """True for an accepted draft, false for the target's own token."""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer as a list of tokens, each with its time."""

    drafter: str
    """Name of the drafter; "none" with speculation off."""
    tokens: tuple[TimedToken, ...]
    lossless: bool = True

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def total_s(self) -> float:
        return self.tokens[-1].at_s

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of total time, prefill included."""
        return len(self.tokens) / self.total_s

    @property
    def figures(self) -> dict[str, float]:
        return {"tokens_per_s": self.tokens_per_s, "total_s": self.total_s, "num_tokens": len(self.tokens)}

    @property
    def tokens_per_round(self) -> float:
        """Tokens per decode round, without the first token, which prefill generates; 1.0 without decode rounds."""
        return (len(self.tokens) - 1) / self.tokens[-1].round if self.tokens[-1].round else 1.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Two answers to one prompt, with speculation off and on, and a description of model and machine."""

    prompt: str
    model: str
    device: str
    dtype: str
    machine: str
    temperature: float
    off: TimedAnswer
    on: TimedAnswer
    first_difference: int | None
    """Number of equal tokens before the answers differ; None if they are equal."""
    version: int = VERSION
    predicted: str | None = None
    """Verdict to show instead of a measured one, if the times are predicted and no model ran
    (`bench/pages/predicted.py`)."""

    @property
    def speedup(self) -> float | None:
        """Ratio of tokens per second with speculation to those without; None if it exceeds the acceptance length, which
        is impossible, see `doubt`."""
        return possible_speedup(self._measured, self.on.tokens_per_round)

    @property
    def doubt(self) -> str | None:
        """Reason not to trust the speed-up (machine busy, too few tokens), or None."""
        return doubt(self._measured, self.on.tokens_per_round, len(self.on.tokens))

    @property
    def _measured(self) -> float:
        return self.on.tokens_per_s / self.off.tokens_per_s

    @property
    def usual_speed(self) -> float:
        """Default replay speed, as a factor of real time: the highest of 1.0, 0.5, 0.25 and 0.1 at which the replay
        lasts at least 3 seconds. It is 0.1 if the replay is shorter at every speed."""
        end_s = max(self.off.total_s, self.on.total_s)
        return next((speed for speed in SPEEDS if end_s / speed >= LEAST_S), SPEEDS[-1])

    @property
    def tone(self) -> Tone:
        """Colour of the verdict on the speed-up: "good" (green: a gain), "cost" (amber: slower than plain decoding),
        "bad" (red: not lossless), or "" (grey: no clear gain, or predicted or unreliable times)."""
        if not self.on.lossless:
            return "bad"
        return "" if self.predicted is not None or self.doubt else tone_of([self._measured])

    @property
    def verdict(self) -> str:
        if self.predicted is not None:
            return self.predicted
        if self.first_difference is None:
            same = f"the same {len(self.on.tokens)} tokens"
        elif self.temperature > 0:
            same = "sampled: another text of the same distribution"
        else:
            same = f"the same first {self.first_difference} tokens, then {self.dtype} is rounded elsewhere"
        mocked = "" if self.on.lossless else ", NOT LOSSLESS: acceptance was mocked or lossy"
        return f"{self.doubt or f'{self.speedup:.2f}x as fast'}, {same}{mocked}"


def record(
    llm: LLM,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    prompt: str,
    machine: str = "",
    repeat: int = 3,
    on_answer: Callable[[str], None] = ignore,
) -> Timing:
    """Record when the tokens of an answer are generated, without and with drafts. Answers the prompt `prompt_ids`
    `repeat` times without drafts and `repeat` times with the LLM's drafter, alternately. Returns the token times of two
    answers, one without and one with drafts: those with the median total time. `prompt`, `machine`: texts to store with
    the times. `on_answer` gets a progress text after each answer."""
    warm_up = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens))
    engines = Engines(llm)
    engines.add("on", llm.drafter)
    engines.add("off", NoDrafter())
    runs: dict[str, list[tuple[TimedAnswer, list[int]]]] = {"off": [], "on": []}
    try:
        for _ in range(repeat):
            for name, done in runs.items():
                for settings in (warm_up, params):
                    engines.use(name)
                    *_, last = llm.stream(prompt_ids, settings)
                sequence = last.sequence
                done.append((timed(sequence, llm.tokenizer.stream(), llm.drafter.name), sequence.output_ids))
                on_answer(f"speculation {name}")
    finally:
        engines.use("on")
    (off, off_ids), (on, on_ids) = (
        sorted(done, key=lambda run: run[0].total_s)[len(done) // 2] for done in runs.values()
    )
    return Timing(
        prompt=prompt,
        model=llm.config.model,
        device=llm.config.device,
        dtype=llm.config.dtype,
        machine=machine,
        temperature=params.temperature,
        off=off,
        on=on,
        first_difference=first_difference(on_ids, off_ids),
    )


def timed(sequence: Sequence, detokenizer: Any, drafter: str) -> TimedAnswer:
    """Return the tokens of a finished sequence, each with its text, its seconds after the request's arrival, and the
    number of its round. `detokenizer`: a streaming detokenizer that has not been used yet. `drafter`: the drafter's
    name, stored with the result."""
    ids = sequence.output_ids
    origins = [(0, False)]
    for number, one in enumerate(sequence.rounds, start=1):
        origins += [(number, True)] * one.num_accepted + [(number, False)]
    arrival_s, last = sequence.timings.arrival_s, len(ids) - 1
    is_ended = sequence.finish_reason == "stop"
    tokens = []
    for place, (token, at_s, (number, is_drafted)) in enumerate(
        zip(ids, sequence.timings.token_s, origins, strict=False)
    ):
        text = "" if is_ended and place == last else detokenizer.push([token])
        text += detokenizer.flush() if place == last else ""
        tokens.append(TimedToken(text, at_s - arrival_s, number, is_drafted))
    return TimedAnswer(drafter, tuple(tokens), sequence.lossless)


def read_timing(folder: Path) -> Timing:
    """Read the token times of two answers that `paceline compare` recorded, from the run folder or the JSON file
    itself. Raises ConfigError if the file is missing or invalid."""
    file = folder / NAME if folder.is_dir() else folder
    read = read_json(file, "--from wants a folder of paceline compare")
    damaged = (KeyError, TypeError, ValueError, AttributeError)
    with reraised(ConfigError, f"{file} holds no token times", "run paceline compare again", *damaged):
        if read["version"] != VERSION:
            raise ValueError(f"it is of version {read['version']!r}, this reads {VERSION}")
        return Timing(**{**read, "off": _answer(read["off"]), "on": _answer(read["on"])})


def _answer(read: dict[str, Any]) -> TimedAnswer:
    tokens = tuple(
        TimedToken(str(token["text"]), float(token["at_s"]), int(token["round"]), bool(token["is_drafted"]))
        for token in read["tokens"]
    )
    if not 0 < len(tokens) <= MOST_TOKENS:
        raise ValueError(f"an answer has 1 to {MOST_TOKENS:,} tokens, this has {len(tokens):,}")
    if not all(math.isfinite(token.at_s) and token.at_s > 0 for token in tokens):
        raise ValueError("a token's time is no number above 0")
    if any(later.at_s < sooner.at_s or later.round < sooner.round for sooner, later in pairwise(tokens)):
        raise ValueError("the tokens are not in the order they came")
    return TimedAnswer(str(read["drafter"]), tokens, bool(read["lossless"]))


def page(timing: Timing) -> str:
    """Return an HTML page that replays the two answers in two columns: each token appears at its recorded time. The
    replay speed is at first `timing.usual_speed`."""
    data = embedded(plain(timing) | {"verdict": timing.verdict, "speed": timing.usual_speed})
    return render(
        "timing.html", title=f"{timing.model}: {timing.verdict}", tone=timing.tone, data=Markup(data), hash_of=hash_of
    )


@dataclass(frozen=True, slots=True)
class Run:
    """Piece of an answer's text that is drawn in one colour: tokens on one line, from one round, either all accepted
    drafts or all the target's own."""

    line: int
    cell: int
    """Column of the first character in the line, in monospaced cells from 0."""
    text: str
    width: int
    """Width of the text in monospaced cells."""
    round: int
    is_drafted: bool


def svg(timing: Timing, speed: float | None = None) -> str:
    """Return an animated SVG of the answers without and with drafts, side by side, replayed at `speed` times real time
    [default: slow enough to follow]."""
    speed = speed or timing.usual_speed
    sides = (timing.off, timing.on)
    laid_out = [list(runs(side)) for side in sides]
    rounds = [list(group) for side in sides for _, group in groupby(side.tokens, key=lambda token: token.round)]
    end_s = max(side.total_s for side in sides)
    tick_s = max(0.1 * speed, end_s / MOST_TICKS)
    num_ticks = int(end_s / tick_s) + 1
    pace = "" if speed == 1 else f", shown at {speed:g}x speed"
    return render(
        "timing.svg",
        sides=sides,
        runs=laid_out,
        tallest=max(map(len, rounds)),
        most_lines=MOST_LINES,
        num_lines=[max((run.line for run in own), default=0) + 1 for own in laid_out],
        end_s=end_s,
        speed=speed,
        loop_s=end_s / speed + HOLD_S,
        ticks=[
            [_said(side, tick * tick_s if tick < num_ticks else end_s) for side in sides]
            for tick in range(num_ticks + 1)
        ],
        verdict=timing.verdict,
        about=f"{timing.model}, drafter {timing.on.drafter}, {timing.dtype}, {timing.machine or timing.device}{pace}",
    )


def _said(side: TimedAnswer, now_s: float) -> str:
    count, spent_s = sum(token.at_s <= now_s for token in side.tokens), min(now_s, side.total_s)
    return f"{count} tokens, {spent_s:.2f} s, {count / spent_s if spent_s else 0:.0f} tokens/s"


def runs(side: TimedAnswer, cells: int = CELLS) -> Iterator[Run]:
    """Yield an answer's text in pieces that are drawn in one colour (`Run`), each with its line and column. Lines are
    wrapped at `cells` characters, between words where possible."""
    text = Text(overflow="fold")
    for (number, is_drafted), group in groupby(side.tokens, key=lambda token: (token.round, token.is_drafted)):
        letters = "".join(token.text for token in group).replace("\r", "").replace("\t", "    ")
        text.append(printable(letters), Style(meta={"round": number, "is_drafted": is_drafted}))
    for number, line in enumerate(text.wrap(Console(), cells)):
        for begin, end, style in line.spans:
            before, shown = line.plain[:begin], line.plain[begin:end]
            if shown.strip() and isinstance(style, Style):
                cell = cell_len(before + shown) - cell_len(shown.lstrip())
                yield Run(number, cell, shown.strip(), cell_len(shown.strip()), **style.meta)
