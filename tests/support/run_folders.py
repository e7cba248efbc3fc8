"""Folders of runs from lines made by hand: steps and checks of a training, and an evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EVIL = "</pre><script>alert('x')</script> & \x00 \u0007"
Line = dict[str, Any]


def step(number: int, loss: float | None = 2.0, seconds: float = 60.0) -> dict[str, Any]:
    recall = [0.5, 0.4, 0.3]
    figures = {"loss": loss, "eal": 1.5, "accuracy": 0.3, "recall1": recall, "recall16": recall}
    return {"step": number, "blocks": 100 * number, **figures, "blocks_per_s": 12.0, "seconds": seconds}


def check(number: int, eal: float = 1.7, ood: bool = True) -> dict[str, Any]:
    figures = {"loss": 1.9, "eal": eal, "accuracy": 0.4, "recall1": [0.6, 0.5, 0.4], "recall16": [0.9, 0.8, 0.7]}
    return {"step": number, "blocks": 100 * number, "heldout": figures, "ood": {**figures, "eal": 1.2} if ood else None}


def row(drafter: str, batch: int, temperature: float, **values: Any) -> dict[str, Any]:
    return {
        "drafter": drafter,
        "drafter_name": drafter,
        "batch": batch,
        "temperature": temperature,
        "tokens_per_s": 20.0,
        "tokens_per_s_range": [19.0, 21.0],
        "decode_tokens_per_s": None,
        "tokens_per_round": 1.0 if drafter == "none" else 2.5,
        "tokens_per_round_interval": [None, None] if drafter == "none" else [2.25, 2.75],
        "survival": [] if drafter == "none" else [0.7, 0.5, 0.3],
        "accepted_histogram": [10] if drafter == "none" else [3, 2, 2, 3],
        "speedup": 1.0 if drafter == "none" else 1.85,
        "speedup_interval": [1.6, 2.05],
        "speedup_vs": {},
        "identical": 1.0 if temperature == 0 else None,
        "lossless": True,
        "seconds": {"prefill": 1.0, "draft": 1.0, "verify": 1.0, "host": 1.0, "wall": 4.0},
        "bytes_per_s": 1e9,
        "repetition": 0.1,
        "num_answers": 3,
        "num_output_tokens": 240,
        "differences": [],
        **values,
    }


def evaluation(name: str = "gsm8k", **values: Any) -> dict[str, Any]:
    rows = [row(drafter, batch, t, **values) for t in (0.0, 1.0) for batch in (1, 8) for drafter in ("none", "d")]
    looping = {
        "temperature": 0.0,
        "num_answers": 4,
        "looping_share": 0.25,
        "tokens_per_round": 2.5,
        "tokens_per_round_interval": [2.25, 2.75],
        "without_loops": None,
        "without_loops_interval": [None, None],
    }
    text = {"request": EVIL, "temperature": 0.0, "prompt": EVIL, "text": EVIL, "num_tokens": 8, "tokens_per_round": 2.0}
    figures = {"results": rows, "looping": [looping], "looping_share": 0.25, "texts": [{**text, "is_loop": True}]}
    return {
        "drafter": "d",
        "model": "m",
        "dtype": "float32",
        "device": "cpu",
        "machine": {"name": "test"},
        "ceiling_tokens_per_s": 100.0,
        "sets": {name: figures},
        "heldout": {name: 2.5},
        "settings": {"bench": {"seed": 0}},
    }


def folder(path: Path, lines: list[dict[str, Any]] | None = None, evaluated: dict[str, Any] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"what": "train", "target": "m", "versions": {"torch": "2"}}))
    (path / "command.txt").write_text("paceline train --target m\n")
    if lines is not None:
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if evaluated is not None:
        (path / "evaluation.json").write_text(json.dumps(evaluated))
    return path


def trained(path: Path, default: float | None, **served: Any) -> Path:
    """A run whose plan expected 1.10 tokens a round from 44 answers where 3,000 are advised."""
    run = folder(path, [{**step(1), "unigram_entropy": 5.55}, check(1)])
    heldout = {"tokens_per_round": 1.06, "num_rounds": 300, "num_prompts": 16, "speedup": 1.17, **served}
    heldout |= {"plain_tokens_per_s": 10.0, "drafted_tokens_per_s": 11.7}
    heldout |= {"default_drafter": {"tokens_per_round": default}} if default else {}
    (run / "heldout.json").write_text(json.dumps(heldout))
    expected = {"tokens_per_round": 1.1, "is_beyond_the_curve": False, "answers": 44, "advised": 3000}
    (run / "plan.json").write_text(json.dumps({"expected": expected}))
    (run / "config.json").write_text(json.dumps({"what": "train", "shape": {"start": "copied"}}))
    return run
