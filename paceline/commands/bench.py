"""`paceline bench decode`: load once, state the ceiling, run, write the run folder, print the table."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.bench.config import BenchConfig
from paceline.bench.decode import Bench, as_line
from paceline.bench.report import ceiling_line, table, write_run
from paceline.commands.terminal import introduce, print_json, progress, say
from paceline.engine.llm import LLM
from paceline.hardware import this_machine
from paceline.prompts import read_prompts
from paceline.runlog import RunFolder, write_whole

BUILTIN_PROMPTS = Path(__file__).parent.parent / "bench" / "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class BenchAsk:
    """A `bench decode` command, its options read."""

    settings: dict[str, Any]
    """Keyword arguments of LLM."""
    config: BenchConfig
    prompts: str | None = None
    limit: int | None = None
    out: Path | None = None
    save_results: Path | None = None
    """Folder or file for one JSON of figures, versions, commit and raw runs."""
    as_json: bool = False


def bench_decode(ask: BenchAsk) -> None:
    """Run the benchmark and report it."""
    prompts = read_prompts(ask.prompts or BUILTIN_PROMPTS, ask.limit)
    run = RunFolder.create("bench-decode", _described(ask), ask.out)
    llm = LLM(drafter="none", max_batch=max(ask.config.batches), **ask.settings)
    machine = this_machine(llm.config.device)
    say(introduce(llm))
    say(ceiling_line(llm, machine))
    bench = Bench(llm, prompts, ask.config, notice=say)
    with progress("decoding", bench.num_answers) as advance:
        bench.run(
            on_answer=lambda setting: advance(str(setting)),
            on_pass=lambda setting, done: run.log(**asdict(setting), tokens_per_s=done.tokens_per_s, wall_s=done.wall_s),
        )
    line = as_line(bench, machine)
    notice = write_run(run, bench, machine, line)
    if notice:
        say(notice)
    table(line["results"]).show()
    say(f"report, figures and raw runs: {run.path}")
    if ask.save_results:
        say(f"results: {_save(ask.save_results, run, line['device'])}")
    if ask.as_json:
        print_json({**line, "run": run.path})


def _described(ask: BenchAsk) -> dict[str, Any]:
    prompts = ask.prompts or "built-in"
    return {"llm": ask.settings, "bench": ask.config, "prompts": prompts, "limit": ask.limit}


def _save(where: Path, run: RunFolder, device: str) -> Path:
    """Copy the run's results.json to a file of its own."""
    file = where if where.suffix == ".json" else where / f"decode_{device}_{time.strftime('%Y-%m-%d')}.json"
    write_whole(file, (run.path / "results.json").read_text(encoding="utf-8"))
    return file
