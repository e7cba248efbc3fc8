"""`paceline advise`: estimates the benefit of training a drafter, from traces, a running server or a model's name."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import Changed, Opt, Without, options
from paceline.commands.shared import Json, say
from paceline.errors import ConfigError
from paceline.report.tables import Column, Table
from paceline.simulate.config import AdviceConfig, CostsConfig

if TYPE_CHECKING:
    from paceline.train.plan.advise import Advice, Seen

COLUMNS = (
    Column("answers", lambda each: each.answers, "{:,}", "right"),
    Column(
        "tokens/round",
        lambda each: f"{'at least ' if each.is_beyond else ''}{each.tokens_per_round:.2f}",
        align="right",
    ),
    Column("over plain", lambda each: each.speedup, "{:.2f}x", "right"),
    Column("over now", lambda each: each.gain, "{:.2f}x", "right"),
    Column("tokens/s", lambda each: each.tokens_per_s, "{:,.0f}", "right"),
    Column(
        "training",
        lambda each: f"{60 * each.hours:.0f} min" if each.hours < 1.5 else f"{each.hours:.1f} h",
        align="right",
    ),
    Column("cost, $", lambda each: each.cost, "{:,.2f}", "right"),
    Column("saves $ an hour", lambda each: each.saved_per_hour, "{:,.2f}", "right"),
    Column("paid back after", lambda each: _days(each.pays_back_days), align="right"),
)
MOST_BYTES = 64 * 2**20
"""Largest /metrics page that is read."""


@options
def advise(
    costs: Annotated[CostsConfig, Without("toy", "expert_locality", "per_layer", "drafter_params")],
    config: Annotated[AdviceConfig, Changed(streams=Opt("--streams", "--batch"))],
    traces: Annotated[
        Path | None, typer.Argument(help="Traces from paceline serve --traces or paceline record.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running server (paceline, vLLM or SGLang): reads its /metrics.")
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="With --url: the model to read, if the metrics are of several models.")
    ] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Decide whether a drafter of your own is worth it.

    Estimates the speed-up, the training answers and hours it needs, and when it pays off. The current acceptance length
    comes from traces or from a running server's metrics; otherwise plain decoding is assumed. The estimates use
    measured learning curves, the plan of `paceline train` and the predictions of `paceline simulate`. No weights and no
    GPU are needed. The last line is the decision.

    Examples:
      paceline advise --model Qwen3.5-27B --hardware "2x H100" --streams 16
      paceline advise traces/ --model Qwen3-8B --hardware H100 \\
        --price-per-hour 2.5 --traffic application
      paceline advise --url http://127.0.0.1:8000 --model Qwen3-8B --hardware H100
    """
    from paceline.train.plan.advise import Seen, seen_in_traces
    from paceline.train.plan.advise import advise as library

    if traces is not None and url is not None:
        raise ConfigError("traces and --url both give what is served now: leave one out")
    seen = seen_in_traces(traces) if traces is not None else _server(url, served_name) if url is not None else Seen()
    advice = library(costs, config, seen)
    _show(advice, config, stderr=as_json)
    return advice.as_json()


def _days(days: float | None) -> str | None:
    return None if days is None else "under a day" if days < 1 else f"{days:,.0f} days"


def _server(url: str, model: str | None) -> Seen:
    """Return the acceptance that a running server's metrics report. Raises ConfigError."""
    from paceline.net.streaming import Client
    from paceline.simulate.server_logs import parse_server
    from paceline.train.plan.advise import seen_in_server

    with contextlib.closing(Client(url, timeout_s=30.0)) as client:
        answer = client.ask("GET", "/metrics")
    if answer.failure:
        raise ConfigError(f"--url {url}: {answer.failure}: is a server running there?")
    if answer.status != 200 or len(answer.body) > MOST_BYTES:
        raise ConfigError(
            f"--url {url}: GET /metrics answered {answer.status}: start vLLM or SGLang with its metrics on"
        )
    return seen_in_server(parse_server(answer.body.decode("utf-8", errors="replace"), f"{url}/metrics", model), url)


def _show(advice: Advice, config: AdviceConfig, *, stderr: bool) -> None:
    """Print the table of training sizes, the assumptions and, as the last line, the decision."""
    now = advice.now
    streams = f"{now['streams']:.0f} stream{'s' if now['streams'] != 1 else ''}"
    title = f"{advice.title}, {streams} of {config.context} tokens; trained on {advice.machine}"
    note = (
        f"now: {now['tokens_per_round']:.2f} tokens a round, {now['tokens_per_s']:,.0f} tokens/s "
        f"({now['plain_tokens_per_s']:,.0f} plainly); with every draft right {advice.ideal_speedup:.2f}x plain decoding"
    )
    columns = COLUMNS if config.price_per_hour else COLUMNS[:6]
    Table(columns, advice.steps, title=title, notes=[note]).show(stderr=stderr)
    basis = [f"- {sentence}" for sentence in advice.basis]
    lines = ["What this rests on:", *basis, "", *advice.sentences[1:], advice.sentences[0]]
    (say if stderr else print)("\n".join(lines))
