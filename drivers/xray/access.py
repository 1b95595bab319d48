"""Xray's access lines: whose connection comes from where, and what of the core's lines a controller is shown. Pure.

Formats: `common/log/access.go`, `app/dispatcher/default.go`, `app/log/log.go` of Xray-core 26.3.27.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import NamedTuple

from drivers.sockets.connections import Endpoint, endpoint
from drivers.sockets.reuseport import is_of_knock

_EMAIL = " email: "
# Older cores have no microseconds; lines of a multiplexed connection name the network of the source, too.
_ACCEPTED = re.compile(
    r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d(?:\.\d{6})? from (?:tcp:)?(?:([\d.]+)|\[([\da-fA-F:.]+)(?:%[^\]]*)?\]):(\d{1,5}) "
    r"accepted (\S+) \[(.+)\]",
    re.ASCII,
)
_STAMP = re.compile(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d(?:\.\d{6})? ", re.ASCII)
# Where an access line has `from`, other lines have their severity in brackets.
_ACCESS = re.compile(_STAMP.pattern + "from ", re.ASCII)
# What stands behind `accepted` in a line that no newline of a user's has cut: where to, and by which way.
_WHOLE = re.compile(r"\S* \[.+\]")
# How lines say that they may end with what a user sent, and the most characters that this can be.
_REJECTED, _INVALID = " rejected ", "invalid domain name: "
_REFUSED = 300
# Connections without a valid credential are rejected before the core reads what could be printed. After a removal such
# lines are many, and stand between those of connections that the core accepted just before.
_STRANGER = re.compile(
    _ACCESS.pattern + r"\S+ rejected  (?:common/drain: .+ > )?proxy/(?:"
    r"vless/encoding: invalid request (?:version|user id: [\da-f-]{36})"
    r"|trojan: not (?:a valid user|trojan protocol)"
    r"|vmess/encoding: invalid user > user do not exist"
    r"|shadowsocks: failed to match an user > proxy/shadowsocks: Not Found)",
    re.ASCII,
)
# The most characters of a target: SOCKS 4a takes 8,191, Hysteria 2,048.
_TARGET = 8300
_IPV4 = re.compile(r"(?:\d{1,3}\.){3}\d{1,3}", re.ASCII)
# Quickly found out: there are two colons with hardly anything between them.
_MAYBE_IPV6 = re.compile(r":[\da-fA-F]{0,8}:", re.ASCII)
_IPV6 = re.compile(r"(?:[\da-fA-F]{0,4}:[\da-fA-F]{0,4}){2,7}", re.ASCII)
_NAMED_MASKS = {"quarter": (8, 16), "half": (16, 32), "full": (0, 0)}
# Python makes no number of thousands of digits.
_BITS = re.compile(r"/?([+-]?\d{1,20})", re.ASCII)


class Accepted(NamedTuple):
    """A connection that the core let in. `detour` is `INBOUND >> OUTBOUND`, with one of three arrows."""

    email: str
    endpoint: Endpoint
    udp: bool
    detour: str


def parse(line: str) -> Accepted | None:
    """What an access line says; None for every other line, and where the source is not known whole."""
    # The last one: what stands before it is in part the user's to choose.
    head, _, email = line.rpartition(_EMAIL)
    match = _ACCEPTED.match(head)
    if match is None:
        return None
    ipv4, ipv6, port, target, detour = match.groups()
    if port == "0":  # the address is one that a reverse proxy forwarded
        return None
    try:
        return Accepted(email, endpoint(ipv4 or ipv6, int(port)), target.startswith("udp:"), detour or "")
    except (OSError, OverflowError):
        return None


class Records:
    """Tells the core's records from lines that a user wrote into one: it prints names as they came, newlines and all.

    Such a line ends, or for targets begins, not far behind the line that its record began with. What the core itself
    says there is not believed either.
    """

    def __init__(self) -> None:
        self._at = 0
        # Lines that end up to here, and those that begin before there, are not believed.
        self._ends = self._begins = 0

    def is_one(self, line: str, accepted: Accepted | None = None) -> bool:
        """Whether the line, which is the next one, is a whole record of the core's; one that was parsed is not cut."""
        begin, self._at = self._at, self._at + len(line) + 1
        believed = begin >= self._begins and self._at > self._ends
        if _INVALID in line or (_REJECTED in line and not _STRANGER.fullmatch(line)):
            self._ends = self._at + _REFUSED
        elif accepted is None and _is_cut(line):
            self._begins = self._at + _TARGET
        return believed


def _is_cut(line: str) -> bool:
    """Whether a record of an accepted connection ends before it says by which way that went."""
    head, accepted, rest = line.partition(" accepted ")
    if not accepted or not _ACCESS.match(head) or head.endswith(" from DNS"):
        return False
    return not _WHOLE.match(rest)


class BadMask(ValueError):
    """A log.maskAddress that the core would refuse."""


@dataclass(frozen=True)
class Mask:
    """How many leading bits of addresses stay readable."""

    ipv4: int
    ipv6: int

    @classmethod
    def of(cls, text: str) -> Mask | None:
        """As in the configuration: empty, `quarter`, `half`, `full`, or as `/16+/64`. Raises `BadMask`."""
        if not text:
            return None
        if text in _NAMED_MASKS:
            return cls(*_NAMED_MASKS[text])
        mask = cls(*[_bits(part) for part in [*text.split("+"), ""][:2]])
        if mask.ipv4 not in (0, 8, 16, 24, 32):
            raise BadMask(f"maskAddress {text!r}: the IPv4 part must be 0, 8, 16, 24 or 32")
        return mask

    def cover(self, line: str) -> str:
        """The line with its addresses masked, its time left alone."""
        stamp = _STAMP.match(line)
        begin = stamp.end() if stamp else 0
        text = _IPV4.sub(lambda match: self._cover_ipv4(match.group()), line[begin:])
        if _MAYBE_IPV6.search(text):
            text = _IPV6.sub(lambda match: self._cover_ipv6(match.group()), text)
        return line[:begin] + text

    def _cover_ipv4(self, address: str) -> str:
        if self.ipv4 == 0:
            return "[Masked IPv4]"
        kept = self.ipv4 // 8
        return ".".join([*address.split(".")[:kept], *["*"] * (4 - kept)])

    def _cover_ipv6(self, address: str) -> str:
        if self.ipv6 == 128:
            return address
        if not 0 < self.ipv6 < 128:
            return "Masked IPv6"
        try:
            network = ipaddress.IPv6Network((address, self.ipv6), strict=False)
        except ValueError:
            return address  # a time, or another thing with colons
        return str(network)


@dataclass(frozen=True)
class Shown:
    """What a controller asked to see of the core's lines: access lines or not, and addresses masked or not."""

    access: bool = True
    mask: Mask | None = None

    def line(self, line: str) -> str | None:
        """The line as it is shown; None withholds it."""
        if not self.access and _ACCESS.match(line):
            return None
        if is_of_knock(line) and _EMAIL not in line:
            return None  # no user, whatever names users have invented
        return self.mask.cover(line) if self.mask else line


def _bits(text: str) -> int:
    if not text:
        return 0
    match = _BITS.fullmatch(text)
    if match is None:
        raise BadMask(f"maskAddress: {text[:20]!r} is not a number of bits")
    return int(match.group(1))
