"""Explains the difference between what the core has counted and what the interfaces have carried. Pure.

Each byte of a user passes the machine twice, in and out of the core, with headers each time. What headers, TLS and
transports add was measured: docs/bill.md has how.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from protos.service_pb2 import Bill, BilledBytes


class Factors(NamedTuple):
    """Bytes on the network for each byte that the core counts: for large transfers, and for small requests."""

    large: float
    small: float


# Between users and the core, by transport; and between the core and its targets.
OF_USERS = {
    "tcp": Factors(1.049, 1.24),
    "tls": Factors(1.058, 2.05),
    "reality": Factors(1.055, 2.12),
    "websocket": Factors(1.060, 2.25),
    "xhttp": Factors(1.054, 2.41),
    "shadowsocks": Factors(1.051, 1.32),
    "hysteria": Factors(1.057, 1.30),
}
OF_TARGETS = Factors(1.049, 1.24)
# Of a transport that was not measured.
UNKNOWN = Factors(min(each.large for each in OF_USERS.values()), max(each.small for each in OF_USERS.values()))
# Differences that need no explanation: this part of what was carried, or this number of bytes, whichever is more.
PART, BYTES = 0.01, 1024**3

_OTHERS = (
    "the interfaces carried {bytes:,} bytes more than headers, TLS and controllers explain: other programs use this "
    "machine, or the core did not count all bytes"
)
_MISSING = (
    "the core counted {bytes:,} bytes that the interfaces did not carry: they stayed on this machine, such as those of "
    "a proxy or web server on it, or took other interfaces, or were counted twice"
)


def band(transports: Collection[str]) -> Factors:
    """Bytes that the machine carries for each byte of users who connect by these transports."""
    factors = [OF_USERS.get(transport, UNKNOWN) for transport in transports] or [UNKNOWN]
    return Factors(
        min(each.large for each in factors) + OF_TARGETS.large, max(each.small for each in factors) + OF_TARGETS.small
    )


def explain(bill: Bill) -> None:
    """Add to the sums of a bill what follows from them.

    The kernel counts the headers of packets that the network card divides or joins (offloading) once: so headers
    may be next to nothing for it.
    """
    users = max(_both(bill.users), _both(bill.inbounds))
    bill.core = users + (_both(bill.outbounds) or users)
    bill.least, bill.most = band(bill.transports)
    rest = _both(bill.interfaces) - bill.core - _both(bill.controllers)
    bill.missing = max(0, -rest)
    bill.headers = min(max(0, rest), round((bill.most / 2 - 1) * bill.core))
    bill.others = max(0, rest) - bill.headers
    if bill.core:
        bill.ratio = max(0.0, (bill.core + rest) / (bill.core / 2))
    slack = max(BYTES, PART * _both(bill.interfaces))
    for text, count in ((_OTHERS, bill.others), (_MISSING, bill.missing)):
        if count > slack:
            bill.warnings.append(text.format(bytes=count))


def _both(count: BilledBytes) -> int:
    return count.received + count.sent
