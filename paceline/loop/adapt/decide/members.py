"""Finds the drafter that serves a cluster (group of similar requests), and predicts the acceptance length of the other
drafters on the server from the verdicts of the gate, which compares drafters with the serving one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import DownloadError, UnreachableError
from paceline.loop.adapt.servers.deployment import Deployment


def route_of(deployment: Deployment, cluster: str) -> str | None:
    """Returns the name of the drafter that the server always uses for this cluster. Returns None if none is set, or if
    the server does not know the cluster or cannot route clusters. Raises UnreachableError if it does not answer."""
    try:
        return deployment.pinned(cluster)
    except UnreachableError:
        raise
    except DownloadError:  # a server without a pool, or one that was restarted and has no clusters yet
        return None


def serving(deployment: Deployment, cluster: str, incumbent: str) -> tuple[str, str]:
    """Returns the drafter that serves this cluster (group of similar requests), as (name on the server, folder or id):
    the one that the cluster is routed to if it is still on the server, else `incumbent` (folder or id).

    Raises DownloadError if the server does not answer, or if the result would be `incumbent` and a paceline server has
    not loaded it."""
    name = route_of(deployment, cluster)
    drafter = deployment.members().get(name) if name else None
    return (name, drafter) if name and drafter else (deployment.place_of(incumbent), incumbent)


def others(deployment: Deployment, cluster: str, incumbent: str) -> tuple[str, dict[str, str]]:
    """Returns (folder or id of the drafter that serves the cluster, {name on the server: folder or id} of all other
    drafters). `incumbent`: folder or id of the drafter that serves clusters without a route. Raises DownloadError if
    the server does not answer, cannot route the cluster, or has not loaded `incumbent`."""
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
    """Predicts the acceptance length of the other drafters on the server on this cluster (group of similar requests).
    Returns {drafter's name: acceptance length} of those that passed the gate, the comparison with the serving drafter.

    The prediction is `current`, the present acceptance length of the serving drafter, times the ratio that the gate
    measured on stored requests (other drafter / serving drafter).

    `scored`: the gate's latest results, {"hour": hour of the comparison, "members": {drafter's name: verdict as JSON}}.
    `fired_at`: hour of the alarm. `incumbent`: folder or id of the drafter that serves clusters without a route.

    Returns {} if the server has no other drafter or cannot route the cluster. Returns None if the server does not
    answer, or if `scored` is missing or older than the alarm: the gate must then run again."""
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
