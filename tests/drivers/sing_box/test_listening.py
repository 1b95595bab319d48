"""Inbounds with shared connections, and inbounds with sessions."""

from __future__ import annotations

from typing import Any

import pytest

from drivers.sing_box.listening import Listens


@pytest.mark.parametrize(
    ("more", "shared"),
    [
        ({}, False),
        ({"transport": {"type": "ws"}}, False),
        ({"transport": {"type": "grpc"}}, True),
        ({"fallback": {"server": "127.0.0.1", "server_port": 80}}, True),
        ({"fallback_for_alpn": {"h2": {"server": "127.0.0.1", "server_port": 80}}}, True),
    ],
)
def test_connections_of_several_users(more: dict[str, Any], shared: bool) -> None:
    """Where a connection can carry many requests, and where a fallback may get it."""
    inbound = {"type": "trojan", "tag": "in", "listen": "::", "listen_port": 443, **more}
    assert Listens({"inbounds": [inbound]}).shared == ({"in"} if shared else set())


@pytest.mark.parametrize(
    ("more", "keeps"),
    [
        ({}, False),
        ({"transport": {"type": "ws"}}, False),
        ({"transport": {"type": "grpc"}}, True),
        ({"transport": {"type": "http"}}, True),
        ({"multiplex": {"enabled": True}}, True),
        ({"multiplex": {"enabled": False}}, False),
        ({"type": "anytls"}, True),
    ],
)
def test_where_clients_keep_sessions(more: dict[str, Any], keeps: bool) -> None:
    """Where several streams share a connection; with a detour this counts for the inbound behind it."""
    inbound = {"type": "trojan", "tag": "in", "listen": "::", "listen_port": 443, **more}
    assert Listens({"inbounds": [inbound]}).multiplexed == ({"in"} if keeps else set())
    inner = {"type": "shadowsocks", "tag": "inner", "listen": "::", "listen_port": 444, "network": "tcp"}
    found = Listens({"inbounds": [{**inbound, "detour": "inner"}, inner]}).multiplexed
    assert found == ({"in", "inner"} if keeps else set())


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({}, "tcp"),
        ({"type": "shadowsocks"}, "shadowsocks"),
        ({"tls": {"enabled": True}}, "tls"),
        ({"tls": {"enabled": False}}, "tcp"),
        ({"tls": {"enabled": True, "reality": {"enabled": True}}}, "reality"),
        ({"tls": {"enabled": True}, "transport": {"type": "ws"}}, "websocket"),
        ({"transport": {"type": "httpupgrade"}}, "websocket"),
        ({"transport": {"type": "grpc"}}, "grpc"),
        ({"type": "hysteria2", "tls": {"enabled": True}}, "hysteria"),
        ({"type": "tuic"}, "tuic"),
        ({"listen": "127.0.0.1"}, "local"),
    ],
)
def test_how_users_connect(more: dict[str, Any], name: str) -> None:
    """In the words of the bill; behind a server on this machine it is not known."""
    inbound = {"type": "trojan", "tag": "in", "listen": "::", "listen_port": 443, **more}
    assert Listens({"inbounds": [inbound]}).transports == {name}
