"""Settings of `paceline record`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from paceline.errors import ConfigError, refuse


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """Settings of a recording: the served model, and the server to record or the log files to import. Raises
    ConfigError on impossible values."""

    model: str
    """The served model: built-in name, folder, GGUF file or hub id. Only its tokenizer and chat template are read."""
    upstream: str | None = None
    """Address of an OpenAI-compatible server, without /v1; clients send their requests to this proxy instead."""
    imports: tuple[Path, ...] = ()
    """Files to import in place of a proxy: logs of vllm serve, or OpenTelemetry spans as OTLP JSON lines."""
    served_names: tuple[str, ...] = ()
    """Record only requests for this model name [default: any]."""

    def __post_init__(self) -> None:
        if bool(self.imports) == (self.upstream is not None):
            raise ConfigError(
                "give either --upstream URL, to record as a proxy, or --import FILE, to read what another recorded"
            )
        if self.upstream is None:
            return
        parts, whole = urlsplit(self.upstream), f"--upstream {self.upstream!r}"
        refuse(
            ConfigError,
            (
                parts.scheme not in ("http", "https") or not parts.hostname,
                f"{whole} is no address: write http://HOST:PORT",
            ),
            (
                bool(parts.username or parts.password),
                "--upstream holds a password: clients send their own keys, leave it out",
            ),
            (bool(parts.query or parts.fragment), f"{whole} ends in a query: write http://HOST:PORT"),
            (
                parts.path.rstrip("/").endswith("/v1"),
                f"{whole} ends in /v1, which clients ask for themselves: leave it out",
            ),
        )
