"""What people read of a benchmark: the table, report.md, and the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.bench.decode import Bench, Result, ceiling_tokens_per_s, name_of
from paceline.bench.plots import draw
from paceline.hardware import Machine
from paceline.model.backends import form_of
from paceline.runlog import RunFolder

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.engine.llm import LLM

COLUMNS = ("drafter", "batch", "temp", "tokens/s", "decode/s", "speed-up", "tokens/round", "identical", "lossless", "repeats")
WIDE = 140
"""Columns a terminal needs for the intervals."""
NUM_SAMPLES = 3
SAMPLE_CHARACTERS = 400


def ceiling_line(llm: LLM, machine: Machine) -> str:
    """The most plain decoding could do, stated before anything runs."""
    return (
        f"ceiling: {machine.name} reads {machine.bytes_per_s / 1e9:.1f} GB/s, a pass reads {llm.target.weight_bytes / 1e6:.0f} "
        f"MB of {form_of(llm.target).weight_format} weights: plain decoding of one request cannot exceed "
        f"{ceiling_tokens_per_s(llm, machine):.1f} tokens/s"
    )


def row(result: Result) -> tuple[str, ...]:
    """The cells of one line, under COLUMNS."""
    return (
        result.drafter,
        str(result.batch),
        f"{result.temperature:g}",
        f"{result.tokens_per_s:.1f}",
        "-" if result.decode_tokens_per_s is None else f"{result.decode_tokens_per_s:.1f}",
        f"{result.speedup:.2f}x" + _interval(result.speedup_interval),
        "-"
        if result.tokens_per_round is None
        else f"{result.tokens_per_round:.2f}" + _interval(result.tokens_per_round_interval),
        "-" if result.identical is None else f"{result.identical:.0%}",
        {None: "-", True: "yes", False: "NO"}[result.lossless],
        f"{result.repetition:.0%}",
    )


def _interval(interval: tuple[float | None, float | None]) -> str:
    low, high = interval
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"


def table(results: list[Result], width: int) -> Table:
    """A rich table for the terminal; a narrow one leaves the intervals to the report."""
    from rich import box
    from rich.table import Table

    made = Table(*COLUMNS, box=box.SIMPLE_HEAD)
    for result in results:
        made.add_row(*(cell if width >= WIDE else cell.partition(" [")[0] for cell in row(result)))
    return made


def markdown(bench: Bench, machine: Machine, results: list[Result]) -> str:
    """report.md: ceiling, table, survival, stages, near-ties, and a few answers to judge the text by."""
    llm = bench.llm
    parts = [
        f"# Decoding speed: {llm.config.model}, {llm.config.dtype} ({form_of(llm.target)}), {machine.name}",
        ceiling_line(llm, machine) + ".",
        f"{len(bench.requests)} requests, up to {bench.config.max_tokens} tokens each, medians of {bench.config.repeat} "
        f"repetitions; {bench.num_skipped} turns left out for length. Speed-up is over `none` in the same batch and process. "
        "`repeats`: share of 8-grams that stood before in the same answer; looping text is easy to draft.",
        markdown_table(COLUMNS, [row(result) for result in results]),
        "## Survival\n\nShare of rounds whose first i drafts all stood.\n\n" + _survival(results),
        "## Time by stage (seconds)\n\n" + _stages(results, machine),
        "## Differences from plain greedy decoding\n\n" + _differences(results),
        "## Samples\n\n" + _samples(bench),
    ]
    return "\n\n".join(parts) + "\n"


def markdown_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table as Markdown."""
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _survival(results: list[Result]) -> str:
    lines = [
        f"- {name_of(result)}: " + ", ".join(f"{share:.2f}" for share in result.survival)
        for result in results
        if result.survival
    ]
    return "\n".join(lines) or "Nothing was drafted."


def _stages(results: list[Result], machine: Machine) -> str:
    names = ("prefill", "draft", "verify", "host", "wall")
    rows = []
    for result in results:
        cells = ["-" if result.seconds[name] is None else f"{result.seconds[name]:.2f}" for name in names]
        rate = (
            "-"
            if result.bytes_per_s is None
            else f"{result.bytes_per_s / 1e9:.1f} ({result.bytes_per_s / machine.bytes_per_s:.0%})"
        )
        rows.append((name_of(result), *cells, rate))
    return markdown_table(("setting", *names, "GB/s of weights while verifying"), rows)


def _differences(results: list[Result]) -> str:
    lines = [
        f"- {name_of(result)}, request {each.request}: first at token {each.index}, "
        f"where the two best logits were {each.top2_gap:.4f} apart"
        for result in results
        for each in result.differences
    ]
    return "\n".join(lines) or "None."


def _samples(bench: Bench) -> str:
    passes = next((passes for passes in reversed(bench.passes.values()) if passes), [])
    answers = passes[0].answers[:NUM_SAMPLES] if passes else []
    pairs = zip(bench.requests, answers, strict=False)
    return "\n\n".join(f"**{request.name}**\n\n```text\n{answer.text[:SAMPLE_CHARACTERS]}\n```" for request, answer in pairs)


def raw_runs(bench: Bench) -> list[dict[str, Any]]:
    """Every pass with every answer's counts and times, without the texts."""
    return [
        {
            "drafter": setting.drafter,
            "batch": setting.batch,
            "temperature": setting.temperature,
            "repetition": number,
            "wall_s": each.wall_s,
            "prefill_s": each.prefill_s,
            "draft_s": each.draft_s,
            "verify_s": each.verify_s,
            "num_passes": each.num_passes,
            "answers": [
                {
                    "request": request.name,
                    "num_prompt_tokens": len(request.token_ids),
                    "num_output_tokens": len(answer.token_ids),
                    "seconds": answer.seconds,
                    "num_rounds": answer.num_rounds,
                    "num_accepted": answer.num_accepted,
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
    run.report(markdown(bench, machine, results))
    run.write_json("results.json", {**line, "runs": raw_runs(bench)})
    texts = [
        {
            "drafter": setting.drafter,
            "batch": setting.batch,
            "temperature": setting.temperature,
            "request": request.name,
            "text": answer.text,
        }
        for setting, passes in bench.passes.items()
        for request, answer in zip(bench.requests, passes[0].answers if passes else [], strict=False)
    ]
    run.write_json("texts.json", texts)
    return draw(run.path, results)
