"""Finds the drafter that serves a cluster (group of similar requests), and predicts the acceptance length of the other
drafters on the server from the verdicts of the gate, which compares drafters with the serving one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import DownloadError, UnreachableError
from paceline.loop.adapt.servers.deployment import Deployment


def route_of(deployment: Deployment, cluster: str) -> str | None:
    """Returns the name of the drafter that a cluster is routed to; None without a route, or if the server cannot route
    it. Raises UnreachableError if the server does not answer."""
    try:
        return deployment.pinned(cluster)
    except UnreachableError:
        raise
    except DownloadError:  # a server without a pool, or one that was restarted and has no clusters yet
        return None


def serving(deployment: Deployment, cluster: str, incumbent: str) -> tuple[str, str]:
    """Returns the drafter that serves a cluster, as (its name on the server, the folder or id it was loaded from): the
    one that the cluster is routed to, else the incumbent. Raises DownloadError if the server does not answer or does
    not have the incumbent."""
    name = route_of(deployment, cluster)
    drafter = deployment.members().get(name) if name else None
    return (name, drafter) if name and drafter else (deployment.place_of(incumbent), incumbent)


def others(deployment: Deployment, cluster: str, incumbent: str) -> tuple[str, dict[str, str]]:
    """Returns (drafter that serves the cluster, {name on the server: drafter} of the server's other drafters). Each
    drafter is given as the folder or id that it was loaded from. Raises DownloadError if the server cannot route the
    cluster or does not answer."""
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
    """Predicts acceptance lengths on this cluster (group of similar requests) of the drafters on the server that do not
    serve it now. Returns {drafter's name on the server: acceptance length}.

    Each is `current`, the present acceptance length of the serving drafter, times the ratio of acceptance lengths,
    other to serving drafter, that the gate measured. `scored`: the gate's latest results, {"hour": hour of the
    comparison, "members": {name of a drafter that passed: verdict as JSON}}. `incumbent`: folder or id of the drafter
    that serves clusters without a route.

    Returns {} if the server has no other drafter or cannot route the cluster; None if it does not answer, or if
    `scored` is missing or older than `fired_at`, the hour in which the alarm (a lasting drop of acceptance) fired."""
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
