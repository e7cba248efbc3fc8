"""vLLM's own mocked acceptance on a CPU beside what `paceline simulate --server-log` predicts: speed-ups over plain.

    PEERS_VENV=FOLDER .venv/bin/python experiments/vllm_mocked_acceptance.py      # FOLDER/vllm/bin/python: see peers.sh

vLLM serves one stream plainly, then with a DFlash drafter whose acceptance is mocked (`rejection_sample_method:
synthetic`) at each of `--lengths`, always with `--num-drafted` drafts; at the end plainly again, for the machine's
noise. The CPU build lacks the kernel for it, which vllm_mocked_kernel.py adds. The drafter's weights are random: they
cost what trained ones do. The prediction gets the log of the plain server under two loads, one request and as many as a
round has positions, the target's and the drafter's sizes, this machine's measured rates and the acceptance that was
asked for, and no time of a speculative round. Our own engine's mocked rounds (`bench decode --mock-tokens-per-round`)
stand beside. Exit status 1 where a prediction is off by more than `--within`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from decode_vs_peers import installed, say
from fleet_servers import VLLM_MODULE, environment
from gguf_to_folder import folder_of
from server_process import HOST, Missed, free_port, process, wait_until
from stages import paceline

from paceline import LLM
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.hardware import this_machine
from paceline.loop.adapt.servers.counters import is_up
from paceline.net.streaming import Client
from paceline.report.tables import Column, Table
from paceline.runs.folder import write_results
from paceline.simulate.server_logs import parse_server

PROMPT_TOKENS = 24


@contextlib.contextmanager
def serving(args: argparse.Namespace, model: Path, log: Path, speculative: dict[str, Any] | None) -> Iterator[Client]:
    """vLLM for one stream, without drafts for as many as a round has positions."""
    port, python = free_port(), Path(installed(args.peers_home / "vllm/bin/python", "vllm"))
    words = ["--model", model, "--dtype", args.dtype, "--enforce-eager", "--max-model-len", 1024]
    words += ["--max-num-seqs", 1 if speculative else args.num_drafted + 1]
    words += ["--no-enable-prefix-caching", "--host", HOST, "--port", port]
    if speculative:
        words += ["--speculative-config", json.dumps(speculative), "--worker-extension-cls"]
        words += ["vllm_mocked_kernel.MockedAcceptance"]
    own = {
        "OMP_NUM_THREADS": str(args.threads),
        "VLLM_LOG_STATS_INTERVAL": "2",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    own = environment(python, args.peers_home / "vllm/cache") | own
    client = Client(f"http://{HOST}:{port}")
    with process([str(python), "-m", VLLM_MODULE, *map(str, words)], log, own) as server:
        try:
            wait_until("vLLM", lambda: is_up(client), server, log, 600)
            yield client
        except BaseException:
            say(log.read_text()[-3000:])
            raise


def decode_rate(client: Client, model: Path, number: int, max_tokens: int) -> float:
    """Tokens/s of a streamed answer behind its first token, which comes of the prompt's pass."""
    prompt = [1000 + (37 * number + 101 * place) % 40_000 for place in range(PROMPT_TOKENS)]
    body = {"model": str(model), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    stream = client.post("/v1/completions", json.dumps(body).encode())
    failed = f"vLLM failed, see its log: {stream.failure or stream.body[-300:]!r}"
    if stream.failure or stream.status != 200:
        sys.exit(failed)
    chunks = [(at, json.loads(data)) for at, data in stream.events() if data.startswith(b"{")]
    if any("error" in chunk for _, chunk in chunks):
        sys.exit(failed)
    times = [at for at, chunk in chunks if chunk["choices"]]
    return (chunks[-1][1]["usage"]["completion_tokens"] - 1) / (times[-1] - times[0])


def measured(args: argparse.Namespace, model: Path, log: Path, speculative: dict[str, Any] | None) -> dict[str, Any]:
    with serving(args, model, log, speculative) as client:
        rates = [decode_rate(client, model, number, args.max_tokens) for number in range(args.answers + 1)][1:]
        if speculative is None:
            with ThreadPoolExecutor(args.num_drafted + 1) as pool:  # for the log: rounds of as many positions
                all_rates = pool.map(
                    lambda number: decode_rate(client, model, number, 2 * args.max_tokens), range(args.num_drafted + 1)
                )
                say(f"{sum(all_rates):.1f} tokens/s of {args.num_drafted + 1} streams together")
        length = parse_server(client.get("/metrics").body.decode()).tokens_per_round or 1.0
    say(f"{statistics.median(rates):.1f} tokens/s at an acceptance length of {length:.2f}")
    return {"tokens_per_s": statistics.median(rates), "runs": rates, "acceptance_length": length}


def curve(length: float, num_drafted: int) -> str:
    """Survival by draft position for this acceptance length, as vLLM mocks it: whole drafts, then a share of one."""
    shares = [min(max(length - 1 - place, 0.0), 1.0) for place in range(num_drafted)]
    return "survival:" + ",".join(f"{share:g}" for share in shares)


def predicted(args: argparse.Namespace, model: Path, log: Path, params: int, length: float) -> dict[str, Any]:
    context = PROMPT_TOKENS + args.max_tokens // 2
    line = paceline(
        *("simulate", "--model", model / "config.json", "--hardware", "this", "--precision", args.dtype),
        *("--server-log", log, "--context", context, "--drafter-params", params, "--block", args.num_drafted + 1),
        *("--max-draft", args.num_drafted, "--acceptance", curve(length, args.num_drafted)),
    )
    return {"speedup": dict(line["curve"])[args.num_drafted], "overhead": line["overhead"]}


def runs(args: argparse.Namespace, model: Path, scratch: Path) -> tuple[dict[str, Any], dict[float, Any], int]:
    """Returns (figures of vLLM by mocked length, the predictions, the number of the drafter's parameters)."""
    target = LLM(str(model), drafter="none", dtype="float32", device="cpu", max_len=64).target
    drafter = DFlashDrafter.random(target, num_layers=args.layers, block_size=args.num_drafted + 1)
    drafter.save(scratch / "drafter")
    params = sum(each.numel() for each in drafter.network.parameters()) + target.vocab_size * target.hidden_size
    speculative = {"method": "dflash", "model": str(scratch / "drafter"), "num_speculative_tokens": args.num_drafted}
    figures = {"plain": measured(args, model, scratch / "plain.log", None)}
    for length in args.lengths:
        mocked = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
        figures[f"{length:g}"] = measured(args, model, scratch / f"{length:g}.log", speculative | mocked)
    figures["plain again"] = measured(args, model, scratch / "again.log", None)
    simulated = {each: predicted(args, model, scratch / "plain.log", params, each) for each in args.lengths}
    return figures, simulated, params


def main() -> None:
    args = arguments()
    model = folder_of(args.model, args.peers_home / "models")
    with tempfile.TemporaryDirectory(prefix="paceline-mocked-") as scratch:
        figures, simulated, params = runs(args, model, Path(scratch))
    lengths = ",".join(f"{length:g}" for length in args.lengths)
    ours = paceline(
        *("bench", "decode", "--model", model, "--mock-tokens-per-round", lengths, "--num-drafted", args.num_drafted),
        *("--dtype", args.dtype, "--threads", args.threads, "--device", "cpu"),
    )["results"]
    own = {row["tokens_per_round"]: row["speedup"] for row in ours if row["tokens_per_round"] > 1}
    plain_s = (1 / figures["plain"]["tokens_per_s"] + 1 / figures["plain again"]["tokens_per_s"]) / 2
    rows = []
    for length in args.lengths:
        speedup = figures[f"{length:g}"]["tokens_per_s"] * plain_s
        one = {"length": length, "measured": speedup, **simulated[length], "bench_mock": own.get(length)}
        rows.append(one | {"error": one["speedup"] / speedup - 1})
    columns = (
        Column("acceptance length", lambda row: row["length"], "{:g}", "right"),
        Column("vLLM, times plain", lambda row: row["measured"], "{:.2f}", "right"),
        Column("predicted", lambda row: row["speedup"], "{:.2f}", "right"),
        Column("error", lambda row: row["error"], "{:+.0%}", "right"),
        Column("our engine, mocked", lambda row: row["bench_mock"], "{:.2f}", "right"),
    )
    Table(columns, rows).show()
    record = {name: getattr(args, name) for name in ("num_drafted", "layers", "max_tokens", "answers", "threads")}
    record = {"model": args.model, "dtype": args.dtype, "settings": record, "drafter_params": params, "rows": rows}
    write_results(args.save_results, record | {"machine": this_machine("cpu"), "vllm": figures, "bench_mock": ours})
    sys.exit(0 if all(abs(row["error"]) <= args.within for row in rows) else 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a built-in name, or a GGUF file")
    parser.add_argument("--lengths", type=lambda text: [*map(float, text.split(","))], default=[1.0, 2.0, 4.0])
    for name, value in {"num-drafted": 7, "layers": 3, "answers": 6, "max-tokens": 256, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--within", type=float, default=0.15, help="of the measured speed-up, as a share")
    home = os.environ.get("PEERS_VENV")
    parser.add_argument("--peers-home", type=Path, default=home, required=home is None, help="has vllm/bin/python")
    default = Path(f"experiments/results/vllm_mocked_acceptance_cpu_{time.strftime('%Y-%m-%d')}.json")
    parser.add_argument("--save-results", type=Path, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except Missed as error:
        sys.exit(str(error))
