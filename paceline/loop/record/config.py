"""What `paceline record` is asked: frozen, documented field by field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from paceline.errors import ConfigError, refuse


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """Whose answers are kept. Raises ConfigError on impossible values."""

    model: str
    """The model behind that server: built-in name, folder, GGUF file or hub id. Of it only tokenizer and template are read."""
    upstream: str | None = None
    """Address of an OpenAI-compatible server, without /v1: its clients ask this proxy instead."""
    imports: tuple[Path, ...] = ()
    """In place of a proxy: a log of vllm serve, or OpenTelemetry spans as OTLP JSON lines."""
    served_names: tuple[str, ...] = ()
    """Keep only what was asked of the model under this name [default: of any]."""

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
            (parts.scheme not in ("http", "https") or not parts.hostname, f"{whole} is no address: write http://HOST:PORT"),
            (bool(parts.username or parts.password), "--upstream holds a password: clients send their own keys, leave it out"),
            (bool(parts.query or parts.fragment), f"{whole} ends in a query: write http://HOST:PORT"),
            (
                parts.path.rstrip("/").endswith("/v1"),
                f"{whole} ends in /v1, which clients ask for themselves: leave it out",
            ),
        )
