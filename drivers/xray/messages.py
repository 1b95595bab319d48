"""The messages of Xray's configuration: names of their types, how to edit one, and encoding by hand. Pure.

Type names: Xray-core 26.3.27 to 26.10.21. The encoding (https://protobuf.dev/programming-guides/encoding/) is for
messages that are needed 100,000 times. A tag is the field's number times 8, plus 2 for bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from google.protobuf.message import Message

from protos.xray_pb2 import TypedMessage

M = TypeVar("M", bound=Message)
Version = tuple[int, ...]

# The prefix of tags that the node adds, and of no others.
OURS = "~txnode-"

COMMANDER = "xray.app.commander.Config"
DNS = "xray.app.dns.Config"
GEODATA = "xray.app.geodata.Config"
LOG = "xray.app.log.Config"
METRICS = "xray.app.metrics.Config"
OBSERVATORIES = ("xray.core.app.observatory.Config", "xray.core.app.observatory.burst.Config")
POLICY = "xray.app.policy.Config"
REVERSE = "xray.app.reverse.Config"
ROUTER = "xray.app.router.Config"
STATS = "xray.app.stats.Config"

BLACKHOLE = "xray.proxy.blackhole.Config"
DOKODEMO = "xray.proxy.dokodemo.Config"
FREEDOM = "xray.proxy.freedom.Config"
SHADOWSOCKS = "xray.proxy.shadowsocks.ServerConfig"
SHADOWSOCKS_2022 = "xray.proxy.shadowsocks_2022.MultiUserServerConfig"
SHADOWSOCKS_2022_SINGLE = "xray.proxy.shadowsocks_2022.ServerConfig"
TROJAN = "xray.proxy.trojan.ServerConfig"
TUN = "xray.proxy.tun.Config"
VLESS = "xray.proxy.vless.inbound.Config"
WIREGUARD = "xray.proxy.wireguard.DeviceConfig"

HTTP_HEADER = "xray.transport.internet.headers.http.Config"
HTTP_UPGRADE = "xray.transport.internet.httpupgrade.Config"
HYSTERIA = "xray.transport.internet.hysteria.Config"
REALITY = "xray.transport.internet.reality.Config"
SPLIT_HTTP = "xray.transport.internet.splithttp.Config"
TCP = "xray.transport.internet.tcp.Config"
TLS = "xray.transport.internet.tls.Config"
WEBSOCKET = "xray.transport.internet.websocket.Config"


@contextmanager
def edited(packed: TypedMessage, message_type: type[M]) -> Iterator[M]:
    """Parse a message, and put it back with the changes that the block makes."""
    message = message_type.FromString(packed.value)
    yield message
    # Without a change nothing is written: that would add a message that is not there.
    if (value := message.SerializeToString()) != packed.value:
        packed.value = value


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Sizes(dict[int, bytes]):
    def __missing__(self, size: int) -> bytes:
        return varint(size)


# Sizes as varints; the usual ones are precomputed.
SIZE = _Sizes((size, varint(size)) for size in range(512))


def field(tag: bytes, value: bytes) -> bytes:
    """Encode a field of bytes, text or a message."""
    return tag + SIZE[len(value)] + value
