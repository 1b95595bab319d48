"""Rate limit for wrong keys by address: beyond it, answers are delayed. Requests with a valid key are never delayed."""

from __future__ import annotations

from collections import OrderedDict

from twisted.internet.interfaces import IReactorTime

from node.base.limited_warning import LimitedWarning
from node.base.logs import Logger
from node.door.bucket import Bucket, Rate
from node.door.connection import Connection

# Wrong keys of one address that are answered at once, and how many more each second; and the delay of further answers
# in seconds. A delayed client's connection counts as one without a key, which a newcomer may replace.
LIMIT = Rate(60, 1.0)
LATE = 3.0
# Addresses that are remembered: the last ones that sent wrong keys.
REMEMBERED = 4096


class Guesses:
    """Counts wrong keys by address: a token bucket for each."""

    log = Logger()

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()
        self._keys = LimitedWarning(reactor, self.log.warn, "a request with a wrong key or none")
        self._late = LimitedWarning(
            reactor, self.log.warn, "many wrong keys from one address; answers to it are delayed"
        )

    def wrong(self, connection: Connection) -> float:
        """Count a request with a wrong key or none. Returns the seconds by which to delay its answer."""
        self._keys.happened(connection.address)
        now = self._reactor.seconds()
        bucket = self._buckets.setdefault(connection.network, Bucket(LIMIT, now))
        self._buckets.move_to_end(connection.network)
        if len(self._buckets) > REMEMBERED:
            self._buckets.popitem(last=False)
        if bucket.take(1, now):
            return 0.0
        self._late.happened(connection.address)
        return LATE

    def sum_up(self) -> None:
        """Log the warnings that were only counted."""
        self._keys.sum_up()
        self._late.sum_up()
