"""Warnings for operators: on messages of the real core, and on messages as newer cores make them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drivers.process.allowlist import Allowed
from drivers.xray import compat
from drivers.xray.access import Shown
from drivers.xray.compat import UNTRUSTED
from drivers.xray.config import ApiAddress, plan
from drivers.xray.connections import Connections
from drivers.xray.generation import Output
from drivers.xray.messages import REALITY, receiver_of
from protos import xray_pb2
from protos.xray_pb2 import Config, InboundHandlerConfig, TypedMessage
from scripts.staging.core import Json
from scripts.staging.transports import reality
from tests.harness.convert import convert

OLD, NEW = (26, 3, 27), (26, 7, 28)
ID = "b831381d-6324-4d53-ad4f-8cda48b30811"
DIRECT: Json = {"protocol": "freedom", "tag": "direct"}


def warned(version: tuple[int, ...], *exclude: str, allow: str = "", **parts: Any) -> list[str]:
    text = json.dumps(parts)
    readable = {**parts}
    readable.pop("env", None)
    allowed = Allowed(frozenset({allow}))
    made = plan(convert(json.dumps(readable)), text, frozenset(exclude), version, allowed)
    return [warning for warning in made.warnings if "safer core" not in warning]


def inbound(listen: str = "127.0.0.1", stream: Json | None = None, key: str = "clients", **settings: Any) -> Json:
    return {
        "tag": "in",
        "port": 1000,
        "listen": listen,
        "protocol": "vless",
        "settings": {"decryption": "none", key: [{"id": ID}], **settings},
        "streamSettings": stream or {"network": "raw"},
    }


def strict(version: bytes) -> Config:
    security = xray_pb2.RealityConfig(min_client_ver=version).SerializeToString()
    stream = xray_pb2.StreamConfig(security_settings=[TypedMessage(type=REALITY, value=security)])
    receiver = xray_pb2.ReceiverConfig(stream_settings=stream).SerializeToString()
    return Config(inbound=[InboundHandlerConfig(tag="in", receiver_settings=TypedMessage(value=receiver))])


def test_the_default_of_reality() -> None:
    """The version limit that newer cores set by default is warned of, others are not."""
    assert "minClientVer" in next(compat.warnings(strict(bytes((26, 3, 27))), "{}", NEW))
    assert not list(compat.warnings(strict(b""), "{}", NEW))
    assert not list(compat.warnings(strict(bytes((1, 8, 0))), "{}", NEW))


@pytest.mark.core
def test_a_version_of_reality_that_is_written_down() -> None:
    """The field number is the core's."""
    server = reality(443).server
    for written, told in (("26.3.27", True), ("1.8.0", False)):
        stream = {**server, "realitySettings": {**server["realitySettings"], "minClientVer": written}}
        assert ("minClientVer" in str(warned(NEW, inbounds=[inbound(stream=stream)]))) is told


@pytest.mark.core
@pytest.mark.parametrize("network", ["ws", "httpupgrade", "xhttp", "grpc"])
def test_behind_a_reverse_proxy(network: str) -> None:
    """An inbound that only local programs reach is named, where the header is not trusted by default."""
    trusted = {"sockopt": {"trustedXForwardedFor": ["X-Forwarded-For"]}}
    for listen in ("127.0.0.1", "::1", "@here"):
        assert "trustedXForwardedFor" in str(warned(NEW, inbounds=[inbound(listen, {"network": network})]))
    for listen, more in (("127.0.0.1", trusted), ("0.0.0.0", {})):
        assert warned(NEW, inbounds=[inbound(listen, {"network": network, **more})]) == []
    # There gRPC has another header, which cannot be turned off.
    assert len(warned(OLD, inbounds=[inbound("127.0.0.1", {"network": network})])) == (network != "grpc")
    assert warned(NEW, inbounds=[inbound()]) == []


@pytest.mark.core
@pytest.mark.parametrize("listen", ["0.0.0.0", "127.0.0.1"])
def test_a_header_that_anybody_may_send(listen: str) -> None:
    """Trust in every client who sends the header is named, unless only local programs connect."""
    for name, anybody in (("x-forwarded-for", True), ("X-Of-My-Proxy", False)):
        stream = {"network": "ws", "sockopt": {"trustedXForwardedFor": [name]}}
        found = warned(NEW, inbounds=[inbound(listen, stream)])
        assert ("chooses its own address" in str(found)) == (anybody and listen == "0.0.0.0")


@pytest.mark.core
@pytest.mark.parametrize("network", ["ws", "httpupgrade", "xhttp", "grpc", "tcp"])
def test_nobody_is_believed(network: str) -> None:
    """On older cores the node sets a header that no client can guess, unless the inbound says whom to believe."""

    def believed(version: tuple[int, ...], **stream: Json) -> list[str]:
        text = json.dumps({"inbounds": [inbound("0.0.0.0", {"network": network, **stream})]})
        [made] = plan(convert(text), text, frozenset(), version).base.inbound
        return list(receiver_of(made).stream_settings.socket_settings.trusted_x_forwarded_for)

    assert len(believed(OLD)) == (network not in ("grpc", "tcp"))
    assert believed(OLD) == believed(OLD)
    assert all(len(name) > 30 for name in believed(OLD))
    assert believed(NEW) == []
    assert believed(OLD, sockopt={"trustedXForwardedFor": ["A"]}) == ["A"]


@pytest.mark.core
def test_multipath_tcp_is_off() -> None:
    """In every inbound, with a note; other options of the socket stay."""
    here, there = (inbound("0.0.0.0", {"sockopt": {"tcpMptcp": on, "v6only": True}}) for on in (True, False))
    text = json.dumps({"inbounds": [{**here, "tag": "a"}, {**there, "tag": "b", "port": 1}]})
    made = plan(convert(text), text, frozenset(), NEW)
    one, other = (receiver_of(each).stream_settings.socket_settings for each in made.base.inbound)
    assert one == other and one.ByteSize() > 0 and not one.tcp_mptcp
    [note] = made.notes
    assert "'a' does not use Multipath TCP" in note


def leading(*addresses: str, to: str = "direct") -> Json:
    return {"routing": {"rules": [{"type": "field", "ip": list(addresses), "outboundTag": to}]}}


@pytest.mark.core
@pytest.mark.parametrize("address", ["10.1.0.0/16", "192.168.0.7", "fd00::/8", "8.8.8.8, 127.0.0.1"])
def test_private_addresses(address: str) -> None:
    """A freedom outbound without rules that gets private addresses is named, for cores that block them."""
    outbounds = [DIRECT, {**DIRECT, "tag": "other"}]
    [warning] = warned(NEW, outbounds=outbounds, **leading("8.8.8.8", *address.split(", ")))
    assert "'direct'" in warning and "other" not in warning
    assert warned(OLD, outbounds=outbounds, **leading(address.split(", ")[0])) == []


@pytest.mark.core
def test_private_addresses_elsewhere() -> None:
    """Without such rules, or with a blackhole, there is no warning."""
    outbounds = [DIRECT, {"protocol": "blackhole", "tag": "block"}]
    assert warned(NEW, outbounds=outbounds) == []
    assert warned(NEW, outbounds=outbounds, **leading("8.8.8.8")) == []
    assert warned(NEW, outbounds=outbounds, **leading("10.0.0.0/8", to="block")) == []


def test_private_addresses_with_rules() -> None:
    rules = TypedMessage(type="xray.proxy.freedom.Config", value=b"\x42\x02\x08\x01")
    outbound = xray_pb2.OutboundHandlerConfig(tag="direct", proxy_settings=rules)
    said = json.dumps(leading("10.0.0.0/8"))
    assert not list(compat.warnings(Config(outbound=[outbound]), said, NEW))
    outbound.proxy_settings.value = b""
    assert list(compat.warnings(Config(outbound=[outbound]), said, NEW))


@pytest.mark.core
def test_an_environment() -> None:
    """If it is allowed, it has no effect."""
    [warning] = warned(OLD, allow="env", env={"XRAY_BUF_SPLICE": "enable"})
    assert warning.startswith("`env` ")


@pytest.mark.core
def test_users_that_the_core_does_not_read() -> None:
    """The warning is for inbounds that are left as configured; managed ones get their users from the controller."""
    renamed, usual = inbound(key="users"), inbound()
    assert "'in'" in str(warned(OLD, "in", inbounds=[renamed]))
    assert "clients" not in str(warned(compat.USERS, "in", inbounds=[renamed]))
    assert warned(OLD, inbounds=[renamed]) == []
    assert warned(OLD, "in", inbounds=[usual]) == []


SAID = (
    '2026/11/22 10:00:00 [Warning] common/protocol/http: received "X-Forwarded-For" from 10.0.0.1:5 but '
    '"sockopt.trustedXForwardedFor" is not configured; ignoring it and using the real remote address'
)


def reading(seen: list[str]) -> Output:
    """The output of a run, whose connections are read from the lines `seen`."""
    connections = cast(Connections, SimpleNamespace(take=seen.append))
    return Output(ApiAddress("", "0123", direct=True), Shown(), connections)


def test_a_core_that_does_not_trust_the_header() -> None:
    """The core logs it for each connection: it appears once in the log, and once in the warnings."""
    output = reading([])
    assert not output.warnings
    assert output.sift(["something else", SAID, SAID, "something else"]) == ["something else", SAID, "something else"]
    assert len(output.warnings) == 1
    assert output.sift([SAID]) == []
    assert len(output.warnings) == 1


def test_words_of_the_core_in_a_name() -> None:
    """A target with the core's warning in it does not hide its user: the connection is attributed, and cut."""
    seen: list[str] = []
    lines = [f"from tcp:192.0.2.1:{port} accepted tcp:a.test:443 [in >> direct] email: {UNTRUSTED}" for port in (1, 2)]
    reading(seen).sift([SAID, *lines, "of the node's own 0123"])
    assert seen[-2:] == lines
