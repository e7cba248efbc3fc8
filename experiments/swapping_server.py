"""`paceline serve`, but new requests get another drafter every few seconds: the server of `serving_soak.py --swap-s`.

python experiments/swapping_server.py --swap-s 2 --other random-dflash --count swaps.txt
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from pathlib import Path
from typing import Any

from paceline import LLM
from paceline.commands.serve import warm_up
from paceline.serve.metrics import Metrics
from paceline.serve.run import run
from paceline.serve.settings import ServeConfig
from paceline.serve.worker import EngineWorker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--other", default="random-dflash", help="takes turns with --drafter")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--swap-s", type=float, default=2.0, help="seconds between two swaps")
    parser.add_argument("--count", type=Path, required=True, help="file for the number of swaps, and of those under load")
    options = parser.parse_args()
    names = itertools.cycle([options.other, options.drafter])
    drafters: dict[str, Any] = {}

    def swap(llm: LLM) -> int:
        """Returns how many requests run meanwhile."""
        if not drafters:
            drafters.update({options.drafter: llm.drafter, options.other: llm.make_drafter(options.other)})
        llm.use_drafter(drafters[next(names)])
        return len(llm.engine.scheduler.running)

    async def swap_again_and_again() -> None:
        num_under_load = 0
        for num_swaps in itertools.count(1):
            await asyncio.sleep(options.swap_s)
            num_under_load += await worker.call(swap) > 0
            options.count.write_text(f"{num_swaps} {num_under_load}")

    tasks: set[asyncio.Task[None]] = set()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if line.startswith("ready: "):
            tasks.add(asyncio.get_running_loop().create_task(swap_again_and_again()))

    config, metrics = ServeConfig(port=0, drain_seconds=300), Metrics(options.model, None)
    settings = {"drafter": options.drafter, "dtype": options.dtype, "max_len": 512}
    worker = EngineWorker(lambda: LLM(options.model, **settings), config, metrics, warm_up=warm_up)
    run(worker, say=say, introduce=lambda llm: "")


if __name__ == "__main__":
    main()
