"""A server under load turns from one traffic to another: seen, trained, judged, swapped, kept; then a bad drafter,
twice.

    python recipes/support_tickets.py --train 240 --heldout 100 --out runs/tickets
    python experiments/adapt_live.py --tickets runs/tickets/train.jsonl --unseen runs/tickets/heldout.jsonl \\
        --questions gsm8k_test.jsonl --general gsm8k_train.jsonl --general user_instructions.jsonl --ood
        seed_tasks.jsonl

Clients ask questions, with drafter `default`; after some days they ask mostly about tickets. `paceline adapt watch`
stands beside the server: nothing is told to it. It must train once, on the tickets that it saw, pass its gate, be
swapped in and kept, and bring twice as many tokens a round on tickets: on others, of customers and cities that nobody
asked about before, so that what was learned by heart does not count. Then weights with noise are given to the gate,
which must refuse them, and put in by hand through the admin API, which the daemon must take back. Every answer is
compared with plain decoding's, made beforehand. An hour of the daemon takes --hour-s seconds (PACELINE_ADAPT_HOUR_S):
all else runs as it always does.

Prints what happens, then one JSON object; status 1 when any of it is not so, or takes longer than --limit-minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from adapt_clients import QUESTIONS, TICKETS, UNSEEN, Done, Known, Traffic
from adapt_story import Story, add_arguments, finish, new_folder, watch_options
from server_process import Missed, post

from paceline import LLM, SamplingParams
from paceline.bench.serving.servers import started
from paceline.data.prompts import read_prompts
from paceline.report.tables import SILENT

__all__ = ["Done", "Run", "Traffic", "verdicts"]
MEMBER, OURS = "general", "adapt-live"


class Run(Story):
    """The steps of one run, and their results."""

    # Beforehand

    def known(self) -> dict[str, list[Known]]:
        """The prompts with plain decoding's answers."""
        options = self.options
        prompts = {
            QUESTIONS: read_prompts(options.questions, options.num_questions),
            TICKETS: read_prompts(options.tickets, options.num_tickets),
            UNSEEN: read_prompts(options.unseen, options.num_unseen),
        }
        llm = LLM(options.model, drafter="none", dtype=options.dtype, max_batch=16, max_len=options.max_len)
        params, known = SamplingParams(max_tokens=options.max_tokens), dict[str, list[Known]]()
        for kind, each in prompts.items():
            answers = llm.chat([prompt.messages for prompt in each], params)
            known[kind] = [Known(prompt.messages, answer.text) for prompt, answer in zip(each, answers, strict=True)]
            self.say(f"plain decoding has answered {len(each)} {kind}")
        del llm
        gc.collect()
        return known

    # Beside the server

    def watch_command(self, port: int, general: list[Path], ood: list[Path]) -> list[str]:
        options = self.options
        words: list[Any] = ["--model", options.model, "--dtype", options.dtype, "--server", f"http://127.0.0.1:{port}"]
        words += ["--traces", self.out / "traces", "--state", self.state, "--incumbent", "default"]
        words += watch_options(options, general, ood)
        return self.command("adapt", "watch", *words, *shlex.split(options.watch_options))

    # The story

    def adapted(self, traffic: Traffic, daemon: subprocess.Popen[bytes]) -> Path:
        """From questions to tickets, a training, a swap; the drafter that serves then."""
        options = self.options
        self.turn(traffic, daemon)
        self.wanted("swapped", ("refused", "failed"), 60 * (options.minutes + 15), daemon)
        traffic.ask_instead(TICKETS, traffic.prompts[UNSEEN])
        self.wanted("kept", ("rolled back",), 60 * (options.probation_minutes + 5), daemon)
        return Path(self.members(traffic)[MEMBER])

    def members(self, traffic: Traffic) -> dict[str, str]:
        words = self.command("drafters", "list", "--server", f"http://127.0.0.1:{traffic.port}")
        line = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        return {row["name"]: row["drafter"] for row in json.loads(line)["drafters"] if row["state"] == "ready"}

    def poisoned(self, traffic: Traffic, daemon: subprocess.Popen[bytes], ours: Path) -> None:
        """Weights with noise: refused by the gate; put in by hand, taken back."""
        bad = self.poison(ours)
        before = len(self.events())
        self.mark("forced")
        status, answer = post(traffic.port, {"drafter": str(bad)}, path=f"/admin/drafters/{MEMBER}")
        if status != 200:
            raise Missed(f"the poisoned drafter could not be put in by hand: {status} {answer}")
        self.say("the poisoned one serves, by hand")
        ended = self.until_taken_back(daemon, before)
        self.results["after_force"] = {"ended": ended, "serves": self.members(traffic).get(MEMBER), "ours": str(ours)}
        time.sleep(self.options.after_s)

    def go(self) -> None:
        """All of it; the figures are in `results`."""
        options = self.options
        prompts = self.known()
        general = self.answers("general", options.general, options.num_general)
        ood = self.answers("ood", options.ood, options.num_ood)
        words = ["--model", options.model, "--dtype", options.dtype, "--drafter", f"{MEMBER}=default", "--route", "tag"]
        words += ["--max-batch", options.clients, "--max-len", options.max_len, "--traces", self.out / "traces"]
        words += ["--speculate", "full", *shlex.split(options.serve_options)]
        with started([("live", [*map(str, words)])], self.out, SILENT) as [url]:
            port = int(url.rpartition(":")[2])
            traffic = Traffic(port, prompts, options.max_tokens, options.clients, options.think_s, {QUESTIONS: 1.0})
            self.results["traffic"] = traffic
            with self.watching(self.watch_command(port, general, ood)) as daemon, traffic.running():
                self.poisoned(traffic, daemon, self.adapted(traffic, daemon))


def verdicts(run: Run, missed: str | None) -> dict[str, bool]:
    """Condition -> True if it holds."""
    traffic: Traffic | None = run.results.pop("traffic", None)
    if traffic is None:
        return {"the server ran": False}
    now = time.time()
    at = {
        name: run.times.get(name, now)
        for name in ("questions begin", "tickets begin", "swapped", "forced", "taken back")
    }
    before = traffic.figures(TICKETS, at["tickets begin"], at["swapped"])
    after = traffic.figures(TICKETS, at["swapped"], at["forced"])
    run.results |= {
        "tickets_before": before,
        "tickets_after": after,
        "tickets_poisoned": traffic.figures(TICKETS, at["forced"], at["taken back"]),
        "questions_before": traffic.figures(QUESTIONS, at["questions begin"], at["swapped"]),
        "questions_after": traffic.figures(QUESTIONS, at["swapped"], at["forced"]),
        "ratio": after["tokens_per_round"] / max(before["tokens_per_round"], 1.0),
        "requests": len(traffic.done),
        "wrong": traffic.wrong[:20],
        "missed": missed,
    }
    names = [line["event"] for line in run.events()]
    forced = run.results.get("after_force", {})
    return run.verdicts(traffic, missed) | {
        "swapped by the gate, and kept": "kept" in names and names.index("swapped") < names.index("kept"),
        "tokens a round on tickets that nobody saw at least doubled": after["requests"] >= 10
        and run.results["ratio"] >= 2,
        "no failed request": not traffic.failed and bool(traffic.done),
        "every text is plain decoding's": not traffic.wrong and bool(traffic.done),
        "put in by hand, it is rolled back": forced.get("ended") == "rolled back",
        "and ours serves again": bool(forced) and forced.get("serves") == forced.get("ours"),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tickets", required=True, help="file of recipes/support_tickets.py")
    parser.add_argument("--unseen", required=True, help="tickets of others, asked from the swap on")
    parser.add_argument("--num-unseen", type=int, default=100)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--serve-options", default="", help="more words for paceline serve")
    add_arguments(parser, "runs/adapt-live", limit_minutes=40.0)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    options.out = new_folder(options.out, OURS)
    run = Run(options)
    return finish(run, run.go, lambda missed: verdicts(run, missed), "adapt live")


if __name__ == "__main__":
    sys.exit(main())
