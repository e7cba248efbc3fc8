"""Settings of `paceline record`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from paceline.bounds import Name, check, within
from paceline.errors import ConfigError
from paceline.net.streaming import reason_of, without_secrets

ADD_FIELDS = ("none", "vllm", "sglang")


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """Settings of a recording: the served model, and the server to record or the log files to import. Raises
    ConfigError on impossible values."""

    model: str
    """The served model: built-in name, folder, GGUF file or hub id. Its tokenizer, chat template and
    generation_config.json are read."""
    upstream: str | None = None
    """Address of an OpenAI-compatible server, without /v1; clients send their requests to this proxy instead."""
    imports: tuple[Path, ...] = ()
    """Files to import in place of a proxy: logs of vllm serve, or OpenTelemetry spans as OTLP JSON lines."""
    served_names: tuple[Name, ...] = ()
    """Record only requests for this model name [default: any]."""
    add_fields: Annotated[str, ADD_FIELDS] = "none"
    """Engine whose fields for token ids the proxy adds to requests that lack them (vLLM: return_token_ids; SGLang also:
    return_spec_tokens_details). Use it if the engine parses reasoning or tool calls; clients see the ids in answers."""
    sampling_defaults: str = "model"
    """Sampling settings of requests that leave fields out: model (generation_config.json, as vLLM and SGLang do),
    engine (neutral, as with vLLM's --generation-config vllm), none (unknown), or values such as
    temperature=0.6,top_p=0.95,top_k=20."""
    metrics_port: Annotated[int, within("between 1 and 65535", least=1, most=65535)] | None = None
    """Serve the proxy's own Prometheus metrics at 127.0.0.1:PORT/metrics; the path /metrics of the proxy itself returns
    the recorded server's."""

    def __post_init__(self) -> None:
        check(self)
        if bool(self.imports) == (self.upstream is not None):
            raise ConfigError(
                "give either --upstream URL, to record as a proxy, or --import FILE, to read what another recorded"
            )
        if self.upstream is None:
            if self.add_fields != "none" or self.metrics_port is not None:
                raise ConfigError("--add-fields and --metrics-port are for a proxy: leave them out with --import")
            return
        whole = f"--upstream {without_secrets(self.upstream)!r}"
        try:
            parts = urlsplit(self.upstream)
            _ = parts.port, (parts.hostname or "").encode("idna")  # the proxy needs both
        except ValueError as error:
            reason = reason_of(self.upstream, error)
            raise ConfigError(f"{whole} is no address{reason}: write http://HOST:PORT") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{whole} is no address: write http://HOST:PORT")
        if parts.username or parts.password:
            raise ConfigError("--upstream holds a password: clients send their own keys, leave it out")
        if parts.query or parts.fragment:
            raise ConfigError(f"{whole} ends in a query: write http://HOST:PORT")
        if parts.path.rstrip("/").endswith("/v1"):
            raise ConfigError(f"{whole} ends in /v1, which clients ask for themselves: leave it out")
