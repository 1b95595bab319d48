"""Proxied users do not reach the server itself: by address, by name, by a name that changes, by TCP and UDP.

The server and the machines around it live in network namespaces of the test's own: see `tests.harness.town`.
"""

from __future__ import annotations

from typing import Any

import pytest

from scripts.staging.inbounds import NAMES
from tests.harness.grounds import SING_BOX, XRAY, Ground
from tests.harness.town import ALLOWED, LATER, METADATA, OPEN, OWN, PLAIN, RESOLVER, visit

# A user has one Shadowsocks credential.
KINDS = [name for name in NAMES if not name.startswith("shadowsocks") or name == "shadowsocks-2022-aes-128"]
FEW = ("vless-raw", "trojan-tls")
# What a name with a closed and an open address may reach.
HARMLESS = {"", "allowed", "own"}
# What the machines answer that are no business of users.
INNER = {"loopback", "metadata", "node"}


def closed(reached: dict[str, str]) -> None:
    """Users reach the other machine, and nothing of the server's."""
    assert {name for name, who in reached.items() if who in INNER} == set()
    for host in OPEN:
        assert (reached[f"tcp {host}"], reached[f"udp {host}"]) == ("allowed", "allowed"), host
    # Other services of the server's own address are as open to users as to the world.
    assert reached[f"tcp {OWN}"] == "own"
    assert reached["later allowed"] == "allowed"


@pytest.mark.slow
def test_closed(ground: Ground) -> None:
    """By default, over each protocol, and `info` says what the node has added."""
    found = visit(KINDS if ground is XRAY else FEW, ground.name, PROXY_TO_SERVER="")
    for name, reached in found["reached"].items():
        assert reached, name
        closed(reached)
    assert {found["reached"][PLAIN][f"plain {host}"] for host in OPEN} == {"allowed"}
    assert not any("PROXY" in warning for warning in found["warnings"])
    [note] = found["notes"]
    assert note.startswith("PROXY_TO_SERVER=block: users do not reach 127.0.0.0/8")


@pytest.mark.slow
def test_open(ground: Ground) -> None:
    """With `allow` the probes do reach the server: they can tell."""
    found = visit(FEW[:1], ground.name, PROXY_TO_SERVER="allow")
    reached = found["reached"][FEW[0]]
    for host in ("127.0.0.1", "loop.test", "zero.test", "mapped.test"):
        assert (reached[f"tcp {host}"], reached[f"udp {host}"]) == ("loopback", "loopback"), host
    assert reached[f"tcp {METADATA}"] == reached["tcp meta.test"] == "metadata"
    assert reached["later 127.0.0.1"] == "loopback"
    assert reached["node 127.0.0.1"] == reached[f"node {OWN}"] == "node"
    assert found["notes"] == []


@pytest.mark.slow
def test_without_an_interface(ground: Ground) -> None:
    """Where later packets of a UDP session get through, bound to no interface, `info` warns of it."""
    found = visit(FEW[:1], ground.name, PROXY_TO_SERVER="block", PROXY_INTERFACE="none")
    reached = found["reached"][FEW[0]]
    assert {name for name, who in reached.items() if who in INNER} <= {f"later {host}" for host in LATER}
    assert any("Set PROXY_INTERFACE" in one for one in found["warnings"]) == (reached["later 127.0.0.1"] == "loopback")


# A rule of the configuration's own for a target of the server.
ON_PURPOSE: dict[str, Any] = {
    XRAY.name: {
        "routing": {"rules": [{"ip": ["127.0.0.9"], "network": "tcp", "outboundTag": "direct"}]},
        "outbounds": [
            {
                "tag": "direct",
                "protocol": "freedom",
                "settings": {
                    "finalRules": [
                        {"action": "allow", "ip": ["127.0.0.9"], "network": "tcp"},
                        # Newer versions count networks for documentation as private.
                        {"action": "allow", "ip": [ALLOWED, OWN]},
                    ]
                },
            }
        ],
    },
    SING_BOX.name: {"route": {"rules": [{"ip_cidr": ["127.0.0.9"], "network": ["tcp"], "outbound": "direct"}]}},
}


@pytest.mark.slow
def test_rules(ground: Ground) -> None:
    """With `rules` the configuration's own rule for a target of the server holds, and opens nothing else."""
    reached = visit(FEW[:1], ground.name, ON_PURPOSE[ground.name], PROXY_TO_SERVER="rules")["reached"][FEW[0]]
    assert reached["tcp 127.0.0.9"] == "loopback"
    inner = {name for name, who in reached.items() if who in INNER}
    # On an Xray without `finalRules` the rule's outbound is bound to no interface.
    assert inner - {f"later {host}" for host in LATER} == {"tcp 127.0.0.9"}


@pytest.mark.slow
def test_block_wins(ground: Ground) -> None:
    """With `block` such a rule opens nothing."""
    closed(visit(FEW[:1], ground.name, ON_PURPOSE[ground.name], PROXY_TO_SERVER="block")["reached"][FEW[0]])


@pytest.mark.slow
@pytest.mark.parametrize("server", [RESOLVER, OPEN[1]])
def test_own_dns(server: str) -> None:
    """Xray asks DNS servers by its router: one of the machine answers all the same, and one with a name is found."""
    found = visit(FEW[:1], XRAY.name, {"dns": {"servers": [server]}}, PROXY_TO_SERVER="block")
    closed(found["reached"][FEW[0]])
