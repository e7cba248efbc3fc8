"""Would passes that refine a DFlash block bring more tokens a round, and how many could they bring at most?

    python experiments/refinement.py --prompts gsm8k_test.jsonl --limit 24

The target answers the prompts greedily, with all drafts of every block checked. Then each answer is gone through again, round
by round, as the engine would go with every other way to draft: since the text does not depend on drafts, what each round keeps
follows from the text. Ways to draft:

plain             the block as one pass gives it, each slot's most likely token: K = 0
oracle            the first draft is the target's own token, the others are the plain block's: no pass more
oracle of 16      every draft is the target's own token where that is among the slot's 16 most likely: the most that any order
                  of these candidates could bring, and so any refinement over them
oracle, seen      the first draft is the target's own token, and the block is drafted again with that token in place of the
                  first mask, so that the slots behind it can see it; the network never learned from such a block
jacobi K          (DFlash 2) all slots at once take the best of their 16 candidates by the selector's pair scores, behind what
                  the pass before took one slot earlier; K = number of slots is the walk that DFlash 2 serves
network K         all masks are replaced by the drafts of the pass before, and the network drafts again, K times
left to right K   pass k replaces the k-th mask by its draft, the masks behind it stay: K passes more, K tokens seen

Oracles are ceilings, never figures of a drafter: they read the answer. The network learned to read masks only, so `network`
and `left to right` are what an untrained drafter makes of its own drafts. Two figures of each way: over the rounds that it
would have itself, and at the anchors that the plain block's rounds have.

Tokens/s are tokens a round over the time of the target's pass over the block, the draft with what it reads, and the passes
more, each the median of --repeats on this machine, alone: what a round takes besides in the engine is left out. Drafters whose
slots say the token behind them are refused. Prints a table, then one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from refinement_rounds import Tally, Walk, kept, walk_all
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.draft.dflash import DFlashDrafter
from paceline.draft.dflash2_paths import DFlash2NativePath, DFlash2Path
from paceline.draft.dflash2_selector import Picks
from paceline.draft.dflash_paths import NativePath, TorchPath
from paceline.draft.dflash_reading import scale_logits
from paceline.model.native_lib import pointer
from paceline.model.target import ForwardBatch
from paceline.prompts import read_prompts
from paceline.runlog import record_of

NEAR = 16
CHUNK = 256
"""Positions of a pass over a whole answer."""
CONTEXT = 200
"""Positions before a block whose passes are timed, where an answer has them."""
DraftPath = TorchPath | NativePath


def jacobi(best_KP: Tensor, passes: int) -> list[int]:
    """Which candidate each slot takes after so many passes, from the most likely ones, which are the first.

    best_KP: of each slot the best candidate behind each candidate of the slot before it; row 0 is the same for all, it follows
    the anchor. As many passes as slots give the walk from left to right.
    """
    taken_K = torch.zeros(len(best_KP), dtype=torch.long)
    for _ in range(passes):
        before_K = torch.cat([torch.zeros(1, dtype=torch.long), taken_K[:-1]])
        taken_K = best_KP.gather(1, before_K[:, None])[:, 0]
    return taken_K.tolist()


class Blocks:
    """Blocks of one row of a bound drafter, of any tokens."""

    def __init__(self, drafter: DFlashDrafter, row: int) -> None:
        path = drafter._path
        self.path: DraftPath = path
        self.row, self.config, self.width = row, drafter.config, drafter.num_drafted
        self.ids = None if drafter.draft_ids is None else drafter.draft_ids.cpu()
        self.size = self.width + 1

    def masked(self, anchor: int, seen: Sequence[int] = ()) -> list[int]:
        """A block of the anchor, these tokens, and masks."""
        return [anchor, *seen, *[self.config.mask_token_id] * (self.width - len(seen))]

    def read(self, tokens: list[int]) -> Tensor:
        """Logits [K, V] of the slots behind a block's first."""
        path = self.path
        if isinstance(path, NativePath):
            return scale_logits(native_logits(path, self.row, tokens), self.config)
        with torch.inference_mode():
            embedded_TD = path._target.embed(torch.tensor(tokens, device=path.device))
            hidden_TD = path.run_block([self.row], embedded_TD * self.config.input_embedding_scale)
            return scale_logits(path._head(path._final_norm(hidden_TD[1:])), self.config)

    def best(self, logits_KV: Tensor) -> list[int]:
        """The most likely token of each slot."""
        return self.named(logits_KV.max(-1).indices)

    def named(self, columns_K: Tensor) -> list[int]:
        return (columns_K.cpu() if self.ids is None else self.ids[columns_K.cpu()]).tolist()


def native_logits(path: NativePath, row: int, tokens: list[int]) -> Tensor:
    """Logits [K, V] of the slots behind the first of a block of these tokens: `NativePath.draft`, which fills in masks."""
    size = len(tokens)
    logits_KV = torch.empty(size - 1, path._head.rows)
    work, buffers = path._buffers.work, path._buffers
    work.num_rows, work.num_logit_rows, work.num_taps = 1, size - 1, 0
    work.logits, work.logits_stride, work.taps = pointer(logits_KV), path._head.rows, pointer(None)
    buffers.fill(rows=[row], starts=[path.cache.lengths[row]], counts=[size])
    buffers.fill(tokens=tokens, logit_rows=list(range(1, size)))
    buffers.room("argmax", size - 1)
    path._model.forward(path._view, work)
    return logits_KV


class Block:
    """One anchor: what its ways to draft share is computed once, when it is asked for."""

    def __init__(self, blocks: Blocks, anchor: int, rest: Sequence[int]) -> None:
        """`rest`: the target's tokens behind the anchor, at least one, which only oracles look at."""
        self.blocks, self.anchor, self.rest = blocks, anchor, rest

    @cached_property
    def read(self) -> Tensor:
        return self.blocks.read(self.blocks.masked(self.anchor))

    @cached_property
    def plain(self) -> list[int]:
        return self.blocks.best(self.read)

    def oracle(self) -> list[int]:
        return [self.rest[0], *self.plain[1:]]

    def oracle_of_16(self) -> list[int]:
        near_K16 = self.read.topk(min(NEAR, self.read.shape[-1]), dim=-1).indices
        drafts = [*self.plain]
        for slot, (token, columns) in enumerate(zip(self.rest, near_K16, strict=False)):
            drafts[slot] = token if token in self.blocks.named(columns) else drafts[slot]
        return drafts

    def oracle_seen(self) -> list[int]:
        return [self.rest[0], *self.again([self.rest[0]])[1:]]

    def again(self, seen: list[int]) -> list[int]:
        """What the network drafts when it sees these tokens in place of the first masks."""
        return self.blocks.best(self.blocks.read(self.blocks.masked(self.anchor, seen)))

    def network(self, passes: int) -> list[int]:
        drafts = self.plain
        for _ in range(passes):
            drafts = self.again(drafts)
        return drafts

    def left_to_right(self, passes: int) -> list[int]:
        drafts = self.plain
        for number in range(1, passes + 1):
            drafts = drafts[:number] + self.again(drafts[:number])[number:]
        return drafts

    @cached_property
    def picks(self) -> Picks:
        blocks, path = self.blocks, self.blocks.path
        assert isinstance(path, DFlash2Path | DFlash2NativePath)
        with torch.inference_mode():
            return path.pick([blocks.row], [self.anchor], blocks.width, blocks.size)

    @cached_property
    def best_KP(self) -> Tensor:
        return self.picks.scores_BKPM[0].argmax(-1).cpu()

    def jacobi(self, passes: int) -> list[int]:
        taken_K = torch.tensor(jacobi(self.best_KP, passes))
        return self.blocks.named(self.picks.chosen_BKM[0].cpu().gather(1, taken_K[:, None])[:, 0])


@dataclass(frozen=True, slots=True)
class Way:
    """A way to draft: what it costs beside the plain block, and how its drafts come about."""

    name: str
    drafts: Callable[[Block], list[int]]
    network_passes: int = 0
    selector_passes: int | None = None
    """None: the selector is not asked at all."""
    is_oracle: bool = False


def ways_of(drafter: DFlashDrafter, passes: Sequence[int]) -> list[Way]:
    """What can be tried with this drafter, the plain block first."""
    found = [
        Way("plain", lambda block: block.plain),
        Way("oracle", Block.oracle, is_oracle=True),
        Way("oracle of 16", Block.oracle_of_16, is_oracle=True),
        Way("oracle, seen", Block.oracle_seen, 1, is_oracle=True),
    ]
    if drafter.config.second is not None:
        most = drafter.num_drafted
        for number in sorted({*(each for each in passes if each < most), most}):
            name = f"jacobi {number}" if number < most else "walk, as served"
            found.append(Way(name, partial(Block.jacobi, passes=number), selector_passes=number))
    for number in passes:
        found.append(Way(f"network {number}", partial(Block.network, passes=number), number))
    for number in passes:
        if number <= drafter.num_drafted:
            found.append(Way(f"left to right {number}", partial(Block.left_to_right, passes=number), number))
    return found


class Rig:
    """A target and a drafter of which every row is free, and one row of both."""

    def __init__(self, llm: LLM, drafter: DFlashDrafter) -> None:
        self.target, self.drafter = llm.target, drafter
        drafter.bind(llm.target)
        llm.target.set_taps(drafter.tap_layers)
        row = llm.target.cache.allocate()
        assert row is not None, "the engine must be idle"
        self.row, self.blocks = row, Blocks(drafter, row)

    def read(self, tokens: list[int]) -> Tensor:
        """The target's features of these tokens, [N, F]; both caches of the row begin anew."""
        for cache in (self.target.cache, self.drafter._cache):
            cache.rollback([self.row], [0])
        taps: list[Tensor] = []
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            out = self.target.forward(ForwardBatch([self.row], [start], [len(part)], part, "none"))
            assert out.taps_TF is not None
            taps.append(out.taps_TF.clone())
        return torch.cat(taps)

    def see(self, taps_NF: Tensor, length: int) -> None:
        """Have the drafter read features up to `length` positions."""
        done = self.drafter._cache.lengths[self.row]
        if length > done:
            self.blocks.path.inject([self.row], [done], [length - done], taps_NF[done:length])

    def walk(self, prompt: list[int], answer: list[int], ways: Sequence[Way]) -> dict[str, tuple[Walk, Walk]]:
        """All ways through one answer."""
        tokens = prompt + answer
        taps_NF = self.read(tokens[:-1])
        by_name, blocks = {way.name: way for way in ways}, dict[int, Block]()

        def stands(name: str, place: int) -> int:
            if place not in blocks:
                blocks.clear()
                self.see(taps_NF, len(prompt) + place)
                blocks[place] = Block(self.blocks, answer[place], answer[place + 1 :])
            return kept(by_name[name].drafts(blocks[place]), answer[place + 1 :])

        return walk_all(answer, list(by_name), stands)

    def times(self, tokens: list[int], repeats: int) -> dict[str, float]:
        """Seconds of each part of a round behind these tokens: medians."""
        length, width, target = min(len(tokens) - 1, CONTEXT), self.blocks.width, self.target
        taps_NF, anchor = self.read(tokens[:length]), tokens[length]
        self.see(taps_NF, length)
        block, rows = self.blocks.masked(anchor), [self.row]
        path = self.blocks.path

        def verify() -> None:
            target.forward(ForwardBatch(rows, [length], [1 + width], block, "all", only_argmax=True))
            target.cache.rollback(rows, [length])

        def observe() -> None:
            path.cache.rollback(rows, [length - 3])
            path.inject(rows, [length - 3], [3], taps_NF[-3:])

        found = {"target": timed(verify, repeats), "observe": timed(observe, repeats)}
        found["draft"] = timed(lambda: path.draft(rows, [anchor], width, 1 + width, False), repeats)
        if isinstance(path, DFlash2Path | DFlash2NativePath):
            one = Block(self.blocks, anchor, [anchor])
            found["draft"] = timed(lambda: path.read(rows, [anchor], width, 1 + width), repeats)
            both_s = timed(lambda: path.pick(rows, [anchor], width, 1 + width).scores_BKPM.argmax(-1), repeats)
            found["selector"] = max(both_s - found["draft"], 0.0)
            found["jacobi"] = timed(lambda: jacobi(one.best_KP, 8), repeats) / 8
        return found


def timed(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds; the first few calls do not count."""
    seconds = []
    for number in range(repeats + 3):
        began = time.perf_counter()
        run()
        if number >= 3:
            seconds.append(time.perf_counter() - began)
    return median(seconds)


def round_seconds(way: Way, times: dict[str, float]) -> float:
    """What a round of this way takes: target, draft and the passes more; an oracle's reveal takes nothing."""
    seconds = times["target"] + times["observe"] + (1 + way.network_passes) * times["draft"]
    if way.selector_passes is not None:
        seconds += times["selector"] + way.selector_passes * times["jacobi"]
    return seconds


def row_of(way: Way, tally: Tally, times: dict[str, float]) -> dict[str, Any]:
    per_round, seconds = tally.own.tokens / tally.own.rounds, round_seconds(way, times)
    return {
        "way": way.name,
        "is_oracle": way.is_oracle,
        "rounds": tally.own.rounds,
        "tokens_per_round": per_round,
        "at_plain_anchors": tally.plain.tokens / tally.plain.rounds,
        "round_ms": 1000 * seconds,
        "tokens_per_s": per_round / seconds,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'way':<18} {'tokens/round':>12} {'at plain anchors':>17} {'ms a round':>11} {'tokens/s':>9} {'over plain':>11}"]
    for row in rows:
        over = row["tokens_per_s"] / rows[0]["tokens_per_s"]
        lines.append(
            f"{row['way']:<18} {row['tokens_per_round']:12.3f} {row['at_plain_anchors']:17.3f} {row['round_ms']:11.2f} "
            f"{row['tokens_per_s']:9.1f} {over:10.2f}x{'  (ceiling)' if row['is_oracle'] else ''}"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="default", help="a folder with a DFlash or DFlash 2 drafter")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=24, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--passes", default="1,2,4", help="K of every kind of refinement")
    parser.add_argument("--repeats", type=int, default=30, help="of each pass that is timed")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    llm = LLM(args.model, drafter=args.drafter, dtype=args.dtype, threads=args.threads, max_batch=4, max_len=1024, plan="fixed")
    drafter = llm.drafter
    if not isinstance(drafter, DFlashDrafter) or drafter.config.from_anchor:
        sys.exit(f"{args.drafter} is no DFlash drafter whose slots say the token at their own place: give another folder")
    read = [prompt for file in args.prompts for prompt in read_prompts(file, args.limit)]
    prompts = [llm.encode_chat(each.messages) for each in read]
    completions = llm.generate_ids(prompts, SamplingParams(max_tokens=args.max_tokens, temperature=0.0))
    num_rounds = sum(each.stats.num_rounds for each in completions)
    served = 1 + sum(each.stats.num_accepted for each in completions) / num_rounds
    rig, ways = Rig(llm, drafter), ways_of(drafter, [int(each) for each in args.passes.split(",")])
    tallies = {way.name: Tally() for way in ways}
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), start=1):
        for name, walks in rig.walk(prompt, list(completion.token_ids), ways).items():
            tallies[name].add(*walks)
        print(f"{number} of {len(prompts)} answers", file=sys.stderr, flush=True)
    longest = max(zip(prompts, completions, strict=True), key=lambda pair: len(pair[0]) + len(pair[1].token_ids))
    times = rig.times([*longest[0], *longest[1].token_ids], args.repeats)
    rows = [row_of(way, tallies[way.name], times) for way in ways]
    name = "plain" if drafter.config.second is None else "walk, as served"
    as_served = next(row["tokens_per_round"] for row in rows if row["way"] == name)
    print(table(rows), file=sys.stderr)
    print(f"the engine served {served:.3f} tokens a round, '{name}' gives {as_served:.3f} here", file=sys.stderr)
    print(", ".join(f"{part} {1000 * seconds:.3f} ms" for part, seconds in times.items()), file=sys.stderr)
    settings = {key: value for key, value in vars(args).items() if value is not None}
    found = {"settings": settings, "served_tokens_per_round": served, "times_s": times, "results": rows}
    print(json.dumps(record_of({"what": "refinement passes", **found})))
    return 0 if abs(as_served / served - 1) < 0.03 else 1


if __name__ == "__main__":
    sys.exit(main())
