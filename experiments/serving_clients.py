"""Inputs of serving_clients.sh: prompts for guidellm, the model's name, and a look at its report.

python experiments/serving_clients.py prompts FILE | model URL | sweep REPORT.json
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

BUILTIN = Path(__file__).parent.parent / "paceline" / "bench" / "prompts.jsonl"
NUM_PROMPTS = 32


def write_prompts(file: Path) -> None:
    """The built-in prompts again and again, each with its number first, so that none is in the server's prefix
    cache."""
    texts = [json.loads(line)["prompt"] for line in BUILTIN.read_text(encoding="utf-8").splitlines()]
    rows = [{"prompt": f"Question {number + 1}. {texts[number % len(texts)]}"} for number in range(NUM_PROMPTS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def model_of(url: str) -> str:
    """The first that the server names."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return json.load(answer)["data"][0]["id"]


def report_sweep(file: Path) -> int:
    """A line for each number of streams; 1 when a request failed or none was made."""
    benchmarks = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
    num_bad = 0
    for each in benchmarks:
        requests, metrics = each["scheduler_metrics"]["requests_made"], each["metrics"]
        streams = each["config"]["strategy"]["streams"]
        rate = metrics["output_tokens_per_second"]["successful"]["mean"]
        first = metrics["time_to_first_token_ms"]["successful"]["percentiles"]
        print(
            f"{streams:3d} streams: {requests['successful']} answered, {requests['errored']} failed, "
            f"{requests['incomplete']} incomplete; "
            f"{rate:.1f} tokens/s, first token p50 {first['p50']:.0f} ms, p99 {first['p99']:.0f} ms"
        )
        num_bad += requests["errored"] + requests["incomplete"] + (requests["successful"] == 0)
    return 1 if num_bad or not benchmarks else 0


def main(words: list[str]) -> int:
    match words:
        case ["prompts", file]:
            write_prompts(Path(file))
        case ["model", url]:
            print(model_of(url))
        case ["sweep", file]:
            return report_sweep(Path(file))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
