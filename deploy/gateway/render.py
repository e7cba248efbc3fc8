"""Gateways in front of several replicas: a configuration for nginx or Envoy, or the command line of vLLM's router.

    python deploy/gateway/render.py nginx --region eu=10.0.0.1:8000,10.0.0.2:8000 --region us=10.1.0.1:8000 > nginx.conf
    python deploy/gateway/render.py envoy --region eu=... > envoy.yaml python deploy/gateway/render.py vllm-router
    --region eu=...

A request goes to a region by its header `x-region`, else to the first; within a region always to the same replica while
it is well: by a consistent hash of the header `x-session-id`, else of its API key, else of its address. There a
conversation finds its beginning in the prefix cache. docs/how-to/serve.md says who should take which.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import jinja2

HERE = Path(__file__).parent
REGION = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
REPLICA = re.compile(r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?):(?P<port>[1-9][0-9]{0,4})")
KINDS = {"nginx": "nginx.conf.j2", "envoy": "envoy.yaml.j2", "vllm-router": "vllm-router.sh.j2"}


class RenderError(ValueError):
    """What is asked for cannot be written; the message says what to do."""


@dataclass(frozen=True)
class Replica:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def read_regions(given: list[str]) -> dict[str, list[Replica]]:
    """NAME=HOST:PORT,HOST:PORT by name, in their order. Raises RenderError."""
    found: dict[str, list[Replica]] = {}
    for text in given:
        name, _, listed = text.partition("=")
        if not REGION.fullmatch(name) or name in found:
            raise RenderError(
                f"--region {text!r}: give each region a name of its own, small letters, digits and dashes, as eu=..."
            )
        matches = [REPLICA.fullmatch(each.strip()) for each in listed.split(",")]
        if not all(match and int(match["port"]) < 65536 for match in matches):
            raise RenderError(f"--region {text!r}: write its replicas as HOST:PORT,HOST:PORT")
        found[name] = [Replica(match["host"], int(match["port"])) for match in matches if match]
    if not found:
        raise RenderError("there is no replica: give --region eu=HOST:PORT,HOST:PORT")
    return found


def render(kind: str, regions: dict[str, list[Replica]], listen: int = 8080) -> str:
    """The text of one of KINDS, listening on a port. Raises RenderError for vLLM's router with several regions."""
    if kind == "vllm-router" and len(regions) > 1:
        raise RenderError("vLLM's router knows no regions: run one in each, and nginx or Envoy before them")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(KINDS[kind]).render(regions=regions, first=next(iter(regions)), listen=listen)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--region", action="append", default=[], metavar="NAME=HOST:PORT,...", help="may be repeated")
    parser.add_argument("--listen", type=int, default=8080, help="port of the gateway")
    given = parser.parse_args(words)
    try:
        sys.stdout.write(render(given.kind, read_regions(given.region), given.listen))
    except RenderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
