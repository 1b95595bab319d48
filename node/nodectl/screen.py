"""Draw a view on the whole terminal with each answer of the nodes, until q or Ctrl-C."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorFDSet
from twisted.internet.main import CONNECTION_DONE
from twisted.python.failure import Failure

from node.nodectl.fleet import Fleet, Outcome, Work
from node.nodectl.run import Descriptor

T = TypeVar("T")


async def show(
    fleet: Fleet, console: Console, work: Work[T], every: float, drawn: Callable[[Outcome[T]], RenderableType]
) -> None:
    """Poll the nodes `every` seconds, and show what `drawn` makes of each answer. Restores the screen at the end."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        polling = Deferred.fromCoroutine(
            fleet.poll(work, every, lambda outcome: live.update(drawn(outcome), refresh=True))
        )
        quitting = _keys(IReactorFDSet(fleet.reactor), lambda key: polling.cancel() if key in "qQ" else None)
        with quitting, suppress(CancelledError):
            await polling


@contextmanager
def _keys(reactor: IReactorFDSet, pressed: Callable[[str], None]) -> Iterator[None]:
    """Call `pressed` with each key, without echo. Does nothing if standard input is not a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)

    def read() -> Failure | None:
        found = os.read(number, 64)
        for key in found.decode("ascii", "ignore"):
            pressed(key)
        return None if found else Failure(CONNECTION_DONE)

    # If the terminal is gone, a signal ends this process.
    reader = Descriptor(number, read, lambda: reactor.removeReader(reader))
    reactor.addReader(reader)
    try:
        yield
    finally:
        reactor.removeReader(reader)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
