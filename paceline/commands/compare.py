"""`paceline compare`: record the token times of both ways, or read those of a run; write the page, the picture, the figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.timing import NAME, Timing, read_timing, record
from paceline.bench.timing_page import page
from paceline.bench.timing_svg import check_speed, svg
from paceline.commands.terminal import print_json, progress, say
from paceline.runlog import RunFolder, write_whole
from paceline.types import SamplingParams

PAGE = "compare.html"


@dataclass(frozen=True, slots=True)
class CompareAsk:
    """A `compare` command, its options read and checked."""

    prompt: str
    settings: dict[str, Any]
    """Keyword arguments of LLM."""
    params: SamplingParams
    system: str | None = None
    raw: bool = False
    repeat: int = 3
    out: Path | None = None
    svg: Path | None = None
    svg_speed: float | None = None
    as_json: bool = False


def compare(ask: CompareAsk) -> None:
    """Ask both ways, record, draw."""
    from paceline.commands.generate import Ask, encode
    from paceline.commands.terminal import introduce
    from paceline.engine.llm import LLM
    from paceline.hardware import this_machine

    check_speed(ask.svg_speed)
    llm = LLM(**ask.settings)
    say(introduce(llm))
    token_ids = encode(llm, Ask(ask.prompt, ask.settings, ask.params, ask.system, ask.raw))
    machine = this_machine(llm.config.device)
    with progress("answering", 2 * ask.repeat) as advance:
        timing = record(
            llm, token_ids, ask.params, prompt=ask.prompt, machine=machine.name, repeat=ask.repeat, on_answer=advance
        )
    described = {"llm": ask.settings, "sampling": ask.params, "system": ask.system, "raw": ask.raw, "repeat": ask.repeat}
    run = RunFolder.create("compare", described, ask.out)
    run.write_json(NAME, timing)
    _draw(run, timing, ask.svg, ask.svg_speed, ask.as_json)


def show(recorded: Path, out: Path | None, picture: Path | None, svg_speed: float | None, as_json: bool) -> None:
    """Draw what was recorded, into its own folder or into `out`. Raises ConfigError when there is nothing to draw."""
    check_speed(svg_speed)
    timing = read_timing(recorded)
    _draw(RunFolder(out or (recorded if recorded.is_dir() else recorded.parent)), timing, picture, svg_speed, as_json)


def _draw(run: RunFolder, timing: Timing, picture: Path | None, svg_speed: float | None, as_json: bool) -> None:
    made = {"page": run.write(PAGE, page(timing))}
    if picture is not None:
        write_whole(picture, svg(timing, svg_speed))
        made["svg"] = picture
    off, on = timing.off, timing.on
    say(
        f"off {off.tokens_per_s:.1f} tokens/s, on {on.tokens_per_s:.1f} tokens/s ({on.tokens_per_round:.2f} tokens per round): "
        f"{timing.verdict}"
    )
    say("open in a browser: " + ", ".join(str(path) for path in made.values()))
    if as_json:
        print_json(
            {
                "speedup": timing.speedup,
                "off": {"tokens_per_s": off.tokens_per_s, "total_s": off.total_s, "num_tokens": len(off.tokens)},
                "on": {
                    "tokens_per_s": on.tokens_per_s,
                    "total_s": on.total_s,
                    "num_tokens": len(on.tokens),
                    "tokens_per_round": on.tokens_per_round,
                },
                "first_difference": timing.first_difference,
                "lossless": on.lossless,
                "text": on.text,
                "run": run.path,
                **made,
            }
        )
