"""`paceline simulate-serving`: resolve names and files, simulate the loads or replay a run, print, write the run folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.commands.simulate import Setup, SimulateAsk, set_up
from paceline.commands.simulate_serving_report import compared_rows, loads_table, write_report
from paceline.commands.terminal import print_json, say
from paceline.errors import ConfigError
from paceline.runlog import RunFolder
from paceline.simulate.arrivals import Survival, parse_lengths, workload
from paceline.simulate.load import Case, LoadFigures, capacity, sweep
from paceline.simulate.measured import read_steps, read_table
from paceline.simulate.prefill import prefill_of_steps
from paceline.simulate.recorded import parse_acceptance
from paceline.simulate.replay import FIRST_TOKEN_WITHIN, THROUGHPUT_WITHIN, Compared, compare, read_passes, recorded_survival
from paceline.simulate.serving import REQUEST_S, PrefillSeconds, ServerShape

SHARES = (0.3, 0.6, 0.8, 0.95, 1.2)
"""Of what plain decoding can finish: the loads when none are given."""
MAX_ROWS, MAX_DRAFT, ACCEPTANCE = 8, 16, "0.8"
LIMITS = (
    "Simulated server: one prefill chunk and one round a step, first come first served, no prefix cache, answers of known "
    "length; HTTP and tokenizing only as --request-overhead says.",
    "Every round's acceptance is drawn anew from one curve: real requests differ from one another, and so do their rounds.",
)


@dataclass(frozen=True, slots=True)
class ServingSimulation:
    """A `simulate-serving` command, its options read; see cli_simulate_serving.py for what they mean."""

    steps: Path | None = None
    model: str | None = None
    hardware: str | None = None
    gpus: int = 1
    precision: str | None = None
    calibration: Path | None = None
    drafter_cost: float | None = None
    drafter_params: float | None = None
    block: int | None = None
    max_draft: int | None = None
    acceptance: str | None = None
    rates: tuple[float, ...] = ()
    concurrencies: tuple[int, ...] = ()
    policies: tuple[str, ...] = ("off", "best", "adaptive")
    requests: int = 400
    prompt_tokens: str = "256"
    answer_tokens: str = "128"
    max_rows: int | None = None
    prefill_chunk: int | None = 256
    request_overhead: float = REQUEST_S
    seed: int = 0
    against: Path | None = None
    out: Path | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        checks = (
            (self.requests < 1, "--requests must be at least 1"),
            (self.max_draft is not None and self.max_draft < 1, "--max-draft must be at least 1"),
            (any(each < 1 for each in self.concurrencies), "--concurrency must be at least 1"),
            (
                bool(self.against and (self.rates or self.concurrencies)),
                "--against has its own loads: leave --rate and --concurrency out",
            ),
        )
        for is_wrong, remedy in checks:
            if is_wrong:
                raise ConfigError(remedy)


def simulate_serving(ask: ServingSimulation) -> None:
    """Simulate and print: people read stdout, or stderr beside --json."""
    if ask.against:
        _replay(ask, ask.against)
        return
    prompt, answer = parse_lengths("--prompt-tokens", ask.prompt_tokens), parse_lengths("--answer-tokens", ask.answer_tokens)
    jobs = workload(ask.requests, prompt, answer, ask.seed)
    setup = _set_up(ask, round(sum(job.prompt_tokens + job.answer_tokens / 2 for job in jobs) / len(jobs)))
    server = _server(ask, MAX_ROWS)
    case = Case(jobs, setup.costs, server, _survival(ask), ask.seed, _prefill_s(ask))
    rates = ask.rates or (() if ask.concurrencies else _usual_rates(case))
    found = sweep(case, ask.policies, rates, ask.concurrencies)
    loads_table(found, _title(setup, server)).show(stderr=ask.as_json)
    _print_notes(setup, ask.as_json)
    line = _line(ask, setup, {"results": found})
    _write(ask, setup, line, found)


def _set_up(ask: ServingSimulation, context: int) -> Setup:
    same = ("model", "hardware", "gpus", "precision", "calibration", "drafter_cost", "drafter_params", "block")
    return set_up(
        SimulateAsk(
            batches=(ask.max_rows or MAX_ROWS,),
            context=context,
            max_draft=_most(ask) or MAX_DRAFT,
            table=ask.steps,
            **{name: getattr(ask, name) for name in same},
        )
    )


def _most(ask: ServingSimulation) -> int | None:
    """Drafts of a round at most, as told, else as many as were measured."""
    if ask.max_draft is None and ask.steps is not None:
        table = read_table(ask.steps)
        return int((table.draft or table.verify).span[3]) - (table.draft is None) or None
    return ask.max_draft


def _survival(ask: ServingSimulation) -> Survival:
    return tuple(parse_acceptance(ask.acceptance or ACCEPTANCE).survival(_most(ask) or MAX_DRAFT))


def _server(ask: ServingSimulation, max_rows: int) -> ServerShape:
    """Prompts are cut as the engine does on the machine that was measured."""
    adapts = ask.steps is not None and read_steps(ask.steps).get("prefill_adapts") is True
    return ServerShape(ask.max_rows or max_rows, ask.prefill_chunk, adapts, ask.request_overhead)


def _prefill_s(ask: ServingSimulation) -> PrefillSeconds | None:
    return prefill_of_steps(read_steps(ask.steps)) if ask.steps else None


def _usual_rates(case: Case) -> tuple[float, ...]:
    most = capacity(case, "off")
    return tuple(float(f"{share * most:.2g}") for share in SHARES)


def _title(setup: Setup, server: ServerShape) -> str:
    return f"{setup.title}, {server.max_rows} rows"


def _print_notes(setup: Setup, as_json: bool) -> None:
    show = say if as_json else print
    for warning in dict.fromkeys(setup.warnings):
        show(f"warning: {warning}")
    show("Limits:")
    for sentence in (*LIMITS, *setup.limits):
        show(f"- {sentence}")


def _replay(ask: ServingSimulation, folder: Path) -> None:
    passes = read_passes(folder)
    tokens = [job.prompt_tokens + job.answer_tokens / 2 for each in passes for job in each.jobs]
    setup = _set_up(ask, round(sum(tokens) / len(tokens)))
    server = _server(ask, _rows_of(folder))
    survival = _survival(ask) if ask.acceptance else recorded_survival(passes)[: ask.max_draft]
    found = compare(passes, setup.costs, server, survival, seed=ask.seed, prefill_s=_prefill_s(ask))
    loads_table(found, _title(setup, server)).show(stderr=ask.as_json)
    within = sum(each.is_within for each in found)
    say(
        f"{within} of {len(found)} within {THROUGHPUT_WITHIN:.0%} of the measured throughput and {FIRST_TOKEN_WITHIN:.0%} of "
        f"the median time to the first token; drafts stood as {'told' if ask.acceptance else 'the run recorded'}: "
        + (", ".join(f"{share:.2f}" for share in survival) or "nothing was drafted")
    )
    _print_notes(setup, ask.as_json)
    line = _line(ask, setup, {"compared": compared_rows(found), "num_within": within, "survival": survival, "against": folder})
    _write(ask, setup, line, found)


def _rows_of(folder: Path) -> int:
    """--max-batch of the servers that the run started; the default when it does not say."""
    try:
        words = json.loads((folder / "config.json").read_text(encoding="utf-8"))["server"]
        return int(words[words.index("--max-batch") + 1]) if "--max-batch" in words else MAX_ROWS
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return MAX_ROWS


def _line(ask: ServingSimulation, setup: Setup, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        **figures,
        "kind": setup.kind,
        "title": setup.title,
        "seed": ask.seed,
        "warnings": list(dict.fromkeys(setup.warnings)),
    }


def _write(ask: ServingSimulation, setup: Setup, line: dict[str, Any], found: list[LoadFigures] | list[Compared]) -> None:
    if ask.out:
        run = RunFolder.create("simulate-serving", asdict(ask), ask.out)
        run.write_json("results.json", line)
        if notice := write_report(run, setup.title, found, [*LIMITS, *setup.limits]):
            say(notice)
        say(f"report and figures: {run.path}")
        line = {**line, "run": run.path}
    if ask.as_json:
        print_json(line)
