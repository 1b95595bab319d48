"""A stream of log lines that reconnects."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain

from twisted.internet.interfaces import IReactorTime

from node.base.logs import NODE_MARK, REPLAY, TOO_SLOW
from node.client.failures import NoReply
from node.client.inbox import Inbox
from node.client.stream import Stream
from node.client.transport import Line

# Seconds without a line after which the first lines of a new connection are complete, and seconds after which they
# count as complete in any case.
QUIET, SETTLED = 0.3, 2.0

# Begins lines that the client itself adds.
CLIENT_MARK = "[client] "
# Added where lines may be missing.
GAP = f"{CLIENT_MARK}the connection broke: lines may be missing here"


class LogStream(Stream[Line, str]):
    """The node's log lines, in order: those that it sends a new reader, then those that come.

    If the connection breaks, the stream goes on after the last line that was read. The node sends the place of each
    line, so that no line is missing, and none comes twice. If more lines came meanwhile than the node keeps, a line
    says how many are lost; lines that it had not sent when it ended are lost, too: `GAP` marks that.

    Older nodes, and all nodes in the deployed dialect, send no places. Then the first lines of a new connection, the
    newest REPLAY lines of the ring, are matched with the lines that were read last. This has limits:

    - If more than REPLAY lines came meanwhile, those before the newest REPLAY are lost. `GAP` marks that.
    - If identical lines repeat, one may be taken for another, and be missing or come twice. Lines of cores have a
      time stamp; those of the node itself do not.
    - After a reconnect, the first lines may come SETTLED seconds late.
    """

    def __init__(
        self, reactor: IReactorTime, connect: Callable[[str], Awaitable[Inbox[Line]]], patience: float = math.inf
    ) -> None:
        super().__init__(reactor, patience)
        self._connect = connect
        # The last line that was read.
        self._last = Line("")
        self._seen: deque[str] = deque(maxlen=REPLAY)

    async def _connected(self) -> Inbox[Line]:
        return await self._connect(self._last.place)

    async def _reconnect(self) -> None:
        await super()._reconnect()
        if not self._last.place:
            try:
                self._go_on(await self._beginning())
            except NoReply:
                self._source.close()
                raise

    async def _beginning(self) -> list[Line]:
        """Read the first lines of a new connection, or more."""
        lines: list[Line] = []
        end = self._reactor.seconds() + SETTLED
        while len(lines) < REPLAY and self._reactor.seconds() < end and (more := await self._source.take(QUIET)):
            lines += more
        return lines

    def _go_on(self, lines: list[Line]) -> None:
        known = overlap(list(self._seen), [line.text for line in lines[:REPLAY]])
        if known is None:
            self._seen.clear()
        self._put(lines[known or 0 :], [GAP] if known is None else [])

    def _deliver(self, items: list[Line]) -> None:
        self._put(items, [] if items[0].log == self._last.log or not self._last.log else [GAP])

    def _put(self, lines: list[Line], before: Sequence[str]) -> None:
        for text, _ in lines:
            if text.startswith(NODE_MARK) and text.endswith(TOO_SLOW):
                self._seen.clear()  # lines are missing here, so the earlier ones do not precede the next
            else:
                self._seen.append(text)
        self._last = lines[-1] if lines else self._last
        self._outbox.put([*before, *(text for text, _ in lines)])


def overlap(seen: Sequence[str], beginning: Sequence[str]) -> int | None:
    """Count the lines at the beginning of a new stream that were read before; None if the last ones are not there.

    The longest overlap counts; if all of `seen` occurs more than once, the first occurrence.
    """
    size = len(seen)
    whole = (end for end in range(size, len(beginning) + 1) if beginning[end - size : end] == seen)
    parts = (end for end in range(min(size, len(beginning)), 0, -1) if beginning[:end] == seen[size - end :])
    return next(chain(whole, parts), None)
