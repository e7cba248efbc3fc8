"""Training on one GPU and on several: whole runs, whether they learn the same, and how fast. For a machine with 1 to 8
GPUs.

    python experiments/many_gpus.py --out runs/many-gpus                                         # all GPUs, ten minutes
    at most python experiments/many_gpus.py --device cpu --processes 2 --tiny --out runs/many-gpus-tiny  # no GPU: gloo,
    a random target

The target answers once, on all processes. Then `paceline train` goes through features, steps and held-out prompts
served, with the same documents: on one process, on all with the network on each (replicated) and with a part on each
(sharded); in float32, where they must agree closely, and with products in bfloat16. What is measured is printed and
written to
OUT/result.json: losses step by step and last weights beside those of one process, blocks per second of the steps after
the first few, seconds of each command. Exit status 1 when they differ by more than the limits below.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from paceline.runs.folder import RunFolder, write_results
from paceline.train.tiny import write_tiny_target

LIMITS = {"float32": {"loss": 1e-4, "weight": 1e-4}, "bfloat16": {"loss": 2e-2, "weight": 5e-3}}
"""Largest difference to one process: of a step's loss, relative; of a last weight. Sums are made in another order."""
WARM_UP = 5
"""Steps that are not timed."""
SUBJECTS = ("a river", "a train", "bread", "the moon", "a small shop", "an old map", "rain", "a chess game")
TASKS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Write a poem about {}.",
)


@dataclass
class Bench:
    """One pass of the script: its options, what it runs, and until when."""

    options: argparse.Namespace
    out: Path
    deadline: float
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each command."""

    def run(self, name: str, world: int, words: list[str]) -> None:
        """`paceline` with these words on so many processes; SystemExit with the end of its output when it fails or is
        late."""
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
        command = [sys.executable, *launch, "-m", "paceline", *words]
        threads = {"OMP_NUM_THREADS": "1"} if self.options.device == "cpu" else {}
        print(f"{name}: paceline {' '.join(words)}", flush=True)
        began, log = time.monotonic(), self.out / f"{name}.log"
        with log.open("w", encoding="utf-8") as output:
            try:
                done = subprocess.run(
                    command,
                    stdout=output,
                    stderr=output,
                    env=os.environ | threads,
                    timeout=max(1.0, self.deadline - began),
                )
            except subprocess.TimeoutExpired:
                raise SystemExit(
                    f"{name}: the {self.options.minutes:g} minutes are over; fewer --steps or more --minutes"
                ) from None
        self.seconds[name] = round(time.monotonic() - began, 1)
        if done.returncode:
            raise SystemExit(
                f"{name} ended with status {done.returncode}, {log}:\n{log.read_text(encoding='utf-8')[-2000:]}"
            )

    def target(self) -> list[str]:
        model = str(write_tiny_target(self.out / "target")) if self.options.tiny else self.options.target
        dtype = "float32" if self.options.tiny else "bfloat16"
        return ["--target", model, "--device", self.options.device, "--dtype", dtype]

    def answer(self) -> Path:
        """Folder of the target's answers."""
        prompts, folder, options = self.out / "prompts.jsonl", self.out / "answers", self.options
        questions = [
            task.format(f"{subject}, number {number}") for number in range(99) for task in TASKS for subject in SUBJECTS
        ]
        prompts.write_text(
            "".join(json.dumps({"prompt": each}) + "\n" for each in questions[: options.prompts]), encoding="utf-8"
        )
        words = ["regenerate", *self.target(), "--prompts", str(prompts), "--max-tokens", str(options.max_tokens)]
        self.run("answers", options.processes, [*words, "--out", str(folder)])
        return folder / "answers"

    def train(self, answers: Path, world: int, way: str, precision: str) -> dict[str, Any]:
        """A whole training, and its figures."""
        name, options = f"{way}-{world}-{precision}", self.options
        words = ["train", *self.target(), "--answers", str(answers), "--out", str(self.out / name), "--plan", "off"]
        words += ["--parallel", way, "--max-steps", str(options.steps), "--serve-share", "0", "--max-len", "512"]
        words += ["--full-precision"] if precision == "float32" else []
        words += ["--layers", "2", "--taps", "2", "--blocks-per-step", "128", "--anchors", "16"] if options.tiny else []
        self.run(name, world, words)
        run = RunFolder(self.out / name)
        steps = [line for line in run.metrics() if "objective" in line]
        served = run.path / "heldout.json"
        return {
            "processes": world,
            "way": way,
            "precision": precision,
            "seconds": self.seconds[name],
            "objective": [line["objective"] for line in steps],
            "blocks_per_s": statistics.median(line["blocks_per_s"] for line in steps[WARM_UP:]),
            "tokens_per_s": statistics.median(line["tokens_per_s"] for line in steps[WARM_UP:]),
            "eal": next((line["heldout"]["eal"] for line in reversed(steps) if "heldout" in line), None),
            "served_tokens_per_round": json.loads(served.read_text())["tokens_per_round"] if served.is_file() else None,
        }

    def weights(self, run: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Weights of the last checkpoint, float32."""
        folder = self.out / f"{run['way']}-{run['processes']}-{run['precision']}" / "checkpoints"
        return load_file(max(folder.glob("step-*")) / "model.safetensors")


def beside(bench: Bench, run: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """How far a run is from that on one process, and whether this is within the limits."""
    pairs = zip(run["objective"], alone["objective"], strict=True)
    loss = max(abs(own - other) / abs(other) for own, other in pairs)
    own, other = bench.weights(run), bench.weights(alone)
    weight = max(float((tensor - other[name]).abs().max()) for name, tensor in own.items())
    limits = LIMITS[run["precision"]]
    halves = [torch.equal(tensor.bfloat16(), other[name].bfloat16()) for name, tensor in own.items()]
    return {
        "largest_loss_difference": loss,
        "largest_weight_difference": weight,
        "same_bits": all(torch.equal(tensor, other[name]) for name, tensor in own.items()),
        "tensors_of_the_drafter_with_the_same_bits": f"{sum(halves)} of {len(halves)}",
        "is_within_limits": loss <= limits["loss"] and weight <= limits["weight"],
        "speedup": run["blocks_per_s"] / alone["blocks_per_s"],
    }


def devices(options: argparse.Namespace) -> list[str]:
    """Names of the GPUs; none on a CPU. SystemExit when there are fewer than asked for."""
    if options.device == "cpu":
        return []
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not number:
        raise SystemExit("there is no GPU here; without one: --device cpu --processes 2 --tiny")
    options.processes = options.processes or number
    if options.processes > number:
        raise SystemExit(
            f"--processes {options.processes}: there are {number} GPUs here, and each process wants its own"
        )
    return [torch.cuda.get_device_name(each) for each in range(options.processes)]


def read_options(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder; what an earlier pass left there is deleted")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--processes", type=int, help="default: as many as GPUs; 2 on a CPU")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--tiny", action="store_true", help="a random target of some kilobytes")
    parser.add_argument("--prompts", type=int, help="default: 512, tiny 96")
    parser.add_argument("--max-tokens", type=int, help="of an answer; default: 128, tiny 48")
    parser.add_argument("--steps", type=int, help="of each training; default: 60, tiny 20")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything")
    options = parser.parse_args(words)
    defaults = {"prompts": (512, 96), "max_tokens": (128, 48), "steps": (60, 20)}
    for name, pair in defaults.items():
        setattr(options, name, getattr(options, name) or pair[options.tiny])
    if options.device == "cpu":
        options.processes = options.processes or 2
    if options.steps <= WARM_UP:
        raise SystemExit(f"--steps {options.steps}: the first {WARM_UP} are not timed, give more")
    return options


def main() -> None:
    options = read_options()
    names = devices(options)
    for old in ("answers", *(f"{way}-*" for way in ("replicated", "sharded"))):
        for folder in options.out.glob(old):
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    bench = Bench(options, options.out, began + 60 * options.minutes)
    answers, runs = bench.answer(), []
    for precision in LIMITS:
        alone = bench.train(answers, 1, "replicated", precision)
        runs.append(alone)
        for way in ("replicated", "sharded") if options.processes > 1 else ():
            run = bench.train(answers, options.processes, way, precision)
            runs.append(run | {"beside_one_process": beside(bench, run, alone)})
    for each in runs:
        compared = each.get("beside_one_process", {})
        differs = f", {compared['speedup']:.2f} times one process, {compared}" if compared else ""
        print(
            f"{each['way']} on {each['processes']}, {each['precision']}: {each['blocks_per_s']:.0f} blocks/s{differs}"
        )
    is_equal = all(each["beside_one_process"]["is_within_limits"] for each in runs if "beside_one_process" in each)
    figures = {
        "devices": names,
        "cuda": torch.version.cuda,
        "processes": options.processes,
        "limits": LIMITS,
        "runs": runs,
    }
    figures |= {"seconds": bench.seconds | {"all": round(time.monotonic() - began, 1)}, "is_within_limits": is_equal}
    print(f"{write_results(options.out / 'result.json', figures)}: {'within' if is_equal else 'BEYOND'} the limits")
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()
