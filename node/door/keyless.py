"""Decides which clients may read pages without a key.

A proxied user may come from this machine, by way of the core: they get at most `ok` or `not ok`.
"""

from __future__ import annotations

import os
from collections.abc import Container
from ipaddress import ip_address
from typing import Any

from node.machine.peer_user import user_of


def is_open_here(paths: Container[str], path: str, transport: Any) -> bool:
    """Whether this path needs no key: one of `paths`, from loopback. The client may be a proxied user."""
    return path in paths and is_loopback(transport.getPeer().host)


def is_open_to_others(_: str, transport: Any) -> bool:
    """Whether the client runs as another user of this machine, so that it is no core and no proxied user."""
    peer, host = transport.getPeer(), transport.getHost()
    try:
        user = user_of((peer.host, peer.port), (host.host, host.port))
    except OSError:  # the kernel does not answer: the client needs a key
        return False
    return user is not None and user != os.getuid()


def is_loopback(host: str) -> bool:
    """Whether this is a loopback address, also an IPv4-mapped one."""
    address = ip_address(host.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
