"""Predicts speed-up by draft length, tokens per second and the time split of a round, from acceptance and costs.

speedup(g) = N(g) * round(0) / round(g), where g is the number of drafts, N(g) the tokens per round, and round(g) =
target pass of g + 1 positions + drafting of g + host. N(g) comes from acceptance in one of these forms:

    0.8                       one chance for every draft
    0.8,0.75,0.7              a chance for each position, given that earlier ones are accepted
    survival:.77,.57,.42      shares of rounds whose first 1, 2, 3 drafts are accepted
    histogram:20,10,5,2       counts of rounds with 0, 1, 2, 3 accepted drafts
    runs/bench-decode-x       a run of bench decode or evaluate (or its file), or traces in JSON lines or Parquet
    vllm.log                  a log of vLLM or SGLang, or the text of GET /metrics (`server_logs.py`)

If a bench run has several settings, the one with the most accepted drafts counts; runs/x:default selects a drafter.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.bounds import Checked, Context, Streams
from paceline.errors import ConfigError, needing, reraised
from paceline.report.statistics import add_histograms, survival
from paceline.simulate.config import DraftLength
from paceline.simulate.costs.rounds import NO_COST, DraftFit, MeasuredCosts, RooflineCosts, StepCosts
from paceline.simulate.files import is_amount, read_objects, with_name
from paceline.simulate.server_logs import is_server_text, read_server

HEAD_BYTES = 1 << 20
"""Number of bytes at the start of a file that are searched for the known lines of a server's log."""
DELTAS = (-0.1, -0.05, -0.01, 0.01, 0.05, 0.1)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance chances by draft position, each given that all earlier drafts of the round are accepted. The last
    chance also holds for all later positions. Raises ConfigError for chances outside 0..1."""

    conditional: tuple[float, ...]
    """conditional[i - 1]: chance that draft i is accepted if all earlier ones are."""
    kind: Literal["constant", "conditional", "survival", "histogram"] = "conditional"
    """Form in which the acceptance was given."""
    num_rounds: int = 0
    """Number of recorded rounds that the chances come from; 0 if they were not recorded."""

    def __post_init__(self) -> None:
        if not self.conditional:
            raise ConfigError("--acceptance is empty: give a chance such as 0.8, or a curve such as 0.8,0.75,0.7")
        for chance in self.conditional:
            if not 0 <= chance <= 1:  # also NaN
                meant = f": did you mean {chance / 100:g}? It" if 1 < chance <= 100 else ": it"
                raise ConfigError(f"--acceptance {chance:g} is no chance{meant} must be between 0 and 1, such as 0.8")

    @property
    def depth(self) -> int:
        """Number of draft positions with a chance of their own; 0 if one constant chance holds for all positions."""
        return 0 if self.kind == "constant" else len(self.conditional)

    def at(self, place: int) -> float:
        """Returns the chance that draft number `place`, counted from 1, is accepted if all earlier ones are."""
        return self.conditional[min(place, len(self.conditional)) - 1]

    def survival(self, num_drafted: int) -> list[float]:
        """Returns `num_drafted` shares: entry i is the share of rounds whose first i + 1 drafts are all accepted."""
        return list(itertools.accumulate(map(self.at, range(1, num_drafted + 1)), operator.mul))


def tokens_per_round(acceptance: Acceptance, num_drafted: int) -> float:
    """Returns the acceptance length for `num_drafted` drafts: 1 (the bonus token) + the sum of
    `Acceptance.survival`."""
    return 1.0 + sum(acceptance.survival(num_drafted))


def shifted(acceptance: Acceptance, points: float) -> Acceptance:
    """Returns the acceptance with `points` added to every chance (0.01 is one percentage point), clipped to 0..1."""
    return replace(
        acceptance, conditional=tuple(min(max(chance + points, 0.0), 1.0) for chance in acceptance.conditional)
    )


def constant(chance: float) -> Acceptance:
    return Acceptance((chance,), "constant")


def chance_for(wanted: float, num_drafted: int) -> float:
    """Returns the acceptance chance, equal for all draft positions, at which rounds of `num_drafted` drafts give
    `wanted` tokens on average (with the bonus token). Raises ConfigError unless `wanted` is between 1 and `num_drafted`
    + 1."""
    if not 1 <= wanted <= num_drafted + 1:
        raise ConfigError(
            f"{num_drafted} drafts bring between 1 and {num_drafted + 1} tokens a round, never {wanted:g}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_round(constant(middle), num_drafted) < wanted else (low, middle)
    return high


def from_survival(shares: Sequence[float]) -> Acceptance:
    """Builds the acceptance from a survival curve: the shares of rounds whose first 1, 2, ... drafts are accepted.
    Raises ConfigError if a share is larger than the one before, or outside 0..1."""
    before, chances = 1.0, []
    for place, share in enumerate(shares, start=1):
        if not 0 <= share <= before:
            raise ConfigError(
                f"survival at draft {place} is {share:g} after {before:g}: it must fall, between 1 and 0; "
                "chances given that the earlier drafts stand are written without 'survival:'"
            )
        chances.append(share / before if before else 0.0)
        before = share
    return Acceptance(tuple(chances), "survival")


def from_histogram(counts: Sequence[float]) -> Acceptance:
    """Builds the acceptance from `counts[n]`, the number of rounds with exactly n accepted drafts. All rounds are
    assumed to have had the same number of drafts; if some had fewer, the chances of late drafts are slightly too low.
    Raises ConfigError without rounds or without drafts."""
    if not all(map(is_amount, counts)) or len(counts) < 2 or not 0 < sum(counts) < math.inf:
        raise ConfigError(
            "the histogram needs counts of rounds with 0, 1, 2, ... accepted drafts, at least two of them"
        )
    shares = survival(counts)
    while len(shares) > 1 and shares[-1] == 0:
        shares.pop()
    return replace(from_survival(shares), kind="histogram", num_rounds=int(sum(counts)))


def from_rounds(rounds: Iterable[tuple[int, int]]) -> Acceptance:
    """Builds the acceptance from (number drafted, number accepted) of each round. The chance of draft i is the share of
    rounds that accepted it, among those that had a draft i and accepted all before it. Raises ConfigError if no round
    drafted anything."""
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


WRITTEN = {
    "survival": from_survival,
    "conditional": lambda chances: Acceptance(tuple(chances)),
    "histogram": from_histogram,
}


def parse_acceptance(text: str) -> Acceptance:
    """Parses acceptance in one of these forms. Raises ConfigError for any other text.

    - 0.8: one chance for every draft.
    - 0.8,0.75: a chance for each draft position.
    - survival:.77,.57: shares of rounds whose first 1, 2 drafts are accepted.
    - histogram:20,10,5: numbers of rounds with 0, 1, 2 accepted drafts.
    - A path, or PATH:NAME with a drafter or model, see `read_acceptance`."""
    kind, colon, rest = text.partition(":")
    if colon and kind.strip().lower() in WRITTEN:
        return WRITTEN[kind.strip().lower()](_numbers(rest, text))
    path, drafter = with_name(text)
    if os.path.exists(path):
        return read_acceptance(Path(path), drafter)
    values = _numbers(text, text)
    return constant(values[0]) if len(values) == 1 else Acceptance(tuple(values))


def _numbers(text: str, whole: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(
            f"--acceptance {whole!r} is no chance, no curve and no file: write 0.8, 0.8,0.75,0.7, survival:.77,.57, "
            "histogram:20,10,5, or the path of a bench run"
        ) from None


def read_acceptance(path: Path, drafter: str = "") -> Acceptance:
    """Reads the acceptance from results of bench decode or evaluate, from traces, or from a server's log. `path`: the
    file; results and traces may also be given as their folder. Raises ConfigError for any other file.

    `drafter`: the name of the drafter whose results are read; "" selects the one with the most tokens per round. A
    server's log names no drafters: there it is the name of the served model; "" is enough if the log has only one."""
    named = [path / "results.json", path / "evaluation.json"]
    stored = [file for file in named if file.exists()] or sorted(path.glob("*.parquet"))
    files = (stored or named) if path.is_dir() else [path]
    file = files[0]
    if _is_servers(file):
        return _of_server(file, drafter or None)
    is_table, remedy = file.suffix == ".parquet", "give a run of bench decode or evaluate, or traces"
    lines = [line for each in files for line in _parquet_lines(each)] if is_table else read_objects(file, remedy)
    if len(lines) == 1 and isinstance(lines[0].get("results"), list):
        return from_histogram(_best_histogram(lines[0]["results"], drafter, file))
    if histograms := [line["accepted_histogram"] for line in lines if line.get("accepted_histogram")]:
        return from_histogram(add_histograms(histograms))
    rounds = [pair for line in lines for pair in _pairs(line.get("drafted"), line.get("accepted"))]
    if not rounds:
        raise ConfigError(f"{file} holds no accepted_histogram: give the folder of paceline bench decode, or traces")
    return from_rounds(rounds)


def _is_servers(file: Path) -> bool:
    """True for another server's log or metrics."""
    if file.suffix in (".parquet", ".json", ".jsonl") or not file.is_file():
        return False
    with reraised(ConfigError, f"cannot read {file}", "check its permissions", OSError), file.open("rb") as opened:
        return is_server_text(opened.read(HEAD_BYTES).decode("utf-8", errors="replace"))


def _of_server(file: Path, model: str | None) -> Acceptance:
    """Reads a server's survival curve, or else the constant chance that gives its mean tokens per round. Raises
    ConfigError."""
    seen = read_server(file, model)
    if seen.survival:
        return from_survival(seen.survival)
    drafts = max([seen.num_drafted, *(sample.num_drafted for sample in seen.samples)])
    if seen.tokens_per_round is None or not drafts:
        raise ConfigError(f"{file}: the server drafted nothing, or does not say how much: give a chance or a curve")
    return constant(chance_for(min(seen.tokens_per_round, drafts + 1), drafts))


def _best_histogram(results: Sequence[dict[str, Any]], drafter: str, file: Path) -> list[int]:
    known = [result for result in results if len(result.get("accepted_histogram") or ()) > 1]
    chosen = [
        result for result in known if not drafter or drafter in (result.get("drafter"), result.get("drafter_name"))
    ]
    if not chosen:
        names = ", ".join(str(result.get("drafter")) for result in known) or "none that drafted"
        raise ConfigError(f"{file} has no recorded drafts{f' of {drafter!r}' if drafter else ''}: it holds {names}")
    return max(chosen, key=lambda result: float(result.get("tokens_per_round") or 0.0))["accepted_histogram"]


def _parquet_lines(file: Path) -> list[dict[str, Any]]:
    with needing(ConfigError, "reading a Parquet trace needs pyarrow: pip install 'paceline[data]'"):
        from pyarrow import ArrowException, parquet
    what = f"{file} is no trace with drafted and accepted"
    with reraised(ConfigError, what, "give one of paceline serve", ArrowException, OSError, KeyError):
        return parquet.read_table(file, columns=["drafted", "accepted"]).to_pylist()


def _pairs(drafted: Any, accepted: Any) -> list[tuple[int, int]]:
    is_lists = isinstance(drafted, list) and isinstance(accepted, list) and len(drafted) == len(accepted)
    return list(zip(drafted, accepted, strict=True)) if is_lists else []


@dataclass(frozen=True, slots=True)
class Load(Checked):
    """Batch size, context length and maximum draft length of a prediction. Raises ConfigError for impossible values."""

    batch: Streams = 1
    """Sequences that decode together."""
    context: Context = 4096
    """Tokens in each sequence's cache."""
    max_draft: DraftLength = 16
    """Longest draft considered."""


@dataclass(frozen=True, slots=True)
class Change:
    """Prediction for a changed acceptance: best draft length and speed-up if `points` is added to every acceptance
    chance."""

    points: float
    """Number added to every acceptance chance; 0.01 is one percentage point."""
    best_draft_length: int
    speedup: float
    gain: float
    """Relative change of the predicted speed-up; 0.1 is 10% more."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted speed-up of one load for each draft length. Also has the speed and times at the best length, and the
    effect of a changed acceptance (`sensitivity`)."""

    batch: int
    best_draft_length: int
    speedup: float
    curve: list[tuple[int, float]]
    """(drafts, speed-up), from 0 drafts on."""
    tokens_per_round: float
    """Tokens per round at the best length, including the bonus token."""
    tokens_per_s: float | None
    """Tokens per second of all sequences together at the best length; None if times have no unit."""
    plain_tokens_per_s: float | None
    round_s: float
    plain_round_s: float
    time_split: dict[str, float]
    """Part of a round -> its share of the round's time at the best length; shares add up to 1."""
    sensitivity: list[Change]


def curve(round_s: Sequence[float], acceptance: Acceptance) -> list[tuple[int, float]]:
    """Returns (drafts, speed-up over plain decoding) pairs, from 0 drafts on. `round_s[g]`: seconds of a round with g
    drafts."""
    return [(length, tokens_per_round(acceptance, length) * round_s[0] / spent) for length, spent in enumerate(round_s)]


def best(points: list[tuple[int, float]]) -> tuple[int, float]:
    """Returns the (drafts, speed-up) pair with the highest speed-up and, among equal ones, the fewest drafts."""
    return max(points, key=lambda point: (point[1], -point[0]))


def most_drafts(costs: StepCosts, wanted: int) -> int:
    """Returns the largest number of drafts per round to consider: `wanted` or, if less, the drafter's limit in `costs`.
    The limit depends on the drafter:

    - with measured times: the largest measured number of drafts;
    - if one pass drafts a block of several tokens: the size of the block;
    - if one pass drafts one token: no limit."""
    if isinstance(costs, MeasuredCosts) and costs.draft:
        return min(wanted, costs.max_draft or wanted)
    drafter = costs.drafter if isinstance(costs, MeasuredCosts | RooflineCosts) else NO_COST
    limit = drafter.max_draft if isinstance(drafter, DraftFit) else drafter.block if drafter.block != 1 else None
    return min(wanted, limit or wanted)


def predict(costs: StepCosts, acceptance: Acceptance, load: Load, has_unit: bool = True) -> Prediction:
    """Predicts the speed-up of one load for each draft length, up to the limits of load and drafter. `has_unit`: True
    if `costs` are in seconds; False (toy model) leaves out tokens per second."""
    lengths = range(most_drafts(costs, load.max_draft) + 1)
    round_s = [costs.round_s(load.batch, length, load.context) for length in lengths]
    points = curve(round_s, acceptance)
    length, highest = best(points)
    changes = []
    for delta in DELTAS:
        other, reached = best(curve(round_s, shifted(acceptance, delta)))
        changes.append(Change(delta, other, reached, reached / highest - 1.0))
    gained = tokens_per_round(acceptance, length)
    spent = costs.split(load.batch, length + 1, load.context)
    spent |= {"drafter": costs.draft_s(load.batch, length, load.context), "host": costs.host_s}
    whole_s = sum(spent.values())
    return Prediction(
        batch=load.batch,
        best_draft_length=length,
        speedup=highest,
        curve=points,
        tokens_per_round=gained,
        tokens_per_s=load.batch * gained / round_s[length] if has_unit else None,
        plain_tokens_per_s=load.batch / round_s[0] if has_unit else None,
        round_s=round_s[length],
        plain_round_s=round_s[0],
        time_split={part: seconds / whole_s for part, seconds in spent.items()},
        sensitivity=changes,
    )
