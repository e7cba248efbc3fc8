"""Workloads of `bench latency`: built-in ones from `workloads.json`, or the prompts of a file.

A request of a conversation contains all earlier turns, with fixed answers of the assistant, so that every server gets
the same requests whatever it answers. It begins with the whole prompt of the turn before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.prompts import Prompt, read_prompts

WORKLOADS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
OWN_MAX_TOKENS = 128
"""Maximum tokens of an answer to the prompts of a file."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload: a prompt and, optionally, a JSON schema that the answer must follow."""

    prompt: Prompt
    schema: dict[str, Any] | None = None
    """JSON schema of the answer."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of requests for `bench latency`, with the rate at which they are sent and the longest answer."""

    name: str
    about: str
    requests: list[WorkloadRequest]
    max_tokens: int
    rate: float | None
    """Requests per second, at random times (Poisson); None: one after the other."""


def named_workload(name: str, limit: int | None = None) -> Workload:
    """Return at most the first `limit` requests of the built-in workload "voice", "coding" or "chat". Raises KeyError
    for another name."""
    workload = WORKLOADS[name]
    opening = [{"role": "system", "content": workload["system"]}] if "system" in workload else []
    requests: list[WorkloadRequest] = []
    for number, turns in enumerate(workload["calls"], start=1):
        messages = [
            *opening,
            *({"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)),
        ]
        for end in range(len(opening) + 1, len(messages) + 1, 2):
            turn = (end - len(opening) + 1) // 2
            requests.append(
                WorkloadRequest(Prompt(f"{name} {number}.{turn}", messages[:end], (), name), workload.get("schema"))
            )
    return Workload(name, workload["about"], requests[:limit], workload["max_tokens"], workload["rate"])


def workload_of(source: str | Path, limit: int | None = None, schema: dict[str, Any] | None = None) -> Workload:
    """Return the prompts of a JSON lines or Parquet file as a workload, whose requests are sent one after the other.
    `limit`: use only the first prompts. `schema`: JSON schema that the answers follow. Raises PromptError if the
    prompts cannot be read."""
    prompts = read_prompts(source, limit)
    requests = [WorkloadRequest(prompt, schema) for prompt in prompts]
    return Workload(
        Path(source).stem or str(source), f"the prompts of {Path(source).name}", requests, OWN_MAX_TOKENS, None
    )
