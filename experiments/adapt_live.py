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
import contextlib
import gc
import http.client
import itertools
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from server_process import post, server, stop

from paceline import LLM, SamplingParams
from paceline.data.prompts import read_prompts
from paceline.loop.adapt.gate.lineage import Lineage
from paceline.loop.adapt.log import AdaptLog
from paceline.runs.folder import record_of

MEMBER, OURS = "general", "adapt-live"
QUESTIONS, TICKETS, UNSEEN = "questions", "tickets", "unseen tickets"
HOURS, BEGINS_AT, LATE_S = "PACELINE_ADAPT_HOUR_S", 6, 120
"""The run begins at six of a day; an hour is decided about when all of it is two minutes old."""


Message = dict[str, Any]


@dataclass(frozen=True)
class Known:
    """A prompt, and the only answer that is right."""

    messages: list[Message]
    text: str


@dataclass(frozen=True)
class Done:
    """A request that was answered."""

    ended: float
    """Seconds since 1970."""
    kind: str
    tokens: int
    """That rounds with drafts brought; next, their number."""
    rounds: int
    is_right: bool


@dataclass
class Traffic:
    """Clients that each ask, wait some time (exponential, `think_s` on average), and ask again."""

    port: int
    prompts: Mapping[str, Sequence[Known]]
    """Kind -> what is asked, in turns."""
    max_tokens: int
    num_clients: int
    think_s: float
    shares: dict[str, float]
    """Kind -> its share of the requests; may be set at any time."""
    done: list[Done] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _turns: dict[str, Iterator[Known]] = field(init=False)

    def __post_init__(self) -> None:
        self._turns = {kind: itertools.cycle(known) for kind, known in self.prompts.items()}

    def ask_instead(self, kind: str, known: Sequence[Known]) -> None:
        """From now on, these are the prompts of a kind."""
        self._turns[kind] = itertools.cycle(known)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While the block runs; answers under way at its end are waited for."""
        stop = threading.Event()
        clients = [threading.Thread(target=self._client, args=(stop, number)) for number in range(self.num_clients)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            stop.set()
            for client in clients:
                client.join()

    def _client(self, stop: threading.Event, seed: int) -> None:
        luck = random.Random(seed)
        while not stop.wait(luck.expovariate(1 / self.think_s) if self.think_s else 0.0):
            kind = luck.choices([*self.shares], [*self.shares.values()])[0]
            try:
                self._ask(kind, next(self._turns[kind]))
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                self.failed.append(f"{kind}: {type(error).__name__} {error}")

    def _ask(self, kind: str, known: Known) -> None:
        body = {"messages": known.messages, "max_tokens": self.max_tokens, "temperature": 0, "return_metrics": True}
        status, answer = post(self.port, body, {"x-paceline-tag": kind})
        if status != 200:
            self.failed.append(f"{kind}: status {status} {str(answer)[:200]}")
            return
        text = answer["choices"][0]["message"]["content"]
        if text != known.text:
            self.wrong.append(f"{kind}: {text!r} in place of {known.text!r}")
        sources = answer["metrics"]["speculative_decoding"]["rounds_by_source"]
        histograms = [each["accepted_histogram"] for name, each in sources.items() if name != "none"]
        rounds = sum(map(sum, histograms))
        tokens = rounds + sum(number * count for histogram in histograms for number, count in enumerate(histogram))
        self.done.append(Done(time.time(), kind, tokens, rounds, text == known.text))

    def figures(self, kind: str, begin: float, end: float) -> dict[str, float]:
        """Requests, rounds and acceptance length of a kind's answers that ended in [begin, end)."""
        found = [each for each in self.done if each.kind == kind and begin <= each.ended < end]
        tokens, rounds = sum(each.tokens for each in found), sum(each.rounds for each in found)
        return {"requests": len(found), "rounds": rounds, "tokens_per_round": tokens / rounds if rounds else 0.0}


def noised(source: Path, out: Path, noise: float) -> Path:
    """Writes the drafter's folder with normal noise on each matrix: so many times the deviation of its weights."""
    shutil.copytree(source, out)
    weights, draw = load_file(source / "model.safetensors"), torch.Generator().manual_seed(0)
    for tensor in weights.values():
        if tensor.ndim == 2:
            values = tensor.float()
            tensor.copy_(values + noise * values.std() * torch.randn(values.shape, generator=draw))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out.resolve()


class Missed(Exception):
    """Raised when something did not come about; says what."""


class Run:
    """The steps of one run, and their results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.time()
        self.out: Path = options.out
        self.state = self.out / "adapt"
        self.times: dict[str, float] = {}
        """Name -> seconds since 1970."""
        self.found: dict[str, Any] = {}
        self._num_told = 0
        about = time.time() / options.hour_s
        self.hour_s = time.time() / (about - about % 24 + 24 + BEGINS_AT)

    def say(self, text: str) -> None:
        print(f"{(time.time() - self.began) / 60:5.1f} min  {text}", file=sys.stderr, flush=True)

    def mark(self, name: str) -> float:
        self.times[name] = time.time()
        return self.times[name]

    def command(self, *words: Any) -> list[str]:
        return [sys.executable, "-m", "paceline", *map(str, words)]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {HOURS: repr(self.hour_s)}

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
        params, found = SamplingParams(max_tokens=options.max_tokens), dict[str, list[Known]]()
        for kind, each in prompts.items():
            answers = llm.chat([prompt.messages for prompt in each], params)
            found[kind] = [Known(prompt.messages, answer.text) for prompt, answer in zip(each, answers, strict=True)]
            self.say(f"plain decoding has answered {len(each)} {kind}")
        del llm
        gc.collect()
        return found

    def answers(self, name: str, sources: list[str], number: int) -> list[Path]:
        """Answers of the target to other prompts, for trainings and for the gate."""
        words = ["regenerate", "--target", self.options.model, "--dtype", self.options.dtype]
        found = []
        for place, source in enumerate(sources):
            out = self.out / f"{name}-{place}"
            more = ["--prompts", source, "--limit", number, "--max-tokens", self.options.max_tokens, "--out", out]
            with (self.out / "regenerate.log").open("a") as said:
                subprocess.run(self.command(*words, *more), check=True, stdout=said, stderr=said)
            found.append(out / "answers")
        self.say(f"{name}: up to {number} answers of each of {len(sources)} files")
        return found

    # Beside the server

    def watch_command(self, port: int, general: list[Path], ood: list[Path]) -> list[str]:
        options = self.options
        words: list[Any] = ["--model", options.model, "--dtype", options.dtype, "--server", f"http://127.0.0.1:{port}"]
        words += ["--traces", self.out / "traces", "--state", self.state, "--incumbent", "default"]
        words += [word for folder in general for word in ("--general", folder)] + [w for f in ood for w in ("--ood", f)]
        words += ["--early-periods", 1, "--every", 2, "--probation-minutes", options.probation_minutes]
        words += ["--training-price", 0.001, "--requests", options.requests, "--minutes", options.minutes]
        words += ["--learning-rates", options.learning_rate]
        return self.command("adapt", "watch", *words, *shlex.split(options.watch_options))

    @contextlib.contextmanager
    def watching(self, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        with (self.out / "watch.log").open("w") as said:
            process = subprocess.Popen(command, env=self.environment, stdout=said, stderr=said)
            try:
                yield process
            finally:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()

    def events(self) -> list[dict[str, Any]]:
        """The daemon's logged events; prints new ones."""
        found = [line for line in AdaptLog(self.state).lines() if "event" in line]
        for line in found[self._num_told :]:
            self.say(f"adapt: {line['event']} {', '.join(line.get('clusters') or [])} {line.get('why') or ''}".rstrip())
        self._num_told = len(found)
        return found

    def until(self, what: str, seconds: float, is_so: Callable[[], bool], daemon: subprocess.Popen[bytes]) -> None:
        """Wait; raises Missed when it does not come."""
        ends, told = time.time() + seconds, time.time()
        while not is_so():
            if daemon.poll() is not None:
                raise Missed(f"the daemon ended with status {daemon.returncode}: see {self.out / 'watch.log'}")
            if time.time() > min(ends, self.began + 60 * self.options.limit_minutes):
                raise Missed(
                    f"{what}: not within {seconds / 60:.1f} minutes of waiting, or not within the limit of the whole"
                )
            if time.time() > told + 60:
                told = time.time()
                self.say(f"waiting: {what}")
            time.sleep(1.0)
        self.mark(what)

    def until_event(
        self, names: tuple[str, ...], seconds: float, daemon: subprocess.Popen[bytes], since: int = 0
    ) -> str:
        """Wait for one of these events behind the first `since`; which it was."""

        def latest() -> str | None:
            return next((line["event"] for line in self.events()[since:] if line["event"] in names), None)

        self.until(" or ".join(names), seconds, lambda: latest() is not None, daemon)
        return str(latest())

    # The story

    def adapted(self, traffic: Traffic, daemon: subprocess.Popen[bytes]) -> Path:
        """From questions to tickets, a training, a swap; the drafter that serves then."""
        options = self.options
        self.mark("questions begin")
        self.until("the season is known", 2 * options.calm_hours * self.hour_s + 60, self._is_calm, daemon)
        self.mark("tickets begin")
        traffic.shares = {TICKETS: 1 - options.rest, QUESTIONS: options.rest}
        self.say(f"the traffic turns: {1 - options.rest:.0%} tickets")
        ended = self.until_event(("training", "failed"), 60 * self.hour_s + LATE_S + 60, daemon)
        if ended == "failed":
            raise Missed(f"no training began: {self.events()[-1].get('why')}")
        ended = self.until_event(("swapped", "refused", "failed"), 60 * (options.minutes + 15), daemon)
        if ended != "swapped":
            raise Missed(f"the candidate was {ended}: {self.events()[-1].get('why')}")
        traffic.ask_instead(TICKETS, traffic.prompts[UNSEEN])
        self.mark("swapped")
        ended = self.until_event(("kept", "rolled back"), 60 * (options.probation_minutes + 5), daemon)
        if ended != "kept":
            raise Missed(f"the candidate was {ended}: {self.events()[-1].get('why')}")
        self.mark("kept")
        return Path(self.members(traffic)[MEMBER])

    def _is_calm(self) -> bool:
        return time.time() - self.times["questions begin"] >= self.options.calm_hours * self.hour_s

    def members(self, traffic: Traffic) -> dict[str, str]:
        words = self.command("drafters", "list", "--server", f"http://127.0.0.1:{traffic.port}")
        line = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        return {row["name"]: row["drafter"] for row in json.loads(line)["drafters"] if row["state"] == "ready"}

    def poisoned(self, traffic: Traffic, daemon: subprocess.Popen[bytes], ours: Path) -> None:
        """Weights with noise: refused by the gate; put in by hand, taken back."""
        options = self.options
        bad = noised(ours, self.out / "poisoned", options.noise)
        window = Lineage(self.state / "lineage.json").entries()[-1]["window"]
        words = [
            "adapt",
            "gate",
            bad,
            "--model",
            options.model,
            "--dtype",
            options.dtype,
            "--traces",
            self.out / "traces",
        ]
        words += ["--incumbent", ours, "--cluster", TICKETS, "--since", window["since"], "--requests", options.requests]
        judged = subprocess.run(self.command(*words, "--json"), env=self.environment, capture_output=True, text=True)
        lines = judged.stdout.splitlines()
        if not lines:
            raise Missed(f"the gate said nothing and ended with status {judged.returncode}: {judged.stderr[-500:]}")
        self.found["gate_of_the_poisoned"] = verdict = json.loads(lines[-1]) | {"status": judged.returncode}
        self.say(f"the gate about the poisoned one: {verdict.get('reason')}")
        before = len(self.events())
        self.mark("forced")
        status, answer = post(traffic.port, {"drafter": str(bad)}, path=f"/admin/drafters/{MEMBER}")
        if status != 200:
            raise Missed(f"the poisoned drafter could not be put in by hand: {status} {answer}")
        self.say("the poisoned one serves, by hand")
        ended = self.until_event(("rolled back", "kept"), 60 * (options.probation_minutes + 5), daemon, before)
        self.mark("taken back")
        self.found["after_force"] = {"ended": ended, "serves": self.members(traffic).get(MEMBER), "ours": str(ours)}
        time.sleep(options.after_s)

    def go(self) -> None:
        """All of it; what was found is in `found`."""
        options = self.options
        prompts = self.known()
        general = self.answers("general", options.general, options.num_general)
        ood = self.answers("ood", options.ood, options.num_ood)
        words = ["--model", options.model, "--dtype", options.dtype, "--drafter", f"{MEMBER}=default", "--route", "tag"]
        words += ["--max-batch", options.clients, "--max-len", options.max_len, "--traces", self.out / "traces"]
        serving = self.command("serve", "--port", 0, *words, "--speculate", "full", *shlex.split(options.serve_options))
        with server(serving) as (process, port, _):
            traffic = Traffic(port, prompts, options.max_tokens, options.clients, options.think_s, {QUESTIONS: 1.0})
            self.found["traffic"] = traffic
            with self.watching(self.watch_command(port, general, ood)) as daemon, traffic.running():
                self.poisoned(traffic, daemon, self.adapted(traffic, daemon))
            stop(process)


def verdicts(run: Run, missed: str | None) -> dict[str, bool]:
    """Condition -> True if it holds."""
    traffic: Traffic | None = run.found.pop("traffic", None)
    if traffic is None:
        return {"the server ran": False}
    now = time.time()
    at = {
        name: run.times.get(name, now)
        for name in ("questions begin", "tickets begin", "swapped", "forced", "taken back")
    }
    before = traffic.figures(TICKETS, at["tickets begin"], at["swapped"])
    after = traffic.figures(TICKETS, at["swapped"], at["forced"])
    run.found |= {
        "tickets_before": before,
        "tickets_after": after,
        "tickets_poisoned": traffic.figures(TICKETS, at["forced"], at["taken back"]),
        "questions_before": traffic.figures(QUESTIONS, at["questions begin"], at["swapped"]),
        "questions_after": traffic.figures(QUESTIONS, at["swapped"], at["forced"]),
        "ratio": after["tokens_per_round"] / max(before["tokens_per_round"], 1.0),
        "requests": len(traffic.done),
        "failed": traffic.failed[:20],
        "wrong": traffic.wrong[:20],
        "events": [{key: line.get(key) for key in ("hour", "event", "why")} for line in run.events()],
        "missed": missed,
    }
    names = [line["event"] for line in run.events()]
    forced = run.found.get("after_force", {})
    gate = run.found.get("gate_of_the_poisoned", {})
    return {
        "one training": names.count("training") == 1,
        "swapped by the gate, and kept": "kept" in names and names.index("swapped") < names.index("kept"),
        "tokens a round on tickets that nobody saw at least doubled": after["requests"] >= 10
        and run.found["ratio"] >= 2,
        "no failed request": not traffic.failed and bool(traffic.done),
        "every text is plain decoding's": not traffic.wrong and bool(traffic.done),
        "the poisoned one is refused by the gate": gate.get("passed") is False and gate.get("status") == 3,
        "put in by hand, it is rolled back": forced.get("ended") == "rolled back",
        "and ours serves again": bool(forced) and forced.get("serves") == forced.get("ours"),
        "in time": time.time() - run.began < 60 * run.options.limit_minutes and missed is None,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tickets", required=True, help="file of recipes/support_tickets.py")
    parser.add_argument("--unseen", required=True, help="tickets of others, asked from the swap on")
    parser.add_argument("--questions", required=True, help="prompts of the first traffic, as GSM8K's")
    parser.add_argument(
        "--general", action="append", required=True, help="prompts learned beside tickets; may be repeated"
    )
    parser.add_argument("--ood", action="append", required=True, help="prompts that must not suffer; may be repeated")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--hour-s", type=float, default=8.0, help="seconds of an hour of the daemon")
    parser.add_argument(
        "--calm-hours", type=float, default=54.0, help="hours of questions; a season needs more than 48"
    )
    parser.add_argument("--rest", type=float, default=0.15, help="share of questions among the tickets")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument(
        "--think-s", type=float, default=2.5, help="seconds that a client waits between requests, on average"
    )
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--num-questions", type=int, default=160)
    parser.add_argument("--num-tickets", type=int, default=200)
    parser.add_argument("--num-unseen", type=int, default=100)
    parser.add_argument("--num-general", type=int, default=80, help="of each file")
    parser.add_argument("--num-ood", type=int, default=30, help="of each file")
    parser.add_argument("--requests", type=int, default=40, help="of each set that the gate scores")
    parser.add_argument("--minutes", type=float, default=9.0, help="of training")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--probation-minutes", type=float, default=1.0)
    parser.add_argument("--noise", type=float, default=1.0, help="of the poisoned weights, in their deviations")
    parser.add_argument("--after-s", type=float, default=20.0, help="seconds of traffic behind the last step")
    parser.add_argument("--limit-minutes", type=float, default=40.0)
    parser.add_argument("--serve-options", default="", help="more words for paceline serve")
    parser.add_argument("--watch-options", default="", help="more words for paceline adapt watch")
    parser.add_argument("--out", type=Path, default=Path("runs/adapt-live"), help="replaced if it is there")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    options.out = options.out.absolute()
    if options.out.exists() and not (options.out / OURS).exists():
        sys.exit(f"{options.out} is there, and no run of this script: choose another --out")
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    (options.out / OURS).touch()
    (options.out / "traces").mkdir(mode=0o700)
    run, missed = Run(options), None
    try:
        run.go()
    except Missed as reason:
        missed = str(reason)
        run.say(f"MISSED: {missed}")
    checks = verdicts(run, missed)
    for name, is_so in checks.items():
        run.say(f"{'ok    ' if is_so else 'FAILED'} {name}")
    minutes = (time.time() - run.began) / 60
    told = {"what": "adapt live", "passed": all(checks.values()), "minutes": minutes, "checks": checks, **run.found}
    times = {name: round((when - run.began) / 60, 2) for name, when in run.times.items()}
    settings = {
        name: value if isinstance(value, int | float | list) else str(value) for name, value in vars(options).items()
    }
    print(json.dumps(record_of(told | {"times_min": times, "hour_s": run.hour_s, "settings": settings})))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
