"""What `decode_vs_peers.py` makes of its turns: figures of every contender, ratios to the peers, the tables."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from decode_vs_peers_run import Contender, Run

from paceline.hardware import Machine

REFERENCES = ("transformers", "llama.cpp bf16", "llama.cpp Q4_1", "vllm", "paceline blocks")
"""Columns of ratios: the peers, and our own plain decoding. Answers are compared with those of the first that runs."""
METRICS = {"tokens_per_s": "whole answers, prompts included", "decode_tokens_per_s": "after the first token"}
IDLE = 0.1
"""Busy share of the machine between turns up to which a measurement counts as undisturbed."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One contender's part in one round."""

    run: Run
    busy_after: float | None
    """Share of all cores' time that was not idle right after it; None where the system does not say."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All turns of all contenders."""

    contenders: list[Contender]
    turns: dict[tuple[str, int], list[Turn]]
    """By name and streams, one a round."""
    machines: tuple[Machine, Machine]
    """The same machine, measured before and afterwards."""
    eos: tuple[int, ...]

    @property
    def machine(self) -> Machine:
        """The better of the two measurements: its figures are ceilings."""
        return max(self.machines, key=lambda each: each.bytes_per_s)

    def results(self) -> list[dict[str, Any]]:
        """One per contender: medians and ranges over rounds, what they are measured by, and every turn."""
        return [self._result(contender) for contender in self.contenders]

    def ceilings(self) -> dict[int, float]:
        """Tokens per second at one stream, were reading the weights all the work, by megabytes of weights."""
        sizes = sorted({round(contender.weight_bytes / 1e6) for contender in self.contenders})
        return {size: self.machine.ceiling_tokens_per_s(size * 10**6) for size in sizes}

    def _result(self, contender: Contender) -> dict[str, Any]:
        name, streams = contender.name, contender.streams
        turns = self.turns[name, streams]
        result: dict[str, Any] = {"name": name, "streams": streams, "about": contender.about}
        for metric in METRICS:
            if rates := self._rates(name, streams, metric):
                result[metric] = spread(rates)
            ratios = {each: self._ratios(name, each, streams, metric) for each in REFERENCES if each != name}
            result[f"{metric}_over"] = {each: spread(values) for each, values in ratios.items() if values}
        result["weight_bytes"] = contender.weight_bytes
        if contender.reads_once_per_token and "decode_tokens_per_s" in result:
            passes_per_s = result["decode_tokens_per_s"]["median"] / streams
            result["bytes_per_s"] = passes_per_s * contender.weight_bytes
            result["share_of_ceiling"] = result["bytes_per_s"] / self.machine.read_bytes_per_s(contender.weight_bytes)
        result |= self._agreement(name, streams)
        result["share_past_end"] = self._share_past_end(turns[0].run)
        result["repeats_itself"] = all(turn.run.token_ids == turns[0].run.token_ids for turn in turns)
        result["turns"] = [
            {
                "wall_s": turn.run.wall_s,
                "prefill_s": turn.run.prefill_s,
                "num_tokens": turn.run.num_tokens,
                "busy_after": turn.busy_after,
                **turn.run.details,
            }
            for turn in turns
        ]
        return result

    def _rates(self, name: str, streams: int, metric: str) -> list[float]:
        rates = [getattr(turn.run, metric) for turn in self.turns.get((name, streams), [])]
        return [rate for rate in rates if rate is not None]

    def _ratios(self, name: str, reference: str, streams: int, metric: str) -> list[float]:
        """Of each round; [] without such a reference."""
        own, other = (self._rates(each, streams, metric) for each in (name, reference))
        return [one / two for one, two in zip(own, other, strict=True)] if own and other else []

    def _agreement(self, name: str, streams: int) -> dict[str, Any]:
        """Shares of answers, and of tokens before the first difference, that equal the first reference's at fewest streams."""
        fewest = min(each for _, each in self.turns)
        wanted = [(each, fewest) for each in REFERENCES if (each, fewest) in self.turns] or list(self.turns)
        pairs = list(zip(self.turns[name, streams][0].run.token_ids, self.turns[wanted[0]][0].run.token_ids, strict=True))
        equal = [common_prefix(one, other) for one, other in pairs]
        return {
            "compared_with": wanted[0][0],
            "same_answers": sum(length == len(one) for length, (one, _) in zip(equal, pairs, strict=True)) / len(pairs),
            "same_tokens": sum(equal) / sum(len(one) for one, _ in pairs),
        }

    def _share_past_end(self, run: Run) -> float:
        """Of the tokens, those after an end token: text that a user would not see, and that may be easier to draft."""
        kept = [next((at + 1 for at, token in enumerate(ids) if token in self.eos), len(ids)) for ids in run.token_ids]
        return 1 - sum(kept) / run.num_tokens


def common_prefix(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def print_tables(record: dict[str, Any]) -> None:
    """For each number of streams and metric: rates, ratios to the peers, share of the ceiling, tokens per round, agreement."""
    machine, results = record["machine"], record["results"]
    bf16 = machine["flops_per_s"]["bfloat16"] / 1e9
    print(
        f"{machine['name']}, {machine['num_threads']} threads: reads {machine['bytes_per_s'] / 1e9:.1f} GB/s, "
        f"multiplies {bf16:.0f} GFLOP/s in bfloat16"
    )
    for megabytes, ceiling in record["ceiling_tokens_per_s"].items():
        print(f"  weights of {megabytes} MB, read once a token: at most {ceiling:.0f} tok/s")
    shown = [each for each in REFERENCES if any(result["name"] == each for result in results)]
    for streams in sorted({result["streams"] for result in results}):
        for metric, meaning in METRICS.items():
            print(f"\n{streams} stream{'s' * (streams > 1)}, {meaning}: median (min - max)")
            heads = "".join(f"{'x ' + each:<19}" for each in shown)
            print(f"{'':<26}{'tok/s':>7}{'':<20}{heads}of ceiling  tok/round  same")
            for result in results:
                if result["streams"] == streams and metric in result:
                    print(line_of(result, metric, shown))
    print_notes(record)


def line_of(result: dict[str, Any], metric: str, shown: list[str]) -> str:
    rates, over = result[metric], result[f"{metric}_over"]
    rate = f"{rates['median']:>7.1f}  {'({min:.1f} - {max:.1f})'.format(**rates):<18}"
    cells = ["{median:.2f} ({min:.2f}-{max:.2f})".format(**over[each]) if each in over else "-" for each in shown]
    share = f"{result['share_of_ceiling']:.0%}" if "share_of_ceiling" in result else "-"
    per_round = statistics.median([turn.get("tokens_per_round", 1.0) for turn in result["turns"]])
    ratios = "".join(f"{cell:<19}" for cell in cells)
    return f"{result['name']:<26}{rate}{ratios}{share:>10}  {per_round:>9.2f}  {result['same_tokens']:>4.0%}"


def print_notes(record: dict[str, Any]) -> None:
    results = record["results"]
    print(f"\nsame: share of the tokens that come before the first difference from {results[0]['compared_with']}")
    print(f"text past an end token: {results[0]['share_past_end']:.0%} of the tokens")
    for name, own in record["llama.cpp's own"].items():
        single = max(each["avg_ts"] for each in own["llama-bench"])
        many = {each["pl"]: 0.0 for each in own["llama-batched-bench"]}
        for each in own["llama-batched-bench"]:
            many[each["pl"]] = max(many[each["pl"]], each["speed_tg"])
        told = ", ".join(f"{rate:.1f} at {streams}" for streams, rate in many.items())
        print(f"{name}: llama-bench {single:.1f} tok/s from an empty context; llama-batched-bench {told} streams")
    busy = [turn["busy_after"] for result in results for turn in result["turns"] if turn["busy_after"] is not None]
    if busy and max(busy) > IDLE:
        print(
            f"NOT IDLE: the machine was busy up to {max(busy):.0%} between turns, {statistics.median(busy):.0%} in the median"
        )
    if uneven := [f"{result['name']}, {result['streams']}" for result in results if not result["repeats_itself"]]:
        print(f"answers differ from round to round: {'; '.join(uneven)}")
