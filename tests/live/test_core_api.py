"""The core's API belongs to the node only, and no controller's configuration can change that."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from protos import service_pb2
from protos.service_pb2 import UserStat
from scripts.staging import socks, transfer
from scripts.staging.backend import backend
from scripts.staging.controller import Controller
from scripts.staging.core import Json, Xray, find_xray, server_config
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser
from scripts.staging.wait import accepts, until
from tests.conftest import Place, connection, control, gets_in, member, over, run, stays_out, way

ANNA = TestUser.new("anna@test")
NOBODY = 65534
# An HTTP/2 client's preface with an empty SETTINGS frame (RFC 9113, 3.4); a server's first frame is SETTINGS, too.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
SETTINGS = 4
LOOPBACK = ("127.0.0.1", "::1", "0.0.0.0", "localhost", "::ffff:127.0.0.1")

FREEDOM = {"tag": "direct", "protocol": "freedom", "settings": {"finalRules": [{"action": "allow"}]}}
BLOCK = {"tag": "block", "protocol": "blackhole"}
# Configurations that would reach the API's outbound if it were an ordinary one.
OPEN_DOORS: Mapping[str, Json] = {
    "no outbounds": {"outbounds": []},
    "a balancer over everything": {
        "outbounds": [BLOCK],
        "routing": {
            "balancers": [{"tag": "all", "selector": [""], "strategy": {"type": "random"}}],
            "rules": [{"type": "field", "network": "tcp,udp", "balancerTag": "all"}],
        },
    },
    "an API of its own": {
        "outbounds": [BLOCK],
        "api": {"tag": "api", "services": ["HandlerService", "StatsService"]},
        "routing": {"rules": [{"type": "field", "ruleTag": "api", "network": "tcp,udp", "outboundTag": "api"}]},
    },
    "everything goes out": {"outbounds": [FREEDOM]},
}


@pytest.fixture
def home(all_kinds: Mapping[str, Kind]) -> Place:
    return Place(all_kinds["vless-raw"], "home")


def core(node: NodeProcess) -> psutil.Process:
    """The node's current core; those of earlier tests may drain."""
    return psutil.Process(node.newest_core())


def listening(node: NodeProcess) -> set[tuple[str, int]]:
    """The IP sockets on which the core listens: ("tcp" or "udp", port)."""
    sockets = core(node).net_connections("inet")
    tcp = {("tcp", s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}
    return tcp | {("udp", s.laddr.port) for s in sockets if s.type == socket.SOCK_DGRAM}


def api_socket(node: NodeProcess) -> Path:
    """The only unix socket on which the core listens."""
    (path,) = {str(s.laddr) for s in core(node).net_connections("unix") if s.laddr and not s.raddr}
    return Path(path)


def speaks_http2(link: socket.socket, patience: float = 0.5) -> bool:
    """Whether the other end is an HTTP/2 server, such as a core's API."""
    link.settimeout(patience)
    try:
        link.sendall(PREFACE)
        answer = link.recv(9)
    except OSError:
        return False
    return len(answer) > 3 and answer[3] == SETTINGS


def leads_to_an_api(socks_port: int, host: str, port: int) -> bool:
    try:
        link = socks.connect(socks_port, host, port, timeout=2)
    except OSError:
        return False
    with link:
        return speaks_http2(link)


def environment(process: psutil.Process) -> dict[str, str]:
    """The core's initial environment, from the kernel."""
    entries = Path(f"/proc/{process.pid}/environ").read_bytes().decode().rstrip("\0").split("\0")
    return dict(entry.split("=", 1) for entry in entries)


def test_only_the_inbounds_listen(all_kinds: Mapping[str, Kind], node: NodeProcess, controller: Controller) -> None:
    """The core listens only where the controller configured inbounds: no API, no metrics."""
    names = ("vless-raw", "shadowsocks-2022-aes-128", "hysteria2")
    vless, shadowsocks, hysteria = (Place(all_kinds[name], name) for name in names)
    api, metrics = free_port(), free_port()
    run(
        controller,
        [vless, shadowsocks, hysteria],
        [member(ANNA, vless, shadowsocks, hysteria)],
        api={"tag": "api", "listen": f"127.0.0.1:{api}", "services": ["HandlerService", "ReflectionService"]},
        metrics={"tag": "metrics", "listen": f"127.0.0.1:{metrics}"},
    )
    assert listening(node) == {
        ("tcp", vless.port),
        ("tcp", shadowsocks.port),
        ("udp", shadowsocks.port),
        ("udp", hysteria.port),
    }
    assert not accepts(api)
    assert not accepts(metrics)


@over("grpc")
def test_api_is_private(node: NodeProcess, home: Place, controller: Controller) -> None:
    """Only the node's user on the machine can reach the core's API."""
    run(controller, [home])
    path = api_socket(node)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {path.stat().st_uid, path.parent.stat().st_uid} == {os.geteuid()}
    assert gets_answers(path)
    if os.geteuid() == 0:
        assert knock(path, NOBODY) == "PermissionError"


def knock(path: Path, uid: int) -> str:
    """The result of connecting to the socket from a process that drops to that user after its imports."""
    program = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))\n"
        "try: socket.socket(socket.AF_UNIX).connect(sys.argv[1]); print('connected')\n"
        "except OSError as error: print(type(error).__name__)\n"
    )
    argv = [sys.executable, "-I", "-c", program, str(path), str(uid)]
    return subprocess.run(argv, capture_output=True, check=True, text=True).stdout.strip()


@pytest.mark.parametrize("door", OPEN_DOORS)
@over("grpc")
def test_users_cannot_reach_the_api(door: str, node: NodeProcess, home: Place, controller: Controller) -> None:
    """No destination of a proxied user leads to the core's API, in any configuration."""
    run(controller, [home], [member(ANNA, home)], **OPEN_DOORS[door])
    path = api_socket(node)
    targets = [(host, port) for host in (*LOOPBACK, str(path), f"unix:{path}", f"@{path}") for port in (1, 80)]
    with way(home, ANNA) as port, ThreadPoolExecutor(len(targets)) as pool:
        assert not any(pool.map(lambda target: leads_to_an_api(port, *target), targets))
    assert gets_answers(path)


def gets_answers(path: Path) -> bool:
    """Check that the API works for the node: else its silence would prove nothing."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        return speaks_http2(link)


@over("rest")
def test_an_api_would_be_found(home: Place, controller: Controller) -> None:
    """The test above would find an API that is open on TCP."""
    run(controller, [home], [member(ANNA, home)])
    port = free_port()
    with Xray({**server_config([]), "api": {"tag": "api", "listen": f"127.0.0.1:{port}", "services": []}}):
        until(lambda: accepts(port), what="the open API listens")
        with way(home, ANNA) as socks_port:
            assert leads_to_an_api(socks_port, "127.0.0.1", port)


def test_inbound_of_an_api_leads_nowhere(node: NodeProcess, home: Place, controller: Controller) -> None:
    """A controller's own API inbound is an ordinary inbound, and leads to no API."""
    port = free_port()
    door = {
        "tag": "api-in",
        "listen": "127.0.0.1",
        "port": port,
        "protocol": "dokodemo-door",
        "settings": {"address": "127.0.0.1"},
    }
    rule = {"type": "field", "inboundTag": ["api-in"], "outboundTag": "api"}
    own_api = {"tag": "api", "services": ["HandlerService"]}
    controller.start(backend([home.inbound, door], api=own_api, routing={"rules": [rule]}))
    assert listening(node) == {("tcp", home.port), ("tcp", port)}
    with socket.create_connection(("127.0.0.1", port)) as link:
        assert not speaks_http2(link)


@pytest.fixture
def bare_node(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node whose Xray has no geo files."""
    directory, core = tmp_path / "node", tmp_path / "bin"
    directory.mkdir()
    core.mkdir()
    (core / "xray").symlink_to(find_xray().resolve())
    with NodeProcess(directory, XRAY_EXECUTABLE_PATH=str(core / "xray")) as running:
        yield running


def test_private_addresses_without_geo_files(bare_node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """A configuration that blocks `geoip:private` starts without a geoip.dat, and blocks."""
    assert not list((bare_node.directory.parent / "bin").glob("*.dat"))
    rule = {"type": "field", "ip": ["geoip:private"], "outboundTag": "block"}
    with control(bare_node, "rest") as controller:
        run(controller, [home], [member(ANNA, home)])
        assert gets_in(home, ANNA, echo)
        run(controller, [home], [member(ANNA, home)], routing={"rules": [rule]})
        assert stays_out(home, ANNA, echo)


def test_clean_environment(node: NodeProcess, home: Place, controller: Controller) -> None:
    """The core's environment has no secrets or settings of the node; it counts Vision live and uses plain TCP."""
    run(controller, [home], [member(ANNA, home)])
    process = core(node)
    told = environment(process)
    assert told["GODEBUG"] == "multipathtcp=0"
    assert told["XRAY_BUF_SPLICE"] == "disable"
    # Python sets LC_CTYPE (PEP 538), in the leash.
    ours = {"PATH", "TZ", "XRAY_LOCATION_ASSET", "GODEBUG", "XRAY_BUF_SPLICE", "TXNODE_OWNER", "LC_CTYPE"}
    assert told.keys() <= ours
    command = Path(f"/proc/{process.pid}/cmdline").read_text()
    for secret in (node.key, ANNA.uuid):
        assert secret not in command
        assert secret not in str(told)


def test_splice_is_a_choice(tmp_path: Path, home: Place) -> None:
    """An operator can allow the kernel's splice; nothing else of the node's environment is passed on."""
    with NodeProcess(tmp_path, XRAY_SPLICE="on", CANARY="coal") as node, control(node, "grpc") as controller:
        run(controller, [home])
        told = environment(core(node))
        assert "XRAY_BUF_SPLICE" not in told
        assert not {"CANARY", "API_KEY", "XRAY_SPLICE", "STATE_DIR"} & told.keys()


def test_files_are_not_written(
    tmp_path: Path, all_kinds: Mapping[str, Kind], echo: EchoServer, controller: Controller
) -> None:
    """The core does not write to a controller's paths for logs and TLS secrets; lines go to the log stream."""
    place = Place(all_kinds["trojan-tls"], "tls")
    stream = place.inbound["streamSettings"]
    keys = {**stream["tlsSettings"], "masterKeyLog": str(tmp_path / "keys.log")}
    inbound = {**place.inbound, "streamSettings": {**stream, "tlsSettings": keys}}
    files = {name: str(tmp_path / f"{name}.log") for name in ("access", "error")}
    with controller.logs() as logs:
        controller.start(backend([inbound], [member(ANNA, place)], log={"loglevel": "info", **files}))
        assert gets_in(place, ANNA, echo)
        logs.find(ANNA.email)
    assert not list(tmp_path.iterdir())


def test_comments_and_odd_case(home: Place, node: NodeProcess, echo: EchoServer, controller: Controller) -> None:
    """A configuration with comments and keys in any case works, is counted, and bypasses no check of the node."""
    api, metrics = free_port(), free_port()
    config = f"""
    // a comment
    {{
      "LOG": {{"LogLevel": "warning" /* another "one" */}},
      "Api": {{"TAG": "api", "Listen": "127.0.0.1:{api}", "Services": ["HandlerService"]}},
      "METRICS": {{"tag": "m", "Listen": "127.0.0.1:{metrics}"}},
      # and one more
      "Policy": {{"System": {{"StatsOutboundUplink": false}}, "Levels": {{"0": {{"StatsUserUplink": false}}}}}},
      "InBounds": [{{
        "Tag": "home", "Listen": "127.0.0.1", "PORT": {home.port}, "Protocol": "vless",
        "Settings": {{"Decryption": "none", "CLIENTS": [{{"Id": "{TestUser.new("x").uuid}", "Email": "x"}}]}}
      }}],
      "OutBounds": [{json.dumps(FREEDOM)}]
    }}
    """
    controller.start(service_pb2.Backend(config=config, users=[member(ANNA, home)]))
    before = sum(stat.value for stat in controller.stats(UserStat, ANNA.email).stats)
    with connection(home, ANNA, echo) as link:
        transfer.upload(link, 1000)
    until(lambda: sum(stat.value for stat in controller.stats(UserStat, ANNA.email).stats) >= before + 1000)
    assert listening(node) == {("tcp", home.port)}


@over("rest")
def test_configured_clients_are_not_users(
    home: Place, node: NodeProcess, echo: EchoServer, controller: Controller
) -> None:
    """Clients in the configuration of a managed inbound cannot connect, in any case of the key."""
    foreign = TestUser.new("foreign@test")
    inbound = {**home.inbound, "settings": {"decryption": "none", "CLIENTS": [home.kind.account(foreign)]}}
    controller.start(backend([inbound], [member(ANNA, home)]))
    assert gets_in(home, ANNA, echo)
    assert stays_out(home, foreign, echo)
