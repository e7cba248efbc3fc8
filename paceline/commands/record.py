"""`paceline record`: records traces of another server's answers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from paceline.commands.options import Changed, Only, Opt, options
from paceline.commands.shared import Json, TerminalProgress, say
from paceline.loop.record.config import RecordConfig
from paceline.serve.settings import ServeConfig, TraceConfig

NAMES = {"imports": Opt("--import"), "served_names": Opt("--served-name")}
TRACE_NAMES = {"folder": Opt("--out", help="Folder of the traces."), "max_bytes": Opt("--max-size")}
SERVE_NAMES = {
    "port": Opt(default=8001),
    "allowed_hosts": Opt("--allowed-host"),
    "drain_seconds": Opt(help="Seconds that running answers may take after SIGTERM."),
}


@options
def record(
    config: Annotated[RecordConfig, Changed(**NAMES)],
    serving: Annotated[ServeConfig, Only("host", "port", "allowed_hosts", "drain_seconds"), Changed(**SERVE_NAMES)],
    tracing: Annotated[TraceConfig, Changed(**TRACE_NAMES)],
    as_json: Json = False,
) -> dict[str, Any]:
    """Record the traffic of an OpenAI-compatible server.

    Runs as a proxy in front of the server, or imports the server's logs. Writes the requests and answers to a folder of
    traces, from which paceline train can train a drafter.

    Examples:
      paceline record --upstream http://localhost:8000 \\
        --model smollm2-135m --out traces
    """
    import logging

    from paceline.loop.record.run import proxy, read

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if config.imports:
        done = read(config, tracing, progress=TerminalProgress())
    else:
        done = proxy(config, serving, tracing, progress=TerminalProgress())
    lost = ", ".join(f"{number:,} {reason}" for reason, number in sorted(done.dropped.items()))
    summary = f"{done.num_written:,} traces in {done.folder}"
    if prompts := done.num_written - done.num_answers:
        summary += f", {done.num_answers:,} with their answers and {prompts:,} prompts alone"
    say(summary + (f"; left out: {lost}" if lost else ""))
    return asdict(done)
