"""Speculation on a mixture of experts by batch: measured in the engine beside what `paceline simulate` predicts.

    python experiments/moe_batch.py --out runs/moe-batch

A model of Qwen3-MoE's shape with random weights, its embedding larger by `--embedding-scale` so that each token has experts of
its own; drafts are random tokens, and every round with drafts keeps `--kept` tokens whatever the target says: what rounds cost
is real, what they keep is set (lossless is false).

1. `StepBench`, as `paceline bench steps`: seconds of (rows, positions) at FIT_BATCHES and FIT_POSITIONS -> steps.json.
2. `paceline simulate --calibrate`: the roofline is fitted to these times -> calibration.json. None of the sizes that are
   compared is among them but that of one row and one position.
3. At each batch a plain round and a speculative one take turns in one engine, over the same rows: the speed-up is tokens a
   second of the one over the other, by the medians of their times.
4. Beside it the calibrated prediction for this batch, and how many distinct experts of a layer a pass reads, counted and by
   the roofline's formula. With `--embedding-scale 1` attention decides, and positions of a row share half of theirs, more than
   of text: the locality is fitted to what step 1 counted.

Half of step 1 runs before step 3 and half after it. The table ends with the largest error; the exit status is 1 beyond
`--within`. Run it alone on the machine: it takes about three minutes on two cores. Writes results.json into `--out`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from paceline import LLM, SamplingParams
from paceline.bench.config import StepsConfig
from paceline.bench.passes import mocked_engine, random_prompt
from paceline.bench.steps import StepBench
from paceline.draft.base import Drafter
from paceline.engine.engine import Engine
from paceline.hardware import this_machine
from paceline.model.checkpoint import load_config, random_tensors
from paceline.plan import FixedPlanner
from paceline.runlog import record_of
from paceline.simulate.calibrate import Fitted, calibrate
from paceline.simulate.config import CostsConfig
from paceline.simulate.roofline import distinct_experts
from paceline.types import Batch, DraftBlock

SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 4096,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 256, "norm_topk_prob": True,
    "max_position_embeddings": 4096, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
FIT_BATCHES, FIT_POSITIONS = (1, 3, 6, 12, 24, 40), (1, 2, 3, 6, 8)
CONTEXT = 48
"""Tokens in each row's cache, about."""


class RandomDrafter(Drafter):
    """Any tokens at all, at no cost: each position of a pass has a token of its own, as text has."""

    name = "random tokens"

    def __init__(self, num_drafted: int, vocab_size: int) -> None:
        self.num_drafted = num_drafted
        self._draw, self._tokens = random.Random(0), range(vocab_size)

    def propose(self, batch: Batch) -> DraftBlock:
        limits = batch.draft_limits_B(self.num_drafted)
        return DraftBlock.certain([self._draw.choices(self._tokens, k=limit) for limit in limits])


@dataclass(frozen=True)
class Row:
    """One batch."""

    batch: int
    plain_ms: float
    speculative_ms: float
    """Of a round, medians."""
    tokens_per_round: float
    speedup: float
    predicted: float
    error: float
    """Of the prediction, as a share of what was measured."""
    predicted_plain_ms: float
    predicted_speculative_ms: float
    plain_experts: float
    """Distinct experts of a layer that a plain pass read, the mean over layers and rounds."""
    speculative_experts: float
    formula_experts: tuple[float, float]
    """The same two by the roofline's formula, with the locality that was fitted to the counts of step 1."""
    plain_runs_ms: list[float]
    speculative_runs_ms: list[float]


def hold(engine: Engine, num_drafted: int) -> None:
    engine.planner = FixedPlanner(num_drafted, most_chunk=256, whole_blocks=False)


def fill(engine: Engine, batch: int, name: str) -> list[int]:
    """Begin `batch` answers to random prompts; returns the requests when all of them decode."""
    room = engine.target.cache.max_len - CONTEXT
    params = SamplingParams(max_tokens=room, ignore_eos=True)
    prompts = [random_prompt(f"{name} {row}", CONTEXT // 2, engine.target.vocab_size) for row in range(batch)]
    ids = [engine.add(prompt, params) for prompt in prompts]
    hold(engine, 0)
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    return ids


class Timed(NamedTuple):
    """One round."""

    seconds: float
    num_tokens: int
    """Of all rows."""
    experts: float
    """Distinct experts of a layer that its pass read, the mean over layers."""


def timed(engine: Engine, num_drafted: int) -> Timed:
    hold(engine, num_drafted)
    started = time.perf_counter()
    chunks = engine.step()
    spent_s = time.perf_counter() - started
    return Timed(spent_s, sum(len(chunk.token_ids) for chunk in chunks), engine.target.experts_read or 0.0)


def rounds_of(engine: Engine, batch: int, num_drafted: int, repeat: int) -> dict[int, list[Timed]]:
    """`repeat` rounds without drafts and as many with them, in turns whose order changes; both warmed up."""
    found: dict[int, list[Timed]] = {0: [], num_drafted: []}
    ids = fill(engine, batch, f"batch {batch}")
    for number in range(-1, repeat):
        for width in (0, num_drafted) if number % 2 else (num_drafted, 0):
            done = timed(engine, width)
            if number >= 0:
                found[width].append(done)
    for each in ids:
        engine.abort(each)
    return found


class Comparison:
    """Model and drafter, loaded once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.shape = SHAPE | {name: value for name, value in vars(args).items() if name in SHAPE and value is not None}
        folder = self.out / "model"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.shape, indent=1) + "\n", encoding="utf-8")
        self.config = StepsConfig(FIT_BATCHES, max(FIT_POSITIONS), CONTEXT, args.step_repeat, args.kept)
        longest = CONTEXT + (args.kept + 1) * (args.repeat + 4) + args.drafts
        max_len = max(self.config.needed_len, int(longest)) + 8
        most = max(*FIT_BATCHES, *args.batch)
        self.llm = LLM(str(folder), drafter="none", weights="random", dtype=args.dtype, max_batch=most, max_len=max_len)
        weights = random_tensors(load_config(folder))
        scale = {"model.embed_tokens.weight": args.embedding_scale}
        self.llm.load_weights({name: tensor * scale.get(name, 1.0) for name, tensor in weights})
        drafter = RandomDrafter(max(args.drafts, *FIT_POSITIONS), int(self.shape["vocab_size"]))
        self.steps = StepBench(self.llm, self.config, drafter)
        self.engine = mocked_engine(self.llm, drafter, args.kept)

    def calibrated(self) -> Fitted:
        """By the sizes of FIT_POSITIONS alone."""
        steps = self.steps.as_json(this_machine(), self.shape)
        for kind in ("verify", "rounds", "host", "experts"):
            steps[kind] = [each for each in steps[kind] if each[1] in FIT_POSITIONS]
        steps |= {"drafter": RandomDrafter.name, "draft": []}
        (self.out / "steps.json").write_text(json.dumps(steps, indent=1) + "\n", encoding="utf-8")
        fitted = calibrate(CostsConfig(), [self.out / "steps.json"])
        (self.out / "calibration.json").write_text(json.dumps(fitted.as_json(), indent=1) + "\n", encoding="utf-8")
        return fitted

    def row(self, batch: int, rounds: dict[int, list[Timed]], fitted: Fitted) -> Row:
        drafts, experts, chosen = self.args.drafts, int(self.shape["num_experts"]), int(self.shape["num_experts_per_tok"])
        times = {width: statistics.median(each.seconds for each in done) for width, done in rounds.items()}
        tokens = {width: statistics.fmean(each.num_tokens for each in done) for width, done in rounds.items()}
        read = {width: statistics.fmean(each.experts for each in done) for width, done in rounds.items()}
        ours = {width: fitted.costs.round_s(batch, width, CONTEXT) for width in rounds}
        speedup = tokens[drafts] / times[drafts] * times[0] / tokens[0]
        predicted = self.args.kept * ours[0] / ours[drafts]
        locality = fitted.calibration.expert_locality
        formula = [distinct_experts(experts, chosen, batch, width + 1, locality) for width in (0, drafts)]
        return Row(
            batch=batch,
            plain_ms=1e3 * times[0],
            speculative_ms=1e3 * times[drafts],
            tokens_per_round=tokens[drafts] / batch,
            speedup=speedup,
            predicted=predicted,
            error=predicted / speedup - 1,
            predicted_plain_ms=1e3 * ours[0],
            predicted_speculative_ms=1e3 * ours[drafts],
            plain_experts=read[0],
            speculative_experts=read[drafts],
            formula_experts=(formula[0], formula[1]),
            plain_runs_ms=[1e3 * each.seconds for each in rounds[0]],
            speculative_runs_ms=[1e3 * each.seconds for each in rounds[drafts]],
        )

    def run(self) -> tuple[list[Row], Fitted]:
        self.steps.run(said)
        measured: dict[int, dict[int, list[Timed]]] = {}
        for batch in self.args.batch:
            measured[batch] = rounds_of(self.engine, batch, self.args.drafts, self.args.repeat)
            said(f"batch {batch}")
        self.steps.run(said)
        fitted = self.calibrated()
        return [self.row(batch, rounds, fitted) for batch, rounds in measured.items()], fitted


def said(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def show(rows: list[Row], within: float) -> bool:
    """Prints the comparison; whether every batch is within."""
    print("| batch | plain ms | with drafts ms | speed-up | predicted | error | experts read | formula |\n|" + "---|" * 8)
    for row in rows:
        plain = f"{row.plain_ms:.1f} ({row.predicted_plain_ms:.1f})"
        speculative = f"{row.speculative_ms:.1f} ({row.predicted_speculative_ms:.1f})"
        read = f"{row.plain_experts:.1f} -> {row.speculative_experts:.1f}"
        formula = "{:.1f} -> {:.1f}".format(*row.formula_experts)
        cells = (
            row.batch,
            plain,
            speculative,
            f"{row.speedup:.2f}",
            f"{row.predicted:.2f}",
            f"{row.error:+.1%}",
            read,
            formula,
        )
        print("| " + " | ".join(map(str, cells)) + " |")
    worst = max(rows, key=lambda row: abs(row.error))
    print("in brackets what was predicted; acceptance is mocked: lossless is false")
    print(f"largest error {worst.error:+.1%}, at batch {worst.batch}")
    return abs(worst.error) <= within


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--drafts", type=int, default=3, help="of every speculative round")
    parser.add_argument("--kept", type=float, default=3.0, help="tokens a round, the target's own included")
    parser.add_argument("--repeat", type=int, default=25, help="rounds of each kind at each batch")
    parser.add_argument("--step-repeat", type=int, default=5, help="times each size is measured before, and again behind")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--embedding-scale", type=float, default=50.0, help="1: positions of a row share half of their experts")
    for name, value in SHAPE.items():
        if type(value) is int:
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"of the model's config [default: {value}]")
    parser.add_argument("--within", type=float, default=0.15)
    parser.add_argument("--out", type=Path, default=Path("runs/moe-batch"))
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    rows, fitted = Comparison(args).run()
    is_within = show(rows, args.within)
    told = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    points = {"rows": [asdict(row) for row in rows], "held_out": fitted.mean_error}
    made = {"device": "cpu", "threads": torch.get_num_threads(), "lossless": False, "within": is_within, "options": told}
    made["expert_locality"] = fitted.calibration.expert_locality
    line = record_of(made | points | {"fit": fitted.as_json()["verify"], "shape": SHAPE})
    (args.out / "results.json").write_text(json.dumps(line, indent=1) + "\n", encoding="utf-8")
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
