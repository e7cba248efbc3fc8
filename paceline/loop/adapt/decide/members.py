"""Finds the drafter that serves a cluster (group of similar requests), and predicts the acceptance length of the other
drafters on the server from the verdicts of the gate, which compares drafters with the serving one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import RejectedError, UnreachableError
from paceline.loop.adapt.servers.deployment import Deployment


def route_of(deployment: Deployment, cluster: str) -> str | None:
    """Returns the name of the drafter to which the server routes all requests of this cluster (group of similar
    requests). Returns None if the cluster has no route or is unknown to the server, or if the server cannot route
    clusters. Raises UnreachableError if the server does not answer."""
    try:
        return deployment.pinned(cluster)
    except RejectedError:  # a server without a pool, or one that was restarted and has no clusters yet
        return None


def serving(deployment: Deployment, cluster: str, incumbent: str) -> tuple[str, str]:
    """Returns the drafter that serves this cluster (group of similar requests), as (name on the server, folder or hub
    id).

    The server sends a cluster with a route to one drafter. The general drafter `incumbent`, given as folder or hub id,
    serves clusters without a route, and clusters whose drafter has left the server.

    Raises DownloadError if the server does not answer, or if the result is `incumbent` and the server has not loaded
    it."""
    name = route_of(deployment, cluster)
    drafter = deployment.members().get(name) if name else None
    return (name, drafter) if name and drafter else (deployment.place_of(incumbent), incumbent)


def others(deployment: Deployment, cluster: str, incumbent: str) -> tuple[str, dict[str, str]]:
    """Lists the drafters on the server that do not serve this cluster (group of similar requests). Returns (folder or
    hub id of the drafter that serves it, {name on the server: folder or hub id} of the others).

    `incumbent`: folder or hub id of the drafter that serves clusters without a route. Raises DownloadError if the
    server does not answer, cannot route the cluster, or has not loaded the serving drafter."""
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
    """Predicts the acceptance length that each other drafter on the server would have on this cluster (group of similar
    requests). The gate has compared these drafters with the serving one on stored requests. A prediction is `current`
    times the ratio of acceptance lengths that the gate measured (other drafter / serving drafter).

    Returns {drafter's name: acceptance length} of the drafters that passed the gate; {} if the server has no other
    drafter, cannot route the cluster, or has not loaded the drafter that serves it. Returns None if the server does not
    answer, or if the gate must run first, because `scored` is missing or older than the alarm.

    - `current`: present acceptance length of the serving drafter.
    - `scored`: latest results of the gate, {"hour": hour of the comparison, "members": {drafter's name: verdict as
      JSON}}.
    - `fired_at`: hour of the alarm that needs the prediction.
    - `incumbent`: folder or hub id of the drafter that serves clusters without a route."""
    try:
        names = others(deployment, cluster, incumbent)[1]
    except UnreachableError:
        return None
    except RejectedError:
        return {}
    if not names:
        return {}
    if scored is None or scored["hour"] < fired_at:
        return None
    gains = {name: verdict["gains"]["drifted"] for name, verdict in scored["members"].items() if name in names}
    return {name: current * gain["candidate"] / gain["incumbent"] for name, gain in gains.items()}
