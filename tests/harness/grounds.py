"""The cores that the behaviour tests run on, and what differs between them: declared here, never asked by name."""

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
    """A core under the node.

    `inbound` makes a controller's inbound of a kind, for a port and a tag; `config` a whole configuration of inbounds.
    `other` makes another configuration of the same inbounds. `executable` finds the core, `variable` is the setting for
    it. `live`: users come while everybody stays connected. `refuses`: who was removed is refused; else his connections
    end the moment they have begun. `probes`: with REALITY it looks at the cover site first.

    `refusals` are configurations that the core refuses, by their fault, each with words of its answer; `stranger` is
    what the node says of an executable that is something else. `users` are the names that may use an inbound as the
    core has it, for the node's directory, the core's process and the tag: who is removed may be among them, and barred.
    `cuts`: the node ends a removed user's connections on the core's sockets, which it finds by the access lines; else
    the core ends them, and a client of Xray's may be `late` seconds in telling. `sniffing` makes an inbound wait for a
    connection's first bytes before it is opened. `brief` and `verbose` are settings of the log: with both the core says
    that it has started, with the second lines with `detail`, too. `traces` are what its own API would leave there.
    `outbounds` are those of `config`, the one that traffic takes first.
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
        """A whole start; `extra` are more top-level keys of the configuration."""
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
    """The same protocol over the same transport, as sing-box has it; a client of Xray's fits."""
    protocol, server = kind.protocol, kind.transport.server
    name = "hysteria2" if kind.quic else protocol.name
    inbound = {"type": name, "tag": tag, "listen": "127.0.0.1", "listen_port": port}
    if protocol.name == "shadowsocks":
        # Xray has older methods for each user, sing-box for the inbound.
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
    """The core itself tells, over the one socket in the node's directory that is its own."""
    sockets = set(map(str, StateDirectory(state).run_dir.glob("*.sock")))
    [socket] = sockets & {each.laddr for each in psutil.Process(pid).net_connections("unix")}
    return background.run(lambda: _asked(Path(socket), tag))


def _sing_box_users(state: Path, pid: int, tag: str) -> set[str]:
    """The core does not tell; the configuration that it runs from is its standard input."""
    config = json.loads(Path(f"/proc/{pid}/fd/0").read_bytes())
    [users] = [inbound["users"] for inbound in config["inbounds"] if inbound["tag"] == tag]
    return {user["name"] for user in users}


_XRAY_REFUSALS: Mapping[str, tuple[str, str]] = {
    "not JSON": ("{", "EOF"),
    "an unknown inbound": ('{"inbounds": [{"port": 1, "protocol": "nonsense"}]}', "nonsense"),
    "an unknown outbound": ('{"outbounds": [{"protocol": "gibberish"}]}', "gibberish"),
    "a port that is none": ('{"routing": {"rules": [{"type": "field", "port": "x", "outboundTag": "y"}]}}', "port"),
    # The core converts this one, and refuses it when it is to run.
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
    # The core formats this one, and refuses it when it is to run.
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
    # Xray's client keeps its half of a connection for this time when the other one has ended in good order.
    late=1,
    sniffing={},
    brief={"level": "info"},
    verbose={"level": "trace"},
    detail="TRACE",
    traces=("did not closed", "service/", "v2ray", "StartedService", "StatsService"),
    outbounds=("direct",),
)
GROUNDS = (XRAY, SING_BOX)
