"""Tokens a round of a drafter that never served, told from the traces of another, then served: are they the same?

    python experiments/counterfactual.py --prompts gsm8k_test.jsonl --other runs/custom-workload/drafter-run/drafter

A server with drafter A answers every prompt three times: greedily, sampled with a seed, and sampled without one. From its
traces `paceline.adapt` tells what drafter B would have done, round by round. Then a server with B answers the same. Requests
that are greedy or have a seed must agree to the token, request by request: the text, and what was drafted and stood in each
round. For those without a seed, whose second text is another, the difference of tokens a round must be zero within its
interval (95%, bootstrap over prompts: one fair run in twenty misses it). Without --other, B is A with noise on its weights.

What is done is kept under --out and not done again. Prints progress, then one JSON object; status 1 when something differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from noised_drafter import folder_of, noised
from pyarrow import parquet
from server_process import post, server, stop

from paceline.adapt.score import score
from paceline.adapt.stored import read_requests
from paceline.engine.llm import LLM
from paceline.figures import bootstrap
from paceline.prompts import read_prompts
from paceline.runlog import record_of

BUILTIN = Path(__file__).parents[1] / "paceline" / "bench" / "prompts.jsonl"
GREEDY, SEEDED, SAMPLED = "greedy", "seeded", "sampled"
Figures = tuple[int, int]
"""Tokens that rounds brought, and their number."""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def asked(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The requests, the three kinds of one prompt behind one another."""
    each = -(-options.requests // len(options.prompts))
    found = [prompt for source in options.prompts for prompt in read_prompts(source, each)][: options.requests]
    bodies = []
    for number, prompt in enumerate(found):
        body = {"messages": prompt.messages, "max_tokens": options.max_tokens}
        sampled = body | {"temperature": options.temperature}
        bodies += [body | {"temperature": 0}, sampled | {"seed": 1000 + number}, sampled]
    return bodies


def serve(options: argparse.Namespace, drafter: str, store: Path) -> float:
    """Answers of a server with this drafter, as traces in `store`; the seconds they took."""
    words = ["--model", options.model, "--drafter", drafter, "--dtype", options.dtype, "--max-batch", str(options.concurrency)]
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", *words, "--speculate", "full", "--traces", str(store)]
    bodies = asked(options)
    with server(command) as (process, port, _), ThreadPoolExecutor(options.concurrency) as pool:
        began = time.monotonic()
        for number, (status, answer) in enumerate(pool.map(lambda body: post(port, body), bodies), start=1):
            if status != 200:
                raise RuntimeError(f"a request failed with status {status}: {answer}")
            if number % 30 == 0:
                say(f"{drafter}: {number} of {len(bodies)} answers in {time.monotonic() - began:.0f} s")
        stop(process)
    return time.monotonic() - began


def row_of(prompt: str, temperature: float, seed: int | None, answer: list[int], rounds: list[Figures]) -> dict[str, Any]:
    kind = GREEDY if temperature == 0 else SAMPLED if seed is None else SEEDED
    return {"prompt": prompt, "kind": kind, "answer": answer, "rounds": [list(each) for each in rounds]}


def served(store: Path) -> list[dict[str, Any]]:
    """What traces tell of each answer."""
    found = []
    for path in sorted(store.glob("traces-*.parquet")):
        for row in parquet.read_table(path).to_pylist():
            seed = json.loads(row["sampling"]).get("seed")
            rounds = list(zip(row["drafted"], row["accepted"], strict=True))
            found.append(row_of(row["key"].rsplit("@", 1)[0], row["temperature"], seed, row["answer_ids"], rounds))
    return found


def predicted(options: argparse.Namespace, drafter: str, store: Path) -> list[dict[str, Any]]:
    """The same, as `paceline.adapt` tells it for a drafter that did not serve."""
    requests, left_out = read_requests(store)
    if left_out:
        say(f"left out: {dict(left_out)}")
    longest = max(len(each.prompt_ids) + len(each.answer_ids) for each in requests)
    settings: dict[str, Any] = {"dtype": options.dtype, "max_batch": options.concurrency, "max_len": longest + 1}
    llm = LLM(options.model, drafter="none", plan="fixed", **settings)
    made, found = llm.make_drafter(drafter), []
    for begin in range(0, len(requests), 24):
        for each in score(llm, made, requests[begin : begin + 24]):
            params, rounds = each.request.params, [(one.num_drafted, one.num_accepted) for one in each.rounds]
            found.append(row_of(each.request.prompt, params.temperature, params.seed, each.request.answer_ids, rounds))
        say(f"{len(found)} of {len(requests)} scored")
    return found


def once(file: Path, make: Any) -> Any:
    """What `make` gives, kept in a file: an earlier run's where there is one."""
    if not file.exists():
        made = make()
        file.with_suffix(".part").write_text(json.dumps(made))
        file.with_suffix(".part").rename(file)
    return json.loads(file.read_text())


def traced(options: argparse.Namespace, name: str, drafter: str) -> list[dict[str, Any]]:
    """Answers of a server, once; those of a run that was killed are forgotten."""
    store = options.out / f"traces-{name}"

    def make() -> list[dict[str, Any]]:
        for path in store.glob("traces-*"):
            path.unlink()
        say(f"{drafter} answers, {serve(options, drafter, store):.0f} s")
        return served(store)

    return once(options.out / f"served-{name}.json", make)


def by_request(rows: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {row["prompt"]: row for row in rows if row["kind"] == kind}


def sums(row: dict[str, Any]) -> Figures:
    return sum(accepted + 1 for _, accepted in row["rounds"]), len(row["rounds"])


def rate(rows: list[Figures]) -> float:
    return sum(tokens for tokens, _ in rows) / max(sum(rounds for _, rounds in rows), 1)


def exact(told: dict[str, dict[str, Any]], done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Greedy requests, or those with a seed: which differ, and in what."""
    differ = [prompt for prompt in done if prompt not in told or told[prompt]["rounds"] != done[prompt]["rounds"]]
    texts = [prompt for prompt in done if prompt in told and told[prompt]["answer"] != done[prompt]["answer"]]
    return {
        "requests": len(done),
        "rounds_differ": differ,
        "texts_differ": texts,
        "predicted": rate([sums(row) for row in told.values()]),
        "served": rate([sums(row) for row in done.values()]),
        "passed": bool(done) and not differ and not texts,
    }


def within(told: dict[str, dict[str, Any]], done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Sampled requests: the difference of tokens a round, served less predicted, with its interval."""
    items: list[tuple[float, ...]] = [(*sums(told[prompt]), *sums(done[prompt])) for prompt in done if prompt in told]

    def difference(chosen: list[tuple[float, ...]]) -> float:
        ours, theirs, tokens, rounds = (sum(item[place] for item in chosen) for place in range(4))
        return tokens / max(rounds, 1) - ours / max(theirs, 1)

    low, high = bootstrap(items, difference)
    is_within = low is not None and high is not None and low <= 0 <= high
    found = {"requests": len(items), "predicted": rate([sums(told[prompt]) for prompt in done if prompt in told])}
    found |= {"served": rate([sums(row) for row in done.values()]), "difference": difference(items)}
    return found | {"interval": [low, high], "passed": is_within and len(items) == len(done)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--drafter", default="default", help="A, which serves first")
    parser.add_argument("--other", default=None, help="B: a folder [default: A with noise]")
    parser.add_argument("--noise", type=float, default=0.2, help="of B, where it is A with noise")
    parser.add_argument("--prompts", action="append", default=None, help="file of prompts; may be repeated")
    parser.add_argument("--requests", type=int, default=80, help="prompts, each asked in three ways")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/counterfactual"))
    options = parser.parse_args()
    options.prompts = options.prompts or [str(BUILTIN)]
    options.out.mkdir(parents=True, exist_ok=True)
    other = options.other or str(noised(folder_of(options.drafter, options.model), options.out / "noised", options.noise))
    settings = {name: str(value) for name, value in vars(options).items()}
    if once(options.out / "settings.json", lambda: settings) != settings:
        sys.exit(f"{options.out} holds a run with other settings: choose another --out, or remove it")
    first = traced(options, "a", options.drafter)
    told = once(options.out / "predicted.json", lambda: predicted(options, other, options.out / "traces-a"))
    done = traced(options, "b", other)
    found: dict[str, Any] = {kind: exact(by_request(told, kind), by_request(done, kind)) for kind in (GREEDY, SEEDED)} | {
        SAMPLED: within(by_request(told, SAMPLED), by_request(done, SAMPLED))
    }
    for kind, each in found.items():
        each["with_the_first"] = rate([sums(row) for row in by_request(first, kind).values()])
        verdict = "as predicted" if each["passed"] else "NOT as predicted"
        say(f"{kind}: {each['requests']} requests, {each['predicted']:.4f} predicted, {each['served']:.4f} served: {verdict}")
    passed = all(each["passed"] for each in found.values())
    say("PASSED: what was told of B is what B did" if passed else "FAILED")
    print(json.dumps(record_of({"what": "counterfactual", "settings": settings, **found, "passed": passed})))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
