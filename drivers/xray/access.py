"""Parse Xray's access lines (which user connects from where) and filter the log lines that a controller sees. Pure.

Formats: `common/log/access.go`, `app/dispatcher/default.go`, `app/log/log.go` of Xray-core 26.3.27.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from drivers.sockets.reuseport import is_of_knock
from drivers.sockets.sock_diag import Endpoint, endpoint

_EMAIL = " email: "
_ARROWS = (" >> ", " -> ", " ==> ")
# Older cores print no microseconds. Before the source stands `tcp:` for a multiplexed connection, `udp:` for datagrams.
_ACCEPTED = re.compile(
    r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d(?:\.\d{6})? from (?:tcp:|(udp:))?"
    r"(?:([\d.]+)|\[([\da-fA-F:.]+)(?:%[^\]]*)?\]):(\d{1,5}) accepted (\S+) \[(.+)\]",
    re.ASCII,
)
_STAMP = re.compile(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d(?:\.\d{6})? ", re.ASCII)
# Other lines have their severity in brackets where an access line has `from`.
_ACCESS = re.compile(_STAMP.pattern + "from ", re.ASCII)
# The text after `accepted` in a line that no newline in a target has cut: the target and the route in brackets.
_WHOLE = re.compile(r"\S* \[.+\]")
# Marks of lines that may end with text from a user, and the most characters of such text.
_REJECTED, _INVALID = " rejected ", "invalid domain name: "
_REFUSED = 300
# Errors that end with text of a client, who may be a stranger, with its newlines: the reason why it closed a WebSocket
# (1006 is the node's side's own) or a connection of QUIC, and the name that it asked REALITY for. And the most
# characters of what follows the first line.
_TOLD = re.compile(r"(websocket: close (?!1006)\d+[^:]*: )|(\(remote\): )|(server name mismatch: )", re.ASCII)
_TOLD_MOST = (_REFUSED, 2000, 66_000)
# The end of a connection by which the core could read no more. The core tells nothing else about it.
_ENDED = r"(?:(?:unexpected )?EOF|read tcp \S+->\S+: (?:read: connection reset by peer|i/o timeout))"
# Rejected for lack of a valid credential, or ended before one came, as by a scanner or by a probe of the node: the core
# has read nothing yet that it could print. After a removal there are many such lines between those of connections that
# the core accepted just before.
_STRANGER = re.compile(
    _ACCESS.pattern
    + rf"\S+ rejected  (?:common/drain: common/drain: (?:drained|unable to drain) connection > (?:{_ENDED} > )?)?"
    r"proxy/(?:"
    r"vless/encoding: invalid request (?:version|user id: [\da-f-]{36})"
    r"|trojan: not (?:a valid user|trojan protocol)"
    r"|vmess/encoding: invalid user > user do not exist"
    r"|shadowsocks: failed to match an user > proxy/shadowsocks: Not Found"
    rf"|(?:vmess/encoding: failed to read request header|shadowsocks: failed to read \d+ bytes) > {_ENDED})",
    re.ASCII,
)
# The most characters of a target: SOCKS 4a allows 8,191, Hysteria 2,048.
_TARGET = 8300
_IPV4 = re.compile(r"(?:\d{1,3}\.){3}\d{1,3}", re.ASCII)
# A quick check before the exact one: two colons with at most eight digits between them.
_MAYBE_IPV6 = re.compile(r":[\da-fA-F]{0,8}:", re.ASCII)
_IPV6 = re.compile(r"(?:[\da-fA-F]{0,4}:[\da-fA-F]{0,4}){2,7}", re.ASCII)
_NAMED_MASKS = {"quarter": (8, 16), "half": (16, 32), "full": (0, 0)}
# Bounded, since Python refuses to convert thousands of digits.
_BITS = re.compile(r"/?([+-]?\d{1,20})", re.ASCII)


class Accepted(NamedTuple):
    """A connection that the core accepted. `detour` is `INBOUND >> OUTBOUND`, with one of three arrows.

    `datagram`: the line says that the user connects over UDP; in most lines of such users it does not.
    """

    email: str
    endpoint: Endpoint
    # Mostly with the network: `tcp:HOST:PORT`.
    target: str
    detour: str
    datagram: bool = False

    @property
    def udp(self) -> bool:
        return self.target.startswith("udp:")

    @property
    def forwarded(self) -> bool:
        """Whether a reverse proxy forwarded the address: then there is no port."""
        return not any(self.endpoint[-2:])


def parse(line: str) -> Accepted | None:
    """Parse an access line; None for any other line, and for a source without a valid address and port.

    Port 0 is valid: see `Accepted.forwarded`.
    """
    # The last `email:` counts: a user chooses part of the text before it.
    head, _, email = line.rpartition(_EMAIL)
    match = _ACCEPTED.match(head)
    if match is None:
        return None
    datagram, ipv4, ipv6, port, target, detour = match.groups()
    try:
        return Accepted(email, endpoint(ipv4 or ipv6, int(port)), target, detour or "", datagram is not None)
    except (OSError, OverflowError):
        return None


def inbound_in(detour: str, tags: Collection[str]) -> str | None:
    """The inbound, of those with these tags, that a detour names, if any; a tag may contain arrows itself."""
    found = [tag for tag in tags if any(detour.startswith(tag + arrow) for arrow in _ARROWS)]
    return max(found, key=len, default=None)


class Records:
    """Tell the core's own log records from lines forged by a user: the core prints targets with their newlines.

    A forged line follows the first line of its record closely: within `_REFUSED`, `_TOLD_MOST` or `_TARGET` characters.
    No line in that range is trusted, even if the core wrote it.
    """

    def __init__(self) -> None:
        self._at = 0
        # Offsets: a line that ends at or before `_ends`, or begins before `_begins`, is not trusted.
        self._ends = self._begins = 0

    def is_one(self, line: str, accepted: Accepted | None = None) -> bool:
        """Whether the next line is a whole record of the core's. One that was parsed (`accepted`) is not cut."""
        begin, self._at = self._at, self._at + len(line) + 1
        trusted = begin >= self._begins and self._at > self._ends
        if _INVALID in line or (_REJECTED in line and not _STRANGER.fullmatch(line)):
            self._distrust(_REFUSED)
        if accepted is not None:
            return trusted
        if (told := _TOLD.search(line)) and told.lastindex:
            self._distrust(_TOLD_MOST[told.lastindex - 1])
        elif _is_cut(line):
            self._begins = self._at + _TARGET
        return trusted

    def _distrust(self, most: int) -> None:
        self._ends = max(self._ends, self._at + most)


def _is_cut(line: str) -> bool:
    """Whether a record of an accepted connection ends before its route, cut by a newline in the target."""
    head, accepted, rest = line.partition(" accepted ")
    if not accepted or not _ACCESS.match(head) or head.endswith(" from DNS"):
        return False
    return not _WHOLE.match(rest)


class BadMask(ValueError):
    """The core would refuse this log.maskAddress."""


@dataclass(frozen=True)
class Mask:
    """log.maskAddress: how many leading bits of addresses stay readable."""

    ipv4: int
    ipv6: int

    @classmethod
    def of(cls, text: str) -> Mask | None:
        """Parse the setting: empty, `quarter`, `half`, `full`, or such as `/16+/64`. Raises `BadMask`."""
        if not text:
            return None
        if text in _NAMED_MASKS:
            return cls(*_NAMED_MASKS[text])
        mask = cls(*[_bits(part) for part in [*text.split("+"), ""][:2]])
        if mask.ipv4 not in (0, 8, 16, 24, 32):
            raise BadMask(f"maskAddress {text!r}: the IPv4 part must be 0, 8, 16, 24 or 32")
        return mask

    def cover(self, line: str) -> str:
        """Mask the addresses in a line, but leave its timestamp."""
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
            return address  # a time, or other text with colons
        return str(network)


@dataclass(frozen=True)
class Shown:
    """Which of the core's lines a controller asked for: with access lines or without, addresses masked or not.

    `renamed` gives outbounds of the node's the names that a controller knows.
    """

    access: bool = True
    mask: Mask | None = None
    renamed: Callable[[str], str] | None = None

    def line(self, line: str) -> str | None:
        """The line for the controller; None withholds it."""
        if not self.access and _ACCESS.match(line):
            return None
        if is_of_knock(line) and _EMAIL not in line:
            return None  # a connection of the node's own; user lines have an e-mail
        if self.renamed is not None:
            line = self.renamed(line)
        return self.mask.cover(line) if self.mask else line


def _bits(text: str) -> int:
    if not text:
        return 0
    match = _BITS.fullmatch(text)
    if match is None:
        raise BadMask(f"maskAddress: {text[:20]!r} is not a number of bits")
    return int(match.group(1))
