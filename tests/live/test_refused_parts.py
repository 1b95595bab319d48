"""Dangerous parts of configurations: the bare cores execute them, and the node refuses them by name."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from node.state.directory import StateDirectory
from scripts.staging.backend import backend
from scripts.staging.controller import Controller, ControllerError
from scripts.staging.core import ENVIRONMENT, Json, Xray
from scripts.staging.node import ROOMY, NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.process import Child
from scripts.staging.sing_box import backend as sing_box
from scripts.staging.sing_box import config, find_sing_box
from scripts.staging.wait import until
from tests.conftest import control

KEY = "2KZ4uouMKgI8nR-LDJNP1_MHisCJOmKGj9jUjZLncVU"
WORDS = b"GET /containers/json HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[tuple[str, list[bytes]]]:
    """A private unix socket of the machine, and the bytes received on it."""
    path = tmp_path / "machine.sock"
    with listener(str(path)) as heard:
        yield str(path), heard


@contextmanager
def listener(address: str) -> Iterator[list[bytes]]:
    """A unix server, and the first bytes of each connection; it replies to each with a dot."""
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        server.listen()

        def serve() -> None:
            with suppress(OSError):
                while True:
                    link, _ = server.accept()
                    with link, suppress(OSError):  # The client may close first.
                        link.settimeout(10)
                        heard.append(link.recv(4096))
                        link.sendall(b".")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield heard
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def fallback(port: int, target: str) -> Json:
    """An inbound that forwards clients without VLESS."""
    settings = {"decryption": "none", "clients": [], "fallbacks": [{"dest": target}]}
    return {"tag": "in", "listen": "127.0.0.1", "port": port, "protocol": "vless", "settings": settings}


def cover(port: int, target: str) -> Json:
    """An inbound that forwards clients without REALITY's key."""
    reality = {"target": target, "serverNames": ["cover.test"], "privateKey": KEY, "shortIds": ["0123abcd"]}
    stream = {"network": "raw", "security": "reality", "realitySettings": reality}
    return {**fallback(port, target), "settings": {"decryption": "none", "clients": []}, "streamSettings": stream}


def told(port: int) -> bytes:
    """The reply to a stranger who sends something."""
    with socket.create_connection(("127.0.0.1", port), 10) as link:
        link.sendall(WORDS)
        return link.recv(1)


@pytest.mark.parametrize("inbound", [fallback, cover])
def test_a_bare_core_passes_strangers_on_to_any_socket(
    inbound: Callable[[int, str], Json], secret: tuple[str, list[bytes]]
) -> None:
    """The danger is real: clients of the proxy's port reach a socket for root only."""
    path, heard = secret
    made = inbound(port := free_port(), path)
    with Xray({"inbounds": [made], "outbounds": [{"protocol": "freedom"}]}):
        with suppress(OSError):
            told(port)
        until(lambda: WORDS in heard, 10, "the words of a stranger arrive")


def test_a_bare_core_posts_to_any_socket(secret: tuple[str, list[bytes]]) -> None:
    """With the webhook of a routing rule, with a path and headers from the configuration."""
    path, heard = secret
    hook = {"url": f"{path}:/containers/create", "headers": {"X-Own": "1"}}
    inbound = {"tag": "in", "listen": "127.0.0.1", "port": (port := free_port()), "protocol": "http"}
    rule = {"inboundTag": ["in"], "outboundTag": "out", "webhook": hook}
    outbounds = [{"tag": "out", "protocol": "blackhole"}]
    with (
        Xray({"inbounds": [inbound], "outbounds": outbounds, "routing": {"rules": [rule]}}),
        socket.create_connection(("127.0.0.1", port), 10) as link,
    ):
        link.sendall(b"CONNECT a.test:80 HTTP/1.1\r\nHost: a.test\r\n\r\n")
        until(lambda: any(b"POST /containers/create" in words for words in heard), 10, "the hook arrives")


def test_a_bare_core_runs_programs(tmp_path: Path) -> None:
    """sing-box does, for its Tor outbound."""
    program, trace = tmp_path / "program", tmp_path / "trace"
    program.write_text(f"#!/bin/sh\necho here > {trace}\n")
    program.chmod(0o755)
    outbounds = [{"type": "tor", "executable_path": str(program), "data_directory": str(tmp_path / "tor")}]
    text = config([], outbounds=outbounds).encode()
    with Child([str(find_sing_box()), "run", "-c", "stdin"], ENVIRONMENT, stdin=text) as core:
        until(trace.exists, 10, "the program ran")
        core.kill()


XRAY: Mapping[str, tuple[Json, str]] = {
    "fallback": ({"inbounds": [fallback(1000, "/run/docker.sock")]}, "inbound 'in', fallback: .*CORE_PATHS"),
    "REALITY": ({"inbounds": [cover(1000, "/run/docker.sock")]}, "inbound 'in', REALITY's target: .*CORE_PATHS"),
    "listen": ({"inbounds": [{"listen": "/run/x.sock", "protocol": "socks"}]}, "inbound '', listen: .*CORE_PATHS"),
    "webhook": (
        {"routing": {"rules": [{"network": "tcp", "outboundTag": "direct", "webhook": {"url": "/run/docker.sock"}}]}},
        "routing rule 0, webhook: .*CORE_PATHS",
    ),
    "tun": ({"inbounds": [{"protocol": "tun", "settings": {}}]}, "inbound '': tun is refused, .*CORE_ALLOW=tun"),
    "env": ({"env": {"XRAY_LOCATION_ASSET": "/etc"}}, "env is refused, .*CORE_ALLOW=env"),
}
SING_BOX: Mapping[str, tuple[Json, str]] = {
    "tor": ({"outbounds": [{"type": "tor"}]}, r"outbounds\[0\]: tor is refused, because it runs a program"),
    "tailscale": ({"endpoints": [{"type": "tailscale"}]}, r"endpoints\[0\]: tailscale is refused, .*shell"),
    "tun": ({"inbounds": [{"type": "tun", "auto_route": True}]}, r"inbounds\[0\]: tun is refused"),
    **{
        name: ({"services": [{"type": name}]}, rf"services\[0\]: {name} is refused, .*CORE_ALLOW={name} ")
        for name in ("ccm", "ocm", "derp", "resolved", "usbip-server")
    },
}


@pytest.mark.parametrize("name", XRAY)
def test_the_node_refuses_it_for_xray(controller: Controller, name: str) -> None:
    """With what, where, and the setting that would allow it, over both interfaces."""
    parts, words = XRAY[name]
    with pytest.raises(ControllerError, match=words) as refused:
        controller.start(backend(**{"inbounds": [], **parts}))
    assert refused.value.status in ("400", "INVALID_ARGUMENT")


@pytest.mark.parametrize("name", SING_BOX)
def test_the_node_refuses_it_for_sing_box(controller: Controller, name: str) -> None:
    """The same for sing-box."""
    parts, words = SING_BOX[name]
    with pytest.raises(ControllerError, match=words) as refused:
        controller.start(sing_box(**{"inbounds": [], **parts}))
    assert refused.value.status in ("400", "INVALID_ARGUMENT")


def test_what_settings_allow(tmp_path: Path) -> None:
    """A service by its name; fallbacks to sockets below an allowed directory, in run/, and to abstract ones."""
    front = tmp_path / "front"
    front.mkdir()
    with (
        NodeProcess(tmp_path, CORE_ALLOW="oom-killer", CORE_PATHS=str(front), **ROOMY) as node,
        control(node, "rest") as controller,
    ):
        controller.start(sing_box([], services=[{"type": "oom-killer"}]))
        for target in (
            str(front / "a.sock"),
            str(StateDirectory(node.state).run_dir / "b.sock"),
            f"@front-{os.getpid()}",
        ):
            with listener(target) as heard:
                controller.start(backend([fallback(port := free_port(), target)]))
                assert told(port) == b"." and heard == [WORDS]
        controller.stop()


def test_a_configuration_that_was_refused_changes_nothing(node: NodeProcess) -> None:
    """The running backend stays."""
    with control(node, "grpc") as controller:
        controller.start(backend([{"listen": "127.0.0.1", "port": (port := free_port()), "protocol": "socks"}]))
        with pytest.raises(ControllerError):
            controller.start(backend([], env={"A": "b"}))
        assert controller.info().running
        socket.create_connection(("127.0.0.1", port), 10).close()
        controller.stop()


def test_texts_are_short(node: NodeProcess) -> None:
    """For any length of a name in the configuration."""
    with control(node, "grpc") as controller:
        with pytest.raises(ControllerError) as refused:
            controller.start(backend([{**fallback(1000, "/x" * 50_000), "tag": "t" * 100_000}]))
        assert len(json.dumps(refused.value.text)) < 1000
