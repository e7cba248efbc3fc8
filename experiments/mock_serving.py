"""A mocked server under load beside the simulated one: does `simulate-serving` say what `serve --mock` then does?

    python experiments/mock_serving.py --mock 4 --concurrency 1,8
    python experiments/mock_serving.py --model some/config.json --mock .8,.6,.4 --concurrency 1,4

1. `paceline bench steps`: seconds of verifying, drafting, prompts and the host, on this machine, with nothing beside it.
2. `paceline serve --mock`, and `paceline bench serving` against it: random prompts of one length, answers of one length, so
   many requests in flight; the loads in turns, `--repeat` times.
3. `paceline bench steps` once more: a machine whose pace changed meanwhile shows here. The mean of both is taken.
4. `paceline simulate-serving` with these step times, this acceptance, these lengths and loads: tokens per second.
5. For the eye alone: the same load replayed with the step times that the server itself counted (`--against`).

The simulation is given neither the server's own times nor what it kept, but the share of prompt tokens that the server found
in its prefix cache, which is not simulated; HTTP is its `--request-overhead` of 5 ms. Ends with exit status 1 when tokens per
second of a load differ by more than `--within`. Run it alone on the machine. Writes results.json into `--out`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from server_process import HOST, server, stop

from paceline.config import EngineConfig
from paceline.serve.mock import mocked_engine
from paceline.simulate.answer import simulate_server
from paceline.simulate.config import CostsConfig, ServingConfig
from paceline.simulate.load import LoadFigures

WITHIN = 0.15
SAME = 0.15
"""Step times before and after the load that differ by more were measured on a machine whose pace changed."""
VOCABULARY = 1000
"""Prompts are drawn from the first so many tokens."""


@dataclass(frozen=True)
class Row:
    """One load. Tokens per second."""

    concurrency: int
    measured: float
    measured_range: tuple[float, float]
    simulated: float
    error: float
    """Of the simulation, relative to what was measured."""
    replayed: float
    """The simulation with the server's own step times."""
    tokens_per_round: float
    simulated_tokens_per_round: float
    lossless: bool


def curve_of(kept: float | tuple[float, ...]) -> tuple[float, ...]:
    """What the simulation takes: rounds as equal as they can be keep 1, 1, ..., and the last draft in a share of them."""
    if isinstance(kept, tuple):
        return kept
    whole = int(kept - 1)
    return (1.0,) * whole + ((kept - 1 - whole,) if kept - 1 > whole else ())


def mean_steps(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One table of several: the mean of each size."""
    merged = dict(runs[0])
    for name in ("verify", "draft", "prefill"):
        tables = [{tuple(point[:-1]): point[-1] for point in run[name]} for run in runs]
        merged[name] = [[*size, sum(table[size] for table in tables) / len(tables)] for size in tables[0]]
    merged["host_s"] = sum(run["host_s"] for run in runs) / len(runs)
    return merged


def pace(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Seconds of all sizes of a verify pass after the load, over those before it."""
    return sum(point[-1] for point in after["verify"]) / sum(point[-1] for point in before["verify"])


def command(*words: object) -> dict[str, Any]:
    """The JSON line of a paceline command. Raises subprocess.CalledProcessError; its words are on stderr."""
    called = [sys.executable, "-m", "paceline", *map(str, words), "--json"]
    done = subprocess.run(called, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def write_prompts(file: Path, number: int, length: int, seed: int) -> None:
    """Token ids of no meaning: no prompt has a beginning in common with another, so that each is computed whole."""
    draw = random.Random(seed)
    lines = [json.dumps({"prompt_ids": [draw.randrange(VOCABULARY) for _ in range(length)]}) for _ in range(number)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


class Comparison:
    """Measures into `out`; `rows` compares."""

    def __init__(self, options: argparse.Namespace, engine: EngineConfig) -> None:
        self.options, self.kept, self.out = options, engine.mocked, options.out
        assert self.kept is not None
        self.curve = curve_of(self.kept)
        self.most_rows = max(options.concurrency)
        self.model = ["--model", engine.model, "--weights", engine.weights]
        needed = options.prompt_tokens + options.max_tokens + options.num_drafted + 1
        self.length = ["--max-len", max(needed, 512)]
        self.drafter = options.drafter or ("default" if engine.weights == "checkpoint" else "random-dflash")

    def steps(self, name: str) -> dict[str, Any]:
        told = self.options
        batches = sorted({1, 2, *(size for size in (4, 8, 16, 32) if size < self.most_rows), self.most_rows})
        kept = 1 + sum(self.curve)
        words = ["--batch", ",".join(map(str, batches)), "--positions", told.num_drafted + 1, "--repeat", told.step_repeat]
        words += ["--context", told.prompt_tokens + told.max_tokens // 2, "--tokens-per-round", kept]
        command("bench", "steps", *self.model, "--drafter", self.drafter, *words, "--out", self.out / name)
        return json.loads((self.out / name / "steps.json").read_text(encoding="utf-8"))

    def serve(self) -> dict[str, Any]:
        told, prompts = self.options, self.out / "prompts.jsonl"
        loads = ",".join(map(str, told.concurrency))
        write_prompts(prompts, told.requests, told.prompt_tokens, told.seed)
        words = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--mock", told.mock, *self.model, *self.length]
        words += ["--drafter", self.drafter, "--num-drafted", told.num_drafted, "--max-batch", self.most_rows]
        with server([*map(str, words)]) as (process, port, _):
            line = command(
                *("bench", "serving", "--url", f"http://{HOST}:{port}", "--speculate", "full", "--concurrency", loads),
                *("--requests", told.requests, "--max-tokens", told.max_tokens, "--ignore-eos", "--repeat", told.repeat),
                *("--seed", told.seed, "--prompts", prompts, "--out", self.out / "served"),
            )
            stop(process)
        return line

    def simulate(self, steps: dict[str, Any], concurrency: int, reused: float) -> LoadFigures:
        """Of one load, `reused` being the share of prompt tokens that need not be computed."""
        told, file = self.options, self.out / "steps.json"
        file.write_text(json.dumps(steps), encoding="utf-8")
        asked = ServingConfig(
            max_draft=told.num_drafted,
            acceptance="survival:" + ",".join(map(str, (*self.curve, 0.0))),
            concurrency=(concurrency,),
            requests=told.requests,
            prompt_tokens=str(max(1, round(told.prompt_tokens * (1 - reused)))),
            answer_tokens=str(told.max_tokens),
            policy=(str(told.num_drafted),),
            max_rows=self.most_rows,
            seed=told.seed,
        )
        (found,) = simulate_server(CostsConfig(table=file), asked).loads
        return found

    def replay(self) -> dict[str, float]:
        """By load, with the server's own step times."""
        found = simulate_server(CostsConfig(), ServingConfig(against=self.out / "served", max_rows=self.most_rows))
        return {each.load: each.simulated_tokens_per_s for each in found.compared}

    def rows(self, served: dict[str, Any], steps: dict[str, Any]) -> list[Row]:
        replayed = self.replay()
        made = []
        for each in served["results"]:
            concurrency = each["load"]["concurrency"]
            predicted = self.simulate(steps, concurrency, each["reused"] or 0.0)
            made.append(
                Row(
                    concurrency=concurrency,
                    measured=each["tokens_per_s"],
                    measured_range=tuple(each["tokens_per_s_range"]),
                    simulated=predicted.tokens_per_s,
                    error=predicted.tokens_per_s / each["tokens_per_s"] - 1,
                    replayed=replayed[predicted.load],
                    tokens_per_round=each["tokens_per_round"],
                    simulated_tokens_per_round=predicted.tokens_per_round,
                    lossless=each["lossless"],
                )
            )
        return made


def show(rows: list[Row], change: float, within: float) -> bool:
    """Prints the comparison; whether every load is within."""
    print(f"{'in flight':>9} {'measured':>9} {'range':>15} {'simulated':>9} {'error':>7} {'own steps':>9} {'tokens/round':>17}")
    for row in rows:
        span = "{:.1f} to {:.1f}".format(*row.measured_range)
        rounds = f"{row.tokens_per_round:.2f} / {row.simulated_tokens_per_round:.2f}"
        print(
            f"{row.concurrency:9d} {row.measured:9.1f} {span:>15} {row.simulated:9.1f} {row.error:+7.1%} {row.replayed:9.1f} "
            f"{rounds:>17}"
        )
    print("tokens/s; tokens/round measured / simulated; acceptance is mocked: lossless is false")
    if abs(change - 1) > SAME:
        print(f"note: verify passes took {change:.2f} times as long after the load as before it: the machine's pace changed")
    num_within = sum(abs(row.error) <= within for row in rows)
    print(f"{num_within} of {len(rows)} loads within {within:.0%}")
    return num_within == len(rows)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="with its own weights; of a config.json, random ones")
    parser.add_argument("--mock", default="4", help="as of paceline serve")
    parser.add_argument("--drafter", help="[default: what ships for the model, else random-dflash]")
    parser.add_argument("--num-drafted", type=int, default=7, help="drafts of every round")
    parser.add_argument("--concurrency", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8])
    parser.add_argument("--requests", type=int, default=24, help="of each load")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--repeat", type=int, default=3, help="times each load is measured")
    parser.add_argument("--step-repeat", type=int, default=9, help="times each size is measured, before and after")
    parser.add_argument("--within", type=float, default=WITHIN)
    parser.add_argument("--seed", type=int, default=0, help="of prompts, requests and the simulation")
    parser.add_argument("--out", type=Path, default=Path("runs/mock-serving"))
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="paceline-mock-") as scratch:
        comparison = Comparison(options, mocked_engine(EngineConfig(model=options.model), options.mock, Path(scratch)))
        before = comparison.steps("steps-before")
        served = comparison.serve()
        after = comparison.steps("steps-after")
    rows = comparison.rows(served, mean_steps([before, after]))
    is_within = show(rows, pace(before, after), options.within)
    told = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    line = {"rows": [asdict(row) for row in rows], "pace": pace(before, after), "within": is_within, "options": told}
    (options.out / "results.json").write_text(json.dumps(line, indent=1) + "\n", encoding="utf-8")
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
