"""The memory file that one program of the node leaves to the next: how it is written, found, and done with."""

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

# The forms of `Handover` that this version reads: a node that does not know one starts the core anew. In the second
# there may be several runs.
ONE, SEVERAL = 1, 2
FORMATS = (ONE, SEVERAL)


@dataclass(frozen=True)
class Taken:
    """What an earlier program of this process left. `failed`: why this is that very program again, if it is."""

    handover: Handover
    failed: str = ""


class Handle:
    """Of the program that runs."""

    log = Logger()

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """`environment` is the process's own, as `os.environ`."""
        self._environment = environment
        self._descriptor: int | None = None
        self._failed = ""

    def take(self) -> Taken | None:
        """What was left, if anything was; to be called once, before anything is opened."""
        if VARIABLE not in self._environment:
            return None
        self._descriptor = int(self._environment[VARIABLE])
        self._failed = self._environment.get(FAILED, "")
        if PATH in self._environment:
            # What is run next has its modules from where they always are.
            self._environment["PYTHONPATH"] = self._environment.pop(PATH)
        handover = _read(self._descriptor)
        for descriptor in (self._descriptor, *descriptors(handover)):
            with suppress(OSError):  # it is looked at again where it is used
                os.set_inheritable(descriptor, False)
        return Taken(handover, self._failed)

    def heed_signals(self) -> None:
        """Those that came meanwhile are handled now: there are handlers again, and children inherit what waits."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITING)

    def go_back(self, reason: str) -> None:
        """Give up, and become the program before, which nobody has to notice. Does nothing where there is none."""
        if self._descriptor is not None and not self._failed:
            trampoline.back(reason)

    def commit(self) -> None:
        """This program has come up: there is no way back from here on."""
        if self._descriptor is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for name in (VARIABLE, FAILED):
                self._environment.pop(name, None)
            os.close(self._descriptor)
            self._descriptor = None


def write(words: Mapping[str, object], handover: Handover) -> int:
    """A memory file with both, which the next program inherits, with all that is named there."""
    descriptor = os.memfd_create("txnode-handover", 0)
    left = [*descriptors(handover)]
    # The trampoline, which reads no more than the first line, hands them on to the program before.
    line = json.dumps({**words, "descriptors": left}).encode()
    content = memoryview(line + b"\n" + handover.SerializeToString())
    try:
        while content:
            content = content[os.write(descriptor, content) :]
        for each in left:
            with suppress(OSError):  # of a core that has just ended
                os.set_inheritable(each, True)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def descriptors(handover: Handover) -> Iterable[int]:
    """All that are named there."""
    of_runs = (each for run in (handover.run, *handover.draining) for each in run.descriptors)
    return (handover.lock, *handover.ports.values(), *of_runs, *handover.together.descriptors)


def _read(descriptor: int) -> Handover:
    """What is there; nothing of a form that this version does not know."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    try:
        found = Handover.FromString(content.partition(b"\n")[2])
    except DecodeError:
        found = Handover()
    if found.format in FORMATS:
        return found
    Handle.log.warn("what the last version left cannot be read: the core is started anew")
    # What holds ports and lock is the same in every form.
    return Handover(format=ONE, lock=found.lock, ports=found.ports)


def places(interface: str, port: int) -> Sequence[tuple[Any, ...]]:
    """What the kernel calls this place, which an operator may call by a name, or in another way."""
    try:
        found = socket.getaddrinfo(interface, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return [(interface, port)]
    return [address[:2] for *_, address in found]
