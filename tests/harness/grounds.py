"""The cores that the behaviour tests run on. Their differences are declared here; tests never compare names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from drivers.xray.api import Api
from node.state.directory import StateDirectory
from protos import service_pb2
from scripts.staging import background
from scripts.staging.backend import backend_config
from scripts.staging.core import Json, find_xray
from scripts.staging.inbounds import Kind
from scripts.staging.sing_box import find_sing_box
from scripts.staging.users import TestUser


@dataclass(frozen=True)
class Ground:
    """A core for behaviour tests.

    `inbound` makes a controller's inbound of a kind, for a port and a tag; `config` a whole configuration of
    inbounds. `other` are keys that make another configuration of the same inbounds. `executable` finds the core,
    `variable` is the setting for it. `live`: users are added while all connections stay. `refuses`: the core refuses
    removed users; else their connections are accepted and ended at once. `probes`: with REALITY it probes the cover
    site first.

    `refusals` maps a fault to a configuration that the core refuses for it and a part of the error text; `stranger`
    is the node's error for an executable that is another program. `users` returns the user names of an inbound in the
    core, for the node's directory, the core's pid and the tag; they may include removed users, who are barred.
    `cuts`: the node closes a removed user's connections on the core's sockets, which it finds by the access lines;
    else the core closes them, and Xray's client may report it `late` seconds later. `sniffing` makes an inbound wait
    for a connection's first bytes before it connects. `brief` and `verbose` are settings of the log: with both the
    core logs its start, with the second also lines with `detail`. `traces` are texts that its own API would leave in
    the log. `outbounds` are those of `config`, the default one first.
    """

    name: str
    type: int
    executable: Callable[[], Path]
    variable: str
    inbound: Callable[[Kind, int, str], Json]
    config: Callable[..., str]
    other: Mapping[str, Json] = field(hash=False)
    live: bool
    refuses: bool
    probes: bool
    refusals: Mapping[str, tuple[str, str]] = field(hash=False)
    stranger: str
    users: Callable[[Path, int, str], set[str]]
    cuts: bool
    late: float
    sniffing: Json = field(hash=False)
    brief: Json = field(hash=False)
    verbose: Json = field(hash=False)
    detail: str
    traces: tuple[str, ...]
    outbounds: tuple[str, ...]

    def backend(
        self,
        inbounds: Iterable[Json],
        users: Iterable[service_pb2.User] = (),
        keep_alive: int = 0,
        exclude: Iterable[str] = (),
        **extra: object,
    ) -> service_pb2.Backend:
        """A complete Start request; `extra` adds top-level keys to the configuration."""
        return service_pb2.Backend(
            type=self.type,  # type: ignore[arg-type]
            config=self.config(inbounds, **extra),
            users=users,
            keep_alive=keep_alive,
            exclude_inbounds=exclude,
        )


def _sing_box_config(inbounds: Iterable[Json], **extra: object) -> str:
    outbounds = [{"type": "direct", "tag": "direct"}]
    return json.dumps({"log": {"level": "warn"}, "inbounds": list(inbounds), "outbounds": outbounds, **extra})


def _sing_box_inbound(kind: Kind, port: int, tag: str) -> Json:
    """sing-box's inbound for the same protocol and transport; Xray's clients can use it."""
    protocol, server = kind.protocol, kind.transport.server
    name = "hysteria2" if kind.quic else protocol.name
    inbound = {"type": name, "tag": tag, "listen": "127.0.0.1", "listen_port": port}
    if protocol.name == "shadowsocks":
        # Xray sets an older cipher for each user, sing-box for the inbound.
        of_users = protocol.proxy(TestUser.new("")).shadowsocks.method
        keys = {"method": of_users, **protocol.server}
        inbound |= {key: keys[key] for key in ("method", "password") if key in keys}
    if server.get("security") == "tls":
        (own,) = server["tlsSettings"]["certificates"]
        pair = {"certificate_path": own["certificateFile"], "key_path": own["keyFile"]}
        inbound["tls"] = {"enabled": True, "alpn": server["tlsSettings"].get("alpn", []), **pair}
    if server.get("security") == "reality":
        inbound["tls"] = _reality(server["realitySettings"])
    if server["network"] == "ws":
        inbound["transport"] = {"type": "ws", "path": server["wsSettings"]["path"]}
    if server["network"] == "grpc":
        inbound["transport"] = {"type": "grpc", "service_name": server["grpcSettings"]["serviceName"]}
    return inbound


def _reality(settings: Json) -> Json:
    host, _, port = settings["target"].rpartition(":")
    reality = {
        "enabled": True,
        "handshake": {"server": host, "server_port": int(port)},
        "private_key": settings["privateKey"],
        "short_id": settings["shortIds"],
    }
    return {"enabled": True, "server_name": settings["serverNames"][0], "reality": reality}


async def _asked(socket: Path, tag: str) -> set[str]:
    api = Api(background.reactor, str(socket))
    try:
        return {user.email for user in await api.list_users(tag)}
    finally:
        await api.close()


def _xray_users(state: Path, pid: int, tag: str) -> set[str]:
    """Ask the core's API, on its socket in the node's run directory."""
    sockets = set(map(str, StateDirectory(state).run_dir.glob("*.sock")))
    [socket] = sockets & {each.laddr for each in psutil.Process(pid).net_connections("unix")}
    return background.run(lambda: _asked(Path(socket), tag))


def _sing_box_users(state: Path, pid: int, tag: str) -> set[str]:
    """Read the core's configuration from its standard input, as its API does not list users."""
    config = json.loads(Path(f"/proc/{pid}/fd/0").read_bytes())
    [users] = [inbound["users"] for inbound in config["inbounds"] if inbound["tag"] == tag]
    return {user["name"] for user in users}


_XRAY_REFUSALS: Mapping[str, tuple[str, str]] = {
    "not JSON": ("{", "EOF"),
    "an unknown inbound": ('{"inbounds": [{"port": 1, "protocol": "nonsense"}]}', "nonsense"),
    "an unknown outbound": ('{"outbounds": [{"protocol": "gibberish"}]}', "gibberish"),
    "a port that is none": ('{"routing": {"rules": [{"type": "field", "port": "x", "outboundTag": "y"}]}}', "port"),
    # The core converts this one, and refuses to run it.
    "a key that is none": (
        '{"inbounds": [{"tag": "a", "port": 1, "protocol": "shadowsocks", "settings": {"clients": [],'
        ' "method": "2022-blake3-aes-128-gcm", "password": "short"}}]}',
        "illegal base64",
    ),
}
_SING_BOX_REFUSALS: Mapping[str, tuple[str, str]] = {
    "not JSON": ("{", "unexpected end"),
    "an unknown inbound": ('{"inbounds": [{"type": "nonsense", "listen_port": 1}]}', "nonsense"),
    "an unknown outbound": ('{"outbounds": [{"type": "gibberish"}]}', "gibberish"),
    "a port that is none": ('{"route": {"rules": [{"port": "x", "outbound": "y"}]}}', "port"),
    # The core formats this one, and refuses to run it.
    "a key that is none": (
        '{"inbounds": [{"type": "shadowsocks", "tag": "a", "listen_port": 1,'
        ' "method": "2022-blake3-aes-128-gcm", "password": "short"}]}',
        "illegal base64",
    ),
}
FAULTS = tuple(_XRAY_REFUSALS)
"""The keys of `Ground.refusals`."""


XRAY = Ground(
    "xray",
    service_pb2.XRAY,
    find_xray,
    "XRAY_EXECUTABLE_PATH",
    Kind.inbound,
    backend_config,
    other={"log": {"loglevel": "error"}},
    live=True,
    refuses=True,
    probes=True,
    refusals=_XRAY_REFUSALS,
    stranger="is not Xray",
    users=_xray_users,
    cuts=True,
    late=0,
    sniffing={"sniffing": {"enabled": True, "destOverride": ["http", "tls"]}},
    brief={"loglevel": "warning", "access": ""},
    verbose={"loglevel": "debug", "access": ""},
    detail="[Debug]",
    traces=(" accepted ", ".sock", "StatsService", "HandlerService"),
    outbounds=("direct", "block"),
)
SING_BOX = Ground(
    "sing-box",
    service_pb2.SING_BOX,
    find_sing_box,
    "SING_BOX_EXECUTABLE_PATH",
    _sing_box_inbound,
    _sing_box_config,
    other={"log": {"level": "error"}},
    live=False,
    refuses=False,
    probes=False,
    refusals=_SING_BOX_REFUSALS,
    stranger="is not sing-box",
    users=_sing_box_users,
    cuts=False,
    # Xray's client keeps its half of a connection for so long after the other side has closed cleanly.
    late=1,
    sniffing={},
    brief={"level": "info"},
    verbose={"level": "trace"},
    detail="TRACE",
    traces=("did not closed", "service/", "v2ray", "StartedService", "StatsService"),
    outbounds=("direct",),
)
GROUNDS = (XRAY, SING_BOX)
