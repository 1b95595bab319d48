"""A user's credentials in each proxy protocol: in the server's JSON, a client's JSON and a controller's message."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from protos import service_pb2
from scripts.staging.core import Json
from scripts.staging.users import TestUser, shadowsocks_2022_key

VISION = "xtls-rprx-vision"


@dataclass(frozen=True)
class Protocol:
    """One protocol. `server` is the inbound's `settings` without users.

    `account` makes the inbound's entry for a user (without the e-mail), `client` the `settings` of a user's outbound to
    an address and port, `proxy` the credentials that a controller sends.
    """

    name: str
    account: Callable[[TestUser], Json]
    client: Callable[[str, int, TestUser], Json]
    proxy: Callable[[TestUser], service_pb2.Proxy]
    server: Json = field(default_factory=dict)


def vless(flow: str = "") -> Protocol:
    def account(user: TestUser) -> Json:
        return {"id": user.uuid, "flow": flow}

    def client(address: str, port: int, user: TestUser) -> Json:
        return _vnext(address, port, {**account(user), "encryption": "none"})

    def proxy(user: TestUser) -> service_pb2.Proxy:
        return service_pb2.Proxy(vless=service_pb2.Vless(id=user.uuid, flow=flow))

    return Protocol("vless", account, client, proxy, {"decryption": "none"})


def vmess() -> Protocol:
    def account(user: TestUser) -> Json:
        return {"id": user.uuid}

    def client(address: str, port: int, user: TestUser) -> Json:
        return _vnext(address, port, {**account(user), "security": "auto"})

    def proxy(user: TestUser) -> service_pb2.Proxy:
        return service_pb2.Proxy(vmess=service_pb2.Vmess(id=user.uuid))

    return Protocol("vmess", account, client, proxy)


def trojan() -> Protocol:
    def account(user: TestUser) -> Json:
        return {"password": user.password}

    def client(address: str, port: int, user: TestUser) -> Json:
        return _servers(address, port, account(user))

    def proxy(user: TestUser) -> service_pb2.Proxy:
        return service_pb2.Proxy(trojan=service_pb2.Trojan(password=user.password))

    return Protocol("trojan", account, client, proxy)


def shadowsocks(method: str) -> Protocol:
    """The older ciphers: a method and a password for each user, no key of the server."""

    def account(user: TestUser) -> Json:
        return {"method": method, "password": user.password}

    def client(address: str, port: int, user: TestUser) -> Json:
        return _servers(address, port, account(user))

    def proxy(user: TestUser) -> service_pb2.Proxy:
        return service_pb2.Proxy(shadowsocks=service_pb2.Shadowsocks(password=user.password, method=method))

    return Protocol("shadowsocks", account, client, proxy, {"network": "tcp,udp"})


def shadowsocks_2022(method: str, size: int) -> Protocol:
    """The 2022 ciphers: keys of `size` bytes, one of the server and one of each user."""
    server_key = base64.b64encode(secrets.token_bytes(size)).decode()

    def account(user: TestUser) -> Json:
        return {"password": shadowsocks_2022_key(user.password, size)}

    def client(address: str, port: int, user: TestUser) -> Json:
        return _servers(address, port, {"method": method, "password": f"{server_key}:{account(user)['password']}"})

    def proxy(user: TestUser) -> service_pb2.Proxy:
        return service_pb2.Proxy(shadowsocks=service_pb2.Shadowsocks(password=user.password))

    return Protocol(
        "shadowsocks", account, client, proxy, {"method": method, "password": server_key, "network": "tcp,udp"}
    )


def hysteria() -> Protocol:
    """Hysteria 2. A client's password is in its transport: see `Kind.outbound`."""

    def account(user: TestUser) -> Json:
        return {"auth": user.password}

    def client(address: str, port: int, user: TestUser) -> Json:
        return {"version": 2, "address": address, "port": port}

    def proxy(user: TestUser) -> service_pb2.Proxy:
        return service_pb2.Proxy(hysteria=service_pb2.Hysteria(auth=user.password))

    return Protocol("hysteria", account, client, proxy, {"version": 2})


def _vnext(address: str, port: int, user: Json) -> Json:
    return {"vnext": [{"address": address, "port": port, "users": [user]}]}


def _servers(address: str, port: int, user: Json) -> Json:
    return {"servers": [{"address": address, "port": port, **user}]}
