"""Finds the drafter that serves a cluster (group of similar requests), and predicts the acceptance length of the other
drafters on the server from the gate's verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import DownloadError, UnreachableError
from paceline.loop.adapt.servers.deploy import Deployment


def route_of(deployment: Deployment, cluster: str) -> str | None:
    """Returns the name of the drafter that a cluster is routed to; None without a route, or if the server cannot route
    it. Raises UnreachableError."""
    try:
        return deployment.pinned(cluster)
    except UnreachableError:
        raise
    except DownloadError:  # a server without a pool, or one that was restarted and has no clusters yet
        return None


def serving(deployment: Deployment, cluster: str, incumbent: str) -> tuple[str, str]:
    """Returns (name, drafter) that serves a cluster: the one it is routed to, else the incumbent. Raises
    DownloadError."""
    name = route_of(deployment, cluster)
    drafter = deployment.members().get(name) if name else None
    return (name, drafter) if name and drafter else (deployment.place_of(incumbent), incumbent)


def others(deployment: Deployment, cluster: str, incumbent: str) -> tuple[str, dict[str, str]]:
    """Returns (drafter that serves the cluster, {name: drafter} of the other drafters on the server). Raises
    DownloadError if the cluster cannot be routed."""
    deployment.pinned(cluster)
    name, drafter = serving(deployment, cluster, incumbent)
    return drafter, {member: made_from for member, made_from in deployment.members().items() if member != name}


def scores(
    deployment: Deployment,
    cluster: str,
    incumbent: str,
    scored: Mapping[str, Any] | None,
    fired_at: int,
    current: float,
) -> dict[str, float] | None:
    """Predicts the acceptance length of the other drafters that passed the gate; None if they must be scored first.

    Also None if the server does not answer. `fired_at`: hour in which the alarm fired; older scores do not count.
    `current`: acceptance length of the serving drafter. `scored`: {"hour": hour of scoring, "members": {name:
    verdict}}."""
    try:
        names = others(deployment, cluster, incumbent)[1]
    except UnreachableError:
        return None
    except DownloadError:
        return {}
    if not names:
        return {}
    if scored is None or scored["hour"] < fired_at:
        return None
    gains = {name: verdict["gains"]["drifted"] for name, verdict in scored["members"].items() if name in names}
    return {name: current * gain["candidate"] / gain["incumbent"] for name, gain in gains.items()}
