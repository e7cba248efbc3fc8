"""Requests a second under a limit, and the price of 1,000 answers."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import ConfigError
from paceline.simulate.config import PredictConfig, PriceConfig
from paceline.simulate.costs.rounds import MeasuredCosts, ToyCosts, table_of
from paceline.simulate.server.price import Limit, one_more, parse_slo, priced
from paceline.simulate.speedup import Acceptance, constant, tokens_per_round

LOAD = PredictConfig(batch=(2,), max_draft=3, context=64)
PLAIN, DRAFTS, MORE = range(3)


def costs(pass_s: float = 0.01) -> MeasuredCosts:
    """Every pass takes the same, a prompt next to nothing, and drafts nothing."""
    table = {"verify": [[1, 1, pass_s], [2, 4, pass_s]], "prefill": [[1, 1e-5], [256, 1e-5]]}
    return table_of(table)


def question(**changes: object) -> PriceConfig:
    defaults = {"price_per_hour": 3.6, "requests": 40, "answer_tokens": "20", "prompt_tokens": "16"}
    return PriceConfig(**{**defaults, **changes})  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_without_limits_it_is_what_the_server_can_finish() -> None:
    result = priced(costs(), constant(0.8), LOAD, question())
    plain, drafts, more = result.rows
    assert plain.requests_per_s == pytest.approx(2 / (20 * 0.01), rel=0.1), "two rows of 20 steps of 10 ms each"
    assert drafts.requests_per_s > 1.8 * plain.requests_per_s
    assert more.requests_per_s > drafts.requests_per_s
    assert [row.per_thousand for row in result.rows] == pytest.approx([1 / row.requests_per_s for row in result.rows])
    assert [row.name for row in result.rows] == ["plain", "with drafts", "one more token"]
    assert "drafts serve" in result.sentences[0] and "less for 1,000 answers" in result.sentences[0]


@pytest.mark.slow
def test_a_tighter_limit_serves_fewer_and_holds() -> None:
    loose, tight = (
        priced(costs(), constant(0.8), LOAD, question(slo=f"p90-total={limit}s")).rows[PLAIN] for limit in (0.4, 0.25)
    )
    assert 0 < tight.requests_per_s < loose.requests_per_s
    assert tight.total.p90 is not None and tight.total.p90 <= 0.25
    assert loose.total.p90 is not None and loose.total.p90 <= 0.4


@pytest.mark.slow
def test_only_drafts_meet_some_limits_and_nothing_meets_others() -> None:
    result = priced(costs(), constant(0.9), LOAD, question(slo="p50-total=150ms"))
    assert result.rows[PLAIN].requests_per_s == 0 and result.rows[PLAIN].per_thousand is None
    assert result.rows[DRAFTS].requests_per_s > 0
    assert "only drafts meet" in result.sentences[0]
    none = priced(costs(), constant(0.9), LOAD, question(slo="p50-total=1ms"))
    assert "cannot be met" in none.sentences[0]


@pytest.mark.parametrize("acceptance", [constant(0.5), Acceptance((0.9, 0.5, 0.2)), constant(0.0)])
def test_one_more_token_is_one_more(acceptance: Acceptance) -> None:
    assert tokens_per_round(one_more(acceptance, 7), 7) == pytest.approx(tokens_per_round(acceptance, 7) + 1)
    assert tokens_per_round(one_more(constant(0.95), 2), 2) == pytest.approx(3.0), "at most all of them"


def test_limits_are_read() -> None:
    assert parse_slo("p90-total=2s, p99-first-token=500ms") == [
        Limit("p90", "total", 2.0),
        Limit("p99", "first-token", 0.5),
    ]
    assert parse_slo(None) == []


@pytest.mark.parametrize(
    "text", ["", "p90", "p90-total", "p95-total=2s", "p90-total=2", "p90-total=0s", "p90-total=1.2.3s", "x"]
)
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="p90-total=2s"):
        parse_slo(text)


def test_the_toy_has_no_price() -> None:
    with pytest.raises(ConfigError, match="--toy"):
        priced(ToyCosts(), constant(0.8), LOAD, question())


@pytest.mark.slow
def test_the_command() -> None:
    words = [
        "simulate",
        "--model",
        "Qwen3-8B",
        "--hardware",
        "H100",
        "--batch",
        "2",
        "--max-draft",
        "4",
        "--requests",
        "20",
    ]
    words += [
        "--answer-tokens",
        "16",
        "--prompt-tokens",
        "32",
        "--price-per-hour",
        "2.5",
        "--slo",
        "p90-total=1s",
        "--json",
    ]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    figures = json.loads(result.stdout.splitlines()[-1])["price"]
    assert [row["name"] for row in figures["rows"]] == ["plain", "with drafts", "one more token"]
    assert all(row["total"]["p90"] <= 1 for row in figures["rows"])
    assert "one more token a round" in result.stderr
