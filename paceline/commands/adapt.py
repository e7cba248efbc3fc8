"""Commands of `paceline adapt`: options and output of `paceline.loop.adapt`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import Changed, Only, Opt, Without, options
from paceline.commands.shared import TARGET_FIELDS, Json, TerminalProgress, finish, say, starting
from paceline.config import EngineConfig
from paceline.loop.adapt.config import (
    CandidateConfig,
    DeployConfig,
    PolicyConfig,
    PriceConfig,
    ReplayConfig,
    RetrainConfig,
    StoreConfig,
    WatchConfig,
)
from paceline.runs.folder import write_whole

TO_DO = 3
"""Exit status of `check` if there is something to do, and of `gate` if the drafter does not pass."""
Target = Annotated[EngineConfig, TARGET_FIELDS]
SERVERS = Changed(servers=Opt("--server"), patience_s=Opt("--patience"), num_drafted=Opt("--num-speculative-tokens"))


@options
def adapt_replay(
    config: ReplayConfig, seasonal: PolicyConfig, prices: PriceConfig, as_json: Json = False
) -> dict[str, Any]:
    """Replay a policy on a virtual clock, without training.

    A policy decides every hour whether to act, e.g. to retrain a drafter. The replayed traffic is either synthetic, so
    that it is known when acceptance really fell, or stored traces. Prints how often the policy retrained a drafter. For
    synthetic traffic, also prints how late and how often it found a fall of acceptance, the number of false alarms, and
    the tokens/s lowered by the cost of trainings.

    Examples:
      paceline adapt replay --scenario two-bases --policy seasonal --seeds 200
    """
    from paceline.loop.adapt.traffic.replay import run

    figures = run(config, seasonal, prices, TerminalProgress())
    if not as_json:
        for name, value in figures.items():
            say(f"{name.replace('_', ' ')}: " + (f"{value:.2f}" if isinstance(value, float) else str(value)))
    return figures


@options
def adapt_check(store: StoreConfig, policy: PolicyConfig, prices: PriceConfig, as_json: Json = False) -> None:
    """Decide once, from the latest hour of stored traffic.

    Decides whether an action such as retraining a drafter is due, and prints the decision with its reason. Acceptance
    is read from the traces. If the traces record no decoding rounds, it is read from counted.jsonl, a file that
    paceline adapt watch writes to its folder --state. Exit status 0: nothing to do, or too little traffic to decide; 3:
    something to do; 2: an error.

    Examples:
      paceline adapt check --traces traces
    """
    from paceline.loop.adapt.check import decide_once

    line = decide_once(store, policy, prices)
    decision, left_out = line["decision"], line["left_out"]
    if left_out:
        say(f"left out: {', '.join(f'{count} {reason}' for reason, count in left_out.items())}")
    say(f"{decision.action} {', '.join(decision.clusters)}: {decision.why}".replace(" :", ":"))
    for action, why in decision.declined.items():
        say(f"no {action}: {why}")
    if line["hours"]:
        say(f"acceptance of {line['with_traffic']} hours with traffic, from {line['source']}")
    finish(line, as_json, 0 if decision.is_idle else TO_DO)


@options
def adapt_gate(
    drafter: Annotated[Path, typer.Argument(help="Folder of the new drafter.")],
    engine: Target,
    store: Annotated[StoreConfig, Only("traces")],
    config: Annotated[CandidateConfig, Changed(clusters=Opt("--cluster"), tags=Opt("--tag"))],
    as_json: Json = False,
) -> None:
    """Judge whether a drafter may replace the serving one.

    Compares the acceptance and speed of both drafters on stored requests, which are grouped into classes of similar
    requests. Two conditions must hold. First, the new drafter is faster on the classes that --cluster names, taken
    together (default: the class with the most requests). Second, it is not much slower on any single class, or on the
    answers of --ood. If only the second condition fails, blends of both drafters' weights are judged too. With --tag,
    both are judged only by requests with this tag. Exit status 0: passed, 3: not passed, 2: an error.

    Examples:
      paceline adapt gate runs/mine/drafter --traces traces \\
        --cluster tickets --incumbent default
      paceline adapt gate runs/acme/drafter --traces traces --tag acme
    """
    starting(engine.model)
    from paceline.loop.adapt.gate.examine import examine
    from paceline.loop.adapt.gate.lineage import weights_hash

    verdict = examine(drafter, engine, store.traces, config, TerminalProgress())
    say(f"{'passed' if verdict.passed else 'refused'}: {verdict.reason}")
    for name, gain in verdict.gains.items():
        say(
            f"{name}: {gain.gain:+.1%} tokens/s [{gain.low:+.1%}, {gain.high:+.1%}], {gain.incumbent:.2f} -> "
            f"{gain.candidate:.2f} tokens a round over {gain.requests} requests"
        )
    line = {**verdict.as_json(), "weights": weights_hash(Path(verdict.drafter)) if verdict.drafter else None}
    finish(line, as_json, 0 if verdict.passed else TO_DO)


@options
def adapt_log(
    state: Annotated[Path, typer.Option(help="Folder of the log.")] = Path("runs/adapt"),
    hours: Annotated[int, typer.Option(help="Show only this many hours, the latest.")] = 24,
    page: Annotated[
        bool, typer.Option(help="Also write report.html: acceptance by request class, with decisions.")
    ] = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Show observations, decisions and actions by hour.

    Reads the log of `paceline adapt watch`, which runs in the background and adapts a server's drafters.

    Examples:
      paceline adapt log --state runs/adapt --page
    """
    from paceline.loop.adapt.log import AdaptLog

    lines, num_odd = AdaptLog(state).shown()
    if num_odd:
        say(f"left out: {num_odd} lines of {state / 'log.jsonl'} that are damaged")
    last = lines[-1]["hour"] if lines else 0
    for line in lines:
        if line["hour"] > last - hours:
            print(_sentence(line))
    file = None
    if page:
        from paceline.loop.adapt.page import page as page_of

        file = state / "report.html"
        write_whole(file, page_of(lines))
        say(f"report: {file}")
    return {"lines": len(lines), "report": file}


@options
def adapt_watch(
    target: Target,
    store: StoreConfig,
    policy: PolicyConfig,
    prices: PriceConfig,
    candidate: Annotated[CandidateConfig, Without("clusters", "tags", "tracked", "since", "held_out_only")],
    retrain: RetrainConfig,
    deploy: Annotated[DeployConfig, SERVERS],
    watch: Annotated[WatchConfig, Changed(every_s=Opt("--every"))],
    as_json: Json = False,
) -> dict[str, Any]:
    """Run the daemon that keeps a server's drafters fitted.

    Every hour it decides whether to act, e.g. to retrain a drafter for the current traffic. A new drafter is tested on
    stored requests and, if it passes, replaces the old one on the server. If more requests fail after that,
    or acceptance falls, the old drafter is restored. Without --server the daemon only reports its decisions.

    Examples:
      paceline adapt watch --traces traces --server http://127.0.0.1:8000 \\
        --general runs/general/answers
    """
    from paceline.loop.adapt.run import run

    run(target, store, policy, prices, candidate, retrain, deploy, watch, say)
    return {"traces": store.traces, "server": deploy.servers}


def _sentence(line: dict[str, Any]) -> str:
    """Return a line of the log as text."""
    if "event" in line:
        return f"{line['time']}  {line['event']}: {line.get('why', '')}"
    seen = ", ".join(
        f"{name} {one.get('tokens_per_round', '-')} ({one.get('expected', '?')} usual, {one['state']})"
        for name, one in line["seen"].items()
    )
    decision = line["decision"]
    declined = "; ".join(f"no {action}: {why}" for action, why in decision["declined"].items())
    return f"{line['time']}  {seen or 'no traffic'}  {decision['action']}: {decision['why']} [{declined}]"
