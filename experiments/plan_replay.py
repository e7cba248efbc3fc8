"""What each part of the planner (`paceline/plan.py`) is worth: recorded answers replayed, part by part left out.

    python experiments/plan_replay.py record --prompts gsm8k_test.jsonl mt_bench.jsonl --out drafts.json   # needs the model
    python experiments/plan_replay.py replay drafts.json                                                   # needs nothing

`record` decodes plainly and keeps what the drafter would have drafted at every position, and how sure it was. `replay` walks
the same answers with the real planner and n-gram drafter on simulated machines: rounds take what the machine's table says, with
noise, and drafts stand where they agree with the answer. The table says tokens per second over plain decoding's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from paceline import chances, learned, plan
from paceline.draft.base import Observed
from paceline.draft.ngram import NgramDrafter
from paceline.learned import PassCosts
from paceline.plan import AdaptivePlanner, FixedPlanner, Plan, Row
from paceline.types import Batch, RoundStats, SamplingParams, Sequence

MACHINES = {
    "Zen 5": (((1, 3.17), (2, 3.27), (4, 3.84), (6, 4.74), (8, 6.03), (16, 11.3), (64, 39.9)), 1.2),
    "Xeon, no tiles": (((1, 3.04), (4, 6.43), (8, 11.84), (16, 24.41), (64, 96.0)), 2.4),
    "flat": (((1, 3.0), (16, 3.6), (64, 6.0)), 0.6),
}
"""Milliseconds of a pass by positions, and of drafting a block for one row (docs/LOG.md, processors)."""
DISTURBED = PassCosts(((1, 112e-3), (4, 112e-3), (16, 115e-3), (64, 121e-3)))
"""A start-up table that was measured while another program held a core: every draft looks free."""


class Noting(FixedPlanner):
    """Drafts whole blocks, checks none of them, and keeps what they were."""

    def __init__(self) -> None:
        super().__init__(whole_blocks=False)
        self.blocks: list[tuple[list[int], list[float]]] = []

    def narrow(self, plan: Plan, sure_B: Any) -> list[int]:
        return [0] * len(plan.drafts)


def record(args: argparse.Namespace) -> None:
    from paceline import LLM
    from paceline.draft.pool import Pool
    from paceline.prompts import read_prompts

    llm = LLM(args.model, drafter=args.drafter, dtype=args.dtype, max_batch=1, plan="fixed")
    noting = Noting()
    llm.engine.planner = noting
    propose = Pool.propose

    def noted(pool: Pool, batch: Batch) -> Any:
        block = propose(pool, batch)
        noting.blocks.append((block.tokens_B[0], (block.sure_B or [None])[0] or []))
        return block

    answers = []
    with mock.patch.object(Pool, "propose", noted):
        for file in args.prompts:
            for prompt in read_prompts(file)[args.skip : args.skip + args.limit]:
                noting.blocks.clear()
                ids = llm.encode_chat(prompt.messages)
                (out,) = llm.generate_ids([ids], SamplingParams(max_tokens=args.max_tokens))
                answers.append({"prompt": ids, "answer": out.token_ids, "blocks": list(noting.blocks)})
                print(f"{len(answers)} answers", end="\r", flush=True)
    Path(args.out).write_text(json.dumps(answers))


class Machine:
    """A machine of one stream: what rounds take, and what they made so far."""

    def __init__(self, name: str, seed: int) -> None:
        points, draft_ms = MACHINES[name]
        self.passes, self.draft_s = PassCosts([(size, ms / 1e3) for size, ms in points]), draft_ms / 1e3
        self._random = random.Random(seed)
        self._slow, self.seconds, self.tokens = 1.0, 0.0, 0

    def run(self, planner: AdaptivePlanner, answer: dict[str, Any]) -> None:
        """Decode one answer."""
        prompt, text = answer["prompt"], answer["answer"]
        seq = Sequence(0, list(prompt), len(prompt), SamplingParams(max_tokens=len(text)), row=0)
        lookups = NgramDrafter(min_match=2)
        lookups.start(seq)
        seq.accept(text[:1])
        lookups.observe([Observed(seq, 0, seq.cached_len, None)])
        while seq.num_output < len(text):
            done = seq.num_output
            tokens, sure = answer["blocks"][done - 1]
            most, chance = seq.most_drafted(7), lookups.chance(seq)
            offers = [planner.offer("dflash", "greedy", most)] if most else []
            if chance and (room := seq.most_drafted(16)):
                offers.append(plan.Offer("ngram", (chance,) * room))
            step = planner.next([Row(0, "greedy", offers)])
            take = step.drafts[0]
            if take.source == "ngram":
                tokens, sure = lookups.propose(Batch([seq], step.drafts)).tokens_B[0], None
            sure = sure[: take.count] if sure and take.source == "dflash" else None
            width = planner.narrow(step, [sure])[0]
            kept = _agreeing(tokens[:width], text[done:])
            self._step(planner, step, width, kept, sure)
            begin = seq.cached_len
            seq.accept(text[done : done + kept + 1])
            lookups.observe([Observed(seq, begin, seq.cached_len - begin, None)])
            self.tokens += seq.num_output - done

    def _step(self, planner: AdaptivePlanner, step: Plan, width: int, kept: int, sure: list[float] | None) -> None:
        if self._random.random() < 0.01:
            self._slow = self._random.choice([1.0, 1.0, 1.3, 2.0])
        noise = self._slow * self._random.uniform(0.97, 1.08)
        drafts = bool(step.drafts[0].count) and step.drafts[0].source == "dflash"
        draft_s, verify_s = noise * self.draft_s * drafts, noise * self.passes.seconds(1 + width)
        planner.learn(step, RoundStats([width], [kept], True, draft_s, verify_s, num_checked_B=[width], sure_B=[sure]))
        self.seconds += (draft_s + verify_s) / self._slow / 1.025


def _agreeing(drafts: list[int], text: list[int]) -> int:
    pairs = enumerate(zip(drafts, text, strict=False))
    return next((place for place, (drafted, wanted) in pairs if drafted != wanted), min(len(drafts), len(text)))


def constant(module: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(module, name, value)


def _one_rate(self: learned.RoundRecord, num_rows: int) -> float:
    return num_rows / self.costs.pass_s(num_rows)


WITHOUT: dict[str, Callable[[], Any]] = {
    "all parts": contextlib.nullcontext,
    "how sure the drafter is": lambda: mock.patch.object(
        AdaptivePlanner, "narrow", lambda self, step, sure_B: [take.count for take in step.drafts]
    ),
    "slots to spare": constant(plan, "SPARE", 0),
    "what cutting gains (lift)": constant(plan, "LIFT_WEIGHT", 0.0),
    "rate of recent rounds": lambda: mock.patch.object(learned.RoundRecord, "rate", _one_rate),
    "margin": constant(plan, "MARGIN", 0.0),
    "trials": constant(learned, "TRIAL_SHARE", 0.0),
    "plain rounds": constant(learned, "PLAIN_EVERY", 10**9),
    "corrections by size": lambda: mock.patch.object(learned.RoundCosts, "_compare"),
    "truth of lookups": lambda: mock.patch.object(chances.Truth, "right", lambda self, given: given),
    "fading": constant(chances, "_KEEP", 1.0),
    "doubt after surprises": constant(chances, "_SURPRISE", 1e9),
}


@contextlib.contextmanager
def left_out(name: str) -> Iterator[None]:
    with WITHOUT[name]():
        yield


def replay(args: argparse.Namespace) -> None:
    answers = json.loads(Path(args.file).read_text())
    starts: dict[str, PassCosts | None] = {"right": None, "disturbed": DISTURBED}
    speeds: dict[tuple[str, str, str], float] = {}
    for machine, (start, table), name in itertools.product(MACHINES, starts.items(), WITHOUT):
        ratios = []
        for seed in range(args.seeds):
            run = Machine(machine, seed)
            order = random.Random(seed).sample(answers, len(answers))
            with left_out(name):
                planner = AdaptivePlanner(table or run.passes)
                for answer in order:
                    run.run(planner, answer)
            ratios.append(run.tokens / run.seconds * run.passes.seconds(1))
        speeds[machine, start, name] = statistics.mean(ratios)
    settings = [(machine, start) for machine in MACHINES for start in starts]
    print("| without | " + " | ".join(f"{machine}, {start} table" for machine, start in settings) + " |")
    print("|---|" + "---|" * len(settings))
    for name in WITHOUT:
        print(f"| {name} | " + " | ".join(f"{speeds[machine, start, name]:.3f}" for machine, start in settings) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("--model", default="smollm2-135m")
    recorder.add_argument("--drafter", default="default")
    recorder.add_argument("--dtype", default="bfloat16")
    recorder.add_argument("--prompts", nargs="+", required=True)
    recorder.add_argument("--skip", type=int, default=0)
    recorder.add_argument("--limit", type=int, default=8)
    recorder.add_argument("--max-tokens", type=int, default=128)
    recorder.add_argument("--out", required=True)
    player = commands.add_parser("replay")
    player.add_argument("file")
    player.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    record(args) if args.command == "record" else replay(args)


if __name__ == "__main__":
    main()
