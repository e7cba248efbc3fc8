"""Reads logs and metrics of other servers: running requests, tokens per second, tokens per round.

    seen = read_server(Path("vllm.log"))        # or SGLang's log, or the GET /metrics of either, or of paceline
    seen.samples[0].round_s                     # seconds of a round with this many requests
    seen.survival                               # share of rounds whose first i drafts were accepted, if reported

Log lines that it reads (... is any text):

    vLLM     Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 612.3 tokens/s,
             Running: 8 reqs, ...
             SpecDecoding metrics: Mean acceptance length: 3.20, ..., Per-position acceptance rate: 0.801, 0.620, ...
    SGLang   Decode batch, #running-req: 8, #token: 34816, ..., accept len: 3.20, accept rate: 0.55, ...,
             gen throughput (token/s): 456.7, #queue-req: 0

Each line covers an interval. An interval is used if it has the same number of running requests at its beginning and
end, and almost no prompt tokens. Counters of metrics (llama.cpp's too) are averaged since the start; the number of
running requests is the present one.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, reraised
from paceline.net.prometheus import PREFIXES, engines_of, totals
from paceline.simulate.files import with_name

MOST_BYTES = 256 * 2**20
NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)"
VLLM_LINE = re.compile(
    rf"Engine (\d+): Avg prompt throughput: {NUMBER} tokens/s, "
    rf"Avg generation throughput: {NUMBER} tokens/s, Running: (\d+) reqs"
)
VLLM_DRAFTS = re.compile(rf"SpecDecoding metrics: .*?Mean acceptance length: {NUMBER}")
VLLM_PLACES = re.compile(r"Per-position acceptance rate: ([0-9., ]+)")
VLLM_ACCEPTED = re.compile(r"Accepted: (\d+) tokens")
SGLANG_LINE = re.compile(r"(?:\[[^\]]*?((?: (?:DP|TP|EP|PP)\d+)*)\] )?Decode batch.*?#running-req: (\d+)")
SGLANG_RATE = re.compile(rf"gen throughput \(token/s\): {NUMBER}")
SGLANG_TOKENS = re.compile(r"#(?:full )?token: (\d+)")
SGLANG_LENGTH = re.compile(rf"accept len: {NUMBER}")
SGLANG_SHARE = re.compile(rf"accept rate: {NUMBER}")
FEW_PROMPTS = 0.1
"""Maximum ratio of prompt tokens to generated tokens at which an interval counts as decoding alone."""
LEAST_RATE = 0.02
"""Minimum SGLang accept rate from which the number of drafts is derived: logged rates are rounded to two digits."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Decoding speed and acceptance in one interval of a server's log. Saved metrics have no intervals: `running` is
    then the number of requests when they were saved, and the other values are means since the server's start."""

    running: int
    """Number of requests that decoded together."""
    tokens_per_s: float
    """Tokens per second of all these requests together."""
    tokens_per_round: float = 1.0
    num_drafted: int = 0
    """Number of drafts per request and round."""
    context: float | None = None
    """Tokens in the cache of each request, if reported."""

    @property
    def round_s(self) -> float:
        return self.running * self.tokens_per_round / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class Seen:
    """Figures that a server's log or metrics report: decoding speed, acceptance, and numbers of tokens and answers."""

    server: str
    """Name of the server software: vLLM, SGLang, llama.cpp or paceline."""
    samples: list[Sample]
    tokens_per_round: float | None
    """Acceptance length: mean tokens per round with drafts; None without drafts."""
    survival: tuple[float, ...] = ()
    """Survival curve: share of rounds whose first i drafts were all accepted, if reported."""
    tokens: float = 0.0
    """Tokens generated since the start, if reported."""
    answers: float = 0.0
    """Answers finished since the start, if reported."""
    num_drafted: int = 0
    """Mean drafts per round, if reported."""


def is_server_text(text: str) -> bool:
    """True if `text` looks like a log or metrics that `parse_server` reads. `text` may be the first part of a file."""
    return any(mark in text for mark in (*PREFIXES, "Avg generation throughput:", "Decode batch"))


def read_server(file: Path, model: str | None = None) -> Seen:
    """Reads a server's log, or the saved text of GET /metrics. Metrics of several models need the name of one: `model`,
    or FILE:MODEL as `file`, which takes precedence. Raises ConfigError if the file cannot be read, is larger than 256
    MiB (MOST_BYTES), or has no line of a known form."""
    path, name = with_name(str(file))
    file, model = Path(path), name or model
    with reraised(
        ConfigError, f"cannot read {file}", "give a log of vLLM or SGLang, or what their /metrics says", OSError
    ):
        if file.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{file} is larger than {MOST_BYTES >> 20} MiB: give the part under load, tail -n 100000")
        text = file.read_text(encoding="utf-8", errors="replace")
    return parse_server(text, str(file), model)


def parse_server(text: str, name: str = "the text", model: str | None = None) -> Seen:
    """Parses the text of a log or of metrics. `name`: name of the text, for errors. `model`: selects one of several
    models in metrics. Raises ConfigError if no line has a known form, or if `model` is unknown, or None although there
    are several."""
    lines = text.splitlines()
    if any(line.startswith(PREFIXES) for line in lines):
        return _metrics(text, name, model)
    if "Avg generation throughput:" in text:
        return _vllm(lines, name)
    if "Decode batch" in text:
        return _sglang(lines, name)
    raise ConfigError(
        f"{name} holds neither vLLM's 'Avg generation throughput' lines, nor SGLang's 'Decode batch' lines, nor "
        "metrics: give the server's own log, with its statistics on, or the text of GET /metrics"
    )


@dataclass(slots=True)
class _Interval:
    running: int
    prompt_rate: float
    tokens_per_s: float
    tokens_per_round: float = 1.0
    places: tuple[float, ...] = ()
    accepted: float = 0.0


def _vllm(lines: list[str], name: str) -> Seen:
    """Parses statistics lines, each with the line about drafts that follows it, for each engine."""
    engines: dict[str, list[_Interval]] = defaultdict(list)
    last: _Interval | None = None
    for line in lines:
        if match := VLLM_LINE.search(line):
            last = _Interval(int(match[4]), float(match[2]), float(match[3]))
            engines[match[1]].append(last)
        elif last and (match := VLLM_DRAFTS.search(line)):
            last.tokens_per_round = float(match[1])
            if places := VLLM_PLACES.search(line):
                last.places = tuple(float(each) for each in places[1].replace(" ", "").split(",") if each)
            if accepted := VLLM_ACCEPTED.search(line):
                last.accepted = float(accepted[1])
    samples = [
        Sample(now.running, now.tokens_per_s, now.tokens_per_round, len(now.places))
        for intervals in engines.values()
        for before, now in itertools.pairwise(intervals)
        if now.running == before.running > 0 and now.prompt_rate < FEW_PROMPTS * now.tokens_per_s
    ]
    drafting = [
        each for intervals in engines.values() for each in intervals if each.places and each.tokens_per_round > 1
    ]
    rounds = [each.accepted / (each.tokens_per_round - 1) for each in drafting]
    survival = _weighed([each.places for each in drafting], rounds)
    return _seen("vLLM", samples, survival, None, name)


def _sglang(lines: list[str], name: str) -> Seen:
    """Parses decode lines of each rank; skips the first one after a prefill of its rank, which took part of the
    interval."""
    before: dict[str, int] = {}
    samples, lengths = [], []
    for line in lines:
        if "Prefill batch" in line:
            before.clear()
            continue
        match, rate = SGLANG_LINE.search(line), SGLANG_RATE.search(line)
        if not match or not rate:
            continue
        rank, running, tokens_per_s = match[1] or "", int(match[2]), float(rate[1])
        length, share, held = SGLANG_LENGTH.search(line), SGLANG_SHARE.search(line), SGLANG_TOKENS.search(line)
        accept_length = max(float(length[1]), 1.0) if length else 1.0
        drafts = round((accept_length - 1) / float(share[1])) if share and float(share[1]) >= LEAST_RATE else 0
        context = int(held[1]) / running if held and running else None
        if before.get(rank) == running > 0 and tokens_per_s > 0:
            samples.append(Sample(running, tokens_per_s, accept_length, drafts, context))
        if length:
            lengths.append((accept_length, running))
        before[rank] = running
    weight = sum(running for _, running in lengths)
    mean = sum(accept_length * running for accept_length, running in lengths) / weight if weight else None
    return _seen("SGLang", samples, (), mean, name)


def _seen(server: str, samples: list[Sample], survival: tuple[float, ...], mean: float | None, name: str) -> Seen:
    if not samples and not survival and mean is None:
        raise ConfigError(
            f"{name}: no two lines of {server} in a row tell of the same number of running requests and no prompt: "
            "give a log of a steady load"
        )
    return Seen(server, samples, 1 + sum(survival) if survival else mean, survival)


def _weighed(curves: list[tuple[float, ...]], weights: list[float]) -> tuple[float, ...]:
    """Returns the mean of survival curves, weighted by rounds and made non-increasing (logged values are rounded)."""
    whole, curve, most = sum(weights), list[float](), 1.0
    for place in range(max(map(len, curves), default=0) if whole else 0):
        pairs = zip(curves, weights, strict=True)
        most = min(most, sum(weight * curve[place] for curve, weight in pairs if place < len(curve)) / whole)
        curve.append(most)
    return tuple(curve)


def _metrics(text: str, name: str, model: str | None) -> Seen:
    """Parses the counters of GET /metrics, summed over all engines."""
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total{"
    values = totals(engines_of(text, model, ("position",)))
    by_place = {int(key[len(per_position) : -1]): each for key, each in values.items() if key.startswith(per_position)}
    owner = "sglang:" if any(metric.startswith("sglang:") for metric in values) else "vllm:"
    is_vllm = owner == "vllm:"
    server = _vllm_like(text, values) if is_vllm else "SGLang"
    tokens = values.get(owner + "generation_tokens_total", 0.0)
    answers = values.get(owner + ("request_success_total" if is_vllm else "num_requests_total"), 0.0)
    rounds = values.get("vllm:spec_decode_num_drafts_total", 0.0)
    survival = tuple(min(by_place[place] / rounds, 1.0) for place in sorted(by_place)) if rounds else ()
    while survival and survival[-1] == 0:
        survival = survival[:-1]
    mean = 1 + values.get("vllm:spec_decode_num_accepted_tokens_total", 0.0) / rounds if rounds else None
    mean = mean if is_vllm else _sglang_length(values, tokens - answers)
    running = values.get("vllm:num_requests_running" if is_vllm else "sglang:num_running_reqs", 0.0)
    drafted = values.get("vllm:spec_decode_num_draft_tokens_total", 0.0) / rounds if rounds else 0.0
    gap_s = _mean(values, owner + "inter_token_latency_seconds") or _mean(
        values, owner + "time_per_output_token_seconds"
    )
    samples = []
    if running and gap_s:
        tokens_per_round = mean or 1.0
        round_s = gap_s if is_vllm else gap_s * tokens_per_round  # vLLM observes once a step, SGLang once a token
        samples.append(Sample(int(running), running * tokens_per_round / round_s, tokens_per_round, round(drafted)))
    if not (samples or mean or tokens):
        raise ConfigError(f"{name}: the metrics tell of no token yet: take them after some requests")
    return Seen(server, samples, mean, survival, tokens, answers, round(drafted))


def _sglang_length(values: dict[str, float], tokens: float) -> float | None:
    """Returns SGLang's acceptance length since the start, or from its gauge the recent one if it counts no rounds; None
    without drafts. `tokens`: generated tokens less each answer's first one, which needs no round."""
    if rounds := values.get("sglang:spec_verify_calls_total", 0.0):
        return max(tokens / rounds, 1.0)
    length = values.get("sglang:spec_accept_length", 0.0)
    return length if length > 1 else None


def _vllm_like(text: str, values: dict[str, float]) -> str:
    if "paceline:rounds_total" in values:
        return "paceline"
    return "llama.cpp" if "llamacpp:" in text and "vllm:" not in text else "vLLM"


def _mean(values: dict[str, float], metric: str) -> float | None:
    """Returns the mean of a histogram metric."""
    count = values.get(metric + "_count", 0.0)
    return values.get(metric + "_sum", 0.0) / count if count else None
