"""A configuration cannot make a core read, write, run or serve files that are not its own, on either core."""

from __future__ import annotations

import errno
import json
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from drivers.install.leash import leashed
from drivers.process.confinement import NO_LANDLOCK, UNCONFINED, Confinement, Touched
from drivers.process.paths import Paths
from drivers.xray.executable import private_geoip
from protos.service_pb2 import SING_BOX, XRAY, Backend
from scripts.staging import certs
from scripts.staging.certs import Certificate
from scripts.staging.controller import ControllerError, RpcController
from scripts.staging.core import ENVIRONMENT, Json, find_xray
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.sing_box import find_sing_box
from tests.harness import confined

CORES = ["xray", "sing-box"]
# Paths that no configuration may name with these tests' CORE_PATHS.
SECRETS = ["/etc/shadow", "/proc/self/environ", "/dev/zero", "/etc/ssl/certs/../../shadow", "relative.pem"]


def with_certificate(core: str, certificate: str, key: str) -> Json:
    """An inbound with TLS from these files."""
    if core == "xray":
        files = {"certificateFile": certificate, "keyFile": key}
        stream = {"security": "tls", "tlsSettings": {"certificates": [files]}}
        settings = {"clients": [], "decryption": "none"}
        inbound = {"tag": "in", "listen": "127.0.0.1", "port": free_port(), "protocol": "vless", "settings": settings}
        return config(core, {**inbound, "streamSettings": stream})
    tls = {"enabled": True, "certificate_path": certificate, "key_path": key}
    inbound = {
        "type": "trojan",
        "tag": "in",
        "listen": "127.0.0.1",
        "listen_port": free_port(),
        "users": [],
        "tls": tls,
    }
    return config(core, inbound)


def with_masquerade(core: str, directory: str, pair: Certificate) -> Json:
    """A Hysteria inbound that serves this directory to strangers."""
    found = with_certificate(core, str(pair.certificate), str(pair.key))
    inbound = found["inbounds"][0]
    if core == "xray":
        hysteria = {"version": 2, "masquerade": {"type": "file", "dir": directory}}
        inbound["streamSettings"] |= {"network": "hysteria", "hysteriaSettings": hysteria}
        inbound["streamSettings"]["tlsSettings"]["alpn"] = ["h3"]
        return config(core, {**inbound, "protocol": "hysteria", "settings": {"version": 2}})
    return config(core, {**inbound, "type": "hysteria2", "masquerade": {"type": "file", "directory": directory}})


def plain(core: str) -> Json:
    """An inbound without TLS."""
    where = {"tag": "in", "listen": "127.0.0.1"}
    if core == "xray":
        settings = {"clients": [], "decryption": "none"}
        return {**where, "port": free_port(), "protocol": "vless", "settings": settings}
    return {**where, "type": "vless", "listen_port": free_port(), "users": []}


def config(core: str, inbound: Json) -> Json:
    direct = {"protocol": "freedom"} if core == "xray" else {"type": "direct"}
    return {"inbounds": [inbound], "outbounds": [direct]}


def backend(core: str, what: Json) -> Backend:
    return Backend(type=XRAY if core == "xray" else SING_BOX, config=json.dumps(what))


@contextmanager
def node_of(directory: Path, *through: str, **environment: str) -> Iterator[RpcController]:
    with NodeProcess(directory, through=through, **environment) as node, closing(RpcController(node)) as controller:
        yield controller


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certs.make(tmp_path_factory.mktemp("allowed"), ["proxy.test"])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, pair: Certificate) -> Iterator[RpcController]:
    allowed = str(pair.certificate.parent)
    with node_of(tmp_path_factory.mktemp("node"), CORE_PATHS=allowed) as controller:
        yield controller


@pytest.mark.parametrize("core", CORES)
def test_files_in_an_allowed_directory(node: RpcController, pair: Certificate, core: str) -> None:
    """A certificate there is used, also through a link, and a directory of it is served."""
    info = node.start(backend(core, with_certificate(core, str(pair.certificate), str(pair.key))))
    assert not [warning for warning in info.warnings if "Landlock" in warning]
    node.start(backend(core, with_masquerade(core, str(pair.certificate.parent), pair)))
    node.stop()


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("secret", SECRETS)
def test_a_file_beyond_is_refused_by_name(node: RpcController, pair: Certificate, core: str, secret: str) -> None:
    """The error names the path, its place in the configuration, and the setting; the file is not read."""
    for made in (
        with_certificate(core, secret, str(pair.key)),
        with_certificate(core, str(pair.certificate), secret),
        with_masquerade(core, secret, pair),
    ):
        with pytest.raises(ControllerError) as refused:
            node.start(backend(core, made))
        assert refused.value.status == "INVALID_ARGUMENT"
        assert all(word in str(refused.value) for word in (secret, "CORE_PATHS"))


@pytest.mark.parametrize("core", CORES)
def test_the_state_of_the_node_is_withheld(tmp_path: Path, pair: Certificate, core: str) -> None:
    """STATE_DIR is refused even if the operator allows the directory around it."""
    with node_of(tmp_path, CORE_PATHS="/") as controller:
        for secret in (tmp_path / "state" / "state.db", tmp_path / "state" / "run", tmp_path, Path("/")):
            with pytest.raises(ControllerError, match="CORE_PATHS"):
                controller.start(backend(core, with_masquerade(core, str(secret), pair)))


@pytest.mark.parametrize("core", CORES)
def test_the_key_of_the_node_is_withheld(tmp_path: Path, pair: Certificate, core: str) -> None:
    """The node's key is refused even if it is in an allowed directory."""
    key = tmp_path / "certs" / "key"
    key.parent.mkdir()
    made = NodeProcess(tmp_path, API_KEY="", API_KEY_FILE=str(key), CORE_PATHS=f"{key.parent}:{pair.key.parent}")
    key.write_text(made.key)
    with made as node, closing(RpcController(node)) as controller:
        for named in (key.parent, key):
            with pytest.raises(ControllerError, match="CORE_PATHS"):
                controller.start(backend(core, with_masquerade(core, str(named), pair)))


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", ["a" * 300, "a/" * 50_000])
def test_a_path_that_no_file_can_have(node: RpcController, core: str, name: str) -> None:
    """An impossible path is refused for a certificate, and is no file path for a WebSocket; neither takes long."""
    path = f"/etc/ssl/certs/{name}"
    with pytest.raises(ControllerError) as refused:
        node.start(backend(core, with_certificate(core, path, path)))
    assert refused.value.status == "INVALID_ARGUMENT"
    web = {"network": "ws", "wsSettings": {"path": path}}
    more = {"streamSettings": web} if core == "xray" else {"transport": {"type": "ws", "path": path}}
    node.start(backend(core, config(core, {**plain(core), **more})))
    node.stop()


def test_certificates_that_plugins_name(node: RpcController, pair: Certificate) -> None:
    """In the options of a Shadowsocks outbound of sing-box."""
    server = {"type": "shadowsocks", "server": "127.0.0.1", "server_port": 1, "method": "aes-128-gcm", "password": "x"}
    for file, fits in ((str(pair.certificate), True), ("/etc/shadow", False)):
        out = {**server, "tag": "out", "plugin": "v2ray-plugin", "plugin_opts": f"tls;host=a.test;cert={file}"}
        made = {**config("sing-box", plain("sing-box")), "outbounds": [{"type": "direct"}, out]}
        if fits:
            node.start(backend("sing-box", made))
        else:
            with pytest.raises(ControllerError, match=r"plugin_opts, cert.*CORE_PATHS"):
                node.start(backend("sing-box", made))
    node.stop()


def test_no_socket_among_the_certificates_of_the_system(node: RpcController) -> None:
    """Xray would create a file there."""
    with pytest.raises(ControllerError, match="CORE_PATHS"):
        node.start(backend("xray", config("xray", {**plain("xray"), "listen": "/etc/ssl/certs/in.sock"})))


def test_lists_that_are_links(tmp_path: Path) -> None:
    """Geo files may be links, as packages install them."""
    real, lists = tmp_path / "real" / "geoip.dat", tmp_path / "lists"
    for directory in (real.parent, lists):
        directory.mkdir()
    real.write_bytes(private_geoip())
    (lists / "geoip.dat").symlink_to(real)
    rule = {"ip": ["geoip:private"], "outboundTag": "direct"}
    made = {**config("xray", plain("xray")), "outbounds": [{"protocol": "freedom", "tag": "direct"}]}
    with node_of(tmp_path, XRAY_ASSETS_PATH=str(lists)) as controller:
        controller.start(backend("xray", {**made, "routing": {"rules": [rule]}}))


@pytest.mark.parametrize("core", CORES)
def test_without_landlock(tmp_path: Path, pair: Certificate, core: str) -> None:
    """The node warns; named files are checked as usual, and no directory is served to strangers."""
    through = confined.argv(["landlock_create_ruleset"], errno.ENOSYS)
    with node_of(tmp_path, *through, CORE_PATHS=str(pair.certificate.parent)) as controller:
        info = controller.start(backend(core, with_certificate(core, str(pair.certificate), str(pair.key))))
        assert [warning for warning in info.warnings if "refuses Landlock" in warning and UNCONFINED in warning]
        assert NO_LANDLOCK not in info.warnings
        with pytest.raises(ControllerError, match="CORE_PATHS"):
            controller.start(backend(core, with_certificate(core, "/etc/shadow", str(pair.key))))
        with pytest.raises(ControllerError, match="may not serve a directory"):
            controller.start(backend(core, with_masquerade(core, str(pair.certificate.parent), pair)))


@pytest.mark.parametrize("core", CORES)
def test_devices(tmp_path: Path, core: str) -> None:
    """A device in an allowed directory is refused: it has no end, or yields nothing."""
    with node_of(tmp_path, CORE_PATHS="/dev") as controller, pytest.raises(ControllerError, match="not a file"):
        controller.start(backend(core, with_certificate(core, "/dev/zero", "/dev/zero")))


@pytest.mark.parametrize("core", CORES)
def test_a_file_larger_than_memory(tmp_path: Path, core: str) -> None:
    """The memory of a check, and of a core, is bounded; the node reports it, and serves on."""
    endless = tmp_path / "certs" / "endless.pem"
    endless.parent.mkdir()
    with endless.open("wb") as file:
        file.truncate(64 * 1024**3)
    with node_of(tmp_path, CORE_PATHS=str(endless.parent), CORE_MEMORY="256M") as controller:
        with pytest.raises(
            ControllerError,
            match=r"is out of memory: it may|CORE_MEMORY allows a core 256 MiB|did not read the configuration within",
        ):
            controller.start(backend(core, with_certificate(core, str(endless), str(endless))))
        controller.start(backend(core, config(core, plain(core))))


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("secret", ["/etc/shadow", "/dev/zero", "{state}/state.db", "/proc/1/environ"])
def test_what_the_node_does_not_see_the_kernel_refuses(tmp_path: Path, core: str, secret: str) -> None:
    """A core that gets such a configuration by mistake cannot read the file."""
    (tmp_path / "run").mkdir()
    secret = secret.format(state=tmp_path)
    Path(tmp_path / "state.db").write_text("secret")
    done = bare(core, with_certificate(core, secret, secret), tmp_path / "run")
    assert done.returncode
    assert "permission denied" in done.stdout + done.stderr


@pytest.mark.parametrize("core", CORES)
def test_a_port_that_is_not_named(tmp_path: Path, pair: Certificate, core: str) -> None:
    made = with_certificate(core, str(pair.certificate), str(pair.key))
    done = bare(core, made, tmp_path, pair)
    assert done.returncode
    assert "bind: permission denied" in done.stdout + done.stderr


def bare(core: str, made: Json, own: Path, pair: Certificate | None = None) -> subprocess.CompletedProcess[str]:
    """The core itself with this configuration and the rules of one that names no file, or a certificate."""
    allowed = (pair.certificate.parent.resolve(),) if pair else ()
    files = [str(pair.certificate)] if pair else []
    executable, source = (find_xray(), "stdin:") if core == "xray" else (find_sing_box(), "stdin")
    rules = Confinement(Paths(allowed), own).rules(executable, Touched(files))
    command = leashed([str(executable), "run", "-c", source], rules=rules)
    return subprocess.run(
        command, input=json.dumps(made), capture_output=True, text=True, timeout=20, check=False, env=ENVIRONMENT
    )
