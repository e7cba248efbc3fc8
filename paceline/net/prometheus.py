"""Parses the text of GET /metrics (Prometheus format) and sums its series by engine.

    engines = engines_of(text)                       # {"0": {"vllm:generation_tokens_total": 2900.0, ...}, "1": ...}
    totals(engines)["vllm:generation_tokens_total"]  # over all engines

Names of vLLM, SGLang and paceline are unchanged; those of llama.cpp are mapped to vLLM's. Each engine (label `engine`
in vLLM, `dp_rank` in SGLang) has its own counters. Ranks of one engine report the same values and count once; series of
a draft engine are skipped.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean

from paceline.errors import ConfigError

PREFIXES = ("vllm:", "sglang:", "llamacpp:")
METRIC = re.compile(
    r"""([A-Za-z_][\w:]*)\s*(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?"""  # name, labels
    r"""\s+([^\s\#]\S*)(?:\s+[-+.\deE]+)?(?:\s+\#\s.*)?"""  # value, time stamp, exemplar
)
LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
LLAMACPP = {
    "llamacpp:tokens_predicted_total": "vllm:generation_tokens_total",
    "llamacpp:requests_processing": "vllm:num_requests_running",
}
"""llama.cpp's metric names -> vLLM's. Names of speculation metrics are not listed: only their prefix differs, and
`_total`."""
ENGINES = ("engine", "dp_rank")
"""Labels that number the engines of a server."""
RANKS = frozenset(
    {"tp_rank", "pp_rank", "ep_rank", "moe_ep_rank", "attn_tp_rank", "attn_cp_rank", "cp_rank", "dcp_rank"}
)
"""Labels that number the processes of one engine."""
ROLES = ("engine", "engine_type", "engine_role", "role", "worker", "worker_type")
"""Labels whose value may mark a draft engine."""
MEANS = ("sglang:spec_accept_length", "sglang:spec_accept_rate")
"""Gauges that are averaged over the engines, and over other series, that have drafted, not summed."""
QUEUES = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
"""Gauges that SGLang reports in total (label `priority` empty) and for each priority."""


@dataclass(frozen=True, slots=True)
class Series:
    """One sample of a /metrics page: metric name, labels and current value."""

    name: str
    labels: dict[str, str]
    value: float


def read_series(text: str) -> Iterator[Series]:
    """Yield the samples of a /metrics page; metric names of llama.cpp are replaced by vLLM's. Lines that are not
    samples, and values that are negative, infinite or NaN, are skipped."""
    for line in text.split("\n"):
        match = METRIC.fullmatch(line.strip())
        if not match or line.startswith("#"):
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if 0 <= value < float("inf"):
            yield Series(_name(match[1]), dict(LABEL.findall(match[2] or "")), value)


def _name(name: str) -> str:
    if name.startswith("llamacpp:spec_decode_"):
        return "vllm:" + name.removeprefix("llamacpp:").removesuffix("_total") + "_total"
    return LLAMACPP.get(name, name)


def engines_of(text: str, model: str | None = None, by: tuple[str, ...] = ()) -> dict[str, dict[str, float]]:
    """Read the metrics of a server's engines from the text of its /metrics page. Returns engine -> metric name ->
    value; {} if the page has no metrics of vLLM, SGLang, llama.cpp or paceline. Engines that only draft are left out.

    - Engine: the value of the samples' label `engine` or `dp_rank`; "" for a server without these labels.
    - Value: the sum of the metric's samples. Samples that differ only in the rank (number of a process of one engine)
      count once, with the largest value. SGLang's acceptance lengths and rates (MEANS) are not summed: the value is the
      mean of the samples above 0.

    `by`: names of labels, such as "position". Each value of such a label gives a further metric, named NAME{VALUE}.
    `model`: the model to read; None if the page has only one. Raises ConfigError if the page names its models and
    `model` is not one of them, or if it names several and `model` is None.
    """
    series = [one for one in read_series(text) if not _is_skipped(one)]
    if not any(one.name.startswith((*PREFIXES, "paceline:")) for one in series):
        return {}
    series = _of_model(series, model)
    values = defaultdict[str, defaultdict[str, list[float]]](lambda: defaultdict(list))
    for one in _without_ranks(series):
        engine = "/".join(one.labels[label] for label in ENGINES if label in one.labels)
        for name in (one.name, *(f"{one.name}{{{one.labels[label]}}}" for label in by if label in one.labels)):
            values[engine][name].append(one.value)
    return {
        engine: {name: _combined(name, series_values) for name, series_values in by_name.items()}
        for engine, by_name in values.items()
    }


def _is_skipped(series: Series) -> bool:
    """Return True for an engine that only drafts, and for one priority's share of a gauge (see QUEUES)."""
    is_draft = any("draft" in series.labels.get(label, "").lower() for label in ROLES)
    return is_draft or (series.name in QUEUES and bool(series.labels.get("priority")))


def _of_model(series: list[Series], model: str | None) -> list[Series]:
    names = sorted({one.labels["model_name"] for one in series if "model_name" in one.labels})
    remedy = "name one of them (FILE:MODEL, or served_name)"
    if model is not None and model not in names and names:
        raise ConfigError(f"the metrics have no model {model!r}, only {', '.join(names)}: {remedy}")
    if model is None and len(names) > 1:
        raise ConfigError(f"the metrics have several models, {', '.join(names)}: {remedy}")
    return [one for one in series if model is None or one.labels.get("model_name", model) == model]


def _without_ranks(series: Iterable[Series]) -> Iterable[Series]:
    """Return one series per engine: the largest of those that differ only in the rank."""
    largest: dict[tuple[str, frozenset[tuple[str, str]]], Series] = {}
    for one in series:
        key = one.name, frozenset((label, value) for label, value in one.labels.items() if label not in RANKS)
        if key not in largest or largest[key].value < one.value:
            largest[key] = one
    return largest.values()


def totals(engines: dict[str, dict[str, float]]) -> dict[str, float]:
    """Combine the engines of a server: return metric name -> value of the whole server, from the result of
    `engines_of`. Values of the engines are added up. SGLang's acceptance lengths and rates (MEANS) are averaged over
    the engines that report more than 0."""
    by_name = defaultdict[str, list[float]](list)
    for values in engines.values():
        for name, value in values.items():
            by_name[name].append(value)
    return {name: _combined(name, values) for name, values in by_name.items()}


def _combined(name: str, values: list[float]) -> float:
    """Return the sum of one metric's values; for MEANS the mean of those above 0: an idle engine reports 0."""
    return fmean([value for value in values if value > 0] or [0.0]) if name in MEANS else sum(values)
