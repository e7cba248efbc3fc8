"""Parts of adapt_live.py and fleet_vllm.py: a run folder, the daemon `paceline adapt watch` and its log, limits of
time, a poisoned drafter, and the JSON object at the end."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from adapt_clients import QUESTIONS, TICKETS, Traffic
from safetensors.torch import load_file, save_file
from server_process import Missed, Started, process

from paceline.errors import PacelineError
from paceline.loop.adapt.gate.lineage import Lineage
from paceline.loop.adapt.log import AdaptLog
from paceline.runs.folder import record_of, write_results

HOURS, BEGINS_AT, LATE_S = "PACELINE_ADAPT_HOUR_S", 6, 120
"""The run begins at six of a day; an hour is decided about when all of it is two minutes old."""
SETTINGS: dict[str, Any] = {
    "rest": 0.15, "think_s": 2.5, "max_tokens": 80, "max_len": 1024, "num_questions": 160, "num_tickets": 200,
    "num_general": 80, "num_ood": 30, "requests": 40, "learning_rate": 1e-3, "probation_minutes": 1.0, "noise": 1.0,
    "after_s": 20.0,
}  # fmt: skip
"""Load of both stories. rest: share of questions among the tickets; think_s: mean seconds that a client waits between
its requests; num_general, num_ood: prompts of each file; requests: of each set that the gate scores; noise: of the
poisoned weights, in their deviations; after_s: seconds of traffic behind the last step."""


def noised(source: Path, out: Path, noise: float) -> Path:
    """Writes the drafter's folder with normal noise on each matrix: so many times the deviation of its weights."""
    shutil.copytree(source, out)
    weights, draw = load_file(source / "model.safetensors"), torch.Generator().manual_seed(0)
    for tensor in weights.values():
        if tensor.ndim == 2:
            values = tensor.float()
            tensor.copy_(values + noise * values.std() * torch.randn(values.shape, generator=draw))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out.resolve()


class Story:
    """The steps of one run beside a daemon, and their results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.time()
        self.out: Path = options.out
        self.state = self.out / "adapt"
        self.times: dict[str, float] = {}
        """Name -> seconds since 1970."""
        self.results: dict[str, Any] = {}
        self._num_printed = 0
        about = time.time() / options.hour_s
        self.hour_s = time.time() / (about - about % 24 + 24 + BEGINS_AT)

    def say(self, text: str) -> None:
        print(f"{(time.time() - self.began) / 60:5.1f} min  {text}", file=sys.stderr, flush=True)

    def mark(self, name: str) -> float:
        self.times[name] = time.time()
        return self.times[name]

    def command(self, *words: Any) -> list[str]:
        return [sys.executable, "-m", "paceline", *map(str, words)]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {HOURS: repr(self.hour_s)}

    def answers(self, name: str, sources: list[str], number: int) -> list[Path]:
        """Answers of the target to other prompts, for trainings and for the gate."""
        words = ["regenerate", "--target", self.options.model, "--dtype", self.options.dtype]
        folders = []
        for place, source in enumerate(sources):
            out = self.out / f"{name}-{place}"
            more = ["--prompts", source, "--limit", number, "--max-tokens", self.options.max_tokens, "--out", out]
            with (self.out / "regenerate.log").open("a") as log:
                subprocess.run(self.command(*words, *more), check=True, stdout=log, stderr=log)
            folders.append(out / "answers")
        self.say(f"{name}: up to {number} answers of each of {len(sources)} files")
        return folders

    # Beside the servers

    def watching(self, command: list[str]) -> AbstractContextManager[Started]:
        return process(command, self.out / "watch.log", self.environment)

    def events(self) -> list[dict[str, Any]]:
        """The daemon's logged events; prints new ones."""
        lines = [line for line in AdaptLog(self.state).lines() if "event" in line]
        for line in lines[self._num_printed :]:
            self.say(f"adapt: {line['event']} {', '.join(line.get('clusters') or [])} {line.get('why') or ''}".rstrip())
        self._num_printed = len(lines)
        return lines

    def until(self, what: str, seconds: float, is_so: Callable[[], bool], daemon: Started) -> None:
        """Wait; raises Missed when it does not come."""
        ends, printed = time.time() + seconds, time.time()
        while not is_so():
            if daemon.poll() is not None:
                raise Missed(f"the daemon ended with status {daemon.returncode}: see {self.out / 'watch.log'}")
            if time.time() > min(ends, self.began + 60 * self.options.limit_minutes):
                raise Missed(
                    f"{what}: not within {seconds / 60:.1f} minutes of waiting, or not within the limit of the whole"
                )
            if time.time() > printed + 60:
                printed = time.time()
                self.say(f"waiting: {what}")
            time.sleep(1.0)
        self.mark(what)

    def until_event(self, names: tuple[str, ...], seconds: float, daemon: Started, since: int = 0) -> str:
        """Wait for one of these events behind the first `since`; which it was."""

        def latest() -> str | None:
            return next((line["event"] for line in self.events()[since:] if line["event"] in names), None)

        self.until(" or ".join(names), seconds, lambda: latest() is not None, daemon)
        return str(latest())

    def turn(self, traffic: Traffic, daemon: Started) -> None:
        """Sends questions until the daemon knows a season, then tickets until it trains."""
        hours = self.options.calm_hours * self.hour_s
        begun = self.mark("questions begin")
        self.until("the season is known", 2 * hours + 60, lambda: time.time() - begun >= hours, daemon)
        self.mark("tickets begin")
        rest = self.options.rest
        traffic.shares = {TICKETS: 1 - rest, QUESTIONS: rest}
        self.say(f"the traffic turns: {1 - rest:.0%} tickets")
        self.wanted("training", ("failed",), 60 * self.hour_s + LATE_S + 60, daemon)

    def wanted(self, event: str, names: tuple[str, ...], seconds: float, daemon: Started) -> None:
        """Wait for `event` or one of `names`; raises Missed if it is one of these."""
        if (ended := self.until_event((event, *names), seconds, daemon)) != event:
            raise Missed(f"{event} was to come, and {ended} came: {self.events()[-1].get('why')}")
        self.mark(event)

    def judged(self, drafter: Path, incumbent: Path, *more: Any) -> dict[str, Any]:
        """The gate's verdict on a drafter, with its exit status."""
        options = self.options
        words = ["adapt", "gate", drafter, "--model", options.model, "--dtype", options.dtype, "--incumbent", incumbent]
        words += ["--traces", self.out / "traces", "--requests", options.requests, *more]
        done = subprocess.run(self.command(*words, "--json"), env=self.environment, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        if not lines:
            raise Missed(f"the gate printed nothing and ended with status {done.returncode}: {done.stderr[-500:]}")
        verdict = json.loads(lines[-1]) | {"status": done.returncode}
        self.say(f"the gate on {drafter.name}: {verdict.get('reason')}")
        return verdict

    def poison(self, ours: Path, *more: str) -> Path:
        """Writes our drafter's weights with noise; the gate must refuse them."""
        bad = noised(ours, self.out / "poisoned", self.options.noise)
        since = Lineage(self.state / "lineage.json").entries()[-1]["window"]["since"]
        self.results["gate_of_the_poisoned"] = self.judged(bad, ours, "--cluster", TICKETS, "--since", since, *more)
        return bad

    def verdicts(self, traffic: Traffic, missed: str | None) -> dict[str, bool]:
        """Conditions of both stories -> True if they hold. Puts the events and the failed requests into the results."""
        events, gate = self.events(), self.results.get("gate_of_the_poisoned", {})
        shown = [{key: line.get(key) for key in ("hour", "event", "why")} for line in events]
        self.results |= {"failed": traffic.failed[:20], "events": shown}
        return {
            "one training": [line["event"] for line in events].count("training") == 1,
            "the poisoned one is refused by the gate": gate.get("passed") is False and gate.get("status") == 3,
            "in time": time.time() - self.began < 60 * self.options.limit_minutes and missed is None,
        }

    def until_taken_back(self, daemon: Started, since: int) -> str:
        """Wait for the end of the poisoned one's probation, behind the first `since` events; how it ended."""
        seconds = 60 * (self.options.probation_minutes + 5)
        ended = self.until_event(("rolled back", "kept"), seconds, daemon, since)
        self.mark("taken back")
        return ended


def add_arguments(parser: argparse.ArgumentParser, out: str, limit_minutes: float) -> None:
    """Adds the options that both scripts have."""
    parser.add_argument("--questions", required=True, help="prompts of the first traffic, as GSM8K's")
    parser.add_argument(
        "--general", action="append", required=True, help="prompts learned beside tickets; may be repeated"
    )
    parser.add_argument("--ood", action="append", required=True, help="prompts that must not suffer; may be repeated")
    parser.add_argument("--hour-s", type=float, default=8.0, help="seconds of an hour of the daemon")
    parser.add_argument(
        "--calm-hours", type=float, default=54.0, help="hours of questions; a season needs more than 48"
    )
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=9.0, help="of training")
    parser.add_argument("--limit-minutes", type=float, default=limit_minutes)
    parser.add_argument("--watch-options", default="", help="more words for paceline adapt watch")
    parser.add_argument("--out", type=Path, default=Path(out), help="replaced if it is there")
    parser.set_defaults(**SETTINGS)


def watch_options(options: argparse.Namespace, general: list[Path], ood: list[Path]) -> list[Any]:
    """The daemon's options that are the same beside every engine."""
    words: list[Any] = [word for folder in general for word in ("--general", folder)]
    words += [word for folder in ood for word in ("--ood", folder)]
    words += ["--early-periods", 1, "--every", 2, "--probation-minutes", options.probation_minutes]
    words += ["--training-price", 0.001, "--requests", options.requests, "--minutes", options.minutes]
    return [*words, "--learning-rates", options.learning_rate]


def new_folder(out: Path, mark: str) -> Path:
    """An empty run folder, in place of an earlier one of the same script."""
    out = out.absolute()
    if out.exists() and not (out / mark).exists():
        sys.exit(f"{out} is there, and no run of this script: choose another --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / mark).touch()
    (out / "traces").mkdir(mode=0o700)
    return out


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def finish(run: Story, go: Callable[[], None], verdicts: Callable[[str | None], dict[str, bool]], what: str) -> int:
    """Runs it, prints what is so and what is not, then one JSON object; the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background process ignores SIGINT
        signal.signal(number, interrupted)
    missed = None
    try:
        go()
    except (Missed, PacelineError, OSError, RuntimeError, LookupError, ValueError, subprocess.SubprocessError) as error:
        missed = str(error) if isinstance(error, Missed) else f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        missed = "interrupted"
    if missed:
        run.say(f"MISSED: {missed}")
    checks = verdicts(missed)
    for name, is_so in checks.items():
        run.say(f"{'ok    ' if is_so else 'FAILED'} {name}")
    figures: dict[str, Any] = {"what": what, "passed": all(checks.values()), "missed": missed}
    figures |= {"minutes": round((time.time() - run.began) / 60, 2), "checks": checks, **run.results}
    figures |= {"times_min": {name: round((when - run.began) / 60, 2) for name, when in run.times.items()}}
    settings = {
        name: value if isinstance(value, int | float | list) else str(value)
        for name, value in vars(run.options).items()
    }
    figures |= {"hour_s": run.hour_s, "settings": settings}
    print(json.dumps(record_of(figures)), flush=True)
    if results := getattr(run.options, "results", None):
        write_results(results, figures)
    return 0 if figures["passed"] else 1
