"""Regional drafters with a real model: does a drafter for each of two domains pay, or is one for both as good?

    .venv/bin/python experiments/regional.py --domain maths=gsm8k_train.jsonl:gsm8k_test.jsonl \
        --domain code=mbpp_train.jsonl:mbpp_test.jsonl --minutes 12 --out runs/regional

Four policies over traffic of both domains, with trainings of the same total time:
- mix: one drafter on the answers of both, 2 x `--minutes`;
- regional: a drafter of the same size for each, `--minutes` each, served to its own domain;
- other: these two, each served to the other domain: what a wrong route costs;
- large: one of twice the layers on both, 2 x `--minutes`.

Stages are child processes with a mark in `--out` when they have ended: killed, the same command goes on, and a training
goes on from its checkpoint. Measured are held-out prompts, one stream, greedy, all drafters in turns; tokens/s at
equal shares of both domains, and the price of a million tokens at `--price-per-hour`, the trainings spread over
`--days`. Writes results.json. Two cores and smollm2-135m: 6 x `--minutes` of training, and about ten minutes for
answers, hidden states and the measurement of 24 prompts of each, twice.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stages
from stages import stage

from paceline.hardware import this_machine
from paceline.report.tables import Column, Table
from paceline.runs.folder import write_results


@dataclass(frozen=True, slots=True)
class Domain:
    name: str
    train: Path
    heldout: Path

    @classmethod
    def parse(cls, text: str) -> Domain:
        name, _, files = text.partition("=")
        train, _, heldout = files.partition(":")
        if not (name.isidentifier() and Path(train).is_file() and Path(heldout).is_file()):
            raise argparse.ArgumentTypeError(f"{text!r}: write NAME=TRAIN.jsonl:HELDOUT.jsonl, files that exist")
        return cls(name, Path(train), Path(heldout))


def answered(args: argparse.Namespace, domain: Domain) -> Path:
    words = ("regenerate", "--target", args.target, "--prompts", domain.train, "--limit", args.limit)
    return stage(args.out, f"answers-{domain.name}", *words, "--max-tokens", args.max_tokens) / "answers"


def trained(args: argparse.Namespace, name: str, answers: list[Path], layers: int, minutes: float) -> Path:
    """A drafter from the target's first layers; only the size, the answers and the minutes differ."""
    words: list[object] = ["train", "--target", args.target, "--plan", "off", "--first-layers", "copied"]
    words += ["--layers", layers, "--taps", 5, "--max-len", args.max_len, "--max-tokens", args.max_tokens]
    words += ["--epochs", 1000, "--blocks-per-step", 192, "--anchors", 48, "--loss-vocab", 8192, "--lr", "1.6e-3"]
    words += ["--features", "cached", "--feature-dtype", "int8", "--draft-vocab", 8192, "--keep", "best"]
    words += ["--max-minutes", minutes, "--heldout-every", 250]
    words += [word for each in answers for word in ("--answers", each)]
    return stage(args.out, f"train-{name}", *words) / "drafter"


def measured(args: argparse.Namespace, domain: Domain, drafters: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Tokens/s and acceptance length of each drafter on a domain's held-out prompts, and of plain decoding."""
    words = ("--model", args.target, "--prompts", domain.heldout, "--limit", args.heldout, "--repeat", args.repeat)
    rows = stages.measured(args.out, f"bench-{domain.name}", {"plain": "none", **drafters}, *words, "--max-tokens", 128)
    return {name: {key: row[key] for key in ("tokens_per_s", "tokens_per_round")} for name, row in rows.items()}


def policies(one: str, two: str) -> dict[str, tuple[str, str]]:
    """Drafter of either domain, by policy."""
    return {
        "plain": ("plain", "plain"),
        "mix": ("mix", "mix"),
        "regional": (one, two),
        "other": (two, one),
        "large": ("large", "large"),
    }


def seconds_of(args: argparse.Namespace, *names: str) -> float:
    return sum(float(json.loads((args.out / f"train-{name}" / "seconds.json").read_text())) for name in names)


def figures(args: argparse.Namespace, by_domain: list[dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """A row for each policy: tokens/s, and dollars a million tokens with and without its trainings, at equal shares."""
    one, two = (domain.name for domain in args.domain)
    rows = []
    for policy, (first, second) in policies(one, two).items():
        rates = [by_domain[0][first]["tokens_per_s"], by_domain[1][second]["tokens_per_s"]]
        tokens_per_s = statistics.harmonic_mean(rates)
        training_s = seconds_of(args, *{first, second} - {"plain"})
        serving = 1e6 / tokens_per_s / 3600 * args.price_per_hour
        learning = training_s / 3600 * args.price_per_hour / (tokens_per_s * args.days * 86400) * 1e6
        rows.append(
            {
                "policy": policy,
                "tokens_per_s": {one: rates[0], two: rates[1], "both": tokens_per_s},
                "tokens_per_round": {
                    one: by_domain[0][first]["tokens_per_round"],
                    two: by_domain[1][second]["tokens_per_round"],
                },
                "training_s": training_s,
                "dollars_per_million": {"serving": serving, "with_training": serving + learning},
            }
        )
    return rows


def show(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    one, two = (domain.name for domain in args.domain)
    columns = (
        Column("policy", lambda row: row["policy"]),
        *(
            Column(f"{name}: tokens/round", lambda row, name=name: row["tokens_per_round"][name], "{:.2f}", "right")
            for name in (one, two)
        ),
        *(
            Column(f"{name}: tokens/s", lambda row, name=name: row["tokens_per_s"][name], "{:.1f}", "right")
            for name in (one, two, "both")
        ),
        Column("training, minutes", lambda row: row["training_s"] / 60, "{:.0f}", "right"),
        Column("$ per million", lambda row: row["dollars_per_million"]["serving"], "{:.3f}", "right"),
        Column("with training", lambda row: row["dollars_per_million"]["with_training"], "{:.3f}", "right"),
    )
    Table(columns, rows, width=160).show()


def main() -> None:
    args = arguments()
    answers = {domain.name: answered(args, domain) for domain in args.domain}
    drafters = {name: trained(args, name, [folder], args.layers, args.minutes) for name, folder in answers.items()}
    both = [*answers.values()]
    drafters["mix"] = trained(args, "mix", both, args.layers, 2 * args.minutes)
    drafters["large"] = trained(args, "large", both, 2 * args.layers, 2 * args.minutes)
    rows = figures(args, [measured(args, domain, drafters) for domain in args.domain])
    show(args, rows)
    settings = {name: getattr(args, name) for name in ("minutes", "layers", "limit", "heldout", "max_tokens", "repeat")}
    record = {"model": args.target, "domains": [each.name for each in args.domain], "settings": settings}
    record |= {"prices": {"per_hour": args.price_per_hour, "days": args.days}, "policies": rows}
    write_results(args.out / "results.json", record | {"machine": this_machine("cpu")})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domain", type=Domain.parse, action="append", required=True, help="twice: NAME=TRAIN:HELDOUT")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=12, help="of each regional training; the others get twice it")
    parser.add_argument("--layers", type=int, default=2, help="of a drafter; the large one has twice as many")
    parser.add_argument("--limit", type=int, default=600, help="training prompts of each domain")
    parser.add_argument("--heldout", type=int, default=40, help="held-out prompts of each domain")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--price-per-hour", type=float, default=0.1, help="of this machine, serving or training")
    parser.add_argument("--days", type=float, default=7, help="that a training is used for")
    parser.add_argument("--out", type=Path, default=Path("runs/regional"))
    args = parser.parse_args()
    if len({domain.name for domain in args.domain}) != 2 or {"mix", "large"} & {each.name for each in args.domain}:
        parser.error("give --domain twice, with two names other than mix and large")
    return args


if __name__ == "__main__":
    main()
