"""The types that a sing-box configuration may contain."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from drivers.process.allowlist import Allowed
from drivers.sing_box import allowlist
from drivers.sing_box.config import plan
from node.base.errors import InvalidConfig
from scripts.staging.core import ENVIRONMENT
from scripts.staging.sing_box import BUILDS, find_sing_box

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"inbounds": [{"type": "tun"}]}, "inbounds[0]", "tun"),
    ({"inbounds": [{"type": "vless"}, {"type": "cloudflared", "tag": "in"}]}, "inbounds[1] (in)", "cloudflared"),
    ({"outbounds": [{"type": "tor"}]}, "outbounds[0]", "tor"),
    ({"endpoints": [{"type": "tailscale"}]}, "endpoints[0]", "tailscale"),
    ({"endpoints": [{"type": "wireguard", "tag": "warp", "system": True}]}, "endpoints[0] (warp).system", "tun"),
    *(
        ({"services": [{"type": name}]}, "services[0]", name)
        for name in ("ccm", "ocm", "derp", "resolved", "usbip-server", "usbip-client", "hysteria-realm", "oom-killer")
    ),
    ({"dns": {"servers": [{"type": "local"}, {"type": "resolved"}]}}, "dns.servers[1]", "resolved"),
    ({"dns": {"servers": [{"type": "tailscale"}]}}, "dns.servers[0]", "tailscale"),
    ({"route": {"rule_set": [{"tag": "a", "type": "later"}]}}, "route.rule_set[0] (a)", "later"),
    ({"certificate_providers": [{"type": "tailscale"}]}, "certificate_providers[0]", "tailscale"),
    (
        {"inbounds": [{"type": "trojan", "tls": {"certificate_provider": {"type": "tailscale"}}}]},
        "inbounds[0].tls.certificate_provider",
        "tailscale",
    ),
    ({"inbounds": [{"type": "vless", "transport": {"type": "later"}}]}, "inbounds[0].transport", "later"),
    ({"outbounds": [{"type": "vless", "transport": {"type": "later"}}]}, "outbounds[0].transport", "later"),
    ({"experimental": {"later": {}}}, "experimental", "later"),
    ({"later": {}}, "the configuration", "later"),
]


def take_over(tree: dict[str, Any], allow: str = "") -> None:
    plan(json.dumps(tree).encode(), frozenset(), Path("/state/run"), True, Allowed(frozenset(allow.split(","))))


@pytest.mark.parametrize(("tree", "where", "name"), REFUSED)
def test_refused_unless_allowed(tree: dict[str, Any], where: str, name: str) -> None:
    """The error has the type and its place, unless the setting has the type."""
    with pytest.raises(InvalidConfig) as refused:
        take_over(tree)
    assert str(refused.value).startswith(f"{where}: {name} is refused, because ")
    assert f"CORE_ALLOW={name} " in str(refused.value)
    take_over(tree, name)


def test_known_types_pass() -> None:
    """All types together, also with options that the node does not know."""
    take_over(
        {
            **{kind: {} for kind in ("log", "ntp", "certificate")},
            "http_clients": [{"tag": "h"}],
            "inbounds": [{"type": kind, "later": {"type": "tor"}} for kind in allowlist.INBOUNDS],
            "outbounds": [{"type": kind, "later": [1]} for kind in allowlist.OUTBOUNDS],
            "endpoints": [{"type": "wireguard", "system": False}],
            "services": [{"type": kind} for kind in allowlist.SERVICES],
            "certificate_providers": [{"type": kind, "tag": kind} for kind in allowlist.CERTIFICATE_PROVIDERS],
            "dns": {"servers": [{"type": kind} for kind in allowlist.DNS_SERVERS if kind]},
            "route": {"rule_set": [{"type": kind, "tag": kind} for kind in allowlist.RULE_SETS if kind]},
            "experimental": {kind: {} for kind in allowlist.EXPERIMENTAL},
        }
    )


@pytest.mark.parametrize(
    "tree",
    [
        [],
        {"inbounds": {}},
        {"inbounds": [None]},
        {"inbounds": [{"type": 1}]},
        {"inbounds": [{"type": "vless", "tag": []}]},
        {"inbounds": [{"type": "vless", "listen_port": "443"}]},
        {"inbounds": [{"type": "vless", "listen_port": True}]},
        {"inbounds": [{"type": "vless", "users": [1]}]},
        {"outbounds": [{"type": "vless", "transport": "ws"}]},
        {"route": {"rules": {}}},
        {"experimental": []},
        {"dns": {"servers": "x"}},
    ],
)
def test_wrong_types_of_values(tree: Any) -> None:
    """No core prints these; the error says that they cannot be parsed."""
    with pytest.raises(InvalidConfig, match="cannot parse this configuration"):
        take_over(tree)


def test_deep_nesting_is_refused() -> None:
    """The core accepts rules in rules of any depth."""
    rule: dict[str, Any] = {"action": "reject"}
    for _ in range(120):
        rule = {"type": "logical", "mode": "and", "rules": [rule]}
    with pytest.raises(InvalidConfig, match="nested too deeply"):
        take_over({"route": {"rules": [rule]}})


@pytest.mark.core
@pytest.mark.parametrize("build", list(BUILDS))
def test_the_core_knows_what_the_node_knows(build: str) -> None:
    """The lists contain no misspelled type."""

    def said(tree: dict[str, Any]) -> str:
        argv = [str(find_sing_box(build)), "format", "-c", "stdin", "--disable-color"]
        done = subprocess.run(argv, input=json.dumps(tree).encode(), capture_output=True, env=ENVIRONMENT, check=False)
        return done.stderr.decode()

    def bare(type_: str, kind: str) -> dict[str, Any]:
        version = {"version": 5 if kind == "inbounds" else 4} if type_ == "snell" else {}
        return {"type": type_, "tag": type_, **version}

    for kind, types in (
        ("inbounds", allowlist.INBOUNDS),
        # A removed type fails while the core parses it.
        ("outbounds", set(allowlist.OUTBOUNDS) - {"dns"}),
        ("endpoints", allowlist.ENDPOINTS),
        ("services", [*allowlist.SERVICES, "ccm", "ocm", "derp", "resolved", "usbip-server", "usbip-client"]),
        ("certificate_providers", allowlist.CERTIFICATE_PROVIDERS),
    ):
        assert said({kind: [bare(type_, kind) for type_ in types]}) == ""
    servers = [{"type": kind, "tag": kind} for kind in allowlist.DNS_SERVERS if kind not in ("", "legacy")]
    assert said({"dns": {"servers": servers}}) == ""
    assert said(dict.fromkeys(allowlist.TOP)) == ""
    assert said({"experimental": dict.fromkeys(allowlist.EXPERIMENTAL)}) == ""
    assert "unknown inbound type" in said({"inbounds": [{"type": "no such type"}]})
