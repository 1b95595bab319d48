"""Helpers for tests of how the driver plans and renders Xray's configurations."""

from __future__ import annotations

import json
from collections.abc import Mapping

from drivers.xray import messages
from drivers.xray.config import ApiAddress, Plan, plan, render
from drivers.xray.overrides import SAFE_SINCE
from node.contract.accounts import Accounts
from protos import xray_pb2
from protos.xray_pb2 import Config, InboundHandlerConfig, TypedMessage
from scripts.staging.core import Json
from tests.harness.convert import convert

ID = "b831381d-6324-4d53-ad4f-8cda48b30811"
KEY = "AAECAwQFBgcICQoLDA0ODw=="
FILE = "/nowhere/written-by-the-core"
THROUGH_INBOUND = ApiAddress("/nowhere/api.sock", "0123", direct=False)
DIRECT = ApiAddress("/nowhere/api.sock", "0123", direct=True)


def taken_over(text: str, *exclude: str) -> Plan:
    """The plan for the oldest core version that needs no guard."""
    return plan(convert(text), text, frozenset(exclude), SAFE_SINCE)


def of(**parts: object) -> Plan:
    return taken_over(json.dumps(parts))


def inbound(protocol: str, tag: str | None = "in", stream: Json | None = None, **settings: object) -> Json:
    made: Json = {"port": 1000, "listen": "127.0.0.1", "protocol": protocol, "settings": settings}
    return made | ({"tag": tag} if tag else {}) | ({"streamSettings": stream} if stream else {})


def vless(tag: str | None = "in", stream: Json | None = None, **settings: object) -> Json:
    return inbound("vless", tag, stream, decryption="none", clients=[{"id": ID, "email": "theirs"}], **settings)


def rendered(made: Plan, api: ApiAddress = THROUGH_INBOUND, accounts: Mapping[str, Accounts] | None = None) -> Config:
    no_users: Mapping[str, Accounts] = {tag: {} for tag in made.tags}
    return Config.FromString(render(made, api, accounts or no_users))


def apps(message: Config, type_name: str) -> list[TypedMessage]:
    return [app for app in message.app if app.type == type_name]


def policy(made: Plan) -> xray_pb2.PolicyConfig:
    (app,) = apps(made.base, messages.POLICY)
    return xray_pb2.PolicyConfig.FromString(app.value)


def router(message: Config) -> xray_pb2.RouterConfig:
    (app,) = apps(message, messages.ROUTER)
    return xray_pb2.RouterConfig.FromString(app.value)


def clients(handler: InboundHandlerConfig) -> int:
    return len(xray_pb2.UsersConfig.FromString(handler.proxy_settings.value).users)


TLS = {"masterKeyLog": FILE, "serverName": "kept.example"}
REALITY_SERVER = {
    "show": True,
    "masterKeyLog": FILE,
    "target": "kept.example:443",
    "serverNames": ["kept.example"],
    "privateKey": "4CI1VpXBR3Cdr8lXXp9hVu_rC7NXlkTrYRlOFBBXIXU",
    "shortIds": ["01"],
}
REALITY_CLIENT = {
    "show": True,
    "masterKeyLog": FILE,
    "serverName": "kept.example",
    "publicKey": "i4J0J5UEOQKwJpnjDhKgVsPDnNxCD-J0mD5ICAuHNzQ",
    "fingerprint": "chrome",
    "shortId": "01",
}
WAY_BACK = {
    "address": "kept.example",
    "port": 443,
    "network": "xhttp",
    "security": "tls",
    "tlsSettings": TLS,
    "xhttpSettings": {"path": "/"},
}
STREAMS = {
    "tls": {"network": "raw", "security": "tls", "tlsSettings": TLS},
    "Tls in other letters": {"Network": "raw", "SECURITY": "tls", "TLSSettings": {"MASTERKEYLOG": FILE, **TLS}},
    "reality": {"network": "raw", "security": "reality", "realitySettings": REALITY_CLIENT},
    "way back": {
        "network": "xhttp",
        "security": "tls",
        "tlsSettings": TLS,
        "xhttpSettings": {"path": "/", "extra": {"downloadSettings": WAY_BACK}},
    },
    "way back without extra": {"network": "xhttp", "xhttpSettings": {"path": "/", "downloadSettings": WAY_BACK}},
}
