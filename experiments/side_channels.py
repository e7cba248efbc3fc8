"""Measures what sizes and times of a stream's chunks show about its prompt, and the price of `serve --even-chunks`.

    python experiments/side_channels.py --answers 24 --out experiments/results/side_channels_cpu.json

Three servers (no drafts, drafts, drafts with --even-chunks) answer ten prompts many times, each answer with a seed of
its own, which is the same in all settings. An attacker who sees the lengths of encrypted chunks and their times, never
their contents, learns from some answers and names the prompts of others. Prints a table; writes JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from server_process import CHAT

from paceline.bench.serving.servers import started
from paceline.net.streaming import Client, Stream
from paceline.report.statistics import bootstrap
from paceline.report.tables import SILENT
from paceline.runs.folder import record_of, write_whole

PROMPTS = (
    ("English", "Explain in a few sentences why the sky is blue."),
    ("English", "Describe how bread is made, step by step."),
    ("French", "Explique en quelques phrases pourquoi la mer est salée."),
    ("French", "Raconte une petite histoire avec un chat et un renard."),
    ("German", "Erkläre in einigen Sätzen, warum es Ebbe und Flut gibt."),
    ("German", "Beschreibe einen Spaziergang im Wald an einem Herbsttag."),
    ("Spanish", "Explica en pocas frases por qué hay estaciones del año."),
    ("Spanish", "Cuenta una historia breve sobre un pescador y su hijo."),
    ("Python", "Write a Python function that sorts a list by insertion."),
    ("Python", "Write a Python class for a stack with push, pop and len."),
)
SETTINGS = {"plain": ("none", ()), "drafts": (None, ()), "even": (None, ("--even-chunks",))}
"""Setting -> (drafter, None for --drafter; further options of the server)."""
FOLDS, NUM_FIRST, NUM_WARM_UP = 5, 32, 8
"""Parts of the cross-validation; chunks of which each size and time is a feature; answers before the first measured."""
PENALTY = 0.01
Seen = tuple[list[int], list[float]]
"""Bytes of each chunk, and its time in seconds after the request."""


def seen_of(stream: Stream) -> Seen:
    return [len(piece) for _, piece in stream.pieces], [at - stream.sent_s for at, _ in stream.pieces]


def _summary(values: Sequence[float], bounds: NDArray[np.float64]) -> list[float]:
    counts, _ = np.histogram(values, bounds)
    first = [*values[:NUM_FIRST], *[0.0] * (NUM_FIRST - len(values))]
    return [float(np.mean(values)), float(np.std(values)), *(counts / len(values)), *first]


def features(seen: Seen, names: str) -> list[float]:
    """`names`: of sizes, gaps (between chunks), first (the first chunk's time), number (of chunks) and end (the last
    one's time), those that are used."""
    sizes, times = seen
    gaps = np.log(np.diff(times, prepend=times[0] - 1e-3).clip(1e-5))[1:] if len(times) > 1 else np.zeros(1)
    parts: dict[str, Callable[[], list[float]]] = {
        "sizes": lambda: _summary(sizes, np.append(np.arange(100.0, 800.0, 8.0), np.inf)),
        "gaps": lambda: _summary([*gaps], np.append(np.linspace(-12.0, 0.0, 25), np.inf)),
        "first": lambda: [math.log(times[0])],
        "number": lambda: [float(len(sizes)), float(sum(sizes))],
        "end": lambda: [math.log(times[-1])],
    }
    return [value for name in names.split() for value in parts[name]()]


VIEWS = {
    "sizes and times": "sizes gaps first number end",
    "sizes": "sizes number",
    "times": "gaps first end",
    "no first, number, end": "sizes gaps",
}
"""Name of an attack -> the features that it uses, all or a part."""


def predicted(train_NF: Any, labels_N: NDArray[np.int64], test_MF: Any) -> NDArray[np.int64]:
    """Class of each row of `test_MF`, by logistic regression on standardised features with an L2 penalty."""
    mean_F, scale_F = train_NF.mean(0), train_NF.std(0)
    scale_F[scale_F < 1e-9] = math.inf  # a constant shows nothing
    train, test = (torch.from_numpy((rows - mean_F) / scale_F) for rows in (train_NF, test_MF))
    weight_FC = torch.zeros(train.shape[1] + 1, int(labels_N.max()) + 1, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weight_FC], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        solver.zero_grad()
        logits = train @ weight_FC[:-1] + weight_FC[-1]
        value = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels_N))
        value = value + PENALTY * weight_FC[:-1].square().sum()
        value.backward()
        return value

    solver.step(loss)
    return (test @ weight_FC[:-1] + weight_FC[-1]).argmax(1).numpy()


def wilson(num_right: int, num: int, z: float = 1.959964) -> tuple[float, float]:
    """95% interval of a share (Wilson 1927)."""
    share, below = num_right / num, 1 + z * z / num
    middle = (share + z * z / (2 * num)) / below
    half = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num)) / below
    return middle - half, middle + half


def accuracy(rows_NF: Any, labels_N: NDArray[np.int64], folds_N: NDArray[np.int64]) -> dict[str, Any]:
    """Share of rows whose class was named by a classifier that learned from the other folds."""
    num_right = 0
    for fold in np.unique(folds_N):
        out_N = folds_N == fold
        num_right += int((predicted(rows_NF[~out_N], labels_N[~out_N], rows_NF[out_N]) == labels_N[out_N]).sum())
    return {
        "accuracy": num_right / len(labels_N),
        "interval": wilson(num_right, len(labels_N)),
        "answers": len(rows_NF),
    }


def attacked(seen: dict[tuple[int, int], Seen]) -> dict[str, Any]:
    """Accuracy by what is asked for and what is used. Languages are learned from one prompt of each and named for the
    other, so that no prompt was seen before. `seen`: (prompt, number of the answer) -> its chunks."""
    keys, languages = sorted(seen), sorted({language for language, _ in PROMPTS})
    prompts_N = np.array([prompt for prompt, _ in keys])
    languages_N = np.array([languages.index(PROMPTS[prompt][0]) for prompt, _ in keys])
    result: dict[str, Any] = {"prompt": {}, "language": {}}
    for view, names in VIEWS.items():
        rows_NF = np.array([features(seen[key], names) for key in keys])
        result["prompt"][view] = accuracy(rows_NF, prompts_N, np.array([number % FOLDS for _, number in keys]))
        result["language"][view] = accuracy(rows_NF, languages_N, prompts_N % 2)
    return result


def price(seen: dict[tuple[int, int], Seen], plain: dict[tuple[int, int], Seen]) -> dict[str, Any]:
    """Medians of one setting, and the median of its ratios to plain decoding of the same answer, with intervals."""
    figures: dict[str, Any] = {"bytes": statistics.median(sum(sizes) for sizes, _ in seen.values())}
    for name, place in (("first_s", 0), ("total_s", -1)):
        pairs = [(seen[key][1][place], plain[key][1][place]) for key in seen]
        ratio = statistics.median(own / other for own, other in pairs)
        interval = bootstrap(pairs, lambda drawn: statistics.median(own / other for own, other in drawn))
        figures[name] = {"median": statistics.median(own for own, _ in pairs), "of_plain": ratio, "interval": interval}
    return figures


def ask(client: Client, prompt: int, number: int, options: argparse.Namespace) -> Stream:
    """Stream one answer. Raises RuntimeError if it fails."""
    body = {
        "messages": [{"role": "user", "content": PROMPTS[prompt][1]}],
        "temperature": options.temperature,
        "seed": 1000 * prompt + number,
        "max_tokens": options.max_tokens,
        "stream": True,
    }
    stream = client.post(CHAT, json.dumps(body).encode())
    if stream.failure or stream.status != 200:
        raise RuntimeError(f"an answer failed: {stream.failure or stream.body[:200]!r}")
    return stream


def text_of(stream: Stream) -> str:
    chunks = [json.loads(data) for _, data in stream.events() if data != b"[DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def measure(urls: dict[str, str], options: argparse.Namespace) -> tuple[dict[str, dict[tuple[int, int], Seen]], int]:
    """Ask all servers for the same answers, in turns. Returns the chunks by setting, and the number of answers whose
    texts differ between settings."""
    clients = {name: Client(url) for name, url in urls.items()}
    seen: dict[str, dict[tuple[int, int], Seen]] = {name: {} for name in clients}
    num_different = 0
    for prompt in range(NUM_WARM_UP + len(PROMPTS)):  # the rate of even chunks is measured from the eighth on
        for client in clients.values():
            ask(client, prompt % len(PROMPTS), 999, options)
    for number in range(options.answers):
        for prompt in range(len(PROMPTS)):
            names = [*clients] if number % 2 else [*clients][::-1]
            streams = {name: ask(clients[name], prompt, number, options) for name in names}
            num_different += len({text_of(stream) for stream in streams.values()}) > 1
            for name, stream in streams.items():
                seen[name][prompt, number] = seen_of(stream)
        print(f"{number + 1} of {options.answers} answers to each prompt", file=sys.stderr)
    return seen, num_different


def table_of(results: dict[str, Any]) -> str:
    """A row for each setting; accuracies are those from sizes and times."""
    lines = ["| setting | prompt named (chance 10%) | language named (chance 20%) | first token | total |"]
    lines.append("|---|---|---|---|---|")
    for name, result in results.items():
        shares = [result["attack"][what]["sizes and times"] for what in ("prompt", "language")]
        shown = [
            f"{share['accuracy']:.0%} [{share['interval'][0]:.0%}, {share['interval'][1]:.0%}]" for share in shares
        ]
        for part in ("first_s", "total_s"):
            figure = result["price"][part]
            low, high = figure["interval"]
            shown.append(f"{1e3 * figure['median']:.0f} ms, {figure['of_plain']:.2f}x [{low:.2f}, {high:.2f}]")
        lines.append(f"| {' | '.join([name, *shown])} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--answers", type=int, default=24, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    if options.answers < FOLDS:
        parser.error(f"--answers must be {FOLDS} or more, for the cross-validation")
    common = ("--model", options.model, "--max-batch", "1", "--stream-interval-ms", "0")
    servers = [
        (name, (*common, "--drafter", drafter or options.drafter, *more)) for name, (drafter, more) in SETTINGS.items()
    ]
    with tempfile.TemporaryDirectory() as logs, started(servers, Path(logs), SILENT) as urls:
        seen, num_different = measure(dict(zip(SETTINGS, urls, strict=True)), options)
    results = {name: {"attack": attacked(each), "price": price(each, seen["plain"])} for name, each in seen.items()}
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    record = record_of({**settings, "num_different": num_different, "prompts": PROMPTS, "results": results})
    if options.out:
        write_whole(options.out, json.dumps(record, indent=1) + "\n")
    print(table_of(results))
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
