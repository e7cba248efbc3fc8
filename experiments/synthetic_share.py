"""Synthetic data beside real traffic: how much of the gain does a drafter get that has never seen a real request?

    python experiments/synthetic_share.py --public user_instructions.jsonl --minutes 8

For each of three applications (tickets, extraction, tool calls): its users' requests are answered, and a drafter is trained
on these answers. `paceline synthesize` makes answers from what is known without users, --more for each of theirs, for they
cost nothing but time; another drafter is trained on them for as long. Both, and the drafter they began as, then serve
requests of users whom none has seen. The share is (synthetic - start) / (real - start) in tokens a round. Every answer must
be the same whoever drafts, and parse.

One stage after another, each written down under --out: a run that was killed goes on. Prints progress, then one JSON object;
status 1 when a share is below --least-share or an answer does not parse. One application by itself: --applications tickets.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from applications import APPLICATIONS, Application

from paceline import LLM, SamplingParams
from paceline.figures import Rounds, bootstrap
from paceline.runlog import record_of
from paceline.train.answers import AnswerShards
from paceline.types import GrammarSpec

TRAINING = "--epochs 20 --blocks-per-step 192 --anchors 48 --lr 1e-3 --loss-vocab 8192 --features cached --heldout-every 250"
"""As recipes/custom_workload.sh has it."""
START, REAL, SYNTHETIC = "start", "real", "synthetic"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Stages:
    """What was done for one application, in a folder of its own."""

    def __init__(self, options: argparse.Namespace, application: Application) -> None:
        self.options, self.application = options, application
        self.folder: Path = options.out / application.name
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "schema.json").write_text(application.schema)
        (self.folder / "before.json").write_text(json.dumps(application.opening[1:]))
        if application.tools:
            (self.folder / "tools.json").write_text(json.dumps(application.tools))
        for name, number in (("real", options.answers), ("heldout", options.heldout)):
            rows = application.rows(number, name == "heldout")
            (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def once(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `make` gives, and its seconds; an earlier run's where there is one."""
        file = self.folder / f"{name}.json"
        if not file.exists():
            say(f"{self.application.name}: {name}")
            began = time.monotonic()
            made = make() | {"seconds": round(time.monotonic() - began, 1)}
            file.with_suffix(".part").write_text(json.dumps(made))
            file.with_suffix(".part").rename(file)
        return json.loads(file.read_text())

    def paceline(self, *words: Any) -> dict[str, Any]:
        """A command; its last line, as JSON. What it says goes to a file of its name."""
        with (self.folder / f"{words[0]}.log").open("a") as log:
            command = [sys.executable, "-m", "paceline", *map(str, words), "--json"]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True)
        if done.returncode:
            sys.exit(f"paceline {words[0]} ended with status {done.returncode}: see {self.folder / f'{words[0]}.log'}")
        return json.loads(done.stdout.splitlines()[-1])

    @property
    def common(self) -> list[Any]:
        options = self.options
        words = ["--target", options.model, "--dtype", options.dtype, "--max-tokens", options.max_tokens]
        return [*words, "--max-prompt-tokens", options.max_prompt]

    @property
    def tools(self) -> list[Any]:
        return ["--tools", self.folder / "tools.json"] if self.application.tools else []

    def real(self) -> dict[str, Any]:
        schema = ["--json-schema", self.folder / "schema.json"]
        self.paceline("regenerate", *self.common, "--prompts", self.folder / "real.jsonl", *schema, *self.tools,
                      "--out", self.folder / "real-answers")  # fmt: skip
        return parsed(self.folder / "real-answers" / "answers")

    def synthetic(self) -> dict[str, Any]:
        """From what is known without users: the opening, the form of the answers, public prompts, guessed beginnings. Nothing
        of `real.jsonl` may be among the prompts, which the command checks."""
        options, out = self.options, self.folder / "made"
        number = round(options.answers * options.more)
        public = round(number * options.public_share) if options.public else 0
        words: list[Any] = ["--system", self.application.opening[0]["content"], "--before", self.folder / "before.json"]
        words += self.tools or ["--schema", self.folder / "schema.json"]
        (self.folder / "openers.txt").write_text("\n".join(self.application.openers) + "\n")
        words += [
            "--openers",
            self.folder / "openers.txt",
            "--not-in",
            self.folder / "real-answers" / "answers",
            "--self-written",
            number - public,
        ]
        if public:
            words += ["--limit", -(-public // len(options.public))]
            words += [word for source in options.public for word in ("--prompts", source)]
        self.paceline("synthesize", *self.common, *words, "--out", out)
        card = json.loads((out / "card.json").read_text())
        return parsed(out / "answers") | {name: card[name] for name in ("parsed", "production", "left_out", "steered")}

    def chosen(self, num_real: int, num_made: int) -> dict[str, Any]:
        """The answers that are learned from: all that parse; with --equal as many of each as there are of the fewer."""
        least, tokens, numbers = min(num_real, num_made), dict[str, int](), dict[str, int]()
        for name, source, most in ((REAL, "real-answers", num_real), (SYNTHETIC, "made", num_made)):
            answers = [each for each in AnswerShards(self.folder / source / "answers") if parses(each.finish_reason, each.text)]
            answers.sort(key=lambda each: (each.key, each.turn))
            numbers[name] = least if self.options.equal else most
            chosen = random.Random(0).sample(answers, numbers[name])
            shutil.rmtree(self.folder / f"learned-{name}", ignore_errors=True)
            AnswerShards(self.folder / f"learned-{name}").write(chosen)
            tokens[name] = sum(len(each.answer_ids) for each in chosen)
        return {"answers": numbers, "tokens": tokens}

    def train(self, name: str) -> dict[str, Any]:
        options = self.options
        words: list[Any] = ["--target", options.model, "--dtype", options.dtype, "--init", options.drafter]
        words += ["--answers", self.folder / f"learned-{name}", "--out", self.folder / f"drafter-{name}"]
        words += ["--max-minutes", options.minutes, "--max-len", options.max_prompt + options.max_tokens, "--keep", "best"]
        self.paceline("train", *words, *TRAINING.split(), *options.train_options.split())
        return {"drafter": str(self.folder / f"drafter-{name}" / "drafter")}

    def measure(self, drafters: dict[str, str]) -> dict[str, Any]:
        """Tokens a round of each drafter on requests that nobody has learned from."""
        options, application = self.options, self.application
        longest = options.max_prompt + options.max_tokens
        settings: dict[str, Any] = {"dtype": options.dtype, "max_batch": 8, "max_len": longest, "plan": "fixed"}
        llm = LLM(options.model, drafter="none", **settings)
        rows = application.rows(options.heldout, True)
        prompts = [llm.encode_chat(row["messages"], application.tools) for row in rows]
        params = SamplingParams(max_tokens=options.max_tokens, grammar=GrammarSpec("json_schema", application.schema))
        plain = [answer.token_ids for answer in llm.generate_ids(prompts, params)]
        found: dict[str, Any] = {}
        for name, drafter in drafters.items():
            llm.use_drafter(drafter)
            answers = llm.generate_ids(prompts, params)
            each = [(answer.stats.num_accepted + answer.stats.num_rounds, answer.stats.num_rounds) for answer in answers]
            found[name] = {
                "tokens_per_round": Rounds.sum(answer.stats for answer in answers).tokens_per_round,
                "requests": each,
                "parse": sum(parses(answer.finish_reason, answer.text) for answer in answers),
                "as_plain": sum(answer.token_ids == said for answer, said in zip(answers, plain, strict=True)),
            }
        return {"heldout": len(prompts), "drafters": found}

    def run(self) -> dict[str, Any]:
        real = self.once("real", self.real)
        made = self.once("synthetic", self.synthetic)
        size = self.once("size", lambda: self.chosen(real["parse"], made["parse"]))
        trained = {name: self.once(f"train-{name}", lambda name=name: self.train(name)) for name in (REAL, SYNTHETIC)}
        drafters = {START: self.options.drafter} | {name: each["drafter"] for name, each in trained.items()}
        measured = self.once("measured", lambda: self.measure(drafters))
        return {"real": real, "synthetic": made, "size": size, **measured, **self.verdict(measured, made)}

    def verdict(self, measured: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        each = measured["drafters"]
        both = zip(*(each[name]["requests"] for name in (START, REAL, SYNTHETIC)), strict=True)
        items = [tuple(float(number) for part in parts for number in part) for parts in both]
        share, interval = share_of(items), bootstrap(items, share_of)
        whole = all(one["parse"] == one["as_plain"] == measured["heldout"] for one in each.values())
        passed = share >= self.options.least_share and whole and made["parsed"] == 1.0
        return {"share": share, "interval": interval, "all_parse": whole and made["parsed"] == 1.0, "passed": passed}


def parses(finish_reason: str | None, text: str) -> bool:
    try:
        return finish_reason == "stop" and isinstance(json.loads(text), dict)
    except ValueError:
        return False


def parsed(answers: Path) -> dict[str, Any]:
    found = list(AnswerShards(answers))
    return {"answers": len(found), "parse": sum(parses(each.finish_reason, each.text) for each in found)}


def share_of(items: list[tuple[float, ...]]) -> float:
    """Of requests: (tokens, rounds) of start, real and synthetic behind one another."""
    start, real, made = (
        sum(item[place] for item in items) / max(sum(item[place + 1] for item in items), 1.0) for place in (0, 2, 4)
    )
    return (made - start) / (real - start) if real != start else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--applications", nargs="+", choices=list(APPLICATIONS), default=list(APPLICATIONS))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--drafter", default="default", help="what both trainings begin with")
    parser.add_argument("--public", action="append", default=[], help="file of public prompts; may be repeated")
    parser.add_argument("--public-share", type=float, default=0.2, help="of the prompts; the target writes the others")
    parser.add_argument("--answers", type=int, default=600, help="requests of real users that are learned from, at most")
    parser.add_argument("--more", type=float, default=1.6, help="synthetic prompts for each real one: some are left out")
    parser.add_argument("--equal", action="store_true", help="learn from as many of each")
    parser.add_argument("--heldout", type=int, default=60, help="requests that are measured with")
    parser.add_argument("--minutes", type=float, default=8.0, help="of each training")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--max-prompt", type=int, default=864, help="tokens; longer prompts are left out")
    parser.add_argument("--least-share", type=float, default=0.7)
    parser.add_argument("--train-options", default="", help="more words for paceline train")
    parser.add_argument("--out", type=Path, default=Path("runs/synthetic-share"))
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {name: str(each) for name, each in vars(options).items() if name not in ("applications", "least_share")}
    kept = options.out / "settings.json"
    if kept.exists() and json.loads(kept.read_text()) != settings:
        sys.exit(f"{options.out} holds a run with other settings: choose another --out, or remove it")
    kept.write_text(json.dumps(settings))
    found = {}
    for name in options.applications:
        found[name] = each = Stages(options, APPLICATIONS[name]()).run()
        rates = ", ".join(f"{key} {one['tokens_per_round']:.3f}" for key, one in each["drafters"].items())
        verdict = "enough" if each["passed"] else "NOT enough"
        say(f"{name}: tokens a round {rates}: {each['share']:.0%} of the gain; all parse: {each['all_parse']}; {verdict}")
    passed = all(each["passed"] for each in found.values())
    say("PASSED" if passed else "FAILED")
    print(json.dumps(record_of({"what": "synthetic share", "settings": settings, "applications": found, "passed": passed})))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
