"""Writes a description (card) of synthetic data: contents, origin, and hashes that prove the origin.

runs/x/card.json    for programs; `ood` names the prompts that training monitors (paceline train --ood)
runs/x/README.md    for people
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.loop.synthesize.config import SynthesizeConfig, Synthesized
from paceline.loop.synthesize.coverage import Coverage
from paceline.report.pages import render
from paceline.runs.folder import RunFolder, record_of
from paceline.train.answers.mixture import sources_of


def write_card(
    folder: RunFolder,
    config: SynthesizeConfig,
    schema: dict[str, Any] | None,
    coverage: Coverage | None,
    done: Synthesized,
) -> None:
    """Writes card.json and README.md, which describe the synthetic answers, to the run folder. `schema`: JSON schema of
    the answers, `coverage`: counts of the values that they took; both None for answers without a schema. `done`: counts
    of answers. Raises CacheError if the files cannot be written."""
    sources = [source for source, _ in sources_of(config.prompting.prompts)]
    figures = {
        "what": "synthetic answers",
        "target": config.target.model,
        "form": _form(config),
        "schema_hash": None if schema is None else _hash(json.dumps(schema, sort_keys=True).encode()),
        "prompts": [{"source": source, "sha256": _file_hash(source)} for source in sources],
        "self_written": config.prompting.num_self_written,
        "answers": done.num_answers,
        "tokens": done.num_tokens,
        "steered": done.num_steered,
        "parsed": done.parsed,
        "left_out": done.dropped,
        "choices": [asdict(taken) for taken in coverage.taken()] if coverage else [],
        "texts": coverage.texts() if coverage else [],
        "production": {
            "is_used": False,
            "stores": [str(store) for store in config.not_in],
            "prompts_compared_with": done.num_compared,
            "prompts_left_out": done.num_in_store,
        },
        "ood": list(config.ood),
    }
    card = record_of(figures)
    folder.write_json("card.json", card)
    folder.write("README.md", render("synthesis.md", **card))


def _form(config: SynthesizeConfig) -> str:
    answering = config.answering
    if answering.tools:
        return f"calls of the tools in {answering.tools.name} ({config.tool_choice})"
    return {"json_schema": "JSON of a schema", "json_object": "JSON", "regex": "a regex"}.get(
        answering.grammar.kind if answering.grammar else "", "text"
    )


def _file_hash(source: str) -> str | None:
    """SHA-256 of a file; None for a data set or a folder."""
    path = Path(source)
    return _hash(path.read_bytes()) if path.is_file() else None


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
