"""Acceptance as a person writes it, or as a run recorded it.

    0.8                      one chance          0.8,0.75,0.7            a chance for each place, given that the earlier stood
    survival:.77,.57,.42     shares of rounds    histogram:20,10,5,2     counts of rounds with 0, 1, 2, ... accepted drafts
    runs/bench-decode-x      a bench run's results (or results.json), a trace in JSON lines or Parquet

Of a bench run the setting with the most accepted drafts counts, unless `name:` picks a drafter: runs/x:default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.figures import add_histograms
from paceline.simulate.acceptance import Acceptance, constant, from_conditional, from_histogram, from_survival

WRITTEN: dict[str, Callable[[list[float]], Acceptance]] = {
    "survival": from_survival,
    "conditional": from_conditional,
    "histogram": from_histogram,
}


def parse_acceptance(text: str) -> Acceptance:
    """Raises ConfigError that says how to write it."""
    kind, colon, rest = text.partition(":")
    if colon and kind.strip().lower() in WRITTEN:
        return WRITTEN[kind.strip().lower()](_numbers(rest, text))
    path, _, drafter = text.rpartition(":") if not os.path.exists(text) and ":" in text else (text, "", "")
    if os.path.exists(path):
        return read_acceptance(Path(path), drafter)
    values = _numbers(text, text)
    return constant(values[0]) if len(values) == 1 else from_conditional(values)


def _numbers(text: str, whole: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(
            f"--acceptance {whole!r} is no chance, no curve and no file: write 0.8, 0.8,0.75,0.7, survival:.77,.57, "
            "histogram:20,10,5, or the path of a bench run"
        ) from None


def read_acceptance(path: Path, drafter: str = "") -> Acceptance:
    """The histogram of a bench run or of a trace. Raises ConfigError when there is none in it."""
    file = path / "results.json" if path.is_dir() else path
    if file.suffix == ".parquet":
        return from_rounds(_parquet_rounds(file))
    lines = _json_lines(file)
    if len(lines) == 1 and isinstance(lines[0].get("results"), list):
        return from_histogram(_best_histogram(lines[0]["results"], drafter, file))
    if found := [line["accepted_histogram"] for line in lines if line.get("accepted_histogram")]:
        return from_histogram(add_histograms(found))
    rounds = [pair for line in lines for pair in _pairs(line.get("drafted"), line.get("accepted"))]
    if not rounds:
        raise ConfigError(f"{file} holds no accepted_histogram: give the folder of paceline bench decode, or a trace")
    return from_rounds(rounds)


def from_rounds(rounds: Iterable[tuple[int, int]]) -> Acceptance:
    """From (drafted, accepted) of each round: the chance of a draft is counted over the rounds that drafted that far."""
    pairs = [(drafted, accepted) for drafted, accepted in rounds if drafted > 0]
    if not pairs:
        raise ConfigError("no round drafted anything: record a run with a drafter")
    chances = []
    for place in range(1, max(drafted for drafted, _ in pairs) + 1):
        tried = sum(drafted >= place and accepted >= place - 1 for drafted, accepted in pairs)
        if not tried:
            break
        chances.append(sum(accepted >= place for _, accepted in pairs) / tried)
    return Acceptance(tuple(chances), "histogram", len(pairs))


def _best_histogram(results: Sequence[dict[str, Any]], drafter: str, file: Path) -> list[int]:
    known = [result for result in results if len(result.get("accepted_histogram") or ()) > 1]
    chosen = [result for result in known if not drafter or drafter in (result.get("drafter"), result.get("drafter_name"))]
    if not chosen:
        names = ", ".join(str(result.get("drafter")) for result in known) or "none that drafted"
        raise ConfigError(f"{file} has no recorded drafts{f' of {drafter!r}' if drafter else ''}: it holds {names}")
    return max(chosen, key=lambda result: float(result.get("tokens_per_round") or 0.0))["accepted_histogram"]


def _json_lines(file: Path) -> list[dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file} ({error}): give a bench run, results.json or a trace") from error
    try:
        whole = json.loads(text)
        values = whole if isinstance(whole, list) else [whole]
    except ValueError:  # one object a line
        try:
            values = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ConfigError(f"{file} is neither JSON nor JSON lines ({error}): give a bench run or a trace") from error
    return [value for value in values if isinstance(value, dict)]


def _parquet_rounds(file: Path) -> list[tuple[int, int]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError("reading a Parquet trace needs pyarrow: pip install 'paceline[data]'") from error
    try:
        table = parquet.read_table(file, columns=["drafted", "accepted"]).to_pydict()
    except (ArrowException, OSError, KeyError) as error:
        raise ConfigError(f"{file} is no trace with drafted and accepted ({error}): give one of paceline serve") from error
    rows = zip(table["drafted"], table["accepted"], strict=True)
    return [pair for drafted, accepted in rows for pair in _pairs(drafted, accepted)]


def _pairs(drafted: Any, accepted: Any) -> list[tuple[int, int]]:
    is_lists = isinstance(drafted, list) and isinstance(accepted, list) and len(drafted) == len(accepted)
    return list(zip(drafted, accepted, strict=True)) if is_lists else []
