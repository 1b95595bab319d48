"""The allowed contents of a sing-box configuration: types of inbounds, outbounds and so on, and of values. Pure.

Found by trying each type with `sing-box format` of 1.14.1 and 1.14.4, whose output always has the types of values; what
the types of inbounds and so on do: sing-box's source code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from drivers.process.allowlist import Allowed, shown
from drivers.process.confinement import Touched
from drivers.process.json_text import Json, Named, is_abstract, texts
from drivers.process.paths import Paths
from node.base.errors import InvalidConfig

TOP = (
    *("$schema", "log", "dns", "ntp", "certificate", "certificate_providers", "http_clients", "endpoints", "inbounds"),
    *("outbounds", "route", "services", "experimental"),
)
# The keys of `experimental`; the node removes all of them.
EXPERIMENTAL = ("cache_file", "clash_api", "v2ray_api", "debug")
INBOUNDS = (
    *("direct", "socks", "http", "mixed", "shadowsocks", "vmess", "trojan", "naive", "hysteria", "shadowtls", "vless"),
    *("anytls", "tuic", "hysteria2", "snell", "redirect", "tproxy"),
)
# Types that were removed from sing-box: let through, as its own error explains that better.
_REMOVED = ("wireguard", "dns", "shadowsocksr")
OUTBOUNDS = (
    *("direct", "block", "selector", "urltest", "socks", "http", "shadowsocks", "vmess", "trojan", "naive", "hysteria"),
    *("shadowtls", "vless", "anytls", "tuic", "hysteria2", "snell", "ssh", *_REMOVED),
)
ENDPOINTS = ("wireguard",)
# The node adds its own of both, and removes those of the configuration.
SERVICES = ("api", "ssm-api")
DNS_SERVERS = ("", "legacy", "udp", "tcp", "tls", "https", "quic", "h3", "local", "hosts", "fakeip", "dhcp", "mdns")
RULE_SETS = ("", "inline", "local", "remote")
CERTIFICATE_PROVIDERS = ("acme", "cloudflare-origin-ca")
TRANSPORTS = ("", "http", "ws", "quic", "grpc", "httpupgrade")

# Why other types are refused.
DANGERS: Mapping[str, str] = {
    "tor": "it runs a program",
    "tailscale": "others decide what it connects to, and its SSH server gives them a shell",
    "tun": "it changes the routes of the machine",
    "cloudflared": "others decide what it lets in",
    "derp": "it serves strangers, whom the node neither knows nor counts",
    "hysteria-realm": "it serves strangers, whom the node neither knows nor counts",
    "resolved": "it replaces the DNS resolver of the machine",
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

# A type, a list whose items all have one shape, or an object with the shapes of its optional members.
Shape = type | tuple[type, ...] | list[Any] | Mapping[str, Any]

# The deepest allowed nesting of lists and objects; sing-box nests rules in rules.
DEEPEST = 100
_TYPED = {"type": str, "tag": str}
_HANDLER = {**_TYPED, "transport": {"type": str}}
_INBOUND = {
    **_HANDLER,
    "tls": {"enabled": bool},
    "detour": str,
    "listen": str,
    "listen_port": int,
    "method": str,
    "version": int,
    "network": (str, list),
    "users": [{"name": str, "username": str}],
}
SHAPE: Shape = {
    "log": {"level": str, "disabled": bool, "output": str},
    "dns": {"servers": [_TYPED]},
    "certificate_providers": [_TYPED],
    "endpoints": [_HANDLER],
    "inbounds": [_INBOUND],
    "outbounds": [_HANDLER],
    "route": {"rules": list, "rule_set": [_TYPED]},
    "services": [_TYPED],
    "experimental": {},
}
# Keys whose values are files end like this, …
_FILE = re.compile(r"(.*_)?(path|files?|directory)")
# … except for keys that the node itself has set, or whose values are not files of this machine.
_NO_FILE = ("process_path", "tcp_multi_path", "data_directory", "state_directory", "path")
# The options of a plugin, as the core parses them (`transport/sip003/args.go`): one option, its name and value.
_OPTION = re.compile(r"(?:\\.|[^\\;])++", re.DOTALL)
_SET = re.compile(r"((?:\\.|[^\\=])++)=(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
# Places where the key `path` names a file.
_LISTS = re.compile(r"route\.rule_set\[\d+\]\.path(\[\d+\])?")
_HOSTS = re.compile(r"dns\.servers\[\d+\]\.path(\[\d+\])?")
_SERVED = re.compile(r"\.masquerade\.directory$")
# TCP ports: values of keys like these, those of ACME challenges, and that of the replacement for systemd-resolved.
_PORT = re.compile(r"listen_port|alternative_(http|tls)_port")
_CHALLENGES = (80, 443)
_RESOLVED = 53


def judge(tree: Json, allowed: Allowed) -> None:
    """Raises `InvalidConfig` for the first type that is neither known nor allowed."""
    for name, where, known in _things(tree):
        allowed.judge(name, where, known, DANGERS)


def _things(tree: Json) -> Iterator[tuple[str, str, Collection[str]]]:
    """Yield everything that has a type: the type, its place, and the types that are known there."""
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
    """Yield the typed parts of an inbound, outbound or endpoint."""
    if transport := handler.get("transport"):
        yield transport.get("type", ""), f"{where}.transport", TRANSPORTS
    if handler.get("type") == "wireguard" and handler.get("system"):
        yield "tun", f"{where}.system", ()


def _providers(value: Any, where: str) -> Iterator[tuple[str, str, Collection[str]]]:
    """Yield the certificate providers that are written inline where they are used, at any depth."""
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


def check_shape(tree: Any) -> None:
    """Raises `InvalidConfig` for a value of the wrong type that the node relies on, or nesting deeper than DEEPEST."""
    _check_value(tree, SHAPE, "")
    level: list[Any] = [tree]
    for _ in range(DEEPEST):
        level = [item for value in level for item in _within(value)]
    if level:
        raise InvalidConfig("the configuration is nested too deeply")


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check_value(value: Any, shape: Shape, where: str) -> None:
    if isinstance(shape, list):
        _require(value, list, where)
        for number, item in enumerate(value):
            _check_value(item, shape[0], f"{where}[{number}]")
    elif isinstance(shape, Mapping):
        _require(value, dict, where)
        for key in shape.keys() & value.keys():
            _check_value(value[key], shape[key], f"{where}.{key}")
    else:
        _require(value, shape, where)


def _require(value: Any, kinds: type | tuple[type, ...], where: str) -> None:
    if not isinstance(value, kinds) or (kinds is int and isinstance(value, bool)):
        place = where.removeprefix(".") or "the configuration"
        raise InvalidConfig(
            f"the node cannot parse this configuration: {place} has the wrong type: {shown(str(value))}"
        )


def touched(tree: Json, paths: Paths, unconfined: str | None) -> Touched:
    """Return the files, ports and sockets that a configuration names. Raises `InvalidConfig` for a forbidden file."""
    plugged = list(_of_plugins(tree))
    for named in (*texts(tree), *plugged):
        if named.text and _is_file(named):
            if unconfined is not None and _SERVED.search(named.place):
                raise InvalidConfig(
                    f"{named.place}: a core that is not confined may not serve a directory: {unconfined}"
                )
            if "$" in named.text:
                raise InvalidConfig(
                    f"{named.place}: {named.text!r} contains a $, which the core may expand to another path"
                )
            paths.require(named.text, named.place)
    found = (range(port, port + 1) for port in sorted(set(_ports(tree))))
    files = paths.named_in(tree) | {named.text for named in plugged}
    return Touched(files, (), tuple(found), is_abstract(tree))


def _of_plugins(tree: Json) -> Iterator[Named]:
    """The certificates in the options of Shadowsocks plugins."""
    for named in texts(tree):
        if named.key == "plugin_opts":
            for found in filter(None, map(_SET.fullmatch, _OPTION.findall(named.text))):
                name, value = (_ESCAPED.sub(r"\1", part) for part in found.groups())
                if name == "cert":
                    yield Named(f"{named.place}, cert", "certificate_path", value)


def _is_file(named: Named) -> bool:
    if named.key in _NO_FILE:
        return bool(_LISTS.fullmatch(named.place) or _HOSTS.fullmatch(named.place))
    if named.key == "config_path" and named.place.startswith("services["):
        return False  # derp's key: the node sets this path
    return _FILE.fullmatch(named.key) is not None


def _ports(value: Any) -> Iterator[int]:
    """The TCP ports that any part of the configuration may listen on."""
    rest = [value]
    while rest:
        some = rest.pop()
        rest += some.values() if isinstance(some, dict) else some if isinstance(some, list) else ()
        if isinstance(some, dict):
            named = [port for key, port in some.items() if _PORT.fullmatch(key)]
            yield from (port for port in named if isinstance(port, int) and 0 < port <= 0xFFFF)
            yield from _CHALLENGES if "acme" in some or some.get("type") == "acme" else ()
            yield from [_RESOLVED] if some.get("type") == "resolved" else ()
