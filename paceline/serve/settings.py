"""Settings of the server: frozen, documented field by field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.bounds import Amount, Count, Positive, Whole, check, within
from paceline.config import Bytes
from paceline.errors import ConfigError, refuse


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Where the server listens, whom it lets in, and what it takes at most. Raises ConfigError on impossible values."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface."""
    port: Annotated[int, within("between 0 and 65535", least=0, most=65535)] = 8000
    """Port; 0 takes a free one."""
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
    stream_interval_ms: Annotated[float, within("between 0 and 1000", least=0, most=1000)] = 16.0
    """How long a token may wait for the next round's, to be sent together; 0 sends each round's at once."""

    def __post_init__(self) -> None:
        check(self)
        refuse(
            ConfigError,
            (any(not key.strip() for key in self.api_keys), "an API key must not be empty"),
            (any(not key.isascii() for key in self.api_keys), "an API key must be ASCII text: HTTP headers carry nothing else"),
            (any(not host.strip() for host in self.allowed_hosts), "an allowed host must not be empty"),
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
            raise ConfigError("--trace-sample and --trace-redact need --traces FOLDER")


def speculation(text: str, num_drafted: int | None, drafter: str) -> dict[str, object]:
    """`--speculate` as settings of the engine: auto; full; off; or a number, drafted in every round. Raises ConfigError."""
    if text in ("auto", "full"):
        return {"plan": "auto" if text == "auto" else "fixed", "num_drafted": num_drafted, "drafter": drafter}
    if text in ("off", "0"):
        return {"plan": "auto", "num_drafted": None, "drafter": "none"}
    if text.isdecimal() and text.isascii():
        if num_drafted is not None:
            raise ConfigError("--num-drafted and --speculate N both say how much to draft: leave one out")
        return {"plan": "fixed", "num_drafted": int(text), "drafter": drafter}
    raise ConfigError(f"--speculate {text!r} is not known: choose auto, full, off or a number of drafts")
