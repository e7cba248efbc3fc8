"""Settings of the server: frozen, documented field by field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.bounds import Amount, Count, Positive, Share, Whole, check, within
from paceline.config import Bytes
from paceline.errors import ConfigError, refuse
from paceline.lossy import LOSSY
from paceline.plan.clusters import OTHER
from paceline.types import CANDIDATE, LOOKUP, NONE

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}", re.ASCII)
"""What a drafter of a pool may be called."""
TAKEN = (NONE, LOOKUP, OTHER, CANDIDATE, LOSSY)
"""Names that mean something else where drafters are counted."""
MOST_DRAFTERS = 8
"""Members of a pool: each takes memory, and each cluster of requests tries them all."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Where the server listens, whom it lets in, and what it takes at most. Raises ConfigError on impossible values."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface."""
    port: Annotated[int, within("between 0 and 65535", least=0, most=65535)] = 8000
    """Port; 0 takes a free one."""
    drafters: tuple[str, ...] = ("default",)
    """default (what ships for the model, else ngram), none, ngram, mtp (the model's own layer for it), random-dflash, a folder,
    or a hub id. Several as NAME=DRAFTER: each request gets one of them, by --route, or none."""
    route: str = "auto"
    """Which of several drafters: auto, the one that brings most tokens per second to requests of a kind (by tag, else by
    language, template, tools and form of the answer; each is tried on 2 requests of every kind, while in doubt on at most 6
    more a drafter, and later at most 2% of the requests go to those that look slower); tag or header:NAME, the one that the
    request's tag or header names."""
    admin_keys: tuple[str, ...] = ()
    """Key that opens /admin; without any, only this machine may use it, and only where there are no API keys.
    PACELINE_ADMIN_KEY too."""
    api_keys: tuple[str, ...] = ()
    """Key that opens the API; without any, all who reach the port may use it. PACELINE_API_KEY too."""
    cors_origins: tuple[str, ...] = ()
    """Origin whose web pages may call the API from a browser."""
    allowed_hosts: tuple[str, ...] = ()
    """Name clients may call the server by, * for any [default: on a loopback address its names, else any]."""
    served_names: tuple[str, ...] = ()
    """What clients call the model [default: its own name]."""
    max_body_bytes: Bytes = 4 * 2**20
    """Longest request body: 512K, 4M or bytes."""
    body_seconds: Positive = 30.0
    """A body must have arrived by then."""
    header_seconds: Positive = 15.0
    """So must a request's headers, from the connection or its first byte on."""
    write_seconds: Positive = 60.0
    """A client that takes nothing of what is written for so long is hung up on."""
    max_prompt_tokens: Count | None = None
    """Longest prompt, in tokens [default: what the cache holds]."""
    default_max_tokens: Count = 1024
    """Longest chat answer when the request sets no limit, and the context leaves room for it."""
    max_n: Count = 8
    """Most answers to one prompt."""
    max_queue: Whole = 256
    """Most answers waiting for a row; what comes then gets status 429."""
    deadline: Amount = 600.0
    """Seconds in which a request must be finished; 0 is no limit."""
    drain_seconds: Amount = 30.0
    """Seconds that answers under way may take after SIGTERM."""
    allow_lossy: bool = False
    """Let requests ask for lossy rules, which change what the model says (docs/explanation/lossless.md). Their answers say
    lossless: false and are never kept as traces."""
    max_tv: Share | None = None
    """Most mean total variation of a lossy answer, at each of its tokens; beyond it drafts are verified losslessly."""
    features: bool = False
    """Give hidden states to trainers (/v1/features, train --features-from). Needs an API key."""
    features_bytes: Bytes = 2**30
    """Longest answer with hidden states."""
    stream_interval_ms: Annotated[float, within("between 0 and 1000", least=0, most=1000)] = 16.0
    """How long a token may wait for the next round's, to be sent together; 0 sends each round's at once."""

    def __post_init__(self) -> None:
        check(self)
        refuse(
            ConfigError,
            (self.max_tv is not None and not self.allow_lossy, "max_tv is the budget of lossy rules: it needs allow_lossy"),
            (any(not key.strip() for key in self.api_keys), "an API key must not be empty"),
            (any(not key.isascii() for key in self.api_keys), "an API key must be ASCII text: HTTP headers carry nothing else"),
            (
                any(not key.strip() or not key.isascii() for key in self.admin_keys),
                "an admin key must be ASCII text, not empty",
            ),
            (any(not host.strip() for host in self.allowed_hosts), "an allowed host must not be empty"),
            (
                not re.fullmatch(r"auto|tag|header:[A-Za-z0-9-]+", self.route, re.ASCII),
                f"route must be auto, tag or header:NAME, not {self.route!r}",
            ),
        )
        self.named_drafters()

    def named_drafters(self) -> dict[str, str]:
        """Name -> drafter, in their order; the name of a single one that has none is empty. Raises ConfigError."""
        return named_drafters(self.drafters)


def named_drafters(given: Sequence[str]) -> dict[str, str]:
    """NAME=DRAFTER by name. Raises ConfigError on a name that is none, that is taken, or that is missing where it is needed."""
    named: dict[str, str] = {}
    for each in given or ("none",):
        name, _, drafter = each.partition("=")
        if not drafter or "/" in name:
            name, drafter = "", each
            refuse(ConfigError, (len(given) > 1, f"drafter {each!r} needs a name beside others: write it as NAME={each}"))
        else:
            check_name(name)
        refuse(ConfigError, (name in named, f"two drafters are called {name!r}: give each a name of its own"))
        named[name] = drafter
    refuse(ConfigError, (len(named) > MOST_DRAFTERS, f"at most {MOST_DRAFTERS} drafters, not {len(named)}: leave some out"))
    return named


def check_name(name: str) -> None:
    """Raises ConfigError when no drafter of a pool may be called so."""
    if not NAME.fullmatch(name) or name.lower() in TAKEN:
        raise ConfigError(
            f"a drafter cannot be called {name!r:.80}: take up to 32 letters, digits and dots, not {', '.join(TAKEN)}"
        )


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Which traces of requests are kept, and how long. Raises ConfigError on impossible values."""

    folder: Path | None = None
    """Keep traces of requests in this folder, for training [default: none]."""
    sample: Annotated[float, within("a share, above 0 and at most 1", above=0, most=1)] = 1.0
    """Share of requests that are traced."""
    redact: tuple[str, ...] = ()
    """Regex whose matches are taken out of traces."""
    max_bytes: Bytes = 2**30
    """Most disk space of all traces; the oldest go."""
    max_days: Positive = 30.0
    """Older traces go."""

    def __post_init__(self) -> None:
        check(self)
        if self.folder is None and (self.sample != 1.0 or self.redact):
            raise ConfigError("folder must be given, for traces that are sampled or redacted to be kept in")


def speculation(text: str, num_drafted: int | None, drafter: str) -> dict[str, object]:
    """`--speculate` as settings of the engine: auto; full; off; a number, drafted in every round; or tree:N. Raises
    ConfigError."""
    if text in ("auto", "full"):
        return {"plan": "auto" if text == "auto" else "fixed", "num_drafted": num_drafted, "drafter": drafter}
    if text in ("off", "0"):
        return {"plan": "auto", "num_drafted": None, "drafter": "none"}
    if text.isdecimal() and text.isascii():
        if num_drafted is not None:
            raise ConfigError("--num-drafted and --speculate N both say how much to draft: leave one out")
        return {"plan": "fixed", "num_drafted": int(text), "drafter": drafter}
    if text.startswith("tree:"):
        return {"plan": text, "num_drafted": num_drafted, "drafter": drafter}
    raise ConfigError(f"--speculate {text!r} is not known: choose auto, full, off, a number of drafts, or tree:N")
