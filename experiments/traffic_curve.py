"""How much traffic a drafter of one's own needs: acceptance length over tokens of traffic, for several workloads.

    python experiments/traffic_curve.py --data path/to/prompt/sets --target smollm2-135m --out runs/curve

For each workload the target answers its prompts once. Random samples of these answers, of the sizes of --tokens, are
what drafters learn from, each from the drafter that ships (--init) for --minutes of steps, --seeds times with other
samples. Held-out prompts that belong to no sample are then answered with every drafter, whole blocks, greedy. Every
stage leaves a mark in --out: killed, the same command goes on. curve.json has a row for each training; the table the
mean of the seeds and its 95% interval, from the seeds (Student's t).

Workloads: tickets (recipes/support_tickets.py), maths (GSM8K), tasks (T0's tasks of language) and code (the prompts
behind recipes/answers/qwen2.5-coder-0.5b, held out: HumanEval). A fifth, letters (customers_traffic.py), is for the
comparison with `paceline advise`: it is answered and trained only if named in --workloads.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import stages
from customers_traffic import Customer, as_token_ids
from stages import stage

from paceline.data.answers import AnswerShards
from paceline.report.tables import Column, Table
from paceline.runs.folder import write_results, write_whole
from paceline.train.plan.trainings import student

ROOT = Path(__file__).parents[1]
STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."
HELDOUT = 40
"""Held-out prompts of a workload, at most."""


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    write_whole(file, "".join(json.dumps(row) + "\n" for row in rows))
    return file


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def tickets(args: argparse.Namespace, folder: Path) -> None:
    recipe = (ROOT / "recipes" / "support_tickets.py", "--train", 8000, "--heldout", HELDOUT, "--out", folder)
    subprocess.run([sys.executable, *map(str, recipe)], check=True, stdout=subprocess.DEVNULL)


def maths(args: argparse.Namespace, folder: Path) -> None:
    for part, name in (("train", "gsm8k_train"), ("heldout", "gsm8k_test")):
        questions = [row["question"] for row in rows_of(args.data / f"{name}.jsonl")]
        write_rows(folder / f"{part}.jsonl", [{"prompt": f"{each}\n{STEP_BY_STEP}"} for each in questions])


def tasks(args: argparse.Namespace, folder: Path) -> None:
    rows = [{"prompt": row["prompt"]} for row in rows_of(args.data / "t0_tasks.jsonl")]
    random.Random("tasks").shuffle(rows)
    write_rows(folder / "heldout.jsonl", rows[:HELDOUT])
    write_rows(folder / "train.jsonl", rows[HELDOUT:])


def code(args: argparse.Namespace, folder: Path) -> None:
    recipe = (ROOT / "recipes" / "prompts_of_answers.py", "--target", "qwen2.5-coder-0.5b")
    stored = ROOT / "recipes" / "answers" / "qwen2.5-coder-0.5b"
    command = [sys.executable, *map(str, (*recipe, "--answers", stored, "--out", folder / "train.jsonl"))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    before = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
    prompts = [row["prompt"] for row in rows_of(args.data / "humaneval.jsonl")]
    write_rows(folder / "heldout.jsonl", [{"prompt": f"{before}{each}\n```"} for each in prompts])


def letters(args: argparse.Namespace, folder: Path) -> None:
    customer = Customer(1)
    for part, number in (("train", 4000), ("heldout", HELDOUT)):
        chats = customer.chats(number, is_heldout=part == "heldout")
        write_rows(folder / f"{part}.jsonl", as_token_ids(args.target, chats))


WORKLOADS: dict[str, Callable[[argparse.Namespace, Path], None]] = {
    "tickets": tickets,
    "maths": maths,
    "tasks": tasks,
    "code": code,
    "letters": letters,
}


def answered(args: argparse.Namespace, workload: str, num_tokens: int) -> Path:
    """The target's answers to a workload: about `num_tokens` tokens of them, as far as its prompts reach."""
    folder = args.out / workload
    if not (folder / "heldout.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        WORKLOADS[workload](args, folder)
        rows = rows_of(folder / "train.jsonl")
        random.Random(workload).shuffle(rows)
        write_rows(folder / "train.jsonl", rows)
        write_rows(folder / "heldout.jsonl", rows_of(folder / "heldout.jsonl")[:HELDOUT])
    probe = _answers(args, workload, "probe", 48)
    mean = statistics.fmean(len(answer.answer_ids) for answer in AnswerShards(probe))
    return _answers(args, workload, "answers", round(1.1 * num_tokens / mean))


def _answers(args: argparse.Namespace, workload: str, name: str, limit: int) -> Path:
    words: list[object] = ["regenerate", "--target", args.target, "--prompts", args.out / workload / "train.jsonl"]
    words += ["--limit", limit, "--max-tokens", args.max_tokens, "--max-prompt-tokens", 640]
    return stage(args.out / workload, name, *words, *args.threads) / "answers"


def sample(args: argparse.Namespace, workload: str, answers: Path, num_tokens: int, seed: int) -> Path | None:
    """A folder with a random sample of the answers, of about `num_tokens` tokens; None if there are not as many."""
    folder = args.out / workload / f"sample-{num_tokens}-{seed}"
    if folder.is_dir():
        return folder
    everything = sorted(AnswerShards(answers), key=lambda answer: answer.key)
    random.Random(f"{workload} {seed}").shuffle(everything)
    chosen, tokens = [], 0
    for answer in everything:
        if tokens >= num_tokens:
            break
        chosen.append(answer)
        tokens += len(answer.answer_ids)
    if tokens < 0.9 * num_tokens:
        return None
    scratch = folder.with_suffix(".part")
    scratch.mkdir(exist_ok=True)
    AnswerShards(scratch).write(chosen)
    scratch.rename(folder)
    return folder


def training(args: argparse.Namespace, answers: Path, init: str, minutes: float) -> list[object]:
    """The words of a training of this many minutes of steps."""
    words = ["train", "--target", args.target, "--answers", answers, "--init", init, "--lr", "1e-3", *stages.QUICK]
    words += ["--max-len", 640 + args.max_tokens, "--max-tokens", args.max_tokens, "--max-minutes", minutes]
    return [*words, *args.threads]


def trained(args: argparse.Namespace, workload: str, answers: Path, name: str, minutes: float, seed: int) -> Path:
    words = [*training(args, answers, args.init, minutes), "--shared-features", args.out / workload / "features"]
    return stage(args.out / workload, name, *words, "--heldout-share", 0, "--seed", seed) / "drafter"


def measured(args: argparse.Namespace, workload: str, drafters: Sequence[object]) -> list[dict[str, Any]]:
    """Acceptance lengths of `drafters` on the workload's held-out prompts, in their order."""
    words = ["--model", args.target, "--prompts", args.out / workload / "heldout.jsonl", "--repeat", 1, "--batch", 8]
    words += ["--max-tokens", args.max_tokens, "--speculate", "full", "--max-len", 1024, *args.threads]
    named = {str(drafter): drafter for drafter in drafters}
    rows = stages.measured(args.out / workload, f"bench-{len(drafters)}", named, *words)
    return [{key: row[key] for key in ("tokens_per_round", "tokens_per_round_interval")} for row in rows.values()]


def curve_of(args: argparse.Namespace, workload: str) -> list[dict[str, Any]]:
    """A row for each training of a workload, after one for the drafter that all began with."""
    answers = answered(args, workload, max(args.tokens))
    rows: list[dict[str, Any]] = [{"workload": workload, "tokens": 0, "seed": 0}]
    drafters: list[object] = [args.init]
    for tokens, minutes in zip(args.tokens, args.minutes, strict=True):
        for seed in range(args.seeds):
            part = sample(args, workload, answers, tokens, seed)
            if part is None:
                print(f"{workload}: fewer than {tokens:,} tokens", file=sys.stderr)
                break
            drafters.append(trained(args, workload, part, f"train-{tokens}-{seed}", minutes, seed))
            number = sum(1 for _ in AnswerShards(part))
            rows.append({"workload": workload, "tokens": tokens, "answers": number, "seed": seed, "minutes": minutes})
    return [row | figures for row, figures in zip(rows, measured(args, workload, drafters), strict=True)]


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each workload and size: the seeds' mean, and its 95% interval where there are several seeds."""
    cells = []
    for workload, tokens in dict.fromkeys((row["workload"], row["tokens"]) for row in rows):
        of = [row["tokens_per_round"] for row in rows if (row["workload"], row["tokens"]) == (workload, tokens)]
        half = student(len(of) - 1, 0.95) * statistics.stdev(of) / len(of) ** 0.5 if len(of) > 1 else None
        cells.append({"workload": workload, "tokens": tokens, "mean": statistics.fmean(of), "half": half})
    return cells


def numbers(of: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [of(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of gsm8k_train.jsonl and the other sets")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--init", default="default")
    parser.add_argument("--workloads", default="tickets,maths,tasks,code")
    parser.add_argument("--tokens", type=numbers(int), default=[5_000, 20_000, 100_000, 500_000])
    parser.add_argument("--minutes", type=numbers(float), default=[0.6, 1.5, 5.0, 12.0], help="of steps, for each size")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--threads", type=lambda text: ("--threads", int(text)), default=())
    parser.add_argument("--out", type=Path, default=Path("runs/curve"))
    args = parser.parse_args()
    if unknown := set(args.workloads.split(",")) - set(WORKLOADS):
        parser.error(f"unknown workloads: {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    if len(args.tokens) != len(args.minutes):
        parser.error("give as many --minutes as --tokens")
    return args


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [row for workload in args.workloads.split(",") for row in curve_of(args, workload)]
    cells = summary(rows)
    columns = [
        Column("workload", lambda cell: cell["workload"]),
        Column("tokens", lambda c: c["tokens"], "{:,}", "right"),
    ]
    columns += [
        Column("tokens a round", lambda cell: cell["mean"], "{:.2f}", "right"),
        Column("±", lambda cell: cell["half"], "{:.2f}", "right"),
    ]
    Table(columns, cells).show(stderr=False)
    write_results(args.out / "curve.json", {"target": args.target, "trainings": rows, "summary": cells})


if __name__ == "__main__":
    main()
