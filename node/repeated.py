"""Log lines that strangers can cause: the first is written, those that follow it soon are counted and told as one."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

# Seconds that one line stands for.
PERIOD = 600.0
# Addresses that are told apart in it.
_ADDRESSES = 1000


class Repeated:
    """One kind of thing: `what`, which a logger is to `warn` of."""

    def __init__(self, reactor: IReactorTime, warn: Callable[..., None], what: str) -> None:
        self._reactor = reactor
        self._warn = warn
        self._what = what
        self._count = 0
        self._addresses: set[str] = set()
        self._quiet_until = 0.0
        self._call: IDelayedCall | None = None

    def happened(self, address: str = "") -> None:
        """Once more, because of whoever is at this address."""
        now = self._reactor.seconds()
        if now >= self._quiet_until:
            self._quiet_until = now + PERIOD
            self._warn("{what}: {address}", what=self._what, address=address or "of any address")
            return
        self._count += 1
        if address and len(self._addresses) < _ADDRESSES:
            self._addresses.add(address)
        if self._call is None:
            self._call = self._reactor.callLater(self._quiet_until - now, self.sum_up)

    def sum_up(self) -> None:
        """Tell what was only counted; another such line comes after as long a time."""
        if self._call is not None and self._call.active():
            self._call.cancel()
        self._call = None
        if self._count:
            self._warn(
                "{what}: {count} more, of {addresses} addresses, which are not told one by one",
                what=self._what,
                count=self._count,
                addresses=len(self._addresses),
            )
            self._quiet_until = self._reactor.seconds() + PERIOD
        self._count = 0
        self._addresses.clear()
