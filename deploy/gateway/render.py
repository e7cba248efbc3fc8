"""Gateways in front of several replicas: a configuration for nginx or Envoy, or the command line of vLLM's router.

    python deploy/gateway/render.py nginx --region eu=10.0.0.1:8000,10.0.0.2:8000 --region us=10.1.0.1:8000 > nginx.conf
    python deploy/gateway/render.py envoy --region eu=... --tag acme=10.0.0.9:8000 > envoy.yaml
    python deploy/gateway/render.py vllm-router --region eu=...

A request whose header `x-paceline-tag` names a tag goes to the replicas of that tag: vLLM and SGLang have one drafter
each, so a customer with a drafter of its own has servers of its own. Any other goes to a region by its header
`x-region`, else to the first. Within a tag or region it goes always to the same replica while that is well: by a
consistent hash of the header `x-session-id`, else of its API key, else of its address. There a conversation finds its
beginning in the prefix cache. docs/how-to/serve.md says who should take which.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import jinja2

HERE = Path(__file__).parent
NAMES = {
    "region": (re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"), "small letters, digits and dashes, as eu=..."),
    "tag": (
        re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?"),
        "letters, digits, dots, dashes and underscores, as acme=...",
    ),
}
"""Option -> the names that it takes, as a pattern and in words."""
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


def read_groups(given: list[str], option: str) -> dict[str, list[Replica]]:
    """NAME=HOST:PORT,HOST:PORT by name, in their order. `option`: region or tag. Raises RenderError."""
    pattern, allowed = NAMES[option]
    found: dict[str, list[Replica]] = {}
    for text in given:
        name, _, listed = text.partition("=")
        if not pattern.fullmatch(name) or name.lower() in {each.lower() for each in found}:
            raise RenderError(f"--{option} {text!r}: give each {option} a name of its own, {allowed}")
        matches = [REPLICA.fullmatch(each.strip()) for each in listed.split(",")]
        if not all(match and int(match["port"]) < 65536 for match in matches):
            raise RenderError(f"--{option} {text!r}: write its replicas as HOST:PORT,HOST:PORT")
        found[name] = [Replica(match["host"], int(match["port"])) for match in matches if match]
    return found


def render(
    kind: str, regions: dict[str, list[Replica]], listen: int = 8080, tags: dict[str, list[Replica]] | None = None
) -> str:
    """The text of one of KINDS, listening on a port. Raises RenderError without a region, and for vLLM's router with
    several regions or with tags."""
    if not regions:
        raise RenderError("there is no replica: give --region eu=HOST:PORT,HOST:PORT")
    if kind == "vllm-router" and tags:
        raise RenderError("vLLM's router reads no tags: run one for each tag, and nginx or Envoy before them")
    if kind == "vllm-router" and len(regions) > 1:
        raise RenderError("vLLM's router knows no regions: run one in each, and nginx or Envoy before them")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    first, tags = next(iter(regions)), tags or {}
    groups = regions | {f"tag_{tag}": replicas for tag, replicas in tags.items()}
    template = environment.get_template(KINDS[kind])
    return template.render(regions=regions, tags=tags, groups=groups, first=first, listen=listen)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--region", action="append", default=[], metavar="NAME=HOST:PORT,...", help="may be repeated")
    parser.add_argument(
        "--tag", action="append", default=[], metavar="TAG=HOST:PORT,...", help="replicas of a tag; may be repeated"
    )
    parser.add_argument("--listen", type=int, default=8080, help="port of the gateway")
    given = parser.parse_args(words)
    try:
        regions, tags = read_groups(given.region, "region"), read_groups(given.tag, "tag")
        sys.stdout.write(render(given.kind, regions, given.listen, tags))
    except RenderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
