"""Log files, key logs and debug prints of a configuration are off."""

from __future__ import annotations

import json

import pytest

from drivers.xray import messages
from drivers.xray.config import render
from protos import xray_pb2
from scripts.staging.core import Json
from tests.harness.convert import convert
from tests.harness.rendering import (
    FILE,
    ID,
    REALITY_CLIENT,
    REALITY_SERVER,
    STREAMS,
    THROUGH_INBOUND,
    apps,
    inbound,
    of,
    taken_over,
    vless,
)

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    "text",
    [
        '{"log": {"access": "FILE", "error": "FILE", "loglevel": "info"}}',
        '{"LOG": {"Access": "FILE", "ERROR": "FILE", "loglevel": "info"}}',
        '{ // comment\n "log": {"error": "FILE", "loglevel": "info"}, /* and */ "Log": {"access": "FILE"} # another\n}',
    ],
)
def test_logs_go_to_the_console(text: str) -> None:
    """Log files in a configuration are not written, in any case of keys; the level stays."""
    made = taken_over(text.replace("FILE", FILE))
    (app,) = apps(made.base, messages.LOG)
    log = xray_pb2.LogConfig.FromString(app.value)
    assert (log.error_log_type, log.access_log_type, log.error_log_level) == (1, 1, 3)
    assert FILE.encode() not in render(made, THROUGH_INBOUND, {})


def test_logs_that_are_off_stay_off() -> None:
    """A controller that wants no access lines gets none; the core writes them, for the node."""
    made = of(log={"access": "none", "error": "none"})
    (app,) = apps(made.base, messages.LOG)
    log = xray_pb2.LogConfig.FromString(app.value)
    assert (log.error_log_type, log.access_log_type) == (0, 1)
    line = "2026/11/21 02:17:57.788507 from 127.0.1.2:53843 accepted tcp:127.0.0.1:19313 [vless >> direct] email: ann"
    assert made.shown.line(line) is None
    assert of(log={"error": "none"}).shown.line(line) == line


@pytest.mark.parametrize("name", STREAMS)
def test_no_outbound_logs_keys(name: str) -> None:
    """TLS key logs of outbounds are removed at any depth; the rest of the transport stays."""
    settings = {"address": "kept.example", "port": 443, "id": ID, "encryption": "none"}
    text = json.dumps({"outbounds": [{"protocol": "vless", "settings": settings, "streamSettings": STREAMS[name]}]})
    assert FILE.encode() in convert(text)
    message = render(taken_over(text), THROUGH_INBOUND, {})
    assert FILE.encode() not in message
    assert message.count(b"kept.example") == convert(text).count(b"kept.example")


@pytest.mark.parametrize(
    "stream", [STREAMS["tls"], {"network": "raw", "security": "reality", "realitySettings": REALITY_SERVER}], ids=str
)
def test_no_inbound_logs_keys(stream: Json) -> None:
    """TLS key logs of inbounds are removed, too, managed or not."""
    text = json.dumps({"inbounds": [vless(stream=stream), inbound("socks", "socks", stream | {}, auth="noauth")]})
    text = text.replace('"port": 1000', '"port": 1001', 1)
    assert convert(text).count(FILE.encode()) == 2
    for exclude in ((), ("in",)):
        assert FILE.encode() not in render(taken_over(text, *exclude), THROUGH_INBOUND, {"in": {}})


@pytest.mark.parametrize("side", ["inbounds", "outbounds"])
def test_reality_does_not_print(side: str) -> None:
    """REALITY's debug prints, which bypass the log, are off."""
    stream = {"network": "raw", "security": "reality"}
    if side == "inbounds":
        made = of(inbounds=[vless(stream=stream | {"realitySettings": REALITY_SERVER})])
        found = xray_pb2.ReceiverConfig.FromString(made.base.inbound[0].receiver_settings.value).stream_settings
    else:
        settings = {"address": "kept.example", "port": 443, "id": ID, "encryption": "none"}
        streamed = stream | {"realitySettings": REALITY_CLIENT}
        made = of(outbounds=[{"protocol": "vless", "settings": settings, "streamSettings": streamed}])
        found = xray_pb2.SenderConfig.FromString(made.base.outbound[0].sender_settings.value).stream_settings
    (security,) = found.security_settings
    assert security.type == messages.REALITY
    reality = xray_pb2.RealityConfig.FromString(security.value)
    assert (reality.show, reality.master_key_log) == (False, "")
    assert b"kept.example" in security.value
