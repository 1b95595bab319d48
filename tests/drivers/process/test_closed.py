"""What is closed to users: the settings, the machine's addresses, and which targets they cover."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from twisted.internet.task import Clock

from drivers.process.closed import PRIVATE, SERVER, Closed, Effect
from node.base.logs import LogRing
from node.contract.driver import Host

LAN, V6, LOCAL = "192.0.2.10", "2001:db8::10", "fe80::1%eth0"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A machine with loopback and eth0; the interfaces that are up can be changed."""
    up = {"lo": True, "eth0": True, "docker0": False}
    found = {"lo": ["127.0.0.1", "::1"], "eth0": [LAN, V6, LOCAL, "02:fc:00:00:00:01"]}
    addresses = {name: [SimpleNamespace(address=one) for one in some] for name, some in found.items()}

    def stats() -> dict[str, Any]:
        flags = {name: "up,loopback" if name == "lo" else "up" for name in up}
        return {name: SimpleNamespace(isup=is_up, flags=flags[name]) for name, is_up in up.items()}

    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", stats)
    monkeypatch.setattr("drivers.process.closed._has_route", lambda _: True)
    return up


def closed(*ports: int, **settings: str) -> Closed:
    clock: Any = Clock()
    return Closed.of(Host(clock, LogRing(clock, 1), Path(), settings, ports=ports))


def test_by_default() -> None:
    """The server is closed, with the node's ports at the machine's addresses, and the one interface is bound to."""
    assert closed(62050, 9090) == Closed(SERVER, (LAN, V6), (62050, 9090), interface="eth0", chosen=True)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"PROXY_TO_SERVER": "allow"}, Closed()),
        ({"PROXY_TO_SERVER": "rules"}, Closed(SERVER, yields=True, interface="eth0", chosen=True)),
        ({"PROXY_TO_PRIVATE": "block"}, Closed((*SERVER, *PRIVATE), interface="eth0", chosen=True)),
        (
            {"PROXY_TO_SERVER": "allow", "PROXY_TO_PRIVATE": "block"},
            Closed(PRIVATE, interface="eth0", chosen=True),
        ),
        ({"PROXY_INTERFACE": "none"}, Closed(SERVER)),
        ({"PROXY_INTERFACE": "wg0"}, Closed(SERVER, interface="wg0")),
    ],
)
def test_settings(settings: dict[str, str], expected: Closed) -> None:
    assert closed(**settings) == expected


def test_another_interface(machine: dict[str, bool]) -> None:
    """With several interfaces the node chooses none, and reports one that came up since."""
    chosen = closed()
    assert chosen.moved == ""
    machine["docker0"] = True
    assert "Start again" in chosen.moved
    assert closed().interface == ""
    assert closed(PROXY_INTERFACE="eth0").moved == ""


@pytest.mark.parametrize(
    ("text", "is_closed"),
    [
        ("127.0.0.1", True),
        ("127.0.0.53/32", True),
        ("127.0.0.0/8", True),
        ("::1", True),
        ("169.254.169.254", True),
        ("fe80::1", True),
        ("192.0.2.10", False),
        ("0.0.0.0/0", False),
        ("::/0", False),
        ("10.0.0.1", False),
        ("geoip:private", False),
        ("localhost", False),
    ],
)
def test_covers(text: str, is_closed: bool) -> None:
    assert Closed(SERVER).covers(text) == is_closed


def test_mapped() -> None:
    networks, own = Closed(("127.0.0.0/8", "::1/128"), (LAN, V6)).with_mapped
    assert networks == ("127.0.0.0/8", "::1/128", "::ffff:127.0.0.0/104")
    assert own == (LAN, V6, "::ffff:192.0.2.10/128")


@pytest.mark.parametrize(("four", "six", "expected"), [(0, 1, True), (1, 1, False), (1, 0, False), (0, 0, False)])
def test_without_ipv4(four: int, six: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes decide, as a machine with IPv6 only may have private IPv4 addresses, such as Docker's."""
    monkeypatch.setattr("drivers.process.closed._has_route", lambda address: bool(six if ":" in address else four))
    assert closed(62050).without_ipv4 == expected


def test_effect() -> None:
    """A warning only where later packets get through; a note in any case."""
    bound = Closed(("127.0.0.0/8",), (LAN,), (1, 2), interface="eth0")
    assert Effect.of(bound).warnings == Effect.of(bound, first_only=True).warnings == ()
    assert Effect.of(bound, first_only=True, all_bound=False).warnings
    assert Effect.of(Closed(("127.0.0.0/8",)), first_only=True).warnings
    # Only such a core is bound to an interface.
    assert (Effect.of(bound).binding, Effect.of(bound, first_only=True).binding) == (Closed(), bound)
    assert Effect.of(bound, first_only=True).notes == [
        "PROXY_TO_SERVER=block: users do not reach 127.0.0.0/8, nor ports 1, 2 of 192.0.2.10; direct outbounds use eth0"
    ]
