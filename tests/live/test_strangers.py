"""Strangers at the node's ports: whatever they do, it survives and serves callers with the key."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from protos.service_pb2 import Empty
from scripts.staging import certs
from scripts.staging.controller import RestController, RpcController
from scripts.staging.node import NodeProcess
from scripts.staging.rpc import Rpc
from scripts.staging.wait import until
from tests.harness.strangers import blind, call, knocking, lingering
from tests.live.test_transport import all_of, connected, der, served


def test_knocking_while_the_certificate_is_renewed(tmp_path: Path) -> None:
    """Endless connections and handshakes, and renewals meanwhile, do not end the node."""
    with NodeProcess(tmp_path) as node:
        with knocking(node.grpc_port) as rounds:
            for number in range(10):
                before = rounds()
                renew(node, tmp_path / str(number))
                until(lambda: rounds() > before + 10, 30, "strangers knock")  # noqa: B023
        assert RpcController(node).info().version


def renew(node: NodeProcess, directory: Path) -> None:
    """Replace the certificate and wait until the gRPC port serves it."""
    directory.mkdir()
    pair = certs.make(directory, ["localhost", node.host])
    pair.certificate.replace(node.certificate.certificate)
    pair.key.replace(node.certificate.key)
    os.kill(node.pid, signal.SIGHUP)
    wanted = der(node.certificate.certificate)
    until(lambda: served(node.grpc_port) == wanted, what="the new certificate")


def test_a_path_that_is_not_ascii(tmp_path: Path) -> None:
    """A call that gRPC's server might not survive never reaches it, and ends no other call."""
    with NodeProcess(tmp_path) as node, Rpc(node) as before, RpcController(node).logs() as reader:
        until(lambda: reader.lines, what="the stream is open")
        for _ in range(10):
            assert not call(node.grpc_port, "/é".encode())
            with Rpc(node) as late:
                until(lambda: late.GetBaseInfo(Empty(), wait_for_ready=True).version, 5, "a new controller is served")
        assert before.GetBaseInfo(Empty(), wait_for_ready=True).version
        assert not reader.ended
        assert not any("gRPC server" in line for line in node.lines)
        assert [line for line in node.lines if "Traceback" in line or "stderr" in line] == [], node.lines


@pytest.mark.slow
def test_silent_and_slow_ones_go(tmp_path: Path) -> None:
    """200 silent and 200 slow strangers at each port are gone within 20 s, and controllers are served meanwhile."""
    with NodeProcess(tmp_path) as node, RpcController(node).logs() as reader, Rpc(node) as rpc:
        until(lambda: reader.lines, what="the stream is open")
        assert rpc.GetBaseInfo(Empty()).version
        with lingering(200, node.rest_port, node.grpc_port) as gone:
            served = [bool(RestController(node).info().version and rpc.GetBaseInfo(Empty()).version) for _ in range(20)]
            until(gone, 20, "the strangers are gone")
        assert all(served)
        assert not reader.ended
        assert RestController(node).info().version
        with Rpc(node) as late:
            assert late.GetBaseInfo(Empty()).version


def test_strangers_write_next_to_nothing(own_node: NodeProcess) -> None:
    """The log has one line of each kind for any number of strangers' requests on either port."""
    RestController(own_node).info()
    until(lambda: any("is ready" in line for line in own_node.lines), what="the node has said all")
    before = len(own_node.lines)
    for port in (own_node.rest_port, own_node.grpc_port):
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff", os.urandom(100)):
            with socket.create_connection((own_node.host, port), 5) as plain:
                plain.sendall(text)
        for text in (b"GET /info HTTP/1.1\r\nx-api-key: no\r\n\r\n", b"\xff\r\n\r\n"):
            with connected(port, blind()) as secure, suppress(ConnectionResetError):
                secure.sendall(text)
                all_of(secure)
    for headers in ((), ((b"grpc-timeout", b"x"),), ((b"grpc-encoding", b"\xff"),), ((b"x-api-key", b"\xff"),)):
        assert call(own_node.grpc_port, b"/service.NodeService/Stop", *headers)
    assert RpcController(own_node).info().version
    kinds = [line.partition("#warn] ")[2] for line in own_node.lines[before:]]
    assert sorted(kinds) == ["a TLS handshake failed: 127.0.0.1", "a request with a wrong key or none: 127.0.0.1"]
