"""Lines, bars and progress on stderr, and the one JSON object on stdout."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from paceline.progress import Progress
from paceline.runlog import plain

if TYPE_CHECKING:
    from paceline.engine.llm import LLM, GenerationStats
    from paceline.hardware import Machine
    from paceline.tables import Table

BAR_WIDTH = 30


def say(text: str) -> None:
    """One line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


def print_json(line: dict[str, Any]) -> None:
    """The last line of stdout."""
    print(json.dumps(plain(line)), flush=True)


def histogram_lines(histogram: Sequence[int]) -> list[str]:
    """Accepted drafts per round as a bar chart, one line each count."""
    longest = max(histogram, default=0)
    return [
        f"  {count:3d}  {'█' * round(BAR_WIDTH * rounds / longest)} {rounds}"
        for count, rounds in enumerate(histogram)
        if longest
    ]


def size(num_bytes: float) -> str:
    """Bytes for people: 94 MB, 1.2 GB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def introduce(llm: LLM) -> str:
    """What "auto" and "default" came to, and the memory taken."""
    from paceline.model.backends import form_of

    cache = llm.target.cache
    rows = "1 row" if cache.num_rows == 1 else f"{cache.num_rows} rows"
    return (
        f"{llm.config.model} on {llm.config.device}, {llm.config.dtype} ({form_of(llm.target)}), "
        f"drafter {llm.drafter.name or 'custom'}; "
        f"weights {size(llm.target.weight_bytes)}, KV cache {size(llm.cache_bytes)} ({rows} of {cache.max_len} tokens)"
        + _measured(llm)
    )


def _measured(llm: LLM) -> str:
    """What the planner begins with, where passes were measured at the start."""
    if llm.pass_costs is None:
        return ""
    one, eight = (1000 * llm.pass_costs.seconds(positions) for positions in (1, 8))
    return f"; measured at the start: a pass of one position {one:.1f} ms, of eight {eight:.1f} ms"


def weights_read_per_s(stats: GenerationStats, weight_bytes: int) -> float | None:
    """Bytes of weights read per second of verifying: each round is one pass over all of them."""
    verify_s = stats.timings.verify_s
    return weight_bytes * stats.num_rounds / verify_s if verify_s else None


def stats_lines(stats: GenerationStats, weight_bytes: int, machine: Machine | None = None) -> list[str]:
    """The figures of one answer, for people."""
    times = stats.timings
    lossless = "lossless" if stats.lossless else "NOT LOSSLESS: acceptance was mocked or lossy, do not quote this as a speed-up"
    lines = [
        f"{stats.num_output_tokens} tokens in {stats.total_s:.2f} s: {stats.tokens_per_s:.1f} tokens/s, decoding "
        f"{stats.decode_tokens_per_s:.1f} tokens/s, first token after {1000 * stats.time_to_first_token_s:.0f} ms",
        f"{stats.tokens_per_round:.2f} tokens per round over {stats.num_rounds} rounds, "
        f"{stats.acceptance_rate:.0%} of {stats.num_drafted} drafts accepted; {lossless}",
    ]
    if stats.num_drafted:
        lines += ["accepted drafts per round:", *histogram_lines(stats.accepted_histogram)]
    lines.append(
        f"time: prefill {times.prefill_s:.2f} s, draft {times.draft_s:.2f} s, verify {times.verify_s:.2f} s, "
        f"host {times.host_s:.2f} s"
    )
    rate = weights_read_per_s(stats, weight_bytes)
    if rate and machine:
        lines.append(
            f"verifying reads weights at {rate / 1e9:.1f} GB/s; {machine.name} reads as many bytes at "
            f"{machine.read_bytes_per_s(weight_bytes) / 1e9:.1f} GB/s: "
            f"plain decoding cannot exceed {machine.ceiling_tokens_per_s(weight_bytes):.1f} tokens/s"
        )
    return lines


class TerminalProgress(Progress):
    """Writes to stderr what a library call tells of its progress."""

    def say(self, text: str) -> None:
        say(text)

    def loaded(self, llm: LLM) -> None:
        say(introduce(llm))

    @contextlib.contextmanager
    def bar(self, what: str, total: int) -> Iterator[Callable[[str], None]]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda text: bar.update(task, advance=1, description=text)

    def table(self, table: Table) -> None:
        table.show()


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C only makes the given function true: an answer ends between two rounds. A second one raises."""
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
