"""The hand-over file (a memfd) between one node program and the next: writing, reading and closing it."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from node.logs import Logger
from node.upgrade import trampoline
from node.upgrade.trampoline import FAILED, PATH, VARIABLE, WAITING
from protos.handover_pb2 import Handover

# The formats of `Handover` that this version reads: with an unknown one a node restarts the core. The second may have
# several runs.
ONE, SEVERAL = 1, 2
FORMATS = (ONE, SEVERAL)


@dataclass(frozen=True)
class ReceivedHandover:
    """What the previous program of this process handed over.

    `failed`: why the next version failed, if this is the program that it went back to.
    """

    handover: Handover
    failed: str = ""


class Handle:
    """The hand-over file that the running program was given, if any."""

    log = Logger()

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """`environment` is `os.environ`, or like it."""
        self._environment = environment
        self._descriptor: int | None = None
        self._failed = ""

    def take(self) -> ReceivedHandover | None:
        """Read the hand-over, if there is one. Call it once, before any descriptor is opened."""
        if VARIABLE not in self._environment:
            return None
        self._descriptor = int(self._environment[VARIABLE])
        self._failed = self._environment.get(FAILED, "")
        if PATH in self._environment:
            # The next program must find its modules in the usual place, not in the kept copy.
            self._environment["PYTHONPATH"] = self._environment.pop(PATH)
        handover = _read(self._descriptor)
        for descriptor in (self._descriptor, *descriptors(handover)):
            with suppress(OSError):  # checked again where it is used
                os.set_inheritable(descriptor, False)
        return ReceivedHandover(handover, self._failed)

    def heed_signals(self) -> None:
        """Unblock the signals that were blocked until there are handlers; children would inherit the blocked set.

        The trampoline blocks them at an upgrade, twistd's plugin at a start.
        """
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITING)

    def go_back(self, reason: str) -> None:
        """Give up and execute the previous program again. Does nothing if there is none."""
        if self._descriptor is not None and not self._failed:
            trampoline.back(reason)

    def commit(self) -> None:
        """Note that this program has come up: from here on there is no way back."""
        if self._descriptor is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for name in (VARIABLE, FAILED):
                self._environment.pop(name, None)
            os.close(self._descriptor)
            self._descriptor = None


def write(header: Mapping[str, object], handover: Handover) -> int:
    """Write a hand-over file; make the descriptors named in it inheritable. Returns its descriptor."""
    descriptor = os.memfd_create("txnode-handover", 0)
    left = [*descriptors(handover)]
    # The trampoline reads only the first line; it needs the descriptors to pass them to the previous program.
    line = json.dumps({**header, "descriptors": left}).encode()
    content = memoryview(line + b"\n" + handover.SerializeToString())
    try:
        while content:
            content = content[os.write(descriptor, content) :]
        for each in left:
            with suppress(OSError):  # it may be of a core that has just ended
                os.set_inheritable(each, True)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def descriptors(handover: Handover) -> Iterable[int]:
    """All descriptors that a hand-over names."""
    of_runs = (each for run in (handover.run, *handover.draining) for each in run.descriptors)
    return (handover.lock, *handover.ports.values(), *of_runs, *handover.together.descriptors)


def _read(descriptor: int) -> Handover:
    """Parse a hand-over; of an unknown format only lock and ports."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    try:
        found = Handover.FromString(content.partition(b"\n")[2])
    except DecodeError:
        found = Handover()
    if found.format in FORMATS:
        return found
    Handle.log.warn("the previous version's hand-over has an unknown format: the core is restarted")
    # Ports and lock are the same in every format.
    return Handover(format=ONE, lock=found.lock, ports=found.ports)


def places(interface: str, port: int) -> Sequence[tuple[Any, ...]]:
    """The addresses that an interface and port resolve to: an operator may give a host name."""
    try:
        found = socket.getaddrinfo(interface, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return [(interface, port)]
    return [address[:2] for *_, address in found]
