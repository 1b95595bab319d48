"""Wrong keys by address: beyond some at once their answers come late. Right ones are never kept waiting."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from twisted.internet.interfaces import IReactorTime

from node.logs import Logger
from node.repeated import Repeated

# Wrong keys of one address that are answered at once, and more a second; and how late the answers to others are. Who
# waits holds a place of a stranger, which any newcomer may have.
AT_ONCE = (60, 1.0)
LATE = 3.0
# Addresses that are remembered: of those that guess, the last.
REMEMBERED = 4096


class Connection(Protocol):
    """`network` is what counts as its address, `address` what people are told."""

    @property
    def network(self) -> str: ...
    @property
    def address(self) -> str: ...


class Guesses:
    """How many wrong keys of each address are still answered at once."""

    log = Logger()

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        # What is left, and when that was.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._keys = Repeated(reactor, self.log.warn, "a wrong key, or none")
        self._late = Repeated(reactor, self.log.warn, "many wrong keys of one address, whose answers come late now")

    def wrong(self, connection: Connection) -> float:
        """One more wrong key, or none. Returns the seconds after which it is to be answered."""
        self._keys.happened(connection.address)
        now, (size, rate) = self._reactor.seconds(), AT_ONCE
        left, at = self._left.pop(connection.network, (float(size), now))
        left = min(size, left + (now - at) * rate)
        self._left[connection.network] = (max(left - 1, 0.0), now)
        if len(self._left) > REMEMBERED:
            self._left.popitem(last=False)
        if left >= 1:
            return 0.0
        self._late.happened(connection.address)
        return LATE

    def sum_up(self) -> None:
        """Tell what was only counted."""
        self._keys.sum_up()
        self._late.sum_up()
