"""What people read of `paceline bench decode`: the table, report.md, and the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from paceline.bench.decode import Bench, Result
from paceline.bench.drafting import sources_table
from paceline.bench.pages import render
from paceline.bench.plots import Series, curves, ranges
from paceline.config import EngineConfig
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.hardware import Machine, this_machine
from paceline.model.backends import form_of
from paceline.progress import Progress
from paceline.runlog import RunFolder
from paceline.tables import Column, Table

NUM_SAMPLES = 3
MEANING = (
    "Speed-up is over plain decoding (none), same batch and process. identical: greedy answers that equal plain decoding's, "
    "token for token. repeats: share of 8-grams that stood before in the same answer; looping text is easy to draft. Brackets: "
    "95% bootstrap intervals over prompts."
)


def with_interval(value: float | None, interval: Sequence[float | None] | None, unit: str = "") -> str | None:
    """A figure with its interval, where there is one: "1.50x [1.40, 1.60]"."""
    if value is None:
        return None
    low, high = interval or (None, None)
    return f"{value:.2f}{unit}" + ("" if low is None or high is None else f" [{low:.2f}, {high:.2f}]")


COLUMNS = (
    Column("drafter", lambda each: each.drafter),
    Column("batch", lambda each: each.batch, align="right"),
    Column("temp", lambda each: each.temperature, "{:g}", "right"),
    Column("tokens/s", lambda each: each.tokens_per_s, "{:.1f}", "right"),
    Column("decode/s", lambda each: each.decode_tokens_per_s, "{:.1f}", "right"),
    Column("speed-up", lambda each: with_interval(each.speedup, each.speedup_interval, "x"), cut=" ["),
    Column("tokens/round", lambda each: with_interval(each.tokens_per_round, each.tokens_per_round_interval), cut=" ["),
    Column("identical", lambda each: each.identical, "{:.0%}", "right"),
    Column("lossless", lambda each: {None: None, True: "yes", False: "NO"}[each.lossless]),
    Column("repeats", lambda each: each.repetition, "{:.0%}", "right"),
)


def ceiling_line(llm: LLM, machine: Machine) -> str:
    """The most plain decoding could do, stated before anything runs."""
    return render("ceiling.txt", llm=llm, machine=machine, weight_format=form_of(llm.target).weight_format).rstrip()


def loaded(engine: EngineConfig, progress: Progress) -> tuple[LLM, Machine]:
    """The model without a drafter, and the machine's ceiling, which is told before anything is measured."""
    llm = LLM.of(replace(engine, drafter="none"))
    machine = this_machine(llm.config.device)
    progress.loaded(llm)
    progress.say(ceiling_line(llm, machine))
    return llm, machine


def table(results: list[Result]) -> Table:
    """A line for each setting; a narrow terminal leaves the intervals to the report."""
    return Table(COLUMNS, results, width=140)


def markdown(bench: Bench, machine: Machine, results: list[Result]) -> str:
    """report.md: ceiling, table, survival, stages, near-ties, and a few answers to judge the text by."""
    passes = next((passes for passes in reversed(bench.passes.values()) if passes), [])
    answers = passes[0].answers[:NUM_SAMPLES] if passes else []
    return render(
        "decode.md",
        bench=bench,
        llm=bench.llm,
        form=form_of(bench.llm.target),
        machine=machine,
        ceiling=ceiling_line(bench.llm, machine),
        meaning=MEANING,
        results=results,
        figures=table(results),
        sources=sources_table([(result.setting, result) for result in results]),
        differences=[(result.setting, each) for result in results for each in result.differences],
        samples=list(zip(bench.requests, answers, strict=False)),
    )


def raw_runs(bench: Bench) -> list[dict[str, Any]]:
    """Every pass with every answer's counts and times, without the texts."""
    return [
        {
            **asdict(setting),
            "repetition": number,
            **{name: getattr(each, name) for name in ("wall_s", "prefill_s", "draft_s", "verify_s", "num_passes")},
            "answers": [
                {
                    "request": request.name,
                    "num_prompt_tokens": len(request.token_ids),
                    "num_output_tokens": len(answer.token_ids),
                    **{name: getattr(answer, name) for name in ("seconds", "num_rounds", "num_accepted")},
                }
                for request, answer in zip(bench.requests, each.answers, strict=True)
            ],
        }
        for setting, passes in bench.passes.items()
        for number, each in enumerate(passes)
    ]


def write_run(run: RunFolder, bench: Bench, machine: Machine, line: dict[str, Any]) -> str | None:
    """report.md, results.json, texts and figures; returns a notice when the figures had to be left out."""
    results: list[Result] = line["results"]
    run.write("report.md", markdown(bench, machine, results))
    run.results({**line, "runs": raw_runs(bench)})
    texts = [
        {**asdict(setting), "request": request.name, "text": answer.text}
        for setting, passes in bench.passes.items()
        for request, answer in zip(bench.requests, passes[0].answers if passes else [], strict=False)
    ]
    run.write_json("texts.json", texts)
    return draw(run, results)


def draw(run: RunFolder, results: list[Result]) -> str | None:
    """survival.svg and tokens_per_s.svg; returns a notice when they had to be left out."""
    drafted = [result for result in results if result.survival]
    series = [
        Series(each.setting, range(1, len(each.survival) + 1), each.survival, color) for color, each in enumerate(drafted)
    ]
    speeds = [(each.setting, each.tokens_per_s, each.tokens_per_s_range, 0) for each in results]
    try:
        survived = curves("survival", series, xlabel="first i drafts stood", ylabel="share of rounds", ylim=(0, 1))
        plots = (survived, ranges("tokens_per_s", speeds, "tokens per second: median, slowest and fastest repetition"))
    except ConfigError as error:
        return f"no figures: {error}"
    for name, drawn in plots if series else plots[1:]:
        run.write(f"{name}.svg", drawn)
    return None
