"""Which types of things a configuration of sing-box may have. Pure.

Types: `sing-box format` of 1.14.1 and 1.14.4, asked for each; what they do: the sources of sing-box.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from drivers.process.known import Allowed, shown

Json = dict[str, Any]

TOP = (
    *("$schema", "log", "dns", "ntp", "certificate", "certificate_providers", "http_clients", "endpoints", "inbounds"),
    *("outbounds", "route", "services", "experimental"),
)
# What stands in `experimental`; the node takes all of it out.
EXPERIMENTAL = ("cache_file", "clash_api", "v2ray_api", "debug")
INBOUNDS = (
    *("direct", "socks", "http", "mixed", "shadowsocks", "vmess", "trojan", "naive", "hysteria", "shadowtls", "vless"),
    *("anytls", "tuic", "hysteria2", "snell", "redirect", "tproxy"),
)
# Some were removed from the core, which says so better than the node could.
_REMOVED = ("wireguard", "dns", "shadowsocksr")
OUTBOUNDS = (
    *("direct", "block", "selector", "urltest", "socks", "http", "shadowsocks", "vmess", "trojan", "naive", "hysteria"),
    *("shadowtls", "vless", "anytls", "tuic", "hysteria2", "snell", "ssh", *_REMOVED),
)
ENDPOINTS = ("wireguard",)
# The node has its own of both, and takes these out.
SERVICES = ("api", "ssm-api")
DNS_SERVERS = ("", "legacy", "udp", "tcp", "tls", "https", "quic", "h3", "local", "hosts", "fakeip", "dhcp", "mdns")
RULE_SETS = ("", "inline", "local", "remote")
CERTIFICATE_PROVIDERS = ("acme", "cloudflare-origin-ca")
TRANSPORTS = ("", "http", "ws", "quic", "grpc", "httpupgrade")

# Why the others are refused, by name.
DANGERS: Mapping[str, str] = {
    "tor": "it runs a program",
    "tailscale": "others manage what it connects, and its SSH server is a shell",
    "tun": "it changes the routes of the machine",
    "cloudflared": "others manage what it lets in",
    "derp": "it serves strangers beside the core's users, who are neither known nor counted",
    "hysteria-realm": "it serves strangers beside the core's users, who are neither known nor counted",
    "resolved": "it takes the place of the machine's own resolver",
    "ccm": "it hands out credentials of the machine's user",
    "ocm": "it hands out credentials of the machine's user",
    "usbip-server": "it hands out devices of the machine",
    "usbip-client": "it brings devices into the machine",
}
_KINDS: Mapping[str, Collection[str]] = {
    "inbounds": INBOUNDS,
    "outbounds": OUTBOUNDS,
    "endpoints": ENDPOINTS,
    "services": SERVICES,
    "certificate_providers": CERTIFICATE_PROVIDERS,
}


def judge(tree: Json, allowed: Allowed) -> None:
    """Raises `InvalidConfig` for the first thing that is neither known nor allowed."""
    for name, where, known in _things(tree):
        allowed.judge(name, where, known, DANGERS)


def _things(tree: Json) -> Iterator[tuple[str, str, Collection[str]]]:
    """Everything that has a type: the type, where it stands, and the types that are known there."""
    for key in tree:
        yield key, "the configuration", TOP
    for key in tree.get("experimental", {}):
        yield key, "experimental", EXPERIMENTAL
    for kind, known in _KINDS.items():
        yield from _typed(tree.get(kind, []), kind, known)
    yield from _typed(tree.get("dns", {}).get("servers", []), "dns.servers", DNS_SERVERS)
    yield from _typed(tree.get("route", {}).get("rule_set", []), "route.rule_set", RULE_SETS)
    for kind in ("inbounds", "outbounds", "endpoints"):
        for number, handler in enumerate(tree.get(kind, [])):
            yield from _parts(handler, _place(kind, number, handler))
    yield from _providers(tree, "the configuration")


def _typed(things: list[Json], kind: str, known: Collection[str]) -> Iterator[tuple[str, str, Collection[str]]]:
    for number, thing in enumerate(things):
        yield thing.get("type", ""), _place(kind, number, thing), known


def _parts(handler: Json, where: str) -> Iterator[tuple[str, str, Collection[str]]]:
    """What a handler has that has a type itself."""
    if transport := handler.get("transport"):
        yield transport.get("type", ""), f"{where}.transport", TRANSPORTS
    if handler.get("type") == "wireguard" and handler.get("system"):
        yield "tun", f"{where}.system", ()


def _providers(value: Any, where: str) -> Iterator[tuple[str, str, Collection[str]]]:
    """The providers of certificates that stand where they are used, at whatever depth."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _providers(item, f"{where}[{number}]")
    elif isinstance(value, dict):
        provider = value.get("certificate_provider")
        if isinstance(provider, dict):
            yield provider.get("type", ""), f"{where}.certificate_provider", CERTIFICATE_PROVIDERS
        for key, item in value.items():
            yield from _providers(item, key if where == "the configuration" else f"{where}.{shown(key)}")


def _place(kind: str, number: int, thing: Json) -> str:
    tag = thing.get("tag")
    return f"{kind}[{number}]" + (f" ({shown(tag)})" if tag else "")
