"""The text of GET /metrics as series, and what they come to: for `server_logs.py` and for the daemon's counters alike.

    engines = engines_of(text)                       # {"0": {"vllm:generation_tokens_total": 2900.0, ...}, "1": ...}
    totals(engines)["vllm:generation_tokens_total"]  # of all engines

vLLM's, SGLang's and paceline's names are kept; llama.cpp's are read under vLLM's. Each engine (`engine` of vLLM,
`dp_rank` of SGLang) has counters of its own. Ranks of one engine tell the same, and count once; a draft engine's
series are left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean

from paceline.errors import ConfigError

PREFIXES = ("vllm:", "sglang:", "llamacpp:")
METRIC = re.compile(r"([A-Za-z_][\w:]*)(?:\{(.*)\})? +(\S+)(?: +\d+)?")
LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
LLAMACPP = {
    "llamacpp:tokens_predicted_total": "vllm:generation_tokens_total",
    "llamacpp:requests_processing": "vllm:num_requests_running",
}
"""llama.cpp's names of what vLLM counts; those of speculation differ in their prefix and lack `_total`."""
ENGINES = ("engine", "dp_rank")
RANKS = frozenset({"tp_rank", "pp_rank", "ep_rank", "moe_ep_rank", "attn_tp_rank", "attn_cp_rank", "cp_rank", "dcp_rank"})
"""Labels of processes that compute one engine together."""
ROLES = ("engine", "engine_type", "engine_role", "role", "worker", "worker_type")
"""Labels that say what an engine is for."""
MEANS = ("sglang:spec_accept_length", "sglang:spec_accept_rate")
"""Gauges that are means: of several engines the mean of those that have drafted."""


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    labels: dict[str, str]
    value: float


def read_series(text: str) -> Iterator[Series]:
    """Every line that is a finite amount; lines that are none, and amounts below 0, are left out."""
    for line in text.splitlines():
        found = METRIC.fullmatch(line.strip())
        if not found or line.startswith("#"):
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if 0 <= value < float("inf"):
            yield Series(_name(found[1]), dict(LABEL.findall(found[2] or "")), value)


def _name(name: str) -> str:
    known = LLAMACPP.get(name)
    if known is None and name.startswith("llamacpp:spec_decode_"):
        known = "vllm:" + name.removeprefix("llamacpp:").removesuffix("_total") + "_total"
    return known or name


def engines_of(text: str, model: str | None = None, by: tuple[str, ...] = ()) -> dict[str, dict[str, float]]:
    """Engine -> name -> value, {} of a page without any metric that is known.

    Series that differ in other labels are summed; with labels `by` also under NAME{VALUE}. Raises ConfigError where
    the page tells of several models and `model` names none of them."""
    series = [each for each in read_series(text) if not _is_draft(each)]
    if not any(each.name.startswith(PREFIXES) or each.name.startswith("paceline:") for each in series):
        return {}
    series = _of_model(series, model)
    values = defaultdict[str, defaultdict[str, float]](lambda: defaultdict(float))
    for each in _each_rank_once(series):
        engine = "/".join(each.labels[label] for label in ENGINES if label in each.labels)
        for name in (each.name, *(f"{each.name}{{{each.labels[label]}}}" for label in by if label in each.labels)):
            values[engine][name] += each.value
    return {engine: dict(found) for engine, found in values.items()}


def _is_draft(series: Series) -> bool:
    """True for series of an engine that only drafts."""
    return any("draft" in series.labels.get(label, "").lower() for label in ROLES)


def _of_model(series: list[Series], model: str | None) -> list[Series]:
    names = sorted({each.labels["model_name"] for each in series if "model_name" in each.labels})
    if model is not None and model not in names and names:
        raise ConfigError(
            f"the metrics tell of no model {model!r}, but of {', '.join(names)}: name one of them (FILE:MODEL, or served_name)"
        )
    if model is None and len(names) > 1:
        raise ConfigError(
            f"the metrics tell of several models, {', '.join(names)}: name one of them (FILE:MODEL, or served_name)"
        )
    return [each for each in series if model is None or each.labels.get("model_name", model) == model]


def _each_rank_once(series: Iterable[Series]) -> Iterator[Series]:
    """Of series that differ only in the rank the largest."""
    most: dict[tuple[str, tuple[tuple[str, str], ...]], Series] = {}
    for each in series:
        mark = each.name, tuple(sorted((label, value) for label, value in each.labels.items() if label not in RANKS))
        if mark not in most or most[mark].value < each.value:
            most[mark] = each
    yield from most.values()


def totals(engines: dict[str, dict[str, float]]) -> dict[str, float]:
    """Name -> value of all engines: sums, but of means the mean of the engines whose value is above 0."""
    found = defaultdict[str, list[float]](list)
    for values in engines.values():
        for name, value in values.items():
            found[name].append(value)
    return {name: _mean_of(values) if name in MEANS else sum(values) for name, values in found.items()}


def _mean_of(values: list[float]) -> float:
    above = [value for value in values if value > 0]
    return fmean(above) if above else 0.0
