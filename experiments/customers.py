"""Twenty customers on one base model: who deserves a drafter, and what small drafters bring.

    python experiments/customers.py --minutes 1 --out runs/customers

A server answers the requests of twenty invented customers (customers_traffic.py; five of them large) and records
traces. Then, each stage a mark in `--out` (killed, the same command goes on):

- `paceline advise --by tag` ranks the customers before anything is trained;
- a body is trained on the traffic of all, and the hidden states are kept for all later trainings (`--shared-features`);
- from this body, each customer's own drafter, `--minutes` of steps; for the large customers also a last layer alone
  and low-rank differences, in equal minutes;
- held-out requests of each customer are answered with each of its drafters, in turns: the true ranking.

Exit status 1 if an answer with drafts differs from plain decoding's. Writes results.json.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import stages
from customers_traffic import LARGE, Customer, as_token_ids, customers
from server_process import post
from stages import stage

from paceline.bench.serving.servers import started
from paceline.report.tables import SILENT, Column, Table
from paceline.runs.folder import write_results, write_whole

SMALL = ("last-layer", "low-rank")
RATES = {"all": 1e-3} | dict.fromkeys(SMALL, 2e-3)
"""Learning rates: a small part takes, and needs, a larger one."""
CLIENTS = 4
TRACES = "traces"


def sent(port: int, requests: Iterable[tuple[list[Any], dict[str, str]]], max_tokens: int) -> float:
    """Send chats with their headers, CLIENTS at a time; returns tokens/s. Raises RuntimeError if the server refuses
    one."""

    def one(request: tuple[list[Any], dict[str, str]]) -> int:
        messages, headers = request
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
        status, answer = post(port, body, headers)
        if status != 200:
            raise RuntimeError(f"status {status}: {answer}")
        return answer["usage"]["completion_tokens"]

    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        num_tokens = sum(pool.map(one, requests))
    return num_tokens / (time.perf_counter() - began)


def record_traffic(args: argparse.Namespace) -> Path:
    """Let a server answer the traffic of all customers, in random order, and record it."""
    folder, mark = args.out / TRACES, args.out / "traffic.json"
    if mark.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    requests = [
        (chat, {"x-paceline-tag": customer.tag})
        for customer in customers()
        for chat in customer.chats(args.large if customer.number in LARGE else args.small)
    ]
    random.Random("order").shuffle(requests)
    words = ["--model", args.model, "--traces", str(folder)]
    words += ["--threads", str(args.threads)] if args.threads else []
    with started([("traffic", words)], args.out, SILENT) as [url]:
        rate = sent(int(url.rpartition(":")[2]), requests, args.max_tokens)
    write_whole(mark, json.dumps({"requests": len(requests), "tokens_per_s": rate}))
    return folder


def trained(args: argparse.Namespace, name: str, init: object, minutes: float, *words: object) -> Path:
    """A drafter in `minutes` of steps; every stage reads and adds to the same hidden states."""
    settings = (*stages.QUICK, "--shared-features", args.out / "features")
    settings += ("--max-tokens", args.max_tokens, "--max-len", 768, "--max-minutes", minutes, "--heldout-every", 250)
    settings += ("--threads", args.threads) if args.threads else ()
    answers = ("--target", args.model, "--answers", args.out / TRACES, "--init", init)
    return stage(args.out, name, "train", *answers, *settings, *words) / "drafter"


def own_drafters(args: argparse.Namespace, body: Path) -> dict[str, dict[str, Path]]:
    """Each customer's drafters, by tag and by the part that was learned."""
    drafters = dict[str, dict[str, Path]]()
    for customer in customers():
        parts = ("all", *SMALL) if customer.number in LARGE else ("all",)
        words = ("--tag", customer.tag, "--learn")
        drafters[customer.tag] = {
            part: trained(args, f"{customer.tag}-{part}", body, args.minutes, *words, part, "--lr", RATES[part])
            for part in parts
        }
    return drafters


def measured(args: argparse.Namespace, customer: Customer, drafters: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Held-out figures of a customer's drafters, of the default one and of plain decoding, in turns: as served, and
    "full_tokens_per_round" with every draft verified and no prompt lookup."""
    prompts = args.out / f"{customer.tag}.jsonl"
    heldout = as_token_ids(args.model, customer.chats(args.heldout, is_heldout=True))
    write_whole(prompts, "".join(json.dumps(row) + "\n" for row in heldout))
    words = ("--model", args.model, "--prompts", prompts)
    words += ("--max-tokens", args.max_tokens, "--max-len", 768, *(("--threads", args.threads) if args.threads else ()))
    figures = dict[str, dict[str, Any]]()
    for speculate, repeat in (("auto", args.repeat), ("full", 1)):
        place = args.out, f"bench-{customer.tag}-{speculate}", {"plain": "none", "default": "default", **drafters}
        rows = stages.measured(*place, *words, "--repeat", repeat, "--speculate", speculate)
        for name, row in rows.items():
            figure = figures.setdefault(name, row)
            figure["full_tokens_per_round"] = row["tokens_per_round"]
            figure["identical"] = min(figure["identical"], row["identical"])
    return figures


def ranking(rows: dict[str, dict[str, dict[str, Any]]], advised: dict[str, Any]) -> dict[str, Any]:
    """Customers by the machine time that their own drafter saves over the default one, as measured and as advised."""
    shares = {each["tag"]: each["traffic"] for each in advised["customers"]}
    expected = {each["tag"]: each["saved"] for each in advised["customers"]}
    true = {
        tag: shares[tag] * (1 - of["default"]["tokens_per_s"] / of["all"]["tokens_per_s"]) for tag, of in rows.items()
    }
    tags = sorted(true, key=lambda tag: -true[tag])
    best = sorted(expected, key=lambda tag: -expected[tag])
    correlation = statistics.correlation(range(len(tags)), [best.index(tag) for tag in tags])  # of ranks: Spearman's
    return {"true": tags, "advised": best, "spearman": correlation, "same_of_five": len({*tags[:5]} & {*best[:5]})}


def table(rows: dict[str, dict[str, dict[str, Any]]]) -> Table:
    def figure(name: str, key: str) -> Any:
        return lambda row: rows[row].get(name, {}).get(key)

    columns = [Column("customer", str)]
    for name in ("default", "all", *SMALL):
        columns.append(Column(f"{name}: full", figure(name, "full_tokens_per_round"), "{:.2f}", "right"))
        columns.append(Column("times plain", figure(name, "speedup"), "{:.2f}", "right"))
    note = "full: tokens a round with all drafts of the drafter alone; times plain: as served"
    return Table(columns, list(rows), notes=[note])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--large", type=int, default=200, help="recorded requests of a large customer")
    parser.add_argument("--small", type=int, default=30, help="recorded requests of each other customer")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--body-minutes", type=float, default=4.0, help="minutes of steps on everyone's traffic")
    parser.add_argument("--minutes", type=float, default=1.0, help="minutes of steps of a customer's drafter")
    parser.add_argument("--heldout", type=int, default=8, help="measured requests of a customer")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--threads", type=int, help="CPU threads [default: PyTorch's choice]")
    parser.add_argument("--out", type=Path, default=Path("runs/customers"))
    return parser.parse_args()


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    traces = record_traffic(args)
    advised = stages.paceline("advise", traces, "--by", "tag", "--model", args.model, "--run", "none")
    body = trained(args, "body", "default", args.body_minutes, "--lr", RATES["all"])
    drafters = own_drafters(args, body)
    rows = {customer.tag: measured(args, customer, drafters[customer.tag]) for customer in customers()}
    table(rows).show(stderr=False)
    ranks = ranking(rows, advised)
    print(json.dumps(ranks, indent=1))
    write_results(args.out / "results.json", {"advice": advised, "customers": rows, "ranking": ranks})
    return 0 if all(row["identical"] == 1.0 for of in rows.values() for row in of.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
