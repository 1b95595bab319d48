"""Who reads without a key, by where they are: nobody who may be a proxied user, but for a word."""

from __future__ import annotations

import os
from collections.abc import Container
from ipaddress import ip_address
from typing import Any

from node.machine.neighbour import user_of


def is_open_here(paths: Container[str], path: str, transport: Any) -> bool:
    """Whether this needs no key: who asks is on this machine, maybe a proxied user by way of the core."""
    return path in paths and is_loopback(transport.getPeer().host)


def is_open_to_others(_: str, transport: Any) -> bool:
    """Whether another user of this machine asks, and none who may be a core, or a proxied user by way of one."""
    peer, host = transport.getPeer(), transport.getHost()
    try:
        user = user_of((peer.host, peer.port), (host.host, host.port))
    except OSError:  # the kernel is not asked: whoever asks needs a key
        return False
    return user is not None and user != os.getuid()


def is_loopback(host: str) -> bool:
    """Also in the form that IPv4 has among IPv6's."""
    address = ip_address(host.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
