"""Blocks per second of a DFlash training step: ours, SpecForge's and speculators', on the same prepared features.

    experiments/train_step_vs_peers.sh                                                    (everything, with the table of ratios)
    python experiments/train_step_vs_peers.py --side specforge --threads 2 --dtype bfloat16  (one side, one JSON line)
    python experiments/train_step_vs_peers.py --table results.jsonl                          (the table of collected lines)

Each side runs in its own environment: `paceline` in the repository's, the others where their PyPI package is installed without
its servers. All get the same random tokens and features, the same tied embedding and head, the same initial weights. Timed are
(a) forward, loss, backward and (b) the same with clipping and AdamW; the median of `--repeats` steps after two untimed ones.
A block counts when at least one of its slots is trained, whatever was computed beside it. Every way in which a side can run on
the machine is tried for three steps and the fastest is measured:

* `specforge` 0.2.0: `DFlashTrainStrategy.forward_loss` over `OnlineDFlashModel`, then `FSDPTrainingBackend.backward`, not
  wrapped; (b) is `TrainerCore.train_step` with `BF16Optimizer`. As in its trainer, bfloat16 means the weights', not autocast.
  Tried: sdpa and eager attention, objective_chunk_blocks 128 (its default, computes the head again in backward) and 0.
* `speculators` 0.9.0: `DFlashDraftModel.forward` under autocast with the arguments of its `get_trainer_kwargs`, then what
  `Trainer.train_epoch` does (the Trainer itself moves its model to cuda:0). Its fused losses need Triton; on CPU its eager ones
  run. It computes the target's logits from the target's last hidden state to take their argmax as labels; that state is made
  so that the argmax is the token. Several sequences are packed in one row. Tried: sdpa and eager attention.

FlexAttention, the default of both, has no backward on CPU ("FlexAttention does not support backward on CPU"); on GPU it would
be tried. On CPU neither compiles its model (speculators does on GPU); `--compile` does, and the table takes each side's best.
`--same-anchors` gives every side the same anchors, so that comparable_loss and comparable_gradient_norm must agree: the check
that all sides do the same work.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import logging
import math
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path

import torch
from train_step_batch import Batch, Settings, Step, prepare_batch
from train_step_peers import specforge, speculators

SIDES = ("paceline", "specforge", "speculators")


def ours(settings: Settings, batch: Batch) -> dict[str, Callable[[], Step]]:
    """Imported only here: the peers' environments have no paceline."""
    from train_step_ours import paceline

    return paceline(settings, batch)


def seconds(run: Callable[[], tuple[float, int]], repeats: int, device: str) -> list[float]:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        if device != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - started)
    return times


def fastest(ways: dict[str, Callable[[], Step]], settings: Settings) -> tuple[str, dict[str, float]]:
    """The way with the shorter of two steps after a first, and all ways' milliseconds."""
    tried = {}
    for name, build in ways.items():
        if name.startswith(settings.way):
            tried[name] = 1e3 * min(seconds(build().forward_backward, 3, settings.device)[1:])
            gc.collect()
    if not tried:
        raise SystemExit(f"--way {settings.way!r}: none of {list(ways)} begins so")
    return min(tried, key=lambda name: tried[name]), tried


def checked(step: Step) -> tuple[float, int]:
    """Loss and blocks of a first step, whose loss must be finite and whose gradients must reach every weight."""
    loss, blocks = step.forward_backward()
    idle = [index for index, weight in enumerate(step.parameters) if weight.grad is None or not weight.grad.any()]
    if not math.isfinite(loss) or idle:
        raise SystemExit(f"no valid training step: loss {loss}, parameters without a gradient: {idle}")
    return loss, blocks


def measure(side: str, settings: Settings) -> dict[str, object]:
    batch = prepare_batch(settings)
    ways = {"paceline": ours, "specforge": specforge, "speculators": speculators}[side](settings, batch)
    way, tried = fastest(ways, settings)
    torch.manual_seed(settings.seed)
    step = ways[way]()
    loss, blocks = checked(step)
    report: dict[str, object] = {"side": side, "version": importlib.metadata.version(side)}
    report |= {"way": f"{way}, compiled" if settings.compile else way, "tried_ms": tried}
    report |= {"loss": loss, "comparable_loss": step.comparable(loss, blocks), "blocks": blocks}
    gradients = torch.nn.utils.get_total_norm([weight.grad.float() for weight in step.parameters])
    report["comparable_gradient_norm"] = step.comparable(gradients.item(), blocks)
    for key, run in (("blocks_per_s", step.forward_backward), ("blocks_per_s_with_update", step.full_step)):
        seconds(run, 2, settings.device)
        times = seconds(run, settings.repeats, settings.device)
        report[key] = blocks / statistics.median(times)
        report[f"{key}_runs"] = [round(blocks / each, 2) for each in times]
    report["loss_after"] = checked(step)[0]
    report["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    device = torch.cuda.get_device_name() if settings.device == "cuda" else torch.backends.cpu.get_cpu_capability()
    return report | packages | {"device": device, "settings": asdict(settings)}


def print_table(lines: Iterable[str]) -> None:
    """Medians of every setting, ours over each peer; a setting measured more than once counts with each side's best run."""
    best: dict[tuple, dict[str, dict]] = {}
    for line in lines:
        report = json.loads(line)
        key = tuple(report["settings"][name] for name in ("dtype", "length", "sequences", "anchors", "features", "loss"))
        sides = best.setdefault(key, {})
        if report["side"] not in sides or sides[report["side"]]["blocks_per_s"] < report["blocks_per_s"]:
            sides[report["side"]] = report
    print("dtype     length  seqs  anchors  features  loss   side         blocks/s  with update  ours/it  ours/it  way")
    for key, sides in sorted(best.items()):
        for side in (name for name in SIDES if name in sides):
            figures = [sides[side][name] for name in ("blocks_per_s", "blocks_per_s_with_update")]
            mine = sides.get("paceline")
            ratios = [mine[name] / sides[side][name] for name in ("blocks_per_s", "blocks_per_s_with_update")] if mine else []
            ratio_text = "  ".join(f"{ratio:7.2f}" for ratio in ratios) or "      -        -"
            print(
                "{:<8}  {:>6}  {:>4}  {:>7}  {:>8}  {:<5}  ".format(*key)
                + f"{side:<11}  {figures[0]:8.1f}  {figures[1]:11.1f}  {ratio_text}  {sides[side]['way']}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--table", type=Path, help="print the table of a file of JSON lines, measure nothing")
    for field in fields(Settings):
        option = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    side, table = options.pop("side"), options.pop("table")
    if table:
        print_table(table.read_text(encoding="utf-8").splitlines())
        return
    if not side:
        parser.error("give --side or --table")
    settings = Settings(**options)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(settings.threads)
    print(json.dumps(measure(side, settings)))


if __name__ == "__main__":
    main()
