"""Price of answers: the maximum request rate at which a machine meets the response-time limits, and the price of 1,000
answers.

    result = priced(costs, acceptance, PredictConfig(batch=(8,)), PriceConfig(price_per_hour=2.5, slo="p90-total=2s"))
    result.rows[0].per_thousand

Each rate is simulated like `paceline simulate-serving`: requests at random times, a queue, chunked prefill, rounds of
all rows. The maximum rate is found by bisection; without limits it is the server's capacity. There are three variants:
plain decoding, the best draft length for the running rows, and the latter with one more accepted token per round.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigError
from paceline.report.statistics import Spread
from paceline.simulate.config import PredictConfig, PriceConfig
from paceline.simulate.costs.rounds import StepCosts, ToyCosts
from paceline.simulate.server.load import LoadFigures, arriving, capacity, figures_of, parse_lengths, poisson, workload
from paceline.simulate.server.server import Case, ServerShape
from paceline.simulate.speedup import Acceptance, most_drafts, tokens_per_round

MEASURES = {"total": "total", "first-token": "first_token", "inter-token": "inter_token"}
"""Name of a latency in --slo -> field of LoadFigures."""
LIMIT = re.compile(r"(mean|p50|p90|p99)-(total|first-token|inter-token)=([0-9.]+)(ms|s)")
LEAST, HALVINGS = 0.01, 9
"""Smallest rate that is tried, as a share of the server's capacity (LEAST); number of bisection steps (HALVINGS)."""
CHUNK = 2048
"""Maximum prompt tokens of a step, as in vLLM and SGLang by default."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Upper limit in seconds for one latency (total, first token, or between tokens). It applies to the mean or to a
    percentile over all requests."""

    percentile: str
    measure: str
    seconds: float

    def holds(self, figures: LoadFigures) -> bool:
        spread: Spread = getattr(figures, MEASURES[self.measure])
        value = getattr(spread, self.percentile)
        return value is None or value <= self.seconds


def parse_slo(text: str | None) -> list[Limit]:
    """Parses response-time limits, separated by commas, such as p90-total=2s,mean-first-token=300ms. A limit has a
    statistic (mean, p50, p90 or p99), a latency (total, first-token or inter-token), and a time in s or ms. Returns []
    for None; raises ConfigError for any other text."""
    limits = []
    for part in (text or "").split(","):
        if not part.strip():
            continue
        match = LIMIT.fullmatch(part.strip())
        if not match or not match[3].replace(".", "", 1).isdigit() or float(match[3]) <= 0:
            raise ConfigError(
                f"--slo {part.strip()!r} is no limit: write it as p90-total=2s; one of mean, p50, p90, p99, then "
                "total, first-token or inter-token, then a time above 0 in s or ms"
            )
        limits.append(Limit(match[1], match[2], float(match[3]) * (1e-3 if match[4] == "ms" else 1.0)))
    if text is not None and not limits:
        raise ConfigError("--slo is empty: write it as p90-total=2s")
    return limits


@dataclass(frozen=True, slots=True)
class Priced:
    """Maximum request rate of one variant (plain decoding, or drafting with a given acceptance) on a server with `rows`
    batch rows, and the latencies at that rate."""

    rows: int
    name: str
    """Variant: plain, with drafts, or one more token."""
    requests_per_s: float
    """Maximum request rate; 0 if even 1% (LEAST) of the server's capacity does not meet the limits. The latencies are
    then those at 1%."""
    tokens_per_s: float
    per_thousand: float | None
    """Price of 1,000 answers; None without a price, or if the limits cannot be met."""
    tokens_per_round: float
    first_token: Spread
    inter_token: Spread
    total: Spread


@dataclass(frozen=True, slots=True)
class Prices:
    """Maximum request rates of plain decoding, drafts, and a better drafter, at each batch size, with sentences that
    summarise them."""

    title: str
    rows: list[Priced]
    sentences: list[str]


def priced(costs: StepCosts, acceptance: Acceptance, config: PredictConfig, price: PriceConfig) -> Prices:
    """Finds by simulation the maximum request rate at which a server meets the response-time limits, at each batch
    size; without limits, it is the server's capacity. The variants are plain decoding, the best number of drafts, and a
    better drafter (one more accepted token per round). Raises ConfigError for invalid limits or lengths, and for the
    toy model, whose costs are not in seconds."""
    limits = parse_slo(price.slo)
    if isinstance(costs, ToyCosts):
        raise ConfigError("a price needs costs in seconds, the toy model has none: leave --toy out")
    answer = parse_lengths("--answer-tokens", price.answer_tokens)
    jobs = workload(price.requests, parse_lengths("--prompt-tokens", "1"), answer, price.seed)
    mean = sum(job.answer_tokens for job in jobs) / len(jobs)
    prompt_tokens = price.prompt_tokens or str(max(round(config.context - mean / 2), 1))
    jobs = workload(price.requests, parse_lengths("--prompt-tokens", prompt_tokens), answer, price.seed)
    most = most_drafts(costs, config.max_draft)
    better = one_more(acceptance, most)
    rows, sentences = list[Priced](), list[str]()
    for batch in config.batch:
        server = ServerShape(batch, CHUNK)
        survival = [tuple(each.survival(most)) for each in (acceptance, better)]
        case = Case(jobs, costs, server, survival[0], price.seed)
        plain = _most(case, "off", "plain", limits, price)
        drafts = _most(case, "best", "with drafts", limits, price)
        more = _most(replace(case, survival=survival[1]), "best", "one more token", limits, price)
        rows += [plain, drafts, more]
        sentences += _sentences(plain, drafts, more, price)
    wanted = f"so that {price.slo}" if limits else "as many as it can finish"
    lengths = f"prompts of {prompt_tokens}, answers of {price.answer_tokens} tokens"
    return Prices(f"Requests/s {wanted}; {lengths}, {price.requests} simulated requests", rows, sentences)


def one_more(acceptance: Acceptance, num_drafted: int) -> Acceptance:
    """Returns a higher acceptance, with which rounds of `num_drafted` drafts give one more token on average, at most
    `num_drafted` + 1. The chance of rejection is multiplied by the same factor at every position."""
    wanted = min(tokens_per_round(acceptance, num_drafted) + 1, num_drafted + 1.0)
    chances = [acceptance.at(place) for place in range(1, max(num_drafted, 1) + 1)]

    def with_failures(share: float) -> Acceptance:
        return Acceptance(tuple(1 - share * (1 - chance) for chance in chances))

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if tokens_per_round(with_failures(middle), num_drafted) < wanted else (middle, high)
    return with_failures(low)


def _most(case: Case, policy: str, name: str, limits: Sequence[Limit], price: PriceConfig) -> Priced:
    """Finds the maximum rate by bisection of its logarithm; all rates use the same requests and arrivals, scaled in
    time."""
    most = capacity(case, policy)

    def at(rate: float) -> LoadFigures:
        jobs = arriving(case.jobs, poisson(rate, len(case.jobs), case.seed))
        return figures_of(case.run(policy, jobs), policy, most, rate)

    def holds(figures: LoadFigures) -> bool:
        return all(limit.holds(figures) for limit in limits)

    rate, figures = most, at(most)
    if limits and not holds(figures):
        low, high, figures = math.log(LEAST * most), math.log(most), at(LEAST * most)
        rate = LEAST * most if holds(figures) else 0.0
        for _ in range(HALVINGS if rate else 0):
            middle = (low + high) / 2
            tried = at(math.exp(middle))
            if holds(tried):
                low, figures, rate = middle, tried, math.exp(middle)
            else:
                high = middle
    mean = sum(job.answer_tokens for job in case.jobs) / len(case.jobs)
    cost = price.price_per_hour / 3600 / rate * 1000 if price.price_per_hour and rate else None
    return Priced(
        case.server.max_rows, name, rate, rate * mean, cost, figures.tokens_per_round, figures.first_token,
        figures.inter_token, figures.total,
    )  # fmt: skip


def _sentences(plain: Priced, drafts: Priced, more: Priced, price: PriceConfig) -> list[str]:
    rows = f"{plain.rows} rows"
    if not drafts.requests_per_s:
        return [f"{rows}: {price.slo} cannot be met, not even by one request at a time"]
    if not plain.requests_per_s:
        return [f"{rows}: only drafts meet {price.slo}: {drafts.requests_per_s:.3g} requests/s"]
    times, better = drafts.requests_per_s / plain.requests_per_s, more.requests_per_s / drafts.requests_per_s
    sentence = f"{rows}: drafts serve {times:.2f} times the requests; one more token a round {better - 1:+.0%} requests"
    if plain.per_thousand and drafts.per_thousand and more.per_thousand:
        saved = drafts.per_thousand - more.per_thousand
        sentence += (
            f", {saved:,.3f} less for 1,000 answers ({plain.per_thousand:,.3f} plainly, "
            f"{drafts.per_thousand:,.3f} with drafts, {more.per_thousand:,.3f} with one more)"
        )
    return [sentence]
