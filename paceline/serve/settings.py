"""Server settings: frozen, documented dataclasses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.bounds import MAX_TIMEOUT_S, Amount, Count, Name, Positive, Share, Timeout, Whole, at_least, check, within
from paceline.config import Bytes
from paceline.errors import ConfigError, refuse
from paceline.lossy import LOSSY
from paceline.plan.clusters import OTHER
from paceline.types import CANDIDATE, LOOKUP, NONE, PREDICTION

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}", re.ASCII)
"""Valid names of drafters."""
ROUTE = re.compile(r"auto|tag|header:[A-Za-z0-9-]+", re.ASCII)
TAKEN = (NONE, LOOKUP, PREDICTION, OTHER, CANDIDATE, LOSSY)
"""Names that a drafter may not have, because they mean something else in statistics."""
MOST_DRAFTERS = 64
"""Most drafters of a pool: with route auto, each request class tries all of them."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Address, access control and limits of the server. Raises ConfigError on invalid values."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface."""
    port: Annotated[int, within("between 0 and 65535", least=0, most=65535)] = 8000
    """Port; 0 selects a free one."""
    drafters: tuple[str, ...] = ("default",)
    """default (the drafter shipped for the model, else ngram), none, ngram, mtp (the model's own MTP layer),
    random-dflash, a folder, or a hub id. Several as NAME=DRAFTER: each request gets one of them, by --route, or
    none."""
    route: str = "auto"
    """Selects one of several drafters. auto: the drafter with the most tokens per second for the request's class (by
    tag, else by language, template, tools and answer format; each drafter is tried on 2 requests of a class, on at most
    6 more if the result is uncertain, and later at most 2% of the requests go to drafters that seem slower); tag or
    header:NAME: the drafter named by the request's tag or header."""
    loaded_drafters: Annotated[int, at_least(2)] | None = None
    """Maximum number of drafters in memory [default: all]. When another one is requested, the one used longest ago is
    released. That request gets the first drafter, later ones the requested drafter. The first is never released."""
    admin_keys: tuple[str, ...] = ()
    """Key for /admin. Without a key, /admin is open to this machine only, and closed if there are API keys. Also read
    from PACELINE_ADMIN_KEY."""
    api_keys: tuple[str, ...] = ()
    """Key for the API. Without a key, the API is open to all who reach the port. Also read from PACELINE_API_KEY."""
    cors_origins: tuple[str, ...] = ()
    """Origin whose web pages may call the API from a browser."""
    allowed_hosts: tuple[str, ...] = ()
    """Host name by which clients may address the server, * for any [default: loopback names on a loopback address, else
    any]."""
    served_names: tuple[Name, ...] = ()
    """Model name for clients [default: the model's own name]."""
    max_body_bytes: Bytes = 4 * 2**20
    """Longest request body: 512K, 4M or bytes."""
    body_seconds: Timeout = 30.0
    """Time limit for receiving a request body, in seconds."""
    header_seconds: Timeout = 15.0
    """Time limit for receiving a request's headers, in seconds, from the connection or the request's first byte."""
    write_seconds: Timeout = 60.0
    """Seconds after which a client that reads nothing of its response is disconnected."""
    max_prompt_tokens: Count | None = None
    """Longest prompt, in tokens [default: the size of a cache row]."""
    default_max_tokens: Count = 1024
    """Longest chat answer, in tokens, if the request sets no limit and the context has room for it."""
    max_n: Count = 8
    """Maximum number of answers to one prompt."""
    max_queue: Whole = 256
    """Maximum number of answers waiting for a cache row; further requests get status 429."""
    deadline: Amount = 600.0
    """Time limit for a request, in seconds; 0 disables it."""
    drain_seconds: Annotated[float, within(f"between 0 and {MAX_TIMEOUT_S} seconds", least=0, most=MAX_TIMEOUT_S)] = (
        30.0
    )
    """Seconds that running answers may take after SIGTERM."""
    allow_lossy: bool = False
    """Allow requests with lossy rules, which change the model's output (docs/explanation/lossless.md). Their answers
    are marked lossless: false and never recorded as traces."""
    max_tv: Share | None = None
    """Limit of the mean total variation of a lossy answer; at the limit, verification is lossless."""
    features: bool = False
    """Serve hidden states for training (/v1/features, train --features-from). Needs an API key."""
    features_bytes: Bytes = 2**30
    """Largest response with hidden states."""
    stream_interval_ms: Annotated[float, within("between 0 and 1000", least=0, most=1000)] = 16.0
    """Longest time that streamed tokens wait to be sent with the next round's, in milliseconds; 0 sends every round at
    once."""
    even_chunks: bool = False
    """Hide accepted drafts and lengths of tokens from network listeners: streams send one token per chunk, padded to
    one size, at a steady rate (docs/explanation/side-channels.md)."""
    even_interval_s: Annotated[float, within("between 0.001 and 60", least=0.001, most=60)] | None = None
    """With --even-chunks: seconds from chunk to chunk [default: measured, so that nine of ten recent answers took no
    longer per token]."""

    def __post_init__(self) -> None:
        check(self)
        has_budget, has_rate = self.max_tv is not None, self.even_interval_s is not None
        is_ascii, is_route = all(map(str.isascii, self.api_keys)), ROUTE.fullmatch(self.route)
        are_admin_keys = all(key.strip() and key.isascii() for key in self.admin_keys)
        refuse(
            ConfigError,
            (has_budget and not self.allow_lossy, "max_tv is the budget of lossy rules: it needs allow_lossy"),
            (has_rate and not self.even_chunks, "even_interval_s is the rate of even_chunks: give both"),
            (any(not key.strip() for key in self.api_keys), "an API key must not be empty"),
            (not is_ascii, "an API key must be ASCII text: HTTP headers carry nothing else"),
            (not are_admin_keys, "an admin key must be ASCII text, not empty"),
            (any(not host.strip() for host in self.allowed_hosts), "an allowed host must not be empty"),
            (not is_route, f"route must be auto, tag or header:NAME, not {self.route!r}"),
        )
        self.named_drafters()

    def named_drafters(self) -> dict[str, str]:
        """Parse the setting `drafters`; returns name -> folder, hub id or built-in name of the drafter, in the same
        order. A single drafter without a name has the key "". Without drafters, the result is {"": "none"}. Raises
        ConfigError for an invalid, reserved, repeated or missing name, and for more than `MOST_DRAFTERS` drafters."""
        named: dict[str, str] = {}
        for text in self.drafters or (NONE,):
            name, _, drafter = text.partition("=")
            if not drafter or "/" in name:
                name, drafter = "", text
                if len(self.drafters) > 1:
                    raise ConfigError(f"drafter {text!r} is one of several and needs a name: NAME={text}")
            else:
                check_name(name)
            if name in named:
                raise ConfigError(f"two drafters are called {name!r}: give each a name of its own")
            named[name] = drafter
        if len(named) > MOST_DRAFTERS:
            raise ConfigError(f"at most {MOST_DRAFTERS} drafters, not {len(named)}: leave some out")
        return named


def check_name(name: str) -> None:
    """Raises ConfigError if a drafter cannot have this name. A valid name has up to 32 letters, digits, dots, hyphens
    and underscores, begins with a letter or digit (NAME), and is not reserved (TAKEN)."""
    if not NAME.fullmatch(name) or name.lower() in TAKEN:
        raise ConfigError(
            f"a drafter cannot be called {name!r:.80}: take up to 32 letters, digits and dots, not {', '.join(TAKEN)}"
        )


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Settings for recording traces (prompts and answers of requests) for training. Raises ConfigError on invalid
    values."""

    folder: Path | None = None
    """Record traces of requests in this folder, for training [default: none]."""
    sample: Annotated[float, within("a share, above 0 and at most 1", above=0, most=1)] = 1.0
    """Share of requests that are recorded."""
    redact: tuple[str, ...] = ()
    """Regular expression whose matches are removed from traces."""
    max_bytes: Bytes = 2**30
    """Maximum disk space of all traces; beyond it the oldest are deleted."""
    max_days: Positive = 30.0
    """Delete traces older than this many days."""

    def __post_init__(self) -> None:
        check(self)
        if self.folder is None and (self.sample != 1.0 or self.redact):
            raise ConfigError("folder must be given, for traces that are sampled or redacted to be kept in")
