"""Computes a summary of a store's contents (its card), and writes it as `card.md` with every version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.data.tags import has_tag, refuse_unknown, tag_of
from paceline.loop.store.config import SplitConfig
from paceline.loop.store.split import SIDES
from paceline.report.pages import render
from paceline.report.statistics import is_loop, quantile
from paceline.runs.folder import write_whole

MOST_NAMED = 12


class Described(Protocol):
    """Type of the dataset stores that `card_of` accepts: declares the members that it reads. `folder.Store` has these
    members. It is not used as the type, because `folder` imports this module, which therefore cannot import it."""

    path: Path
    model: str
    split: SplitConfig
    version: int
    forgotten: set[str]

    def rows(self, side: str, version: int | None = None) -> Iterator[dict[str, Any]]: ...
    def versions(self) -> list[dict[str, Any]]: ...
    def labels(self) -> list[dict[str, Any]]: ...


def card_of(store: Described, tags: Sequence[str] = ()) -> dict[str, Any]:
    """Computes a summary of a dataset store as JSON. It has the numbers of rows and tokens on each side ("train" and
    "evals"), the number of rows by source and by tag, and how many rows were left out by `Store.add` or deleted by
    `forget`.

    `tags`: count only stored rows with one of these tags (empty: all rows). Raises ConfigError for a tag that no row
    has."""
    by_side = {side: list(store.rows(side)) for side in SIDES}
    refuse_unknown(store.path, tags, {tag_of(row) for rows in by_side.values() for row in rows})
    by_side = {side: [row for row in rows if has_tag(row, tags)] for side, rows in by_side.items()}
    every = [row for rows in by_side.values() for row in rows]
    conversations = [{row["conversation"] for row in rows} for rows in by_side.values()]
    versions = store.versions()
    left_out = Counter[str]()
    for line in versions:
        left_out.update(line.get("left_out", {}))
    return {
        "model": store.model,
        "version": store.version,
        "split": {"evals_share": store.split.evals_share, "seed": store.split.split_seed},
        "sides": {side: _counts(rows) for side, rows in by_side.items()},
        "on_both_sides": len(set.intersection(*conversations)),
        "sources": dict(Counter(str(row["source"]) for row in every).most_common(MOST_NAMED)),
        "models": dict(Counter(str(row["model"] or "unknown") for row in every).most_common(MOST_NAMED)),
        "tags": dict(Counter(row["tag"] or "none" for row in every).most_common(MOST_NAMED)),
        "finish_reasons": dict(Counter(str(row["finish_reason"]) for row in every)),
        "left_out": dict(left_out),
        "labels": len(store.labels()),
        "forgotten": len(store.forgotten),
        "versions": [{name: line.get(name, "") for name in ("version", "time", "what", "rows")} for line in versions],
    }


def _counts(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    lengths = [len(row["answer_ids"]) for row in rows]
    return {
        "rows": len(rows),
        "conversations": len({row["conversation"] for row in rows}),
        "answer_tokens": sum(lengths),
        "median_answer": quantile(lengths, 0.5) if lengths else None,
        "longest_prompt": max((len(row["prompt_ids"]) for row in rows), default=None),
        "with_top": sum(row["top_ids"] is not None for row in rows),
        "loops": sum(is_loop(row["answer_ids"]) for row in rows),
    }


def text_of(store: Described, card: dict[str, Any]) -> str:
    """Returns `card`, the result of `card_of`, as Markdown."""
    return render("store.md", path=store.path.name, **card)


def write_card(store: Described) -> None:
    write_whole(store.path / "card.md", text_of(store, card_of(store)))
