"""Recognises addresses of this machine. Imports only the standard library, because other engines load it too."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str, *names: str) -> bool:
    """True if `host` is a loopback address, such as 127.0.0.1 or ::1, or one of the host names `names`. The case of
    `host` is ignored; `names` are in lower case."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in names
