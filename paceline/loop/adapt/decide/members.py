"""Who serves a cluster in a pool of drafters, and what the others would bring there, by the gate's verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import DownloadError, UnreachableError
from paceline.loop.adapt.servers.deploy import Deployment


def serving(deployment: Deployment, cluster: str, incumbent: str) -> tuple[str, str]:
    """Name and drafter of the member that a cluster is sent to, else of the incumbent. Raises DownloadError."""
    try:
        name = deployment.pinned(cluster)
    except UnreachableError:
        raise
    except DownloadError:
        name = None  # a server may have nothing to choose
    drafter = deployment.members().get(name) if name else None
    return (name, drafter) if name and drafter else (deployment.place_of(incumbent), incumbent)


def others(deployment: Deployment, cluster: str, incumbent: str) -> tuple[str, dict[str, str]]:
    """The drafter that serves a cluster, and the others: name -> drafter. Raises DownloadError where none can be chosen."""
    deployment.pinned(cluster)
    name, drafter = serving(deployment, cluster, incumbent)
    return drafter, {each: made_from for each, made_from in deployment.members().items() if each != name}


def scores(
    deployment: Deployment, cluster: str, incumbent: str, scored: Mapping[str, Any] | None, raised: int, now: float
) -> dict[str, float] | None:
    """Tokens a round of the other members that passed the gate; None when they were not judged since the hour `raised`,
    or the server does not answer.

    `now` are those of the member that serves. `scored` is {"hour": when, "members": {name: verdict}}.
    """
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
