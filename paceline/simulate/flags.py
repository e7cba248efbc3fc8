"""Builds the commands that start paceline, vLLM and SGLang with the number of drafts that the simulation found best.
`flags.json` holds each server's options."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

FLAGS: dict[str, Any] = json.loads(Path(__file__).with_name("flags.json").read_text(encoding="utf-8"))
METHODS, PLACEHOLDER = FLAGS["methods"], FLAGS["placeholder"]


@dataclass(frozen=True, slots=True)
class Serving:
    """Model, drafter and draft length to serve. Raises ConfigError for an unknown method."""

    model: str
    method: str = "dflash"
    """Drafting method, such as dflash, dspark or eagle3: a key of METHODS."""
    drafter: str = PLACEHOLDER
    """Folder or hub id of the drafter."""
    num_drafted: int = 0
    batch: int = 1
    num_gpus: int = 1
    has_8bit_cache: bool = False
    has_decoder: bool = True
    """True if paceline's own decoder runs the model."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"--method {self.method!r} is not known: choose from {', '.join(METHODS)}")


def server_flags(serving: Serving) -> dict[str, str]:
    """Returns server name (paceline, vllm, sglang) -> command line that serves the model with the drafter and number of
    drafts in `serving`; 0 drafts mean plain decoding. If paceline cannot run the model, or for several GPUs, a sentence
    with the reason replaces paceline's command line. SGLang's --speculative-num-draft-tokens is drafts + 1, because
    SGLang also counts the last accepted token."""
    method, drafts = METHODS[serving.method], serving.num_drafted
    checkpoint = {"model": serving.drafter} if method["model"] else {}
    config = {"method": method["vllm"], **checkpoint, "num_speculative_tokens": drafts, **method.get("vllm_more", {})}
    values = {**asdict(serving), "block": drafts + 1, "sglang": method["sglang"], "vllm_config": json.dumps(config)}
    values["own_drafter"] = method["paceline"].format(drafter=serving.drafter)
    facts = {"": True, "plain": drafts == 0, "drafts": drafts > 0, "gpus": serving.num_gpus > 1}
    facts["8bit_cache"] = serving.has_8bit_cache
    facts |= {name: drafts > 0 and method[name] for name in ("model", "steps")}
    commands = {
        server: shlex.join(word.format(**values) for fact, words in lines if facts[fact] for word in words)
        for server, lines in FLAGS["servers"].items()
    }
    unserved = {"model": not serving.has_decoder, "gpus": serving.num_gpus > 1}
    if reason := next((name for name, holds in unserved.items() if holds), None):
        commands["paceline"] = FLAGS["unserved"][reason].format(**asdict(serving))
    return commands
