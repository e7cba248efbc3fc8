"""Whole trainings of a DFlash drafter on a CPU, answers, features and steps: paceline beside SpecForge and speculators.

    experiments/train_vs_peers.sh --prompts gsm8k_train.jsonl --limit 250 --heldout gsm8k_test.jsonl --minutes 5

(makes the peers' environments first; needs an idle machine.) What is measured is the time to an equal held-out figure, each
tool with its own recipe (`RECIPES` in train_vs_peers_sides.py; paceline's planner chooses ours), the sides one after another:

1. answers. Ours: `paceline regenerate`. The peers ask servers on a GPU (SGLang, vLLM); for both stands in what `--answers-by`
   names, on the same prompts: vLLM's CPU build, or Transformers. Run once, counted for both.
2. features. Ours: within `paceline train`. The peers ask the same servers; a Transformers forward stands in, in each one's own
   environment, into its own files.
3. steps. Ours: `paceline train`. Theirs: their own trainers, by their own loaders. All learn from the same documents, token for
   token, which are our answers, and make a drafter of the same shape: layers, block, taps, width, all tokens drafted. First
   weights (the peers' are random, ours copies of layers of the target), loss, optimiser and rate are each tool's own. On a CPU
   the peers attend over a dense mask in which every block meets every other, so that many anchors at once are slow: `--anchors`
   and `--row` are smaller than their 512 and 8192.
4. the figure. Weights are kept every so often, the clock stopped; at the end one judge looks at all of them
   (train_vs_peers_judge.py): the same held-out blocks, paceline's target and engine.

Clocks hold answering, computing features, training; `start_s` are loading, compiling, and the peers' probe, beside them. Every
stage that is done is kept in --work: the same command goes on after a break, side by side. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gguf_to_folder import folder_of
from train_vs_peers_curve import Text, read_texts, write_texts
from train_vs_peers_judge import Judge
from train_vs_peers_report import OURS, compared, tables

from paceline.config import EngineConfig
from paceline.model.backends import load_target, settle
from paceline.runlog import write_results, write_whole
from paceline.train.config import DrafterShape
from paceline.train.dataset import read_documents
from paceline.train.start import config_for

HERE = Path(__file__).parent
PEERS = ("specforge", "speculators")
BATCH = 32
"""Answers at once, on all sides."""
MAX_LEN = 1024
UNTIL_TIME = ("--heldout-share", "0", "--checkpoint-minutes", "1000", "--features", "cached", "--epochs", "1000")
"""Time ends our training, not the number of documents; only the judge looks at held-out ones."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Asked:
    """One experiment; a work folder holds stages of one only."""

    target: str
    prompts: str
    limit: int
    max_tokens: int
    heldout: str
    heldout_limit: int
    minutes: float
    looks: int
    threads: int
    layers: int
    block: int
    answers_by: str
    anchors: int
    row: int
    seed: int
    changed: list[str]


class Stages:
    """The work folder: what is done has a JSON file, and is not done again."""

    def __init__(self, asked: Asked, work: Path, peers_home: Path) -> None:
        self.asked, self.work, self._home = asked, work, peers_home
        work.mkdir(parents=True, exist_ok=True)
        file = work / "asked.json"
        if file.exists() and json.loads(file.read_text()) != asdict(asked):
            raise SystemExit(f"{work} is of a run with other settings: delete it, or name another folder in --work")
        write_whole(file, json.dumps(asdict(asked), indent=1) + "\n")

    def once(self, name: str, make: Any) -> dict[str, Any]:
        """What `make()` returns, or returned when the stage was done."""
        file = self.work / f"{name}.json"
        if not file.exists():
            say(f"{time.strftime('%H:%M:%S')} {name}")
            write_whole(file, json.dumps(make()) + "\n")
        return json.loads(file.read_text())

    def run(self, python: str | Path, *words: str | Path, log: str) -> str:
        """A process of one stage; its standard output. Raises SystemExit with the end of its log when it fails."""
        environment = os.environ | {"OMP_NUM_THREADS": str(self.asked.threads), "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false"}
        file = self.work / f"{log}.log"
        with file.open("w", encoding="utf-8") as errors:
            command = [str(python), *map(str, words)]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"{log} failed: see {file}, which ends so:\n{file.read_text()[-2000:]}")
        return done.stdout

    def python_of(self, side: str) -> Path:
        return self._home / side / "bin" / "python"

    # --- answers

    def regenerate(self, name: str, prompts: str, limit: int) -> dict[str, Any]:
        asked, out, began = self.asked, self.work / name, time.perf_counter()
        words = ["-m", "paceline", "regenerate", "--target", asked.target, "--prompts", prompts, "--limit", str(limit)]
        words += ["--max-tokens", str(asked.max_tokens), "--threads", str(asked.threads), "--max-batch", str(BATCH)]
        self.run(sys.executable, *words, "--out", out, log=name)
        told = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        wall_s = time.perf_counter() - began
        found = {"by": "paceline", "seconds": told["wall_s"], "start_s": wall_s - told["wall_s"]}
        return found | {"answers": told["num_answers"], "tokens": told["num_tokens"], "batch": BATCH}

    def texts(self, name: str) -> Path:
        """The answers of a `regenerate` as documents, cut as `paceline train` cuts them."""
        file = self.work / f"{name}.jsonl"
        if not file.exists():
            found = read_documents([self.work / name / "answers"], MAX_LEN, Counter())
            write_texts(file, (Text(each.document.tokens.tolist(), each.document.answer_start) for each in found))
        return file

    def others_answers(self, model: Path) -> dict[str, Any]:
        by, out = self.asked.answers_by, self.work / "others.json"
        python = self.python_of("vllm" if by == "vllm" else "speculators")
        words = [by, model, self.texts("answers"), out, self.asked.max_tokens, BATCH, self.asked.threads]
        self.run(python, HERE / "train_vs_peers_answers.py", *map(str, words), log="answers-peers")
        return json.loads(out.read_text())

    # --- features and steps

    def drafter(self) -> Path:
        """config.json of the drafter that all sides make."""
        folder, asked = self.work / "drafter", self.asked
        if not (folder / "config.json").exists():
            target = load_target(settle(EngineConfig(model=asked.target, max_batch=1, max_len=64, threads=asked.threads)))
            raw = config_for(target, DrafterShape(num_layers=asked.layers, block_size=asked.block))
            write_whole(folder / "config.json", json.dumps(raw, indent=1) + "\n")
        return folder

    def ours(self) -> dict[str, Any]:
        asked, raw, out = self.asked, self.raw(), self.work / "paceline"
        every_s = 60 * asked.minutes / asked.looks
        words = ["train", "--target", asked.target, "--answers", self.work / "answers" / "answers", "--out", out / "run"]
        words += ["--layers", asked.layers, "--block-size", asked.block, "--threads", asked.threads, "--seed", asked.seed]
        words += ["--tap-layers", ",".join(map(str, raw["dflash_config"]["target_layer_ids"])), "--max-len", MAX_LEN]
        words += [
            "--intermediate-size",
            raw["intermediate_size"],
            "--draft-vocab",
            0,
            "--max-minutes",
            asked.minutes,
            *UNTIL_TIME,
        ]
        script = HERE / "train_vs_peers_ours.py"
        self.run(sys.executable, script, out / "curve", str(every_s), *map(str, words), log="paceline-train")
        told = json.loads((out / "curve" / "told.json").read_text())
        plan = json.loads((out / "run" / "plan.json").read_text())
        features = {"by": "paceline", "seconds": told["features_s"]}
        return {"features": features, "start_s": told["start_s"], "recipe": plan.get("values"), "versions": {}}

    def peer(self, side: str, model: Path) -> dict[str, Any]:
        asked, raw, out = self.asked, self.raw(), self.work / side
        out.mkdir(parents=True, exist_ok=True)
        job = {name: getattr(asked, name) for name in ("minutes", "looks", "threads", "anchors", "row", "seed", "changed")}
        job |= {"model": str(model.absolute()), "drafter": str((self.work / "drafter").absolute()), "out": str(out.absolute())}
        job |= {"texts": str(self.texts("answers").absolute()), "taps": raw["dflash_config"]["target_layer_ids"]}
        write_whole(out / "job.json", json.dumps(job, indent=1) + "\n")
        for stage in ("features", "steps"):
            if not (out / f"{stage}.json").exists():
                say(f"{time.strftime('%H:%M:%S')} {side}: {stage}")
                words = [HERE / "train_vs_peers_sides.py", side, stage, out / "job.json"]
                self.run(self.python_of(side), *words, log=f"{side}-{stage}")
        features, steps = (json.loads((out / f"{stage}.json").read_text()) for stage in ("features", "steps"))
        start_s = features["start_s"] + steps["start_s"] + steps["probe_s"]
        return {"features": features, "start_s": start_s, **{key: value for key, value in steps.items() if key != "start_s"}}

    def raw(self) -> dict[str, Any]:
        return json.loads((self.drafter() / "config.json").read_text())


def measured(stages: Stages, sides: list[str]) -> dict[str, dict[str, Any]]:
    """Every stage of every side, and the judge's figures."""
    asked, found = stages.asked, {}
    model = folder_of(asked.target, stages.work / "model")
    ours = stages.once("answers", lambda: stages.regenerate("answers", asked.prompts, asked.limit))
    stages.once("heldout", lambda: stages.regenerate("heldout", asked.heldout, asked.heldout_limit))
    stages.drafter()
    for side in sides:
        if side == OURS:
            answers = ours
            told = stages.once(f"{side}-train", stages.ours)
        else:
            answers = stages.once("answers-peers", lambda: stages.others_answers(model))
            told = stages.once(f"{side}-train", lambda side=side: stages.peer(side, model))
        found[side] = {"answers": answers, **told, "start_s": told["start_s"] + answers["start_s"]}
    judges: list[Judge] = []

    def judged(side: str) -> list[dict[str, Any]]:
        if not judges:
            settings = EngineConfig(model=asked.target, threads=asked.threads)
            judges.append(Judge(settings, stages.raw(), read_texts(stages.texts("heldout"))))
        return judges[0].judged(stages.work / side / "curve")

    for side in sides:
        found[side]["curve"] = stages.once(f"{side}-judged", lambda side=side: judged(side))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="file of prompts to learn from")
    parser.add_argument("--heldout", required=True, help="file of prompts to be judged on")
    parser.add_argument("--target", default="smollm2-135m", help="a built-in")
    parser.add_argument("--limit", type=int, default=250, help="prompts to learn from")
    parser.add_argument("--heldout-limit", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=160, help="longest answer")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training, each side")
    parser.add_argument("--looks", type=int, default=12, help="how often weights are kept in that time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--answers-by", choices=("vllm", "transformers"), default="vllm", help="in place of the peers' servers")
    parser.add_argument("--anchors", type=int, default=128, help="of the peers: most blocks of a document, or of a row")
    parser.add_argument("--row", type=int, default=512, help="of speculators: tokens of a packed row")
    parser.add_argument("--seed", type=int, default=0)
    change = "of a peer's recipe, as speculators.optimizer=adamw; RECIPES in train_vs_peers_sides.py has them"
    parser.add_argument("--change", dest="changed", nargs="+", default=[], help=change)
    parser.add_argument("--sides", nargs="+", choices=(OURS, *PEERS), default=[OURS, *PEERS])
    parser.add_argument("--peers-home", type=Path, default=Path("build/peers"))
    parser.add_argument("--work", type=Path, default=Path("runs/train-vs-peers"), help="kept: the same command goes on")
    parser.add_argument("--save-results", type=Path, help="default experiments/results/train_vs_peers_cpu_<date>.json")
    given = vars(parser.parse_args())
    sides, home, work, out = (given.pop(name) for name in ("sides", "peers_home", "work", "save_results"))
    asked = Asked(**given)
    found = measured(Stages(asked, work, home), sides)
    told = compared(found)
    for table in tables(found, told):
        table.show()
    out = out or HERE / "results" / f"train_vs_peers_cpu_{time.strftime('%Y-%m-%d')}.json"
    versions = {side: each["versions"][side] for side, each in found.items() if side != OURS}
    write_results(out, {"what": "whole trainings", "asked": asdict(asked), "sides": found, **told}, versions)
    say(f"results: {out}")
    print(json.dumps({"what": "whole trainings beside peers", **told}))


if __name__ == "__main__":
    main()
