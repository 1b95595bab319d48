"""Xray as a user's client (or, face to face with it, as a plain server), from a configuration of ours."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from drivers.install import install
from drivers.install.releases import XRAY, XRAY_BUILDABLE
from scripts.staging.process import Child
from scripts.staging.wait import accepts, bound

Json = dict[str, Any]

ENVIRONMENT: Mapping[str, str] = {"PATH": os.defpath, "GODEBUG": "multipathtcp=0", "TZ": "UTC"}
"""Plain TCP sockets, so that what is seen on the sockets is the same on any host."""


@functools.cache
def find_xray() -> Path:
    """The Xray of this run, the same for every test: `TXNODE_TEST_XRAY_NEW` of whatever version, else the pinned one.

    That is `TXNODE_TEST_XRAY`, else what the installer finds. Raises `InstallError`, which says what to do; a test
    without a core does not pass by being skipped.
    """
    if newer := os.environ.get("TXNODE_TEST_XRAY_NEW"):
        return _named(newer)
    found = install.find(XRAY_BUILDABLE, configured=os.environ.get("TXNODE_TEST_XRAY"), pinned=True)
    if found is None:
        command = f"python -m drivers.install --version {XRAY_BUILDABLE.version} xray"
        raise install.InstallError(
            f"this needs {XRAY_BUILDABLE.label}: run `{command}`, or set TXNODE_TEST_XRAY to its executable"
        )
    return found


def _named(newer: str) -> Path:
    found = install.find(XRAY, configured=newer)
    assert found is not None
    return found


@functools.cache
def xray_number() -> tuple[int, ...]:
    """The version of the Xray of this run."""
    return tuple(map(int, install.version_of(XRAY, find_xray()).split(".")))


class Xray(Child):
    """Runs Xray from this configuration, handed over on its standard input, until the `with` block ends.

    Returns when all its inbounds are bound; raises `AssertionError` with Xray's own words if they cannot be.
    """

    def __init__(self, config: Json) -> None:
        argv = [str(find_xray()), "run", "-c", "stdin:"]
        super().__init__(argv, ENVIRONMENT, stdin=json.dumps(config).encode())
        self.ready(lambda: all(_listens(inbound) for inbound in config["inbounds"]), 10, "Xray listens")


class XrayClient(Xray):
    """Xray as a client: every SOCKS port of `routes` leads into the outbound beside it.

    Hysteria is one user a client: Xray 26.3.27 keeps one session for an address, so that a second outbound to it goes
    as the first one's user.
    """

    def __init__(self, routes: Mapping[int, Json]) -> None:
        super().__init__(client_config(routes))


def client_config(routes: Mapping[int, Json]) -> Json:
    """A configuration with a SOCKS inbound (UDP too) for each port, and a route from it into its outbound."""
    return {
        "log": {"loglevel": "warning"},
        "inbounds": [_socks(port) for port in routes],
        "outbounds": [{**outbound, "tag": f"to-{port}"} for port, outbound in routes.items()],
        "routing": {"rules": [_rule(port) for port in routes]},
    }


def server_config(inbounds: Iterable[Json]) -> Json:
    """A configuration with these inbounds, whose traffic goes out directly.

    Cores after 26.3.27 refuse loopback targets unless `finalRules` allows them; 26.3.27 does not know the key.
    """
    return {
        "log": {"loglevel": "warning"},
        "inbounds": list(inbounds),
        "outbounds": [
            {"tag": "direct", "protocol": "freedom", "settings": {"finalRules": [{"action": "allow"}]}},
            {"tag": "block", "protocol": "blackhole"},
        ],
    }


def _socks(port: int) -> Json:
    settings = {"udp": True, "ip": "127.0.0.1"}
    return {"tag": f"socks-{port}", "listen": "127.0.0.1", "port": port, "protocol": "socks", "settings": settings}


def _rule(port: int) -> Json:
    return {"type": "field", "inboundTag": [f"socks-{port}"], "outboundTag": f"to-{port}"}


def _listens(inbound: Json) -> bool:
    """SOCKS has a UDP port as well, which Xray opens after the TCP port; newer ones open one when it is asked for."""
    port, quic = inbound["port"], inbound.get("streamSettings", {}).get("network") == "hysteria"
    socks = inbound["protocol"] == "socks" and xray_number() <= (26, 3, 27)
    udp = quic or (socks and inbound["settings"].get("udp", False))
    return (quic or accepts(port)) and (not udp or bound(port))
