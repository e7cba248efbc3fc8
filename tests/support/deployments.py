"""Deployments to one server that only looks like one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_servers import FakeServer

from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.servers.deploy import open_deployment
from paceline.loop.adapt.servers.deployment import Deployment


def opened(server: FakeServer, incumbent: Path | None = None, **changes: Any) -> Deployment:
    return open_deployment(DeployConfig(servers=(server.url,), **changes), incumbent)
