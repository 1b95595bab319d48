"""Xray as a user's client, or as a plain server without the node."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from drivers.install import install
from drivers.install.releases import XRAY, XRAY_BUILDABLE
from scripts.staging import socks
from scripts.staging.process import Child
from scripts.staging.wait import accepts, bound

Json = dict[str, Any]

ENVIRONMENT: Mapping[str, str] = {"PATH": os.defpath, "GODEBUG": "multipathtcp=0", "TZ": "UTC"}
"""Multipath TCP is off, so that sockets behave the same on any host."""


@functools.cache
def find_xray() -> Path:
    """The Xray of this run, the same for every test: `TXNODE_TEST_XRAY_NEW` (any version), else the pinned version.

    The pinned one is `TXNODE_TEST_XRAY`, else the one that the installer finds. Raises `InstallError` with the command
    that installs it: a test without a core fails, it is not skipped.
    """
    if newer := os.environ.get("TXNODE_TEST_XRAY_NEW"):
        return _named(newer)
    found = install.find(XRAY_BUILDABLE, configured=os.environ.get("TXNODE_TEST_XRAY"), pinned=True)
    if found is None:
        command = f"python -m scripts.cores --version {XRAY_BUILDABLE.version} xray"
        raise install.InstallError(
            f"{XRAY_BUILDABLE.label} is not installed: run `{command}`, or set TXNODE_TEST_XRAY to its executable"
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
    """Runs Xray with this configuration on its standard input until the `with` block ends.

    Returns when all its inbounds are bound; raises `AssertionError` with Xray's output if one cannot be.
    """

    def __init__(self, config: Json) -> None:
        argv = [str(find_xray()), "run", "-c", "stdin:"]
        super().__init__(argv, ENVIRONMENT, stdin=json.dumps(config).encode())
        self.ready(lambda: all(_listens(inbound) for inbound in config["inbounds"]), 10, "Xray listens")


class XrayClient(Xray):
    """Xray as a client: `routes` maps each SOCKS port to its outbound.

    Use one client per Hysteria user: Xray 26.3.27 keeps one session per server address, so that a second outbound to it
    would run as the user of the first.
    """

    def __init__(self, routes: Mapping[int, Json]) -> None:
        super().__init__(client_config(routes))
        socks.hurry(routes)


def client_config(routes: Mapping[int, Json]) -> Json:
    """A configuration with a SOCKS inbound (UDP too) for each port, and a rule that routes it to its outbound."""
    return {
        "log": {"loglevel": "warning"},
        "inbounds": [_socks(port) for port in routes],
        "outbounds": [{**outbound, "tag": f"to-{port}"} for port, outbound in routes.items()],
        "routing": {"rules": [_rule(port) for port in routes]},
    }


def server_config(inbounds: Iterable[Json]) -> Json:
    """A configuration with these inbounds and a direct outbound.

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
    """Whether the inbound's ports are bound.

    Xray 26.3.27 opens the UDP port of SOCKS after the TCP port; newer versions open one on request.
    """
    port, quic = inbound["port"], inbound.get("streamSettings", {}).get("network") == "hysteria"
    socks = inbound["protocol"] == "socks" and xray_number() <= (26, 3, 27)
    udp = quic or (socks and inbound["settings"].get("udp", False))
    return (quic or accepts(port)) and (not udp or bound(port))
