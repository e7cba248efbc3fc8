"""Several drafters in one server: does routing find each kind's own, and what does a pool cost?

    python recipes/support_tickets.py --train 0 --heldout 400 --out tickets
    python experiments/routing.py mixed --tickets runs/custom-workload/drafter-run/drafter \\
        --tickets-prompts tickets/heldout.jsonl --general-prompts openai/gsm8k/main:test
    python experiments/routing.py random      # a member with random weights: on how many of the requests is it tried?
    python experiments/routing.py one         # three members, all traffic to one, beside a server with that one alone

Servers are processes of their own, and take turns: a block of the same requests to
one, then to the other, so that the machine's pace is in both. `mixed` sends each request to its own drafter by hand (it
names it) and lets the other server choose (`--route auto`, no tags); the figure is of the blocks after `--learn` requests.
Prints a line a block, then one JSON object; status 1 when a figure is beyond its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server_process import server

from paceline.bench.client import Client
from paceline.figures import bootstrap, ratio_of_sums
from paceline.prompts import read_prompts
from paceline.runlog import record_of

BUILTIN = Path(__file__).parents[1] / "paceline" / "bench" / "prompts.jsonl"
TAG = "x-paceline-tag"
MOST_SLOWER = {"mixed": 0.03, "one": 0.02}
"""Share of tokens/s that the second server may lose."""
ABANDONED, STRAY = 50, 0.02
"""After so many requests a useless member gets at most this share of them."""


@dataclass
class Asked:
    """One request: its messages and the drafter it should have."""

    messages: list[dict[str, str]]
    own: str


@dataclass
class Served:
    """What a server did with a block of requests."""

    num_tokens: int = 0
    seconds: float = 0.0
    given: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(own, given) drafter -> requests."""
    order: list[str] = field(default_factory=list)
    """Drafters in the order of the requests."""


class Contender:
    """A server, and whether requests name their drafter."""

    def __init__(self, name: str, port: int, names: bool) -> None:
        self.name, self._names = name, names
        self._port = port
        self._clients: dict[str, Client] = {}
        self.blocks: list[Served] = []

    def client(self, own: str) -> Client:
        if own not in self._clients:
            self._clients[own] = client = Client(f"http://127.0.0.1:{self._port}")
            if self._names:
                client._headers[TAG] = own
        return self._clients[own]

    def ask(self, asked: Asked, max_tokens: int) -> tuple[int, str]:
        """Tokens of the answer, and the drafter it had."""
        body = {"messages": asked.messages, "max_tokens": max_tokens, "temperature": 0, "return_metrics": True}
        stream = self.client(asked.own).post("/v1/chat/completions", json.dumps(body).encode())
        if stream.failure or stream.status != 200:
            raise RuntimeError(f"{self.name}: {stream.failure or stream.body[:300]}")
        answer = json.loads(stream.body)
        return answer["usage"]["completion_tokens"], answer["metrics"]["speculative_decoding"]["drafter"]

    def run(self, block: list[Asked], concurrency: int, max_tokens: int) -> Served:
        served, began = Served(), time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            for asked, (num_tokens, drafter) in zip(block, pool.map(lambda one: self.ask(one, max_tokens), block), strict=True):
                served.num_tokens += num_tokens
                served.given[asked.own, drafter] += 1
                served.order.append(drafter)
        served.seconds = time.perf_counter() - began
        self.blocks.append(served)
        return served


def requests(options: argparse.Namespace, sources: dict[str, str]) -> list[Asked]:
    """As many as asked for, of the sources in equal parts and a seeded order; a source that is short is asked again."""
    found = []
    for own, source in sources.items():
        prompts = itertools.cycle(read_prompts(source, options.requests))
        found += [Asked(prompt.messages, own) for prompt in itertools.islice(prompts, options.requests // len(sources))]
    random.Random(options.seed).shuffle(found)
    return found


def command(options: argparse.Namespace, drafters: dict[str, str], route: str) -> list[str]:
    words = [word for name, folder in drafters.items() for word in ("--drafter", f"{name}={folder}" if name else folder)]
    more = ["--model", options.model, "--max-batch", str(max(options.concurrency, 1)), "--route", route]
    return [sys.executable, "-m", "paceline", "serve", "--port", "0", *words, *more]


def in_turns(options: argparse.Namespace, asked: list[Asked], contenders: list[Contender]) -> None:
    for begin in range(0, len(asked), options.block):
        block = asked[begin : begin + options.block]
        turns = contenders if (begin // options.block) % 2 == 0 else contenders[::-1]
        for contender in turns:
            contender.run(block, options.concurrency, options.max_tokens)
        rates = ", ".join(f"{each.name} {each.blocks[-1].num_tokens / each.blocks[-1].seconds:.1f}" for each in contenders)
        print(f"{begin + len(block):5d} requests: tokens/s {rates}", file=sys.stderr, flush=True)


def compare(contenders: list[Contender], first: int) -> dict[str, Any]:
    """Tokens/s of the second over the first, from block `first` on, over all blocks together; 95% by bootstrap over blocks."""
    before, after = ([(each.num_tokens, each.seconds) for each in contender.blocks[first:]] for contender in contenders)
    pairs = [(one[0], one[1], two[0], two[1]) for one, two in zip(before, after, strict=True)]

    def ratio(items: list[tuple[float, ...]]) -> float:
        return ratio_of_sums([item[2:] for item in items]) / ratio_of_sums([item[:2] for item in items])

    return {"ratio": ratio([*pairs]), "interval": bootstrap([*pairs], ratio), "blocks": len(pairs)}


def mixed(options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Any]:
    drafters = {"general": options.general, "tickets": options.tickets}
    asked = requests(options, {"general": options.general_prompts, "tickets": options.tickets_prompts})
    _, hand, _ = stack.enter_context(server(command(options, drafters, "tag")))
    _, auto, _ = stack.enter_context(server(command(options, drafters, "auto")))
    contenders = [Contender("by hand", hand, True), Contender("auto", auto, False)]
    in_turns(options, asked, contenders)
    found = compare(contenders, options.learn // options.block)
    given = sum((each.given for each in contenders[1].blocks[options.learn // options.block :]), Counter())
    found["given"] = {f"{own} -> {drafter}": count for (own, drafter), count in sorted(given.items())}
    return found | {"passed": found["ratio"] >= 1.0 - MOST_SLOWER["mixed"]} | told(contenders)


def one(options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Any]:
    asked = requests(options, {"general": options.general_prompts})
    others = {"general": options.general, "second": options.tickets, "third": "random-dflash"}
    _, alone, _ = stack.enter_context(server(command(options, {"": options.general}, "tag")))
    _, pool, _ = stack.enter_context(server(command(options, others, "tag")))
    contenders = [Contender("one drafter", alone, False), Contender("one of three", pool, True)]
    in_turns(options, asked, contenders)
    found = compare(contenders, 1)  # the first block is to warm up
    return found | {"passed": found["ratio"] >= 1.0 - MOST_SLOWER["one"]} | told(contenders)


def useless(options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Any]:
    asked = requests(options, {"general": options.general_prompts})
    drafters = {"useless": "random-dflash", "general": options.general}
    _, port, _ = stack.enter_context(server(command(options, drafters, "auto")))
    contender = Contender("auto", port, False)
    in_turns(options, asked, [contender])
    order = [drafter for block in contender.blocks for drafter in block.order]
    tried = [place for place, drafter in enumerate(order, start=1) if drafter == "useless"]
    share = sum(place > ABANDONED for place in tried) / max(len(order) - ABANDONED, 1)
    return {"tried": tried, "share_after_50": share, "passed": share <= STRAY} | told([contender])


def told(contenders: list[Contender]) -> dict[str, Any]:
    states = {each.name: json.loads(each.client("").get("/admin/drafters").body) for each in contenders}
    return {
        "drafters": states,
        "raw": {each.name: [[block.num_tokens, round(block.seconds, 4)] for block in each.blocks] for each in contenders},
        "tokens_per_s": {
            each.name: statistics.median(block.num_tokens / block.seconds for block in each.blocks) for each in contenders
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mixed", "random", "one"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--general", default="default", help="the drafter of general prompts")
    parser.add_argument("--tickets", default="default", help="the drafter of tickets: a folder")
    parser.add_argument("--general-prompts", default=str(BUILTIN))
    parser.add_argument("--tickets-prompts", default=str(BUILTIN))
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--learn", type=int, default=200, help="requests before the figure begins")
    parser.add_argument("--block", type=int, default=20, help="requests to one server before the other's turn")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        found = {"mixed": mixed, "random": useless, "one": one}[options.what](options, stack)
    print(json.dumps(record_of({"what": options.what, "settings": vars(options)} | found)))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
