"""The table of `drafters_side_by_side.sh`, from what its run folder holds.

    python experiments/drafters_side_by_side.py runs/drafters-side-by-side

Of each drafter: tokens a round with all of its drafts checked, with an interval over prompts, and with a tree where it
drafts trees; what drafting takes of the time of a plain round; speed over plain decoding with all drafts checked and as
the planner chooses; what it learned from. Writes result.json into that folder, and prints a Markdown table.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.report.tables import Column, Table, with_interval
from paceline.runs.folder import RunFolder, write_results

TREES = ("eagle3", "mtp", "dflash", "dflash2", "dspark")
"""Drafters that draft trees."""


@dataclass(frozen=True)
class Line:
    """One kind of drafter."""

    name: str
    tokens_per_round: float
    interval: tuple[float, float]
    tree: float | None
    """Tokens a round with a tree of 32 drafts; None of drafters that draft chains alone."""
    drafting_share: float
    """Drafting time as a share of a plain round's time."""
    fixed: float
    """Speed over plain decoding with every draft checked."""
    auto: float
    auto_interval: tuple[float, float]
    blocks: int | None
    """It learned from; None where it learned nothing, or whole answers."""
    minutes: float | None


def results_of(folder: Path) -> dict[str, dict[str, Any]]:
    """By the drafter's name: of a run folder of ours, the folder that holds it."""
    read = json.loads((folder / "results.json").read_text())
    return {Path(each["drafter"]).parent.name or each["drafter"]: each for each in read["results"]}


def learned(folder: Path) -> tuple[int | None, float | None]:
    """Blocks and minutes of steps; of a small model, which learns from whole answers, minutes alone."""
    if (distilled := folder / "distilled.json").is_file():
        return None, json.loads(distilled.read_text())["minutes"]
    steps = [line for line in RunFolder(folder).metrics() if "blocks_per_s" in line]
    return (steps[-1]["blocks"], steps[-1]["seconds"] / 60) if steps else (None, None)


def rounds_of(result: dict[str, Any]) -> float:
    return result["num_output_tokens"] / result["tokens_per_round"]


def lines_of(out: Path) -> list[Line]:
    full, tree, auto = (results_of(out / speculate) for speculate in ("full", "tree", "auto"))
    plain = full["none"]
    plain_s = (plain["seconds"]["verify"] + plain["seconds"]["host"]) / rounds_of(plain)
    lines = []
    for name, result in full.items():
        if name == "none":
            continue
        drafting_s = result["seconds"]["draft"] / rounds_of(result)
        speeds = auto[name]["speedup"], tuple(auto[name]["speedup_interval"])
        kept = result["tokens_per_round"], tuple(result["tokens_per_round_interval"])
        with_tree = tree[name]["tokens_per_round"] if name in TREES else None
        lines.append(
            Line(name, *kept, with_tree, drafting_s / plain_s, result["speedup"], *speeds, *learned(out / name))
        )
    return sorted(lines, key=lambda line: line.tokens_per_round)


COLUMNS = (
    Column("drafter", lambda line: line.name),
    Column("learned from, thousand blocks", lambda line: line.blocks and line.blocks / 1000, "{:.0f}", "right"),
    Column("minutes of steps", lambda line: line.minutes, "{:.1f}", "right"),
    Column("tokens a round", lambda line: with_interval(line.tokens_per_round, line.interval)),
    Column("with a tree of 32", lambda line: line.tree, "{:.2f}", "right"),
    Column("drafting, of a plain round", lambda line: line.drafting_share, "{:.0%}", "right"),
    Column("all drafts checked", lambda line: line.fixed, "{:.2f}x", "right"),
    Column("as planned", lambda line: with_interval(line.auto, line.auto_interval, unit="x")),
)


def main() -> None:
    out = Path(sys.argv[1])
    lines = lines_of(out)
    read = json.loads((out / "auto" / "results.json").read_text())
    about = {"command": "bash experiments/drafters_side_by_side.sh", "what": "kinds of drafters side by side"}
    record = write_results(out / "result.json", {**about, "model": read["model"], "drafters": lines})
    print(Table(COLUMNS, lines).markdown())
    print(json.dumps(json.loads(record.read_text())))


if __name__ == "__main__":
    main()
