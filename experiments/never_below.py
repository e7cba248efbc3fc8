"""Every drafter against no drafter, in turns: is speculation ever slower than plain decoding?

    python experiments/never_below.py --prompts gsm8k_test.jsonl experiments/prompts_edit.jsonl

One LLM for each drafter, the planner choosing. The prompts are answered by all of them and by plain decoding at the
same time, a step of each in turns, so that all meet the same pace of the machine. `--batch` requests are in flight:
where an answer ends, the next prompt is read beside the others, as in a server. A ratio is of one turn over all
prompts, their reading included; sampled answers all have the same length, so that nobody has more to read. The table
has the median of the ratios, their range, the time from one token of an answer to the next (mean over answers, over
that of plain decoding; median [range]), and the share of rounds by the source of their drafts. `noisy` is the default
drafter with noise in its weights, which drafts as one does that is half trained; `default-chain` is the default drafter
without trees; `none again` is plain decoding once more: how far its ratio
is from 1 is the machine's doing.

On a virtual machine the hypervisor may give the processor to others in the middle of a step, for longer than a turn
takes. Such steps (/proc/stat tells) count as long as undisturbed ones of the same kind take: as many rows, drafts and
prompt tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline import LLM, SamplingParams
from paceline.data.prompts import read_prompts
from paceline.draft.base import Drafter
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.engine.engine import Engine
from paceline.runs.folder import write_results
from paceline.types import LOOKUP, NONE

PROC_STAT, STEAL = Path("/proc/stat"), 8
"""The file with the ticks of all processors, and the place of the stolen ones in its first line, after "cpu"."""
CHAIN = "-chain"
"""Behind a drafter's name: it drafts chains alone, no trees."""

Setting = tuple[str, int, float]
"""Prompt file, batch, temperature."""


def stolen_ticks() -> int:
    """Hundredths of a second that a hypervisor has taken from all processors; 0 where the system does not say.

    A step during which they grew says nothing of the program: steps of 12 ms were seen to take a second then.
    """
    fields = PROC_STAT.read_text(encoding="ascii").split("\n", 1)[0].split() if PROC_STAT.exists() else []
    return int(fields[STEAL]) if len(fields) > STEAL else 0


def noisy(drafter: Drafter, share: float) -> Drafter:
    """A copy whose weights have noise of so many of their own standard deviations."""
    assert isinstance(drafter, DFlashDrafter), "noisy is made of a DFlash drafter"
    generator = torch.Generator().manual_seed(0)
    state = {
        name: weight + (share * weight.float().std() * torch.randn(weight.shape, generator=generator)).to(weight.dtype)
        if weight.ndim == 2
        else weight
        for name, weight in drafter.network.state_dict().items()
    }
    network = type(drafter.network).of(drafter.config, state)
    return DFlashDrafter(network, draft_ids=drafter.draft_ids, head_VD=drafter.head_VD)


def load(args: argparse.Namespace, name: str, max_batch: int) -> LLM:
    own = {"noisy": "default", "none again": "none"}.get(name, name.removesuffix(CHAIN))
    trees = not name.endswith(CHAIN)
    llm = LLM(args.model, drafter=own, dtype=args.dtype, max_batch=max_batch, max_len=1024, trees=trees)
    if name == "noisy":
        llm.use_drafter(noisy(llm.drafter, args.noise))
    return llm


Kind = tuple[int, int, int, int]
"""Counts of a step: prompt tokens, to the nearest four; rows; drafts that were verified; rows whose drafter computed
some."""


def kind_of(engine: Engine) -> Kind:
    rows = checked = computed = 0
    for stats in engine.rounds:
        rows, checked = len(stats.num_drafted_B), sum(stats.num_checked_B)
        computed = sum(source not in (NONE, LOOKUP) for source in stats.source_B)
    return round(engine.read[0] / 4), rows, checked, computed


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine."""

    kind: Kind
    num_tokens: int
    spent_s: float
    is_disturbed: bool
    """True if the hypervisor gave the processor to others meanwhile."""


@dataclass
class Contender:
    """An engine of its own weights and cache, and what it did in this turn."""

    engine: Engine
    steps: list[Step] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    waiting: list[list[int]] = field(default_factory=list)
    clock_s: float = 0.0
    """Seconds of all steps so far."""
    open: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Identity of a sequence whose answer has begun -> (clock at its first tokens, number of tokens since)."""
    waits: list[float] = field(default_factory=list)
    """Mean seconds from one token to the next, for each answer that has ended."""

    def step(self, in_flight: int, params: SamplingParams) -> None:
        """A step with as many requests as may be in flight: the next prompt takes the place of an answer that has
        ended."""
        requests = self.engine.scheduler
        while self.waiting and len(requests.waiting) + len(requests.prefilling) + len(requests.running) < in_flight:
            self.engine.add(self.waiting.pop(0), params)
        stolen, began = stolen_ticks(), time.perf_counter()
        chunks = self.engine.step()
        spent_s = time.perf_counter() - began
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        self.steps.append(Step(kind_of(self.engine), num_tokens, spent_s, stolen_ticks() > stolen))
        self.clock_s += spent_s
        for chunk in chunks:
            key, tokens = id(chunk.sequence), len(chunk.token_ids)
            first_s, since = self.open.get(key, (self.clock_s, -tokens))
            self.open[key] = first_s, since + tokens
            if chunk.finish_reason:
                del self.open[key]
                if since + tokens > 0:
                    self.waits.append((self.clock_s - first_s) / (since + tokens))
                self.sources.update(each.source for each in chunk.sequence.rounds)


def answer(contenders: list[Contender], prompts: list[list[int]], in_flight: int, params: SamplingParams) -> None:
    """Each answers all prompts; a step of each in turns."""
    luck = random.Random(0)
    for one in contenders:
        one.waiting = list(prompts)
    while working := [one for one in contenders if one.waiting or one.engine.has_work]:
        for one in luck.sample(working, len(working)):
            one.step(in_flight, params)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--limit", type=int, default=8, help="prompts of each file, two batches at least")
    parser.add_argument("--drafters", default="default,ngram,random-dflash,noisy", help="comma-separated; folders too")
    parser.add_argument("--noise", type=float, default=0.5)
    parser.add_argument("--batch", default="1,2,4,8")
    parser.add_argument("--temperature", default="0,1")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    args.batches = [int(each) for each in args.batch.split(",")]
    args.temperatures = [float(each) for each in args.temperature.split(",")]
    for file in args.prompts:
        if len(read_prompts(file)) < args.skip + args.limit:
            parser.error(f"{file} has fewer than {args.skip + args.limit} prompts: --skip and --limit need them")
    return args


@dataclass
class Turns:
    """Results of the turns of one setting, by the contender's name."""

    steps: dict[str, list[list[Step]]] = field(default_factory=dict)
    """Contender -> the steps of each turn."""
    sources: dict[str, Counter[str]] = field(default_factory=dict)
    """Rounds by the source of their drafts, over all turns."""
    waits: dict[str, list[float]] = field(default_factory=dict)
    """Contender -> mean seconds from a token to the next over the answers of each turn, disturbed steps included."""

    def add(self, name: str, one: Contender) -> None:
        self.waits.setdefault(name, []).append(statistics.fmean(one.waits))
        self.steps.setdefault(name, []).append(one.steps)
        self.sources.setdefault(name, Counter()).update(one.sources)

    def every(self) -> Iterator[Step]:
        return (step for turns in self.steps.values() for steps in turns for step in steps)

    def speeds(self) -> dict[str, list[float]]:
        """Tokens per second of each turn. A disturbed step counts as long as undisturbed ones of its kind take on
        average, the contender's own where it has some; one of a kind that nobody has undisturbed does not count."""
        anyone = mean_s(self.every())
        speeds = {}
        for name, turns in self.steps.items():
            typical = anyone | mean_s(itertools.chain.from_iterable(turns))
            speeds[name] = []
            for steps in turns:
                counted = [step for step in steps if not step.is_disturbed or step.kind in typical]
                spent_s = sum(typical[step.kind] if step.is_disturbed else step.spent_s for step in counted)
                speeds[name].append(sum(step.num_tokens for step in counted) / spent_s)
        return speeds


def mean_s(steps: Iterable[Step]) -> dict[Kind, float]:
    """Seconds of undisturbed steps, by their kind."""
    durations: dict[Kind, list[float]] = {}
    for step in steps:
        if not step.is_disturbed:
            durations.setdefault(step.kind, []).append(step.spent_s)
    return {kind: statistics.fmean(seconds) for kind, seconds in durations.items()}


def measure(args: argparse.Namespace, llms: dict[str, LLM]) -> dict[Setting, Turns]:
    """All settings, `repeat` times, after a short turn that does not count; what is there is kept after each turn."""
    sets = {
        file: [llms["none"].encode_chat(prompt.messages) for prompt in read_prompts(file)[args.skip :]]
        for file in args.prompts
    }
    settings = list(itertools.product(args.prompts, args.batches, args.temperatures))
    measured = {setting: Turns() for setting in settings}
    for turn, setting in itertools.product(range(-1, args.repeat), settings):
        file, batch, temperature = setting
        most = args.max_tokens if turn >= 0 else 32
        params = SamplingParams(temperature=temperature, max_tokens=most, ignore_eos=temperature > 0)
        contenders = {name: Contender(each.engine) for name, each in llms.items()}
        num_prompts = max(args.limit, 2 * batch) if turn >= 0 else batch
        prompts = list(itertools.islice(itertools.cycle(sets[file]), num_prompts))
        answer(list(contenders.values()), prompts, batch, params)
        for name, one in contenders.items() if turn >= 0 else ():
            measured[setting].add(name, one)
        print(f"turn {turn}: {file} batch {batch} temperature {temperature}", file=sys.stderr, flush=True)
        if setting == settings[-1] and turn >= 0:
            keep(args, llms, measured)
    return measured


def results_of(setting: Setting, turns: Turns) -> list[dict[str, Any]]:
    """One for each contender: its speed over that of plain decoding in each turn."""
    file, batch, temperature = setting
    results, all_speeds = [], turns.speeds()
    for name in all_speeds.keys() - {"none"}:
        ratios = [one / plain for one, plain in zip(all_speeds[name], all_speeds["none"], strict=True)]
        total = turns.sources[name].total()
        shares = {source: round(count / total, 3) for source, count in turns.sources[name].most_common()}
        where = {"prompts": Path(file).name, "batch": batch, "temperature": temperature, "drafter": name}
        waits = [one / plain for one, plain in zip(turns.waits[name], turns.waits["none"], strict=True)]
        speeds = {"ratios": ratios, "median": statistics.median(ratios), "tokens_per_s": all_speeds[name]}
        speeds |= {"wait_ratios": waits, "wait_median": statistics.median(waits)}
        results.append(where | speeds | {"sources": shares})
    return sorted(results, key=lambda each: list(turns.steps).index(each["drafter"]))


def keep(args: argparse.Namespace, llms: dict[str, LLM], measured: dict[Setting, Turns]) -> None:
    """Write the results so far to `--out`, and print the table."""
    results = [each for setting, turns in measured.items() for each in results_of(setting, turns)]
    print(
        "\n| prompts | batch | temperature | drafter | over none | range | time to a token | rounds by source "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    for each in results:
        shares = ", ".join(f"{source} {share:.0%}" for source, share in each["sources"].items())
        print(
            f"| {each['prompts']} | {each['batch']} | {each['temperature']:g} | {each['drafter']} | "
            f"{each['median']:.2f} | {min(each['ratios']):.2f} to {max(each['ratios']):.2f} | "
            f"{each['wait_median']:.2f} [{min(each['wait_ratios']):.2f}, {max(each['wait_ratios']):.2f}] | {shares} |"
        )
    steps = [step for turns in measured.values() for step in turns.every()]
    disturbed = sum(step.spent_s for step in steps if step.is_disturbed) / sum(step.spent_s for step in steps)
    print(f"\nSteps during which a hypervisor gave the processor to others took {disturbed:.1%} of the time.")
    least = min((each for each in results if each["drafter"] != "none again"), key=lambda each: each["median"])
    line = {
        "least_median": least["median"],
        "least": [least[key] for key in ("prompts", "batch", "temperature", "drafter")],
    }
    if args.out:
        figures = {"dtype": llms["none"].config.dtype, "disturbed": disturbed, "results": results}
        write_results(Path(args.out), figures | line)
    print(json.dumps(line), flush=True)


def main() -> None:
    args = arguments()
    names = ["none", "none again", *args.drafters.split(",")]
    measure(args, {name: load(args, name, max(args.batches)) for name in names})


if __name__ == "__main__":
    main()
