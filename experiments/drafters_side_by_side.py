"""The table and the chart of `drafters_side_by_side.sh`, from what its run folder holds.

    python experiments/drafters_side_by_side.py runs/drafters-side-by-side

Of each drafter: tokens a round with all of its drafts checked, with an interval over prompts, and with a tree where it
drafts trees; what drafting takes of the time of a plain round; speed over plain decoding with all drafts checked and as
the planner chooses; what it learned from. Writes chart.svg and result.json beside them, and prints a Markdown table.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.runs.folder import record_of, write_whole

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
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return None, None
    steps = [line for line in map(json.loads, path.read_text().splitlines()) if "blocks_per_s" in line]
    return steps[-1]["blocks"], steps[-1]["seconds"] / 60


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


def table_of(lines: list[Line]) -> str:
    rows = [
        "| drafter | learned from, thousand blocks | minutes of steps | tokens a round | with a tree of 32 "
        "| drafting, of a plain round | all drafts checked | as planned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        blocks = "" if line.blocks is None else f"{line.blocks / 1000:.0f}"
        minutes = "" if line.minutes is None else f"{line.minutes:.1f}"
        low, high = line.interval
        slow, fast = line.auto_interval
        tree = "" if line.tree is None else f"{line.tree:.2f}"
        rows.append(
            f"| {line.name} | {blocks} | {minutes} | {line.tokens_per_round:.2f} [{low:.2f}, {high:.2f}] | {tree} "
            f"| {line.drafting_share:.0%} | {line.fixed:.2f}x | {line.auto:.2f}x [{slow:.2f}, {fast:.2f}] |"
        )
    return "\n".join(rows)


def draw(lines: list[Line], path: Path, title: str) -> None:
    """A row for each drafter: tokens a round, what drafting takes, speed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (tokens, cost, speed) = pyplot.subplots(1, 3, figsize=(9.0, 3.2), sharey=True)
    for row, line in enumerate(lines):
        low, high = line.interval
        slow, fast = line.auto_interval
        kept, auto = line.tokens_per_round, line.auto
        tokens.errorbar(kept, row, xerr=[[kept - low], [high - kept]], fmt="o", capsize=2, color="C0")
        if line.tree is not None:
            tokens.plot(line.tree, row, "D", markerfacecolor="none", color="C2")
        cost.barh(row, line.drafting_share, height=0.4, color="C7")
        speed.errorbar(auto, row, xerr=[[auto - slow], [fast - auto]], fmt="o", capsize=2, color="C0")
        speed.plot(line.fixed, row, "s", markerfacecolor="none", color="C3")
    tokens.set_yticks(range(len(lines)), [line.name for line in lines])
    tokens.set_xlabel("tokens a round\n(diamond: with a tree of 32)")
    cost.set_xlabel("drafting, in plain rounds\n(a block or a chain)")
    speed.set_xlabel("times plain decoding, as planned\n(square: all drafts checked)")
    for axes in (tokens, speed):
        axes.axvline(1.0, color="grey", linewidth=0.8, linestyle="--")
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> int:
    out = Path(sys.argv[1])
    lines = lines_of(out)
    read = json.loads((out / "auto" / "results.json").read_text())
    title = f"Drafters of {read['model']} after the same minutes of training, {read['processor']['name']}"
    draw(lines, out / "chart.svg", title)
    table = table_of(lines)
    about = {"command": "bash experiments/drafters_side_by_side.sh", "what": "kinds of drafters side by side"}
    whole = record_of({**about, "model": read["model"], "drafters": [asdict(line) for line in lines]})
    write_whole(out / "result.json", json.dumps(whole, indent=1) + "\n")
    print(table)
    print(json.dumps(whole))
    return 0


if __name__ == "__main__":
    sys.exit(main())
