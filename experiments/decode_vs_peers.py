"""Decoding on a CPU: paceline beside llama.cpp, Transformers and vLLM, each plain and with its own speculation.

    experiments/decode_vs_peers.sh --models qwen2.5-coder-0.5b --prompts humaneval.jsonl experiments/prompts_edit.jsonl

(builds the peers first; needs an idle machine.) Contenders are PEER/WAY, a way being what drafts; "none" is plain
decoding.

    paceline/none, ngram, default, draft       weights as in the file; lookups; the drafter that ships; a smaller model
    llama.cpp/none, ngram-..., draft           llama-server on the same file; its lookups; the smaller model
    transformers/none, lookup, draft           generate on the same file; prompt_lookup_num_tokens; assistant_model
    vllm/none, ngram, dflash, draft            vLLM's CPU build, in bfloat16; n-gram; our DFlash drafter; a smaller
    model paceline-torch/..., paceline-dense/...     our decoder in PyTorch; weights expanded. Only when named

Each engine is a process of its own, asleep between its turns. For each turn, plain decoding first says how long the
answers are, up to their end token or `--max-tokens`; then every contender answers the same token ids greedily with
exactly so many tokens, each turn beginning with another contender. Ratios are taken within a turn, so a machine whose
pace changes changes all alike; tables show medians, the least and the most. A turn of one stream is one prompt, a turn
of eight streams is eight.

Every turn is kept at once beside the results, in a .jsonl file: the same command goes on after a break. A peer that is
not there, or does not start, is left out and said so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from decode_vs_peers_pipe import Prompts, Worker, WorkerError
from decode_vs_peers_report import PLAIN, figures_of, show
from gguf_to_folder import folder_of

from paceline.data.prompts import read_prompts
from paceline.draft import shipped
from paceline.draft.dflash.checkpoint import read_stored
from paceline.draft.formats.export import export
from paceline.hardware import BusyClock, this_machine
from paceline.hub import resolve
from paceline.model.text.tokenizer import Tokenizer
from paceline.runs.folder import RunFolder, append_lines, write_results

HERE = Path(__file__).parent
DRAFTS = {"qwen2.5-coder-1.5b": "qwen2.5-coder-0.5b"}
"""Models with a smaller one of the same vocabulary."""
WAYS = {
    "paceline": ("none", "ngram", "default", "draft"),
    "paceline-torch": ("none", "ngram", "default", "draft"),
    "paceline-dense": ("none", "ngram", "default", "draft"),
    "llama.cpp": ("none", "ngram-simple", "ngram-short", "ngram-cache", "ngram-mod", "draft"),
    "transformers": ("none", "lookup", "draft"),
    "vllm": ("none", "ngram", "dflash", "draft"),
}
FORMS = {"paceline": "blocks", "paceline-torch": "torch", "paceline-dense": "dense"}
ONE_STREAM_ONLY = ("transformers/lookup", "transformers/draft")
OWN_PROCESSES = ("llama.cpp", "vllm")
"""Ways whose drafter is fixed at the start: one process for each."""
WARM_UP_TOKENS, LEAST_TOKENS = 8, 8
PAUSE_S = 0.3
"""Between turns: longer than any pool of threads spins."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Log:
    """Results so far as JSON lines: the settings, contenders, turns."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self._file = file
        self.lines = RunFolder(file.parent).lines(file.name)
        if not self.lines:
            self.add(settings=settings)
        if self.lines[0]["settings"] != json.loads(json.dumps(settings)):
            raise SystemExit(
                f"{file} is of a run with other settings: delete it, or name another file in --save-results"
            )

    def add(self, **line: Any) -> None:
        self.lines.append(line)
        append_lines(self._file, [line])

    def turns(self) -> list[dict[str, Any]]:
        return [line["turn"] for line in self.lines if "turn" in line]


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt, or as many as there are streams, for every contender."""

    model: str
    prompts: str
    """Name of the file."""
    streams: int
    number: int
    token_ids: Prompts

    @property
    def key(self) -> dict[str, Any]:
        return {"model": self.model, "prompts": self.prompts, "streams": self.streams, "number": self.number}


def turns_of(args: argparse.Namespace, model: str, streams: int) -> Iterator[Turn]:
    """Prompts in the order of the file, from its beginning again when it is too short."""
    tokenizer = Tokenizer.from_path(resolve(model))
    for path in args.prompts:
        prompts = read_prompts(path)
        for number in range(args.turns if streams == 1 else args.group_turns):
            chosen = [prompts[(number * streams + row) % len(prompts)] for row in range(streams)]
            yield Turn(
                model, Path(path).name, streams, number, [tokenizer.encode_chat(each.messages) for each in chosen]
            )


class Block:
    """One model at one number of streams: its engines, loaded, and the turns."""

    def __init__(self, args: argparse.Namespace, log: Log, model: str, turns: list[Turn]) -> None:
        self._args, self._log, self._model, self._turns = args, log, model, turns
        self._streams = turns[0].streams
        self._eos = Tokenizer.from_path(resolve(model)).eos_token_ids
        longest = max(len(ids) for turn in turns for ids in turn.token_ids) + args.max_tokens
        self._max_len = -(-longest // 64) * 64
        self._workers: list[Worker] = []
        self._contenders: dict[str, tuple[Worker, str]] = {}

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            for peer, ways in self._processes():
                self._start(peer, ways)
            if PLAIN not in self._contenders:
                raise SystemExit(f"{PLAIN} did not start: everything else is measured beside it")
            for turn in self._turns:
                self._log.add(turn=turn.key | self._play(turn))

    def _close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _processes(self) -> Iterator[tuple[str, list[str]]]:
        """Groups of ways that share a process."""
        is_plain = bool(self._shipped) and not read_stored(self._shipped).config.has_own_width
        drafts = {"draft": self._model in DRAFTS, "default": bool(self._shipped), "dflash": is_plain}
        for peer, ways in WAYS.items():
            there = [way for way in ways if drafts.get(way, True) and self._is_wanted(f"{peer}/{way}")]
            if peer in OWN_PROCESSES:
                yield from ((peer, [way]) for way in there)
            elif there:
                yield peer, there

    def _is_wanted(self, name: str) -> bool:
        if self._streams > 1 and name in ONE_STREAM_ONLY:
            return False
        return name == PLAIN or any(fnmatch(name, pattern) for pattern in self._args.contenders)

    @property
    def _shipped(self) -> Path | None:
        return shipped.local(self._model)

    def _start(self, peer: str, ways: list[str]) -> None:
        """Start a process, load its ways and warm them up; says why where it cannot."""
        begun, left = time.perf_counter(), list(ways)
        try:
            worker = self._worker(peer, ways)
            self._workers.append(worker)
            for way in ways:
                about = worker.ask(load=way)["about"]
                load_s = time.perf_counter() - begun
                prompts = self._turns[0].token_ids
                warm = worker.ask(run=way, prompts=prompts, num_tokens=[WARM_UP_TOKENS] * len(prompts))
                self._contenders[f"{peer}/{way}"] = worker, way
                self._note(f"{peer}/{way}", load_s=load_s, peak_bytes=warm["peak_bytes"], about=about)
                say(f"{self._model}, {self._streams} streams: {peer}/{way} loaded in {load_s:.1f} s")
                begun = time.perf_counter()
                left.remove(way)
        except (WorkerError, FileNotFoundError) as error:
            for way in left:
                self._note(f"{peer}/{way}", missing=str(error))
            say(f"LEFT OUT: {peer}/{', '.join(left)}: {error}")

    def _note(self, name: str, **what: Any) -> None:
        self._log.add(contender={"model": self._model, "streams": self._streams, "name": name, **what})

    def _worker(self, peer: str, ways: list[str]) -> Worker:
        """Raises FileNotFoundError for a peer that is not installed."""
        args, python, draft, form = self._args, sys.executable, DRAFTS.get(self._model), FORMS.get(peer, "")
        script, model, environment = peer.split("-")[0], self._model, dict(os.environ)
        if peer == "llama.cpp":
            script, form = "llama", installed(args.peers_home / "llama.cpp/bin/llama-server", peer)
        if peer == "vllm":
            python = installed(args.peers_home / "vllm/bin/python", peer)
            model, draft = (name and str(folder_of(name, args.peers_home / "models")) for name in (model, draft))
            environment = vllm_environment(args.peers_home, environment)
        elif script != "paceline":
            model, draft = (name and str(resolve(name)) for name in (model, draft))
        options = ["--model", str(model), "--threads", str(args.threads), "--streams", str(self._streams)]
        options += ["--ways", *ways, "--max-len", str(self._max_len), "--form", form, "--isa", args.isa]
        options += ["--draft", draft] if draft else []
        options += (
            ["--dflash", str(plain_drafter(self._shipped, args.peers_home / "models"))] if "dflash" in ways else []
        )
        return Worker(python, HERE / f"decode_vs_peers_{script}.py", options, environment)

    def _play(self, turn: Turn) -> dict[str, Any]:
        """Everyone's answers to a turn."""
        worker, way = self._contenders[PLAIN]
        most = [self._args.max_tokens] * len(turn.token_ids)
        answers = worker.ask(run=way, prompts=turn.token_ids, num_tokens=most, until_end=True)["token_ids"]
        answers = [ids[:-1] if ids[-1] in self._eos else ids for ids in answers]
        num_tokens = [max(len(ids), LEAST_TOKENS) for ids in answers]
        first, runs = turn.number % len(self._contenders), {}
        names = list(self._contenders)
        for name in names[first:] + names[:first]:
            worker, way = self._contenders[name]
            time.sleep(PAUSE_S)
            runs[name] = worker.ask(run=way, prompts=turn.token_ids, num_tokens=num_tokens)
            runs[name]["busy_after"] = busy_share(PAUSE_S)
            say(f"{turn.key}: {name}: {sum(num_tokens) / runs[name]['wall_s']:.1f} tokens/s")
        return {"prompt_tokens": [len(ids) for ids in turn.token_ids], "num_tokens": num_tokens, "runs": runs}


def installed(path: Path, peer: str) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: PEERS='{peer}' experiments/decode_vs_peers.sh installs it")
    return str(path)


def plain_drafter(drafter: Path, home: Path) -> Path:
    """Our drafter in z-lab's format, dense and without its draft vocabulary."""
    folder = home / f"{drafter.name}-dflash"
    shutil.rmtree(folder, ignore_errors=True)
    export(read_stored(drafter), "z-lab", folder)
    return folder


def vllm_environment(home: Path, ours: dict[str, str]) -> dict[str, str]:
    """Without our packages, and with the OpenMP library that vLLM's documentation asks for."""
    kept = {name: value for name, value in ours.items() if name not in ("PYTHONPATH", "LD_PRELOAD")}
    libraries = [str(file) for file in (home / "vllm/lib").glob("libiomp5.so")]
    return kept | {"VLLM_CACHE_ROOT": str(home / "vllm/cache")} | ({"LD_PRELOAD": libraries[0]} if libraries else {})


def busy_share(seconds: float) -> float | None:
    """Share of all cores' time that others used while we sleep: spinning threads and strangers. None if
    the system does not count it."""
    if not Path("/proc/stat").is_file():
        return None
    clock = BusyClock()
    time.sleep(seconds)
    return clock.others_share()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"], help="GGUF files or built-in names")
    parser.add_argument("--prompts", nargs="+", required=True, help="files as paceline reads them")
    parser.add_argument("--turns", type=int, default=8, help="of one stream, a prompt each, of every file")
    parser.add_argument("--group-turns", type=int, default=2, help="of several streams, of every file")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--isa", default="auto", help="instruction set of ours; build llama.cpp for the same with LLAMA_FLAGS"
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=["paceline/*", "llama.cpp/*", "transformers/*", "vllm/*"],
        help="patterns of names; paceline/none always takes part. Large models: fewer at once, where memory is short",
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = Path(os.environ.get("PEERS_VENV") or cache / "paceline-peers" / "decode")
    parser.add_argument("--peers-home", type=Path, default=home, help="where decode_vs_peers.sh puts the peers")
    default = Path(f"experiments/results/decode_vs_peers_cpu_{time.strftime('%Y-%m-%d')}.json")
    parser.add_argument("--save-results", type=Path, default=default)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    recorded = {"turns", "group_turns", "streams", "max_tokens", "threads", "models", "contenders"}
    settings = {name: value for name, value in vars(args).items() if name in recorded}
    settings["prompts"] = [Path(path).name for path in args.prompts]
    log = Log(args.save_results.with_suffix(".jsonl"), settings)
    machine = this_machine("cpu")
    for model in args.models:
        for streams in args.streams:
            done = [{name: turn[name] for name in ("model", "prompts", "streams", "number")} for turn in log.turns()]
            left = [turn for turn in turns_of(args, model, streams) if turn.key not in done]
            if left:
                try:
                    Block(args, log, model, left).run()
                except WorkerError as error:
                    raise SystemExit(
                        f"{error}\nThe turns so far are kept: run the same command again to go on"
                    ) from error
    figures, peers = figures_of(log.lines, machine)
    write_results(
        args.save_results, {"device": "cpu", "settings": settings, "machine": machine, **figures}, peers=peers
    )
    show(figures, machine)
    print(f"results: {args.save_results}")


if __name__ == "__main__":
    main()
