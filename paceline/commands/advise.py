"""`paceline advise`: is a drafter of your own worth it, from traces, from a running server, or from a model's name alone."""

from __future__ import annotations

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
    Column("tokens/round", lambda each: f"{'at least ' if each.is_beyond else ''}{each.tokens_per_round:.2f}", align="right"),
    Column("over plain", lambda each: each.speedup, "{:.2f}x", "right"),
    Column("over now", lambda each: each.gain, "{:.2f}x", "right"),
    Column("tokens/s", lambda each: each.tokens_per_s, "{:,.0f}", "right"),
    Column("training", lambda each: f"{60 * each.hours:.0f} min" if each.hours < 1.5 else f"{each.hours:.1f} h", align="right"),
    Column("cost, $", lambda each: each.cost, "{:,.2f}", "right"),
    Column("saves $ an hour", lambda each: each.saved_per_hour, "{:,.2f}", "right"),
    Column("paid back after", lambda each: _days(each.pays_back_days), align="right"),
)
MOST_BYTES = 64 * 2**20


@options
def advise(
    costs: Annotated[CostsConfig, Without("toy", "expert_locality", "per_layer", "drafter_params")],
    config: Annotated[AdviceConfig, Changed(streams=Opt("--streams", "--batch"))],
    traces: Annotated[Path | None, typer.Argument(help="Traces of paceline serve --traces or of paceline record.")] = None,
    url: Annotated[
        str | None, typer.Option(help="A running server, whose /metrics are read: paceline, vLLM or SGLang.")
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="With --url: the model that counts, where the metrics tell of several.")
    ] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Decide whether a drafter of your own is worth it.

    Says what it would bring, from how many answers, in how many hours, and when it pays. The acceptance length of
    today comes from traces or from a running server's metrics, else plain decoding is assumed. What more answers
    would bring comes from measured learning curves, hours from the plan of `paceline train`, speed from `paceline
    simulate`. No weights and no GPU are needed. The last line is the decision.

    Examples:
      paceline advise --model Qwen3.5-27B --hardware "2x H100" --streams 16
      paceline advise traces/ --model Qwen3-8B --hardware H100 \\
        --price-per-hour 2.5 --traffic application
      paceline advise --url http://127.0.0.1:8000 --model Qwen3-8B --hardware H100
    """
    from paceline.train.plan.advise import Seen
    from paceline.train.plan.advise import advise as advised

    if traces is not None and url is not None:
        raise ConfigError("traces and --url both say what is served now: leave one out")
    seen = _traces(traces) if traces is not None else _server(url, served_name) if url is not None else Seen()
    found = advised(costs, config, seen)
    _show(found, config, stderr=as_json)
    return found.as_json()


def _days(days: float | None) -> str | None:
    return None if days is None else "under a day" if days < 1 else f"{days:,.0f} days"


def _traces(folder: Path) -> Seen:
    from paceline.train.plan.advise import seen_in_traces

    return seen_in_traces(folder)


def _server(url: str, model: str | None) -> Seen:
    from paceline.net.streaming import Client
    from paceline.simulate.server_logs import parse_server
    from paceline.train.plan.advise import seen_in_server

    client = Client(url, timeout_s=30.0)
    try:
        answer = client.get("/metrics")
    except OSError as error:
        raise ConfigError(f"--url {url}: {error}: is a server running there?") from error
    finally:
        client.close()
    if answer.status != 200 or len(answer.body) > MOST_BYTES:
        raise ConfigError(f"--url {url}: GET /metrics answered {answer.status}: start vLLM or SGLang with its metrics on")
    return seen_in_server(parse_server(answer.body.decode("utf-8", errors="replace"), f"{url}/metrics", model), url)


def _show(found: Advice, config: AdviceConfig, *, stderr: bool) -> None:
    now = found.now
    streams = f"{now['streams']:.0f} stream{'s' if now['streams'] != 1 else ''}"
    title = f"{found.title}, {streams} of {config.context} tokens; trained on {found.machine}"
    told = (
        f"now: {now['tokens_per_round']:.2f} tokens a round, {now['tokens_per_s']:,.0f} tokens/s "
        f"({now['plain_tokens_per_s']:,.0f} plainly); with every draft right {found.ideal_speedup:.2f}x plain decoding"
    )
    columns = COLUMNS if config.price_per_hour else COLUMNS[:6]
    Table(columns, found.steps, title=title, notes=[told]).show(stderr=stderr)
    lines = [
        "What this rests on:",
        *(f"- {sentence}" for sentence in found.basis),
        "",
        *found.sentences[1:],
        found.sentences[0],
    ]
    (say if stderr else print)("\n".join(lines))
