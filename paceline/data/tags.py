"""Selects rows of traces and stores by the tag that the client gave (header x-paceline-tag, column `tag`).

check_tags("traces", ("acme",))                 # ConfigError that lists the known tags, if no row has this one
[row for row in rows if has_tag(row, ("acme",))]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, needing

UNTAGGED = "(no tag)"
"""Tag of all rows without one."""
MOST_LISTED = 20


@dataclass(frozen=True, slots=True)
class Tagged:
    """A file or folder of answers, restricted to the rows with one of `tags`; empty: all rows."""

    path: Path
    tags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.path} with the tag {' or '.join(self.tags)}" if self.tags else str(self.path)


def tagged(paths: Iterable[Path], tags: Sequence[str]) -> list[Tagged]:
    """Return the files or folders at these paths, each restricted to the rows with one of `tags`."""
    return [Tagged(path, tuple(tags)) for path in paths]


def tag_of(row: Mapping[str, Any]) -> str:
    return str(row.get("tag") or UNTAGGED)


def has_tag(row: Mapping[str, Any], tags: Sequence[str]) -> bool:
    """Return True if a row is selected by `tags`: its tag is one of them, or `tags` is empty. A row without a tag has
    the tag "(no tag)"."""
    return not tags or tag_of(row) in tags


def check_tags(source: str | Path, tags: Sequence[str]) -> None:
    """Check that `tags` occur in `source`, a Parquet file or a folder of them; without tags, checks nothing. Raises
    ConfigError if no file has a column `tag`, or if one of `tags` occurs in no row. Call it before selecting rows by
    tags, because an unknown tag would select nothing."""
    if not tags:
        return
    known = _tags_of(Path(source))
    if known is None:
        has = "has" if Path(source).exists() else "is not here, and so has"
        raise ConfigError(
            f"{source} {has} no column tag: give traces, or a store's side such as STORE/train, or leave --tag out"
        )
    refuse_unknown(source, tags, known)


def refuse_unknown(source: str | Path, tags: Sequence[str], known: Iterable[str]) -> None:
    """Raise ConfigError if one of `tags` is not in `known`, the tags that occur in `source`; the error lists these."""
    names = sorted(known)
    for tag in tags:
        if tag not in names:
            listed = ", ".join(names[:MOST_LISTED]) or "none"
            more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
            raise ConfigError(f"{source} has no request with --tag {tag}: its tags are {listed}{more}")


def _tags_of(source: Path) -> set[str] | None:
    """Return the tags of a file or of a folder's own files; None if no file has the column. Unreadable files are left
    out: their error is reported when their rows are read."""
    with needing(ConfigError, "tags are read with pyarrow: pip install 'paceline[data]'"):
        from pyarrow import ArrowException, parquet
    tags, has_column = set[str](), False
    for file in sorted(source.glob("*.parquet")) if source.is_dir() else [source]:
        try:
            opened = parquet.ParquetFile(file)
            is_tagged = "tag" in opened.schema_arrow.names
            rows = opened.read(["tag"]).to_pylist() if is_tagged else [{}] * min(1, opened.metadata.num_rows)
        except (ArrowException, OSError, ValueError):
            continue
        has_column |= is_tagged
        tags.update(map(tag_of, rows))
    return tags if has_column else None
