"""Xray's access lines: whose connection comes from where, and what of the core's lines a controller is shown. Pure.

Formats: `common/log/access.go`, `app/dispatcher/default.go`, `app/log/log.go` of Xray-core 26.3.27.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from sys import intern
from typing import NamedTuple

from drivers.sockets.connections import Endpoint, endpoint

_EMAIL = " email: "
# Older cores have no microseconds; lines of a multiplexed connection name the network of the source, too.
_ACCEPTED = re.compile(
    r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d(?:\.\d{6})? from (?:tcp:)?(?:([\d.]+)|\[([\da-fA-F:.]+)(?:%[^\]]*)?\]):(\d{1,5}) "
    r"accepted (\S+)(?: \[(.+)\])?",
    re.ASCII,
)
_STAMP = re.compile(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d(?:\.\d{6})? ", re.ASCII)
# Where an access line has `from`, other lines have their severity in brackets.
_ACCESS = re.compile(_STAMP.pattern + "from ", re.ASCII)
_IPV4 = re.compile(r"(?:\d{1,3}\.){3}\d{1,3}", re.ASCII)
_IPV6 = re.compile(r"(?:[\da-fA-F]{0,4}:[\da-fA-F]{0,4}){2,7}", re.ASCII)
_NAMED_MASKS = {"quarter": (8, 16), "half": (16, 32), "full": (0, 0)}
# Python makes no number of thousands of digits.
_BITS = re.compile(r"/?([+-]?\d{1,20})", re.ASCII)


class Accepted(NamedTuple):
    """A connection that the core let in. `detour` is `INBOUND >> OUTBOUND`, with one of three arrows, or empty."""

    email: str
    endpoint: Endpoint
    udp: bool
    detour: str


def parse(line: str) -> Accepted | None:
    """What an access line says; None for every other line, and where the source is not known whole."""
    if _EMAIL not in line:
        return None
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


class Endpoints:
    """Where the users of one inbound are connected from, newest last.

    Of several users on one endpoint the newest has it, since ports are used again; where one connection may carry
    several users (`shared`) it is nobody's, as long as it lives.
    """

    _NOBODY = ""

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        # Those since the last `age`, which a look at the sockets that began with it may not have found, and the others.
        self._young: dict[Endpoint, str] = {}
        self._old: dict[Endpoint, str] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def note(self, where: Endpoint, key: str) -> None:
        before = self._old.pop(where, None)
        if before is None:
            before = self._young.get(where)
        nobody = before == self._NOBODY or (self._shared and before is not None and before != key)
        self._young[where] = self._NOBODY if nobody else intern(key)

    def holder(self, where: Endpoint) -> str | None:
        """Whose the endpoint is, by key."""
        return self._young.get(where) or self._old.get(where) or None

    def of(self, keys: AbstractSet[str]) -> set[Endpoint]:
        return {where for part in (self._old, self._young) for where, key in part.items() if key in keys}

    def forget(self, gone: Iterable[Endpoint]) -> None:
        for where in gone:
            self._young.pop(where, None)
            self._old.pop(where, None)

    def age(self) -> None:
        """A look at the sockets begins: only what was noted before it can be missed in what it finds."""
        self._old |= self._young
        self._young = {}

    def prune(self, live: AbstractSet[Endpoint]) -> None:
        """Forget those that a look since `age` did not find."""
        self._old = {where: key for where, key in self._old.items() if where in live}

    def drop(self, count: int) -> None:
        """Forget the oldest."""
        self.forget(list(islice((where for part in (self._old, self._young) for where in part), count)))


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
        return line[:begin] + _IPV6.sub(lambda match: self._cover_ipv6(match.group()), text)

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
        return self.mask.cover(line) if self.mask else line


def _bits(text: str) -> int:
    if not text:
        return 0
    match = _BITS.fullmatch(text)
    if match is None:
        raise BadMask(f"maskAddress: {text[:20]!r} is not a number of bits")
    return int(match.group(1))
