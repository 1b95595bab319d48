"""Rate-limited warnings that strangers can cause: the first is logged, further ones are counted and summed up."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime

from node.base.alarm import Alarm

# Seconds between two lines.
PERIOD = 600.0
# Different addresses that are counted in that time.
_ADDRESSES = 1000


class LimitedWarning:
    """Logs one kind of event, `what`, through `warn`: at most one line in `PERIOD` seconds."""

    def __init__(self, reactor: IReactorTime, warn: Callable[..., None], what: str) -> None:
        self._reactor = reactor
        self._warn = warn
        self._what = what
        self._count = 0
        self._addresses: set[str] = set()
        self._quiet_until = 0.0
        self._alarm = Alarm(reactor, self.sum_up)

    def happened(self, address: str = "") -> None:
        """Log an event that this address caused, or count it if the last line is too recent."""
        now = self._reactor.seconds()
        if now >= self._quiet_until:
            self._quiet_until = now + PERIOD
            self._warn("{what}: {address}", what=self._what, address=address or "from any address")
            return
        self._count += 1
        if address and len(self._addresses) < _ADDRESSES:
            self._addresses.add(address)
        self._alarm.within(self._quiet_until - now)

    def sum_up(self) -> None:
        """Log how many events were counted; the next line comes after another `PERIOD`."""
        self._alarm.cancel()
        if self._count:
            self._warn(
                "{what}: {count} more from {addresses} addresses, not logged one by one",
                what=self._what,
                count=self._count,
                addresses=len(self._addresses),
            )
            self._quiet_until = self._reactor.seconds() + PERIOD
        self._count = 0
        self._addresses.clear()
