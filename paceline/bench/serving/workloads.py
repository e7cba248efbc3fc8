"""What `bench latency` asks: named workloads from `workloads.json`, or the prompts of any file.

A workload's calls are written down with all their turns, the assistant's too: every arm is asked the same, whatever it answers,
and a turn's prompt begins with the whole prompt of the one before it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.prompts import Prompt, read_prompts

WORKLOADS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
OWN_MAX_TOKENS = 128
"""Longest answer to prompts of a file."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, the same for every arm."""

    prompt: Prompt
    schema: dict[str, Any] | None = None
    """What the answer has to be."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and when they come."""

    name: str
    about: str
    requests: list[Asked]
    max_tokens: int
    rate: float | None
    """Requests a second, at random times (Poisson); None: one after the other."""


def named_workload(name: str, limit: int | None = None) -> Workload:
    """The first `limit` requests of a workload of `workloads.json`; its name must be one of them."""
    told = WORKLOADS[name]
    opening = [{"role": "system", "content": told["system"]}] if "system" in told else []
    requests: list[Asked] = []
    for number, turns in enumerate(told["calls"], start=1):
        said = [*opening, *({"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns))]
        for end in range(len(opening) + 1, len(said) + 1, 2):
            turn = (end - len(opening) + 1) // 2
            requests.append(Asked(Prompt(f"{name} {number}.{turn}", said[:end], (), name), told.get("schema")))
    return Workload(name, told["about"], requests[:limit], told["max_tokens"], told["rate"])


def workload_of(source: str | Path, limit: int | None = None, schema: dict[str, Any] | None = None) -> Workload:
    """The prompts of a file, one after the other: `read_prompts` says what it may hold, and what it raises."""
    prompts = read_prompts(source, limit)
    requests = [Asked(each, schema) for each in prompts]
    return Workload(Path(source).stem or str(source), f"the prompts of {Path(source).name}", requests, OWN_MAX_TOKENS, None)
