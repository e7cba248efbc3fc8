"""Where the milliseconds go beside other servers on CPU: `paceline bench latency` over ours, vLLM's and llama-cpp-python's.

    experiments/latency_vs_peers.sh --workload voice

The servers are those of experiments/serving_vs_peers.py, with the built-in model. All run, but while one is asked the others
are stopped (SIGSTOP): they share the processor. Other servers do not say where their time goes, so that theirs is one part;
ours with its parts stands beside them. The report is bench latency's own, in --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from serving_vs_peers import HOST, peers_of

from paceline.bench.config import ArmsConfig, LatencyConfig
from paceline.bench.latency import Arm
from paceline.bench.latency_run import bench_latency
from paceline.bench.workloads import WORKLOADS
from paceline.commands.shared import TerminalProgress
from paceline.runlog import plain


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="may be repeated; voice without any")
    parser.add_argument("--prompts", action="append", default=[], help="a file of prompts; may be repeated")
    parser.add_argument("--limit", type=int, help="only the first so many requests of each")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rate", type=float, help="requests a second; without, the workload's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", default="llama-cpp-python,vllm", help="those of serving_vs_peers.py; empty for ours alone")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("runs/latency-vs-peers"))
    args = parser.parse_args()
    args.streams, args.vllm_drafter = [8], None  # what peers_of wants to know too
    return args


def main() -> None:
    args = arguments()
    peers = list(peers_of(args))
    args.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for number, peer in enumerate(peers):
            stack.callback(peer.stop)
            print(f"starting {peer.name}", file=sys.stderr)
            peer.start(args.out / f"peer-{number}.log")
        for peer in peers:
            peer.signal(signal.SIGCONT)

        @contextlib.contextmanager
        def alone(arm: Arm) -> Iterator[None]:
            for peer in peers:
                peer.signal(signal.SIGCONT if peer.name == arm.name else signal.SIGSTOP)
            yield

        urls = tuple(f"{peer.name}=http://{HOST}:{peer.port}" for peer in peers)
        config = LatencyConfig(rate=args.rate, repeat=args.repeat, seed=args.seed)
        asked = (args.workload or (), args.prompts, None, args.limit)
        line = bench_latency(ArmsConfig(urls=urls), config, *asked, args.out / "run", TerminalProgress(), alone=alone)
    print(json.dumps(plain(line)))


if __name__ == "__main__":
    main()
