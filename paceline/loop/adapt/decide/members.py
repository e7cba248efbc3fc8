"""Finds the drafter that serves a cluster, and the acceptance length that the gate's verdicts predict for the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import DownloadError, UnreachableError
from paceline.loop.adapt.servers.deploy import Deployment


def serving(deployment: Deployment, cluster: str, incumbent: str) -> tuple[str, str]:
    """Returns (name, drafter) that serves a cluster: the one it is routed to, else the incumbent. Raises DownloadError."""
    try:
        name = deployment.pinned(cluster)
    except UnreachableError:
        raise
    except DownloadError:
        name = None  # a server may have nothing to choose
    drafter = deployment.members().get(name) if name else None
    return (name, drafter) if name and drafter else (deployment.place_of(incumbent), incumbent)


def others(deployment: Deployment, cluster: str, incumbent: str) -> tuple[str, dict[str, str]]:
    """Returns (drafter that serves the cluster, {name: drafter} of the others). Raises DownloadError if the server cannot
    route."""
    deployment.pinned(cluster)
    name, drafter = serving(deployment, cluster, incumbent)
    return drafter, {each: made_from for each, made_from in deployment.members().items() if each != name}


def scores(
    deployment: Deployment, cluster: str, incumbent: str, scored: Mapping[str, Any] | None, raised: int, now: float
) -> dict[str, float] | None:
    """Predicts the acceptance length of the other drafters that passed the gate. Returns None if they have not been scored
    since hour `raised`, or the server does not answer.

    `now`: acceptance length of the serving drafter. `scored`: {"hour": hour of scoring, "members": {name: verdict}}."""
    try:
        names = others(deployment, cluster, incumbent)[1]
    except UnreachableError:
        return None
    except DownloadError:
        return {}
    if not names:
        return {}
    if scored is None or scored["hour"] < raised:
        return None
    gains = {name: verdict["gains"]["drifted"] for name, verdict in scored["members"].items() if name in names}
    return {name: now * gain["candidate"] / gain["incumbent"] for name, gain in gains.items()}
