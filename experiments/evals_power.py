"""Do evals cry wolf, and do they find a loss: the same model behind two names, and a planted loss of 5%, from recorded
answers.

    python experiments/evals_power.py record --model smollm2-135m --tickets 120 --samples 6 --out runs/evals-power.json
    python experiments/evals_power.py judge runs/evals-power.json --out experiments/results/evals_power.json

`record` asks a real model the held-out support tickets at temperature 0.7, several times each, and keeps the scores of
its JSON fields. `judge` makes 20 pairs of runs, each with its own seed: cases drawn from the tickets, and for either
name another draw among the answers that the model really gave, so that both are the same model. Then the second name
loses 5% of the
score: answers of a randomly chosen share of cases count 0. The suite's size comes from the recorded spread by a power
calculation (`cases_needed`), for one answer a case and for several, paired; beside it what a comparison that is not
paired would need.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import EngineConfig
from paceline.engine.llm import LLM
from paceline.loop.evals.answerers import LLMAnswerer
from paceline.loop.evals.compare import LEVEL, cases_needed, compare
from paceline.loop.evals.config import EvalSampling, MakeConfig
from paceline.loop.evals.make import make_suite
from paceline.loop.evals.scores import Scored, Scores, run_suite
from paceline.runs.folder import write_results

LOSS, PAIRS, MANY = 0.05, 20, 400


def record(options: argparse.Namespace) -> None:
    """Scores [tickets, samples] of a real model."""
    script, folder = Path(__file__).parents[1] / "recipes" / "support_tickets.py", options.out.parent / "tickets"
    command = [sys.executable, str(script), "--train", "1", "--heldout", str(options.tickets), "--out", str(folder)]
    subprocess.run(command, check=True)
    suite = make_suite(MakeConfig((str(folder / "heldout.jsonl"),)), "tickets")
    llm = LLM.of(EngineConfig(model=options.model, drafter="none", max_len=1024, max_batch=8, threads=options.threads))
    sampling = EvalSampling(max_tokens=options.max_tokens, temperature=options.temperature, seed=7)
    scores = run_suite(suite, LLMAnswerer(llm, sampling), samples=options.samples)
    fields = {"model": options.model, "temperature": options.temperature, "line": scores.as_line()}
    write_results(options.out, fields | {"scores_TS": [list(case.scores) for case in scores.cases]})
    print(json.dumps(scores.as_line()))


def scores_of(values_CS: np.ndarray, name: str) -> Scores:
    cases = tuple(
        Scored(str(number), "json", tuple(map(float, row)), ("",) * len(row), ("",) * len(row), (0.1,), 1, (1,))
        for number, row in enumerate(values_CS)
    )
    return Scores(name, "tickets", "recorded", cases, 1.0)


def drawn(
    recorded_TS: np.ndarray, num_cases: int, samples: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Scores [cases, samples] of two runs of the same model: the same cases, other answers of it to each."""
    tickets = generator.integers(0, len(recorded_TS), num_cases)
    picks = [generator.integers(0, recorded_TS.shape[1], (num_cases, samples)) for _ in range(2)]
    return recorded_TS[tickets[:, None], picks[0]], recorded_TS[tickets[:, None], picks[1]]


def planted(values_CS: np.ndarray, loss: float, generator: np.random.Generator) -> np.ndarray:
    """Answers to a random share of the cases become wrong: the expected mean falls by `loss` times itself."""
    return values_CS * (generator.random((len(values_CS), 1)) >= loss)


def deviation(recorded_TS: np.ndarray, samples: int) -> tuple[float, float]:
    """Standard deviations of a case's paired difference, and of the difference of two unpaired cases' scores."""
    within = recorded_TS.var(axis=1, ddof=1).mean() / samples
    between = max(
        recorded_TS.mean(axis=1).var(ddof=1) - recorded_TS.var(axis=1, ddof=1).mean() / recorded_TS.shape[1], 0.0
    )
    return float(np.sqrt(2 * within)), float(np.sqrt(2 * (within + between)))


def judged(recorded_TS: np.ndarray, num_cases: int, samples: int, loss: float, seeds: range) -> dict[str, Any]:
    """How often the second name is called other than the first, and by how much it differs."""
    verdicts: list[str] = []
    covered: list[bool] = []
    for seed in seeds:
        generator = np.random.default_rng(seed)
        one, two = drawn(recorded_TS, num_cases, samples, generator)
        if loss:
            two = planted(two, loss, generator)
        comparison = compare(scores_of(one, "one"), scores_of(two, "two"))
        verdicts.append(comparison.verdict)
        covered.append(comparison.interval[0] <= -loss * recorded_TS.mean() <= comparison.interval[1])
    return {
        "runs": len(verdicts),
        "worse": verdicts.count("worse"),
        "better": verdicts.count("better"),
        "covered": float(np.mean(covered)),
        "calm_twenties": sum(
            sum(each != "no difference seen" for each in verdicts[begin : begin + PAIRS]) <= 1
            for begin in range(0, len(verdicts), PAIRS)
        ),
    }


def judge(options: argparse.Namespace) -> None:
    recording = json.loads(options.file.read_text())
    recorded_TS = np.array(recording["scores_TS"])
    mean = float(recorded_TS.mean())
    absolute = LOSS * mean
    rows = []
    for samples in (1, 4):
        paired, apart = deviation(recorded_TS, samples)
        spread = float(np.sqrt(paired**2 + LOSS * mean**2))  # the planted loss moves cases apart, too
        needed = cases_needed(absolute, spread)
        same = judged(recorded_TS, needed, samples, 0.0, range(PAIRS))
        lost = judged(recorded_TS, needed, samples, LOSS, range(PAIRS))
        often = judged(recorded_TS, needed, samples, 0.0, range(1000, 1000 + MANY))
        lost_often = judged(recorded_TS, needed, samples, LOSS, range(5000, 5000 + MANY))
        rows.append(
            {
                "samples": samples,
                "deviation_paired": paired,
                "cases": needed,
                "cases_unpaired": cases_needed(absolute, float(np.sqrt(apart**2 + LOSS * mean**2))),
                "false_alarms_of_20": same["worse"] + same["better"],
                "losses_found_of_20": lost["worse"],
                f"false_alarms_of_{MANY}": often["worse"] + often["better"],
                f"losses_found_of_{MANY}": lost_often["worse"],
                "twenties_with_at_most_one_false_alarm": f"{often['calm_twenties']} of {MANY // PAIRS}",
                "interval_covers": often["covered"],
            }
        )
        print(json.dumps(rows[-1]))
    if options.out:
        about = {name: recording[name] for name in ("model", "temperature")}
        shape = {"tickets": len(recorded_TS), "answers_each": recorded_TS.shape[1], "mean": mean}
        write_results(
            options.out,
            {**about, **shape, "loss": LOSS, "level": LEVEL, "results": rows, "scores_TS": recording["scores_TS"]},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record", help="ask a real model")
    recording.add_argument("--model", default="smollm2-135m")
    recording.add_argument("--tickets", type=int, default=120)
    recording.add_argument("--samples", type=int, default=6)
    recording.add_argument("--temperature", type=float, default=0.7)
    recording.add_argument("--max-tokens", type=int, default=112)
    recording.add_argument("--threads", type=int)
    recording.add_argument("--out", type=Path, default=Path("runs/evals-power.json"))
    recording.set_defaults(call=record)
    judging = commands.add_parser("judge", help="pairs of runs from what was recorded")
    judging.add_argument("file", type=Path)
    judging.add_argument("--out", type=Path)
    judging.set_defaults(call=judge)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
