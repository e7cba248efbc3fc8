"""A training killed at random moments, extended, shortened, with other memory settings, beside one that runs through.

    python experiments/killed_training.py --prompts user_instructions.jsonl --out runs/killed

One run goes through from prompts to drafter. Another, of the same command, gets SIGKILL at --kills random moments, as many in
each of its stages, and goes on each time. Answers, the losses of all steps, and the bits of the drafter must be the same. Then
copies of a run that stopped half-way go on for longer, for shorter, and with other memory settings: steps before the change
must have the same bits, steps behind other memory settings the same losses up to rounding (--tolerance).

Prints what happens, then one JSON object; status 1 when anything differs, or when a stage was never hit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from paceline.runlog import RunFolder, record_of
from paceline.train.answers import AnswerShards

STAGES = ("starting", "answers", "features", "steps", "end")
SETTINGS = (
    "--plan off --max-tokens 64 --layers 2 --blocks-per-step 64 --anchors 16 --loss-vocab 4096 --features cached "
    "--heldout-every 10 --keep best --checkpoint-minutes 0.02 --plateau off"
)
MEMORY = "--gradient-checkpointing --blocks-per-pack 32"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def stage_of(folder: Path) -> str:
    """How far a run has come, by what it has written."""
    if (folder / "drafter").exists():
        return "end"
    if any((folder / "checkpoints").glob("step-*")):
        return "steps"
    if any(folder.glob("features-*")):
        return "features"
    return "answers" if any(folder.rglob("answers-*")) else "starting"


class Runs:
    """Runs of one command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        options.out.mkdir(parents=True, exist_ok=True)

    def start(self, folder: Path, steps: int, more: str = "") -> subprocess.Popen[bytes]:
        options = self.options
        words = [sys.executable, "-m", "paceline", "train", "--target", options.target, "--limit", str(options.limit)]
        words += [word for source in options.prompts for word in ("--prompts", source)]
        words += [
            *SETTINGS.split(),
            *options.train_options.split(),
            "--max-steps",
            str(steps),
            *more.split(),
            "--out",
            str(folder),
        ]
        with (self.options.out / f"{folder.name}.log").open("a") as said:
            return subprocess.Popen([*words, "--json"], stdout=said, stderr=said)

    def finish(self, folder: Path, steps: int, more: str = "") -> float:
        """Seconds; SystemExit when it fails."""
        return sum(self.timed(folder, steps, more).values())

    def timed(self, folder: Path, steps: int, more: str = "") -> dict[str, float]:
        """Seconds that each stage took; SystemExit when it fails."""
        began, spent = time.monotonic(), dict.fromkeys(STAGES, 0.0)
        process = self.start(folder, steps, more)
        while process.poll() is None:
            time.sleep(0.02)
            now = time.monotonic()
            spent[stage_of(folder)] += now - began
            began = now
        self._check(folder, process.returncode)
        return spent

    def _check(self, folder: Path, status: int) -> None:
        if status:
            sys.exit(f"the run in {folder} ended with status {status}: see {self.options.out / folder.name}.log")

    def kill(self, folder: Path, steps: int, kills: int, spent: dict[str, float], luck: random.Random) -> list[str]:
        """Start, and kill within the next stage that is wanted, after a random part of what that stage takes: where it died."""
        wanted = sorted(range(kills), key=lambda number: number % len(STAGES))
        died: list[str] = []
        for stage in (STAGES[number % len(STAGES)] for number in wanted):
            parts = sum(STAGES[number % len(STAGES)] == stage for number in wanted)
            process, waits_s = self.start(folder, steps), luck.uniform(0.0, spent[stage] / parts)
            while process.poll() is None and STAGES.index(stage_of(folder)) < STAGES.index(stage):
                time.sleep(0.02)
            try:
                self._check(folder, process.wait(waits_s))
                say(f"it was through {waits_s:.1f} s after the beginning of {stage}: not killed")
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                died.append(stage_of(folder))
                say(f"killed {waits_s:.1f} s after the beginning of {stage}, in {died[-1]}")
        return died

    def stopped(self, folder: Path, steps: int, at: int) -> int:
        """SIGTERM after so many steps; the step whose checkpoint it left."""
        process = self.start(folder, steps)
        while process.poll() is None and len(losses(folder)) < at:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait()
        return max(losses(folder), default=0)


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss."""
    if not (folder / "metrics.jsonl").exists():
        return {}
    return {line["step"]: line["objective"] for line in RunFolder(folder).metrics() if "objective" in line}


def answers(folder: Path) -> dict[str, list[int]]:
    shards = {file.parent for file in folder.rglob("answers-*.parquet")}
    return {f"{each.key}#{each.turn}": each.answer_ids for shard in shards for each in AnswerShards(shard)}


def drafter_hash(folder: Path) -> str:
    return hashlib.sha256((folder / "drafter" / "model.safetensors").read_bytes()).hexdigest()


def largest_difference(one: dict[int, float], other: dict[int, float]) -> float:
    return max(abs(one[step] - other[step]) / abs(other[step]) for step in one.keys() & other.keys())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--prompts", action="append", required=True)
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=0.01, help="of a loss, where products are cut otherwise; relative")
    parser.add_argument("--train-options", default="", help="more words for paceline train")
    parser.add_argument("--out", type=Path, default=Path("runs/killed"), help="replaced")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    runs, out, steps, luck = Runs(options), options.out, options.steps, random.Random(options.seed)

    spent = runs.timed(out / "whole", steps)
    whole_s = sum(spent.values())
    say(f"the one that runs through took {whole_s:.0f} s: " + ", ".join(f"{name} {value:.0f}" for name, value in spent.items()))
    died = runs.kill(out / "killed", steps, options.kills, spent, luck)
    runs.finish(out / "killed", steps)
    whole, killed = losses(out / "whole"), losses(out / "killed")
    checks = {
        "the same answers": answers(out / "whole") == answers(out / "killed") != {},
        "the same losses to the bit": whole == killed and len(whole) == steps,
        "the same drafter to the bit": drafter_hash(out / "whole") == drafter_hash(out / "killed"),
        f"killed {options.kills} times, in answers, features and steps too": len(died) == options.kills
        and {"answers", "features", "steps"} <= set(died),
    }

    half = runs.stopped(out / "half", steps, steps // 2)
    say(f"another was stopped at step {half}")
    told: dict[str, Any] = {"whole_s": round(whole_s, 1), "died": {stage: died.count(stage) for stage in STAGES}, "half": half}
    for name, last, more in (("longer", 2 * steps, ""), ("shorter", half + 5, ""), ("memory", steps, MEMORY)):
        folder = out / name
        shutil.copytree(out / "half", folder)
        runs.finish(folder, last, more)
        found = losses(folder)
        before = all(found[step] == whole[step] for step in range(1, half + 1))
        checks[f"{name}: {len(found)} steps, those before the change as they were"] = before and len(found) == last
        told[name] = {"steps": len(found), "largest_difference": largest_difference(found, whole)}
    checks["other memory settings: losses the same up to rounding"] = told["memory"]["largest_difference"] <= options.tolerance
    for name, is_so in checks.items():
        say(f"{'ok    ' if is_so else 'FAILED'} {name}")
    print(json.dumps(record_of({"what": "killed training", "passed": all(checks.values()), "checks": checks, **told})))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
