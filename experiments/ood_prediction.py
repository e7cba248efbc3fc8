"""Does acceptance on out-of-distribution prompts predict acceptance in production while a drafter trains?

    python experiments/ood_prediction.py --data path/to/prompt/sets --out runs/ood

For each workload of traffic_curve.py the drafter that ships learns from a sample of --tokens tokens of its answers for
--minutes, many times over, so that it can learn too much from too little. Every --every steps it is evaluated on the
workload's held-out prompts, which stand for production, and on user_instructions.jsonl, which are of another kind. The
table has both expected acceptance lengths (teacher-forced, on stored answers) at the first and the last evaluation and
where each was highest, and their correlation over the evaluations. ood.json has every evaluation. A killed run goes on
with the same command.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages import stage
from traffic_curve import WORKLOADS, answered, sample, training

from paceline.report.tables import Column, Table
from paceline.runs.folder import RunFolder, write_results


def evaluations(args: argparse.Namespace, workload: str) -> list[dict[str, Any]]:
    """Trains on one workload; returns step, epoch, production and ood (expected acceptance lengths) by evaluation."""
    answers = sample(args, workload, answered(args, workload, args.tokens), args.tokens, 0)
    if answers is None:
        raise SystemExit(f"{workload}: fewer than {args.tokens:,} tokens of answers")
    words = [*training(args, answers, "default", args.minutes), "--heldout-every", args.every]
    words += ["--heldout", args.out / workload / "heldout.jsonl", "--ood", args.data / "user_instructions.jsonl"]
    folder = stage(args.out / workload, f"overtrain-{args.tokens}", *words)
    return [
        {"step": row["step"], "epoch": row["epoch"], "production": row["heldout"]["eal"], "ood": row["ood"]["eal"]}
        for row in RunFolder(folder).metrics()
        if "heldout" in row and "ood" in row
    ]


def summary(workload: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    production, ood = ([row[name] for row in rows] for name in ("production", "ood"))
    best = {name: max(rows, key=lambda row, name=name: row[name])["epoch"] for name in ("production", "ood")}
    correlation = statistics.correlation(production, ood) if len(rows) > 2 else float("nan")
    ends = {"first": (production[0], ood[0]), "last": (production[-1], ood[-1])}
    return {"workload": workload, "best_epoch": best, "correlation": correlation, "epochs": rows[-1]["epoch"]} | ends


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of user_instructions.jsonl and the other sets")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--workloads", default="tickets,maths,tasks,code")
    parser.add_argument("--tokens", type=int, default=5_000)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--threads", type=lambda text: ("--threads", int(text)), default=())
    parser.add_argument("--out", type=Path, default=Path("runs/ood"))
    args = parser.parse_args()
    if unknown := set(args.workloads.split(",")) - set(WORKLOADS):
        parser.error(f"unknown workloads: {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    return args


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = {workload: evaluations(args, workload) for workload in args.workloads.split(",")}
    summaries = [summary(*each) for each in rows.items()]
    columns = [
        Column("workload", lambda row: row["workload"]),
        Column("epochs", lambda row: row["epochs"], "{:.0f}", "right"),
        Column("production, first and last", lambda row: "{:.2f}, {:.2f}".format(row["first"][0], row["last"][0])),
        Column("others, first and last", lambda row: "{:.2f}, {:.2f}".format(row["first"][1], row["last"][1])),
        Column("production highest at epoch", lambda row: row["best_epoch"]["production"], "{:.1f}", "right"),
        Column("others highest", lambda row: row["best_epoch"]["ood"], "{:.1f}", "right"),
        Column("correlation", lambda row: row["correlation"], "{:.2f}", "right"),
    ]
    Table(columns, summaries).show(stderr=False)
    write_results(args.out / "ood.json", {"target": args.target, "evaluations": rows, "summary": summaries})


if __name__ == "__main__":
    main()
