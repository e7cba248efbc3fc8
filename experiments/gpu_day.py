"""One short visit to a GPU machine: all that is worth knowing in eight minutes, stage by stage, by worth.

    PYTHONPATH=SITE:. PYTHONUNBUFFERED=1 python3 experiments/gpu_day.py --out OUT --minutes 8
    python experiments/gpu_day.py --device cpu --tiny --out OUT        all of it in tiny, as the tests run it

Each stage is a process of its own, forked from this one, which has imported PyTorch but not touched CUDA: a stage
starts within a second, and one that crashes, hangs or spoils its CUDA context ends alone. At its limit a stage gets
SIGTERM, then SIGKILL; the lines that it had reported stay. One that the rest of the day is too short for is skipped.

OUT/day.json has everything; day.md, printed last, is a short table; profile.json is the profile stage's, log.txt what
stages print, drafters.tar.* what the stage `teach` trained (docs/how-to/gpu.md). The exit status is 0 if every stage
that ran passed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_day_stages.visit import Line, Skipped, Visit, nvidia_smi

from paceline.runs.folder import record_of

FORK = multiprocessing.get_context("fork")
GRACE_S = 5.0
"""Between SIGTERM and SIGKILL."""
LAST_S = 3.0
"""Kept free at the end of the day for writing the results."""
MOST_LOG_BYTES = 15 * 2**20
CLOCKS = "name,clocks.sm,clocks.mem,temperature.gpu,power.draw"
"""Readings of the card just after a stage."""
PRELOADED = ("torch", "transformers", "paceline.bench.passes", "paceline.train.learn.loop", "gpu_day_stages.models")
PRELOADED_IN_TINY = ("torch._dynamo",)
"""Imported by optimisers, in every stage that trains: longer than the stage itself."""


@dataclass(frozen=True)
class Stage:
    """The function `name` of gpu_day_stages.`module`."""

    name: str
    module: str
    limit_s: float
    needs_s: float
    """Least time that is worth starting it for."""

    def load(self) -> Any:
        return getattr(importlib.import_module(f"gpu_day_stages.{self.module}"), self.name)


STAGES = (
    Stage("env", "machine", 20, 2),
    Stage("ceilings", "machine", 20, 8),
    Stage("tiny", "exact", 80, 25),
    Stage("graphs", "exact", 100, 20),
    Stage("kernels", "kernels", 40, 10),
    Stage("layer_kernels", "layer_kernels", 25, 8),
    Stage("rounds", "rounds", 40, 10),
    Stage("plain", "speed", 60, 20),
    Stage("mock", "speed", 75, 25),
    Stage("seeds", "exact", 25, 15),
    Stage("real", "real", 60, 25),
    Stage("profile", "speed", 25, 12),
    Stage("train", "training", 60, 25),
    Stage("batch", "speed", 40, 20),
    Stage("mixtures", "speed", 50, 20),
    Stage("peers", "peers", 60, 25),
    Stage("teach", "real", 540, 60),
)
"""By worth: what is known if the day ends early."""


@dataclass
class Day:
    """Results so far, on disk after every line that a stage reports."""

    out: Path
    header: dict[str, Any]
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    _written_at: float = 0.0

    def write(self, *, is_urgent: bool = True) -> None:
        """Write day.json whole or not at all; when not urgent, at most once a second."""
        if is_urgent or time.monotonic() - self._written_at > 1.0:
            scratch = self.out / "day.part"
            scratch.write_text(json.dumps({**self.header, "stages": self.stages}, indent=1, default=str) + "\n")
            scratch.replace(self.out / "day.json")
            self._written_at = time.monotonic()

    @property
    def is_good(self) -> bool:
        return all(record["status"] in ("passed", "skipped") for record in self.stages.values())

    def table(self) -> str:
        """Stages, then measurements beside what was predicted, then goals."""
        every = [line for record in self.stages.values() for line in record["lines"]]
        card = next((line["name"] for line in every if line.get("what") == "card"), self.header["device"])
        lines = [f"{card}, commit {self.header['commit']}, {self.header['date']}"]
        lines += ["", "| stage | status | s | |", "|---|---|---|---|"]
        for name, record in self.stages.items():
            lines.append(f"| {name} | {record['status']} | {record['seconds']:.0f} | {record['why']} |")
        lines += ["", "| measured | ms | predicted | floor | of read bandwidth |", "|---|---|---|---|---|"]
        for line in (line for line in every if "what" in line and isinstance(line.get("ms"), dict)):
            more = (line.get(name) for name in ("predicted_ms", "measured_floor_ms", "share_of_read"))
            cells = ("" if each is None else f"{each:.3g}" for each in (line["ms"]["median"], *more))
            lines.append(f"| {line['what']} | {' | '.join(cells)} |")
        lines += ["", "| goal | value | wanted | met |", "|---|---|---|---|"]
        words = {True: "yes", False: "no", None: "not judged"}
        for line in (line for line in every if "goal" in line):
            lines.append(f"| {line['goal']} | {line['value']:.3g} | {line['wanted']:.3g} | {words[line['met']]} |")
        return "\n".join(lines) + "\n"


def run_day(stages: Sequence[Stage], visit: Visit, day: Day, minutes: float, began: float) -> None:
    """All stages in turn; `began` is when the day did, on `time.monotonic`."""
    with (day.out / "log.txt").open("ab") as log:
        for stage in stages:
            left_s = began + 60 * minutes - LAST_S - time.monotonic()
            record = day.stages[stage.name] = {
                "status": "running",
                "why": "",
                "seconds": 0.0,
                "lines": [],
            }
            if left_s < stage.needs_s:
                why = f"{max(left_s, 0):.0f} s are left of the day, it needs {stage.needs_s:.0f}"
                record |= {"status": "skipped", "why": why}
            else:
                log.write(f"\n== {stage.name} {time.strftime('%H:%M:%S')}\n".encode())
                log.flush()
                visit.earlier = {name: each["lines"] for name, each in day.stages.items()}
                limit_s = visit.sized(min(stage.limit_s, left_s), left_s)  # in tiny no check may depend on speed
                run_stage(stage, visit, limit_s, record, log.fileno(), day)
                record["clocks"] = nvidia_smi(CLOCKS) if visit.device.startswith("cuda") else {}
            day.write()
            print(f"{stage.name}: {record['status']} in {record['seconds']:.1f} s {record['why']}", flush=True)


def run_stage(stage: Stage, visit: Visit, limit_s: float, record: dict[str, Any], log: int, day: Day) -> None:
    """Run one stage in a process of its own and fill its record."""
    lines: list[Line] = record["lines"]
    ours, theirs = FORK.Pipe(duplex=False)
    began = time.monotonic()
    own = replace(visit, ends_at=began + limit_s, send=theirs.send)
    process = FORK.Process(target=_in_child, args=(stage, own, log))
    process.start()
    theirs.close()
    try:
        while (left_s := began + limit_s - time.monotonic()) > 0:
            if ours.poll(min(left_s, 0.5)):
                lines.append(ours.recv())
                day.write(is_urgent=False)
            elif _is_over(process):
                break
    except (EOFError, OSError):  # the stage has closed its end, or died within a line
        _wait(process, began + limit_s - time.monotonic())
    was_ended = not _is_over(process)
    _end(process)
    with contextlib.suppress(EOFError, OSError):
        while ours.poll(0):
            lines.append(ours.recv())
    ours.close()
    status, why = verdict(lines, process.exitcode, f"ended at its limit of {limit_s:.0f} s" if was_ended else "")
    record |= {"status": status, "why": why, "seconds": time.monotonic() - began}


def verdict(lines: list[Line], exit_code: int | None, ended: str) -> tuple[str, str]:
    """A stage's status, and in a few words why."""
    failed = [line["check"] for line in lines if line.get("passed") is False]
    left_out = [line["left_out"] for line in lines if "left_out" in line]
    raised = next((line["traceback"].strip().splitlines()[-1] for line in lines if "raised" in line), "")
    skipped = next((line["skipped"] for line in lines if "skipped" in line), "")
    if ended:
        return "ended", ended
    if exit_code is not None and exit_code < 0:
        return "crashed", f"died of {signal.Signals(-exit_code).name}"
    if raised or exit_code:
        return "raised", raised or f"its process ended with status {exit_code}"
    if failed:
        return "failed", f"{len(failed)} checks failed: {', '.join(failed[:4])}"
    if skipped:
        return "skipped", skipped
    return "passed", f"without {', '.join(left_out)}" if left_out else ""


def _in_child(stage: Stage, visit: Visit, log: int) -> None:
    """The stage's process: a group of its own, output to the log, whatever it raises as its last line."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        stage.load()(visit)
    except Skipped as error:
        visit.send({"skipped": str(error)})
    except BaseException:
        visit.send({"raised": stage.name, "traceback": traceback.format_exc()})
        raise


def _is_over(process: Any) -> bool:
    """True once the process has ended. It is not collected yet, so that no other process or group is given its
    number."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait(process: Any, seconds: float) -> None:
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at and not _is_over(process):
        time.sleep(0.01)


def _end(process: Any) -> None:
    """End a stage's process and all that it started: SIGTERM, then SIGKILL. Collects it."""
    if not _is_over(process):
        _signal_group(process, signal.SIGTERM)
        _wait(process, GRACE_S)
    _signal_group(process, signal.SIGKILL)
    process.kill()  # if it had no group of its own yet
    process.join()


def _signal_group(process: Any, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def preload(more: Sequence[str] = ()) -> list[str]:
    """Import what stages need, and `more`, touching no GPU; returns the modules that cannot be imported, with the
    reason."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whether there is a GPU, without touching CUDA
    missing = []
    for name in (*PRELOADED, *more):
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name}: {error}")
    return missing


def header(options: argparse.Namespace, missing: list[str]) -> dict[str, Any]:
    """Returns the facts that figures depend on; card and driver are in the stage `env`."""
    settings = {name: getattr(options, name) for name in ("device", "tiny", "minutes")}
    record = record_of({**settings, "not_imported": missing})
    return {**record, "commit": options.commit or record["commit"]}


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-day"))
    parser.add_argument("--only", default="", help="these stages, separated by commas, in this order")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything, imports included")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: only whether it runs")
    parser.add_argument("--bring", type=Path, help="folder that gpu_day_stages/pieces.py prepared")
    parser.add_argument("--commit", help="where the checkout cannot tell it")
    parser.add_argument("--list", action="store_true", help="list the stages and end")
    options = parser.parse_args(words)
    known = {stage.name: stage for stage in STAGES}
    names = [name.strip() for name in options.only.split(",") if name.strip()] or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no stage {unknown[0]!r}: choose from {', '.join(known)}")
    options.stages = [known[name] for name in names]
    return options


def main(words: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    options = parsed(words)
    if options.list:
        for stage in options.stages:
            print(f"{stage.name:<13} at most {stage.limit_s:.0f} s, at least {stage.needs_s:.0f}")
        return 0
    logging.basicConfig(level=logging.WARNING)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options.out.mkdir(parents=True, exist_ok=True)
    day = Day(options.out, header(options, preload(PRELOADED_IN_TINY if options.tiny else ())))
    try:
        visit = Visit(options.device, options.tiny, options.out, options.bring)
        run_day(options.stages, visit, day, options.minutes, began)
    finally:
        for child in multiprocessing.active_children():
            _end(child)
        day.write()
        log = options.out / "log.txt"
        if log.exists() and log.stat().st_size > MOST_LOG_BYTES:
            log.write_bytes(log.read_bytes()[-MOST_LOG_BYTES:])
        (options.out / "day.md").write_text(day.table())
        print(day.table(), flush=True)
    return 0 if day.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
