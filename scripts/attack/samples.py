"""Realistic configurations of both cores, which the fuzzers mutate."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_ID = "b831381d-6324-4d53-ad4f-8cda48b30811"
_KEY = "2KZ4uouMKgI8nR-LDJNP1_MHisCJOmKGj9jUjZLncVU"
_SHORT_KEY = "AAECAwQFBgcICQoLDA0ODw=="


def _xray_inbound(tag: str, port: int, protocol: str, settings: Json, stream: Json | None = None) -> Json:
    made: Json = {"tag": tag, "listen": "127.0.0.1", "port": port, "protocol": protocol, "settings": settings}
    return {**made, "sniffing": {"enabled": True, "destOverride": ["tls"]}, "streamSettings": stream or {}}


def xray(*ports: int) -> Json:
    """A configuration of Xray with inbounds on these eight ports."""
    reality = {"target": "127.0.0.1:1", "serverNames": ["a.test"], "privateKey": _KEY, "shortIds": ["0123abcd"]}
    clients = [{"id": _ID, "email": "own", "flow": ""}]
    vless: Json = {"decryption": "none", "clients": clients, "fallbacks": [{"dest": 80}, {"path": "/a", "dest": "@a"}]}
    xhttp = {"path": "/x", "downloadSettings": {"address": "a.test", "port": 1, "network": "xhttp", "security": "none"}}
    rows: list[tuple[str, str, Json, Json]] = [
        ("raw", "vless", vless, {"network": "raw"}),
        ("reality", "vless", {**vless, "fallbacks": []}, {"security": "reality", "realitySettings": reality}),
        ("ws", "vmess", {"clients": clients}, {"network": "ws", "wsSettings": {"path": "/w"}}),
        ("trojan", "trojan", {"clients": [{"password": "x", "email": "own"}]}, {"network": "grpc"}),
        ("ss", "shadowsocks", {"method": "aes-256-gcm", "password": "x", "network": "tcp,udp"}, {}),
        ("ss2022", "shadowsocks", {"method": "2022-blake3-aes-128-gcm", "password": _SHORT_KEY}, {}),
        ("door", "dokodemo-door", {"address": "127.0.0.1", "port": 1, "network": "tcp"}, {}),
        ("xhttp", "vless", {**vless, "fallbacks": []}, {"network": "xhttp", "xhttpSettings": xhttp}),
    ]
    inbounds = [
        _xray_inbound(tag, port, protocol, settings, stream)
        for port, (tag, protocol, settings, stream) in zip(ports, rows, strict=True)
    ]
    peers = [{"publicKey": "A" * 43 + "=", "endpoint": "127.0.0.1:1"}]
    outbounds: list[Json] = [
        {"tag": "direct", "protocol": "freedom", "settings": {"domainStrategy": "UseIP"}},
        {"tag": "block", "protocol": "blackhole"},
        {"tag": "warp", "protocol": "wireguard", "settings": {"secretKey": "A" * 43 + "=", "peers": peers}},
        {"tag": "up", "protocol": "socks", "settings": {"servers": [{"address": "127.0.0.1", "port": 1}]}},
    ]
    rules: list[Json] = [
        {"ip": ["geoip:private"], "outboundTag": "block"},
        {"domain": ["full:a.test"], "balancerTag": "some", "ruleTag": "r"},
        {"network": "udp", "port": "443", "outboundTag": "block", "webhook": {"url": "http://127.0.0.1:1/"}},
    ]
    balancers = [{"tag": "some", "selector": ["di", "up"], "strategy": {"type": "leastPing"}}]
    return {
        "log": {"loglevel": "warning", "access": "none", "maskAddress": "quarter"},
        "dns": {"servers": ["1.1.1.1", {"address": "localhost", "domains": ["full:a.test"]}]},
        "routing": {"domainStrategy": "IPIfNonMatch", "rules": rules, "balancers": balancers},
        "observatory": {"subjectSelector": ["up"], "probeInterval": "1h"},
        "policy": {"levels": {"0": {"handshake": 4, "connIdle": 300}}, "system": {"statsInboundUplink": False}},
        "api": {"tag": "api", "services": ["StatsService"]},
        "stats": {},
        "reverse": {"bridges": [{"tag": "bridge", "domain": "a.test"}], "portals": []},
        "inbounds": inbounds,
        "outbounds": outbounds,
    }


def sing_box(*ports: int) -> Json:
    """A configuration of sing-box with inbounds on these eight ports."""
    reality = {
        "enabled": True,
        "private_key": _KEY,
        "short_id": ["0123abcd"],
        "handshake": {"server": "127.0.0.1", "server_port": 1},
    }
    handshake = {"handshake": {"server": "127.0.0.1", "server_port": 1}, "strict_mode": True}
    ws = {"transport": {"type": "ws", "path": "/w"}}
    rows: list[tuple[str, Json]] = [
        ("vless", {"users": [{"name": "own", "uuid": _ID}], "tls": {"enabled": True, "reality": reality}}),
        ("vmess", {"users": [{"name": "own", "uuid": _ID}], **ws}),
        ("shadowsocks", {"method": "2022-blake3-aes-128-gcm", "password": _SHORT_KEY}),
        ("shadowsocks", {"method": "aes-256-gcm", "password": "x", "network": "tcp"}),
        ("shadowtls", {"version": 3, "users": [{"name": "own", "password": "x"}], **handshake, "detour": "in-2"}),
        ("mixed", {"users": [{"username": "own", "password": "x"}]}),
        ("direct", {"override_address": "127.0.0.1", "override_port": 1}),
        ("http", {"users": [{"username": "own", "password": "x"}]}),
    ]
    inbounds = [
        {"type": kind, "tag": f"in-{number}", "listen": "127.0.0.1", "listen_port": port, **more}
        for number, (port, (kind, more)) in enumerate(zip(ports, rows, strict=True))
    ]
    upstream = {"type": "vless", "tag": "up", "server": "127.0.0.1", "server_port": 1, "uuid": _ID}
    hello = {"enabled": True, "server_name": "a.test", "utls": {"enabled": True, "fingerprint": "chrome"}}
    outbounds = [
        {"type": "direct", "tag": "direct"},
        {"type": "block", "tag": "block"},
        {**upstream, "tls": {**hello, "reality": {"enabled": True, "public_key": _KEY}}},
        {"type": "selector", "tag": "choice", "outbounds": ["direct", "up"]},
        {"type": "urltest", "tag": "fast", "outbounds": ["direct", "up"], "interval": "10m"},
    ]
    logical = {"type": "logical", "mode": "and", "rules": [{"port": 53}, {"network": "udp"}], "action": "reject"}
    rules = [{"action": "sniff"}, {"ip_is_private": True, "outbound": "block"}, logical]
    rule_set = [{"type": "inline", "tag": "own", "rules": [{"domain_suffix": [".test"]}]}]
    servers = [{"type": "udp", "tag": "one", "server": "1.1.1.1"}, {"type": "local", "tag": "here"}]
    return {
        "log": {"level": "warn", "output": "/nowhere/log"},
        "dns": {"servers": servers, "rules": [{"domain": ["a.test"], "server": "here"}], "final": "one"},
        "ntp": {"enabled": False, "server": "a.test", "write_to_system": True},
        "inbounds": inbounds,
        "outbounds": outbounds,
        "route": {"rules": rules, "rule_set": rule_set, "final": "direct", "default_domain_resolver": "one"},
        "experimental": {"cache_file": {"enabled": True, "path": "/nowhere/cache"}},
    }
