"""A model of 30 layers becomes one of 12 for one application: what it keeps, how fast it is, hard beside soft, and a refusal.

    python experiments/distil_tickets.py --out runs/distil-tickets            # about an hour on two cores; killed, it goes on

Stages, each a command or a file in the run's folder: tickets of an invented shop (recipes/support_tickets.py), the teacher's
answers, a student by hard and one by soft labels in the same minutes, one that is hardly taught and must be refused;
answers of all to tickets with customers, cities and products that none of them saw, speeds request by request in turns, and a
drafter for the better student. Fields are scored against the shop's own rules, not against the teacher: `action`, `policy_id`
and `reasoning`, whose words the worked examples fix. Ends with exit status 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.engine.llm import LLM
from paceline.report.statistics import bootstrap
from paceline.runs.folder import RunFolder
from paceline.types import SamplingParams

SHOP: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "recipes" / "support_tickets.py"), run_name="shop")
"""The shop: its policies, its tickets and what is right."""
KEEP, FASTER = 0.98, 2.0
"""The bars: share of the teacher's field accuracy, and plain speed over the teacher's."""
FIELDS = ("action", "policy_id", "reasoning")
TICKET = re.compile(
    r"(?P<name>.+?) from (?P<city>.+?): The (?P<product>.+?) (?:was|has|stopped|is|needs)\b.*\nPolicy (?P<id>\S+): "
)


def wanted(row: dict[str, Any]) -> dict[str, str]:
    """What the shop's rules answer to a ticket."""
    found = TICKET.match(row["messages"][-1]["content"])
    assert found, row
    policy = next(each for each in SHOP["POLICIES"] if each.id == found["id"])
    return json.loads(SHOP["answer"](found["name"], found["city"], found["product"], policy))


def score(text: str, right: dict[str, str]) -> dict[str, float]:
    """1 for each field that is right; a text that is no JSON object has none."""
    try:
        told = json.loads(text)
    except ValueError:
        told = {}
    told = told if isinstance(told, dict) else {}
    return {name: float(told.get(name) == right[name]) for name in FIELDS}


class Run:
    """Stages in a folder: each is done once."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.out = given, given.out
        self.seconds_file = self.out / "seconds.json"

    def command(self, name: str, *words: str, statuses: tuple[int, ...] = (0,)) -> int:
        """Run `paceline` with these words, unless it ended before; returns its exit status."""
        mark = self.out / f"{name}.done"
        if mark.is_file():
            return int(mark.read_text())
        print(f"== {name}: paceline {' '.join(words)}", file=sys.stderr, flush=True)
        began = time.time()
        status = subprocess.run([sys.executable, "-m", "paceline", *words], check=False).returncode
        self.took(name, time.time() - began)
        if status not in statuses:
            sys.exit(f"{name} ended with status {status}")
        mark.write_text(str(status))
        return status

    def stage(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, kept as JSON."""
        file = self.out / f"{name}.json"
        if not file.is_file():
            print(f"== {name}", file=sys.stderr, flush=True)
            began, made = time.time(), make()
            self.took(name, time.time() - began)
            file.write_text(json.dumps(made) + "\n")
        return json.loads(file.read_text())

    def took(self, name: str, seconds: float) -> None:
        """Add the seconds of a stage; one that is resumed adds up."""
        times = json.loads(self.seconds_file.read_text()) if self.seconds_file.is_file() else {}
        times[name] = times.get(name, 0.0) + seconds
        self.seconds_file.write_text(json.dumps(times) + "\n")

    def distil(self, name: str, method: str, *more: str, statuses: tuple[int, ...] = (0, 1)) -> int:
        given, answers = self.given, str(self.out / "answers" / "answers")
        layers = ("--keep-layers", given.keep_layers) if given.keep_layers else ("--layers", str(given.layers))
        words = (
            "distill",
            "--teacher",
            given.teacher,
            "--answers",
            answers,
            *layers,
            "--method",
            method,
            "--lr",
            str(given.lr),
        )
        words += ("--embedding-format", given.embedding_format, "--out", str(self.out / name))
        return self.command(name, *words, *more, statuses=statuses)

    def model(self, name: str) -> str:
        """The file of a student, kept or refused."""
        kept = self.out / name / "student.gguf"
        return str(kept if kept.is_file() else self.out / name / "refused.gguf")

    def answer(self, model: str, rows: list[dict[str, Any]]) -> list[str]:
        llm = LLM(model, drafter="none", max_len=640, max_batch=8)
        asked = SamplingParams(temperature=0.0, max_tokens=128)
        return [each.text for each in llm.chat([row["messages"] for row in rows], asked)]


def accuracy(texts: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Of each ticket the share of its fields that are right."""
    return [fmean(score(text, wanted(row)).values()) for text, row in zip(texts, rows, strict=True)]


def by_field(texts: list[str], rows: list[dict[str, Any]]) -> dict[str, float]:
    scores = [score(text, wanted(row)) for text, row in zip(texts, rows, strict=True)]
    return {name: fmean(each[name] for each in scores) for name in FIELDS}


def speeds(models: dict[str, str], rows: list[dict[str, Any]], tokens: int, repeats: int) -> dict[str, list[float]]:
    """Tokens/s of decoding without a drafter, of each model, request by request in turns; the first round prepares."""
    loaded = {name: LLM(model, drafter="none", max_len=640, max_batch=1) for name, model in models.items()}
    found: dict[str, list[float]] = {name: [] for name in models}
    asked = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for number in range(repeats + 1):
        names = list(loaded)
        random.Random(number).shuffle(names)
        for name in names:
            done = loaded[name].chat([rows[number % len(rows)]["messages"]], asked)[0]
            if number:
                found[name].append(done.stats.tokens_per_s)
    return found


def difference(one: list[float], other: list[float]) -> dict[str, Any]:
    """Of paired scores, with its 95% interval over tickets."""
    pairs = list(zip(one, other, strict=True))
    return {"difference": fmean(one) - fmean(other), "interval": bootstrap(pairs, lambda part: fmean(a - b for a, b in part))}


def run(given: argparse.Namespace) -> dict[str, Any]:
    given.out.mkdir(parents=True, exist_ok=True)
    stages, out = Run(given), given.out
    if not (out / "tickets" / "heldout.jsonl").is_file():
        (out / "tickets").mkdir(exist_ok=True)
        SHOP["write_lines"](out / "tickets" / "train.jsonl", SHOP["train_tickets"](given.tickets))
        SHOP["write_lines"](out / "tickets" / "heldout.jsonl", SHOP["heldout_tickets"](given.heldout))
    rows = [json.loads(line) for line in (out / "tickets" / "heldout.jsonl").read_text().splitlines()]
    prompts = str(out / "tickets" / "train.jsonl")
    stages.command(
        "answers",
        "regenerate",
        "--target",
        given.teacher,
        "--prompts",
        prompts,
        "--out",
        str(out / "answers"),
        "--max-tokens",
        "128",
    )
    length = ("--max-steps", str(given.max_steps)) if given.max_steps else ("--minutes", str(given.minutes))
    status = {method: stages.distil(method, method, *length) for method in ("hard", "soft")}
    status["untaught"] = stages.distil("untaught", "hard", "--max-steps", "5")
    models = {"teacher": given.teacher, **{name: stages.model(name) for name in ("hard", "soft")}}
    texts = {
        name: stages.stage(f"texts-{name}", lambda model=model: stages.answer(model, rows)) for name, model in models.items()
    }
    scores = {name: accuracy(said, rows) for name, said in texts.items()}
    best = max(("soft", "hard"), key=lambda name: fmean(scores[name]))
    rates = stages.stage(
        "speeds", lambda: speeds({"teacher": models["teacher"], "student": models[best]}, rows, 64, given.repeats)
    )
    drafter = None
    if given.drafter_minutes:
        drafter = _drafter(stages, models[best], prompts, given)
    ratios = [(ours / theirs,) for ours, theirs in zip(rates["student"], rates["teacher"], strict=True)]
    kept = [(ours, theirs) for ours, theirs in zip(scores[best], scores["teacher"], strict=True)]
    return {
        "fields": {name: by_field(said, rows) for name, said in texts.items()},
        "accuracy": {name: fmean(each) for name, each in scores.items()},
        "kept": fmean(scores[best]) / fmean(scores["teacher"]),
        "kept_interval": bootstrap(kept, lambda part: sum(a for a, _ in part) / max(1e-9, sum(b for _, b in part))),
        "hard_minus_soft": difference(scores["hard"], scores["soft"]),
        "best": best,
        "speedup": median(each for (each,) in ratios),
        "speedup_interval": bootstrap(ratios, lambda part: median(each for (each,) in part)),
        "tokens_per_s": {name: median(each) for name, each in rates.items()},
        "drafter": drafter,
        "status": status,
        "tickets": len(rows),
        "seconds": json.loads(stages.seconds_file.read_text()),
    }


def _drafter(stages: Run, model: str, prompts: str, given: argparse.Namespace) -> dict[str, Any]:
    """Trained on the student's own answers, measured on tickets that nobody saw."""
    folder, heldout = stages.out / "drafter", str(stages.out / "tickets" / "heldout.jsonl")
    stages.command(
        "drafter", "train", "--target", model, "--prompts", prompts, "--out", str(folder), "--max-len", "512",
        "--max-tokens", "128", "--max-minutes", str(given.drafter_minutes), "--epochs", "20", "--blocks-per-step", "192",
        "--anchors", "48", "--lr", "1e-3", "--loss-vocab", "8192", "--features", "cached",
    )  # fmt: skip
    stages.command(
        "evaluate", "evaluate", str(folder / "drafter"), "--target", model, "--prompts", heldout, "--limit", "40",
        "--batch", "1", "--temperature", "0", "--max-tokens", "128", "--out", str(stages.out / "evaluation"),
    )  # fmt: skip
    told = json.loads((stages.out / "evaluation" / "evaluation.json").read_text())
    return {"tokens_per_round": told["heldout"]}


def faults_of(found: dict[str, Any]) -> list[str]:
    """Which bars were missed."""
    checks = (
        (found["kept"] < KEEP, f"the student keeps {found['kept']:.1%} of the field accuracy, {KEEP:.0%} is the bar"),
        (found["speedup"] < FASTER, f"it is {found['speedup']:.2f}x as fast, {FASTER:g}x is the bar"),
        (found["status"][found["best"]] != 0, "the better student was refused by its gates"),
        (found["status"]["untaught"] != 1, "a student that was hardly taught was not refused"),
    )
    return [text for is_missed, text in checks if is_missed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/distil-tickets"))
    parser.add_argument("--teacher", default="smollm2-135m")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--keep-layers", default="", help="which layers, as 0,1,29, in place of --layers spread evenly")
    parser.add_argument("--embedding-format", default="q4_1", help="twice the speed with 12 layers needs a small one")
    parser.add_argument("--minutes", type=float, default=14, help="of training, of each student")
    parser.add_argument("--max-steps", type=int, help="in place of minutes: the same result on any machine")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tickets", type=int, default=1500, help="to learn from")
    parser.add_argument("--heldout", type=int, default=200, help="to measure on")
    parser.add_argument("--drafter-minutes", type=float, default=8, help="0: no drafter")
    parser.add_argument("--repeats", type=int, default=30, help="requests whose speed is measured")
    given = parser.parse_args()
    found = run(given)
    faults = faults_of(found)
    file = RunFolder(given.out).results(found | {"bars_missed": faults})
    print(json.dumps({name: found[name] for name in ("accuracy", "kept", "hard_minus_soft", "speedup", "drafter")}))
    print(f"figures: {file}; {sum(found['seconds'].values()) / 60:.1f} minutes")
    sys.exit("; ".join(faults) or 0)


if __name__ == "__main__":
    main()
