"""`paceline advise`: estimates the benefit of training a drafter, from traces, a running server or a model's name."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.commands.options import Changed, Opt, Without, options
from paceline.commands.shared import Json, say
from paceline.errors import ConfigError
from paceline.report.tables import Column, Table, with_interval
from paceline.simulate.config import AdviceConfig, CostsConfig

if TYPE_CHECKING:
    from paceline.train.plan.advise import Advice
    from paceline.train.plan.current_traffic import Seen
    from paceline.train.plan.customers import Customer

COLUMNS = (
    Column("customer", lambda each: each.tag),
    Column("answers", lambda each: each.answers, "{:,}", "right"),
    Column("traffic", lambda each: f"{each.traffic:.0%}", align="right"),
    Column("acceptance length", lambda each: each.tokens_per_round, "{:.2f}", "right"),
    Column("over now", lambda each: with_interval(each.gain, each.gain_interval, unit="x"), align="right"),
    Column("saves of all time", lambda each: f"{each.saved:.1%}", align="right"),
    Column("training", lambda each: _training(each), align="right"),
    Column("pays off after", lambda each: _days(each.pays_back_days), align="right"),
    Column("one of its own", lambda each: each.objection or "yes"),
)
NOW = Changed(
    drafter_cost=Opt(
        help="A pass of the drafter that serves now, in target passes [default: by the traces' drafter, else 0.1]."
    ),
    block=Opt(help="Drafts of one pass of the drafter that serves now [default: by the traces' drafter, else 1]."),
)
MOST_CUSTOMERS = 20
"""Rows of the printed table of customers; --json has all."""
MOST_BYTES = 64 * 2**20
"""Largest /metrics page that is read."""


@options
def advise(
    costs: Annotated[CostsConfig, Without("toy", "expert_locality", "per_layer", "drafter_params"), NOW],
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
    tag: Annotated[str | None, typer.Option(help="Only the traces of this customer (x-paceline-tag).")] = None,
    by: Annotated[
        Literal["tag"] | None,
        typer.Option(help="Compare customers (x-paceline-tag): which of them deserve a drafter of their own."),
    ] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Decide whether a drafter of your own is worth it.

    The first line of the output is the decision. Then come the speed-up to expect from a drafter trained on your own
    traffic, with the range in which nine of ten workloads lie; the number of answers and the hours that training
    needs; and when it pays off. No weights and no GPU are needed.

    The number of recorded answers comes from the traces. The acceptance length today comes from the traces or, if these
    record no drafts, from the running server's metrics; without both, plain decoding is assumed. The acceptance length
    of the new drafter is estimated from your newest training of this model in runs/, else from published trainings.

    If the traces have several tags, a table compares the customers, one per tag. The line below the table names the
    customers who deserve a drafter of their own. --by tag prints only the table, this line and the assumptions behind
    them.

    Examples:
      paceline advise --model Qwen3.5-27B --hardware "2x H100" --streams 16
      paceline advise traces/ --url http://127.0.0.1:8000 --model Qwen3-8B --hardware H100
      paceline advise traces/ --by tag --model Qwen3-8B --hardware H100 --price-per-hour 2.5
      paceline advise traces/ --tag acme --model Qwen3-8B --hardware H100 --run runs/mine
    """
    from paceline.train.plan.advise import advise as library
    from paceline.train.plan.current_traffic import Seen, seen_in_traces, with_server

    if tag is not None and traces is None:
        raise ConfigError("--tag selects among traces: give their folder, too")
    if served_name is not None and url is None:
        raise ConfigError("--served-name selects among a server's models: give its --url, too")
    if by is not None and (traces is None or tag is not None):
        raise ConfigError("--by tag compares all customers of a folder of traces: give it, and leave --tag out")
    seen = seen_in_traces(traces, tag) if traces is not None else Seen()
    if url is not None:
        server = _server(url, served_name)
        seen = with_server(seen, server) if traces is not None else server
    if by is not None and not seen.by_tag:
        raise ConfigError(f"--by tag needs traces with several tags (x-paceline-tag): {traces} has not even two")
    advice = library(costs, config, seen)
    _show(advice, stderr=as_json, is_by_tag=by is not None)
    return advice.as_json()


def _server(url: str, model: str | None) -> Seen:
    """Return the acceptance that a running server's metrics report. Raises ConfigError."""
    from paceline.net.streaming import Client
    from paceline.simulate.server_logs import parse_server
    from paceline.train.plan.current_traffic import seen_in_server

    with contextlib.closing(Client(url, timeout_s=30.0)) as client:
        answer = client.ask("GET", "/metrics")
    if answer.failure:
        raise ConfigError(f"--url {url}: {answer.failure}: is a server running there?")
    if answer.status != 200 or len(answer.body) > MOST_BYTES:
        raise ConfigError(
            f"--url {url}: GET /metrics answered {answer.status}: start vLLM or SGLang with its metrics on"
        )
    return seen_in_server(parse_server(answer.body.decode("utf-8", errors="replace"), f"{url}/metrics", model), url)


def _training(customer: Customer) -> str:
    cost = "" if customer.cost is None else f", ${customer.cost:,.2f}"
    return f"{customer.hours:.2f} h{cost}"


def _days(days: float | None) -> str:
    return "never" if days is None else f"{days:.1f} days"


def _show(advice: Advice, *, stderr: bool, is_by_tag: bool) -> None:
    """Print the decision, what it rests on, and the table of customers with those who deserve a drafter."""
    from paceline.train.plan.customers import RULE

    lines = [] if is_by_tag else [*advice.sentences]
    lines += ["This rests on:", *(f"- {sentence}" for sentence in advice.basis)]
    if advice.limits:
        lines.append(f"- {len(advice.limits)} simplifications of the predicted times: --json lists them.")
    (say if stderr else print)("\n".join(lines))
    if advice.customers:
        left = len(advice.customers) - MOST_CUSTOMERS
        notes = ["each with a drafter trained on its own answers, those that save most time first"]
        notes += [f"{left} more that save less: --json"] if left > 0 else []
        Table(COLUMNS, advice.customers[:MOST_CUSTOMERS], title="customers", notes=[*notes, RULE]).show(stderr=stderr)
        (say if stderr else print)(advice.deserving)
