"""vLLM's CPU build for `decode_vs_peers.py`, in a process of its own: it pins other versions than ours of the same packages.

    python experiments/decode_vs_peers_vllm.py FOLDER --threads 2 --max-len 1024   (JSON lines in and out)

The worker waits for its turn in a read of its standard input, its threads asleep. It imports nothing of paceline, the client
nothing of vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


class VllmProcess:
    """The client's end: starts the worker, waits until its model is compiled."""

    def __init__(self, python: Path, folder: Path, threads: int, streams: int, max_len: int) -> None:
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        options = [str(folder), "--threads", str(threads), "--streams", str(streams), "--max-len", str(max_len)]
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")}
        environment |= {"VLLM_CACHE_ROOT": str(python.parent.parent / "cache")}
        self._worker = subprocess.Popen(
            [str(python), __file__, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.about = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._worker.stdin is not None
        self._worker.stdin.write(json.dumps(request) + "\n")
        self._worker.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._worker.stdin is not None
        self._worker.stdin.close()
        self._worker.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self._worker.stdout is not None
        line = self._worker.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"vLLM ended by itself:\n{self._log.read()[-3000:]}")
        return json.loads(line)


class Vllm:
    """One number of streams of the worker's engine."""

    name = "vllm"
    reads_once_per_token = True

    def __init__(self, process: VllmProcess, streams: int, weight_bytes: int) -> None:
        self._process, self.streams, self.weight_bytes = process, streams, weight_bytes
        self.about = process.about

    def run(self, prompts: list[list[int]], max_tokens: int) -> Any:
        from decode_vs_peers_run import Run

        return Run(**self._process.ask(prompts=prompts, streams=self.streams, max_tokens=max_tokens))


def work(args: argparse.Namespace) -> None:
    """The worker: one line when loaded, then one answer for each request until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(args.threads),
    }
    import torch
    import vllm

    engine = vllm.LLM(
        model=args.folder,
        dtype="bfloat16",
        max_model_len=args.max_len,
        max_num_seqs=args.streams,
        enable_prefix_caching=False,  # every round has the same prompts
        disable_log_stats=False,
        seed=0,
    )
    about = {"vllm": vllm.__version__, "torch": torch.__version__, "compiled": True}
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(engine, **json.loads(line))), file=answers, flush=True)


def _run(engine: Any, prompts: list[list[int]], streams: int, max_tokens: int) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    token_ids, prefill_s = [], 0.0
    began = time.perf_counter()
    for first in range(0, len(prompts), streams):
        group = [{"prompt_token_ids": ids} for ids in prompts[first : first + streams]]
        outputs = engine.generate(group, params, use_tqdm=False)
        prefill_s += max(output.metrics.first_token_latency for output in outputs)
        token_ids += [list(output.outputs[0].token_ids) for output in outputs]
    return {"token_ids": token_ids, "wall_s": time.perf_counter() - began, "prefill_s": prefill_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-len", type=int, default=1024)
    work(parser.parse_args())


if __name__ == "__main__":
    main()
