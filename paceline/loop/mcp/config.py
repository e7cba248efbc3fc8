"""Options of `paceline mcp`, as a frozen dataclass. Imports no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.bounds import check, within
from paceline.errors import ConfigError, refuse
from paceline.net.loopback import is_loopback

LEAST_KEY = 16
"""Minimum characters of the key."""


@dataclass(frozen=True, slots=True)
class McpConfig:
    """Address, key and readable folders of the MCP server. Raises ConfigError on invalid values."""

    host: str = "127.0.0.1"
    """Loopback address to listen on, 127.0.0.1 or ::1; all others are refused."""
    port: Annotated[int, within("between 0 and 65535", least=0, most=65535)] = 8765
    """Port; 0 selects a free one."""
    key: str | None = None
    """Key that clients send as Authorization: Bearer KEY, at least 16 characters. Also read from PACELINE_MCP_KEY."""
    folders: tuple[Path, ...] = ()
    """Further folder whose drafters and prompts the tools may read; --traces and --state are readable anyway."""

    def __post_init__(self) -> None:
        check(self)
        refuse(
            ConfigError,
            (
                not is_loopback(self.host),
                f"host {self.host} is no loopback address: take 127.0.0.1, and forward its port if needed",
            ),
            (
                self.key is not None and len(self.key) < LEAST_KEY,
                f"key must have at least {LEAST_KEY} characters: take the output of openssl rand -hex 16",
            ),
        )
