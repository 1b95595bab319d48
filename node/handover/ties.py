"""The node's end of the two sockets to its keeper: see `node.handover.keeper`."""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from twisted.internet.task import deferLater

from node.base.logs import Logger
from node.base.periodic import Periodic
from node.contract.keeper import Keeper, Spawned
from node.handover import keeper
from node.handover.keeper import FEW, MESSAGE, VARIABLE, close, inherit, send
from node.handover.launch import words_of

# Seconds between two signs of life, and until a keeper that does not answer is given up.
ALIVE, ANSWER = 2.0, 10.0
# Seconds in which killed cores end, and between two looks.
ENDED, LOOK = 2.0, 0.005
# How the keeper names what it holds of a core; its PID follows.
_CORE = "core/"


class Ties(Keeper):
    log = Logger()
    lasts = True

    def __init__(self, ask: socket.socket, events: socket.socket) -> None:
        self._ask, self._events = ask, events
        # Held while a request is not answered: the pool's threads ask, too.
        self._asking = threading.Lock()
        self._asked = 0
        self._version = 0
        self._held: dict[str, list[int]] = {}
        self._exits: dict[int, int] = {}
        self._waiting: dict[int, Callable[[int], None]] = {}
        self._reactor: Any = None
        self._alive: Periodic | None = None
        # The caller of `start_next`: see there.
        self._said: list[Callable[[str], None]] = []

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Ties | None:
        """The ties that this process inherited, taken out of its environment; None without a keeper."""
        if VARIABLE not in environment:
            return None
        ask, events, parent = map(int, environment.pop(VARIABLE).split())
        if os.getppid() != parent:
            return None
        inherit((ask, events), False)
        return cls(socket.socket(fileno=ask), socket.socket(fileno=events))

    def hello(self) -> None:
        """Receive what the keeper holds. Waits for the end of the node before, if that still runs."""
        reply, descriptors = self._request("hello", within=None)
        self._version = reply["version"]
        for name, many in reply["names"]:
            self._held[name], descriptors = descriptors[:many], descriptors[many:]
        self._exits = {int(pid): status for pid, status in reply["exits"].items()}

    def follow(self, reactor: Any) -> None:
        """Learn of ended processes from now on, and give signs of life."""
        self._reactor = reactor
        self._events.setblocking(False)
        reactor.addReader(self)
        self._alive = Periodic("the sign of life to the keeper", lambda: self.alive(), ALIVE, reactor)
        self._alive.start()

    def up(self, seconds: float) -> None:
        """This node serves, and is the one to start again; cores go on for `seconds` without any."""
        self._request("up", seconds=seconds)
        if self._version < keeper.VERSION:
            self._request("become", argv=words_of(keeper.__file__))

    async def end_others(self) -> None:
        """Kill the cores that were left for this node and not taken. Returns when they have ended, or after `ENDED`."""
        pidfds = [some[0] for name, some in self._held.items() if name.startswith(_CORE)]
        for pidfd in pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll, until = select.poll(), self._reactor.seconds() + ENDED
        for pidfd in pidfds:
            poll.register(pidfd, select.POLLIN)
        while len(poll.poll(0)) < len(pidfds) and self._reactor.seconds() < until:
            await deferLater(self._reactor, LOOK)

    def drop_leftover(self) -> None:
        """Drop what was left for this node and not taken; cores among it are killed."""
        left, self._held = self._held, {}
        for name, descriptors in left.items():
            close(descriptors)
            if name.startswith(_CORE):
                self.forget(int(name.removeprefix(_CORE)))
        self.drop([name for name in left if not name.startswith(_CORE)])

    def alive(self, text: str = "") -> None:
        """Give a sign of life; `text` is for systemd."""
        with self._asking:
            self._ask.settimeout(ANSWER)
            # Without a number there is no answer: the reactor does not wait for the keeper.
            send(self._ask, {"do": "alive", **({"text": text} if text else {})})

    def start_next(
        self, command: object, plain: object, back: object, patience: float, said: Callable[[str], None]
    ) -> None:
        """Start the next version beside this one; `plain` starts it again when it has come up once.

        `said` gets an empty text when it is ready to go on, and the reason when it has failed, maybe later.
        """
        self._said = [said]
        self._request("next", command=command, plain=plain, back=back, patience=patience)

    def cancel_next(self, reason: str) -> None:
        self._request("cancel", reason=reason)

    def fail(self, reason: str) -> None:
        """This version cannot come up: the keeper ends it, and starts the one before."""
        text = reason.replace("\0", " ").encode("ascii", "backslashreplace").decode()
        self._request("failed", reason=text)

    def bye(self) -> None:
        """All ends with this node."""
        if self._alive is not None:
            self._alive.stop()
        self._request("bye")

    # Keeper

    def spawn(self, argv: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]) -> Spawned:
        reply, (pidfd, out, err) = self._request(
            "spawn", [*descriptors.values()], argv=[*argv], environment={**environment}, targets=[*descriptors]
        )
        # The number of a process that has ended before.
        self._exits.pop(reply["pid"], None)
        return Spawned(reply["pid"], pidfd, {1: out, 2: err})

    def spawned(self, pid: int) -> Spawned | None:
        found = self.take(f"{_CORE}{pid}")
        return Spawned(pid, found[0], {1: found[1], 2: found[2]}, pid in self._exits) if found else None

    def when_exited(self, pid: int, exited: Callable[[int], None]) -> None:
        self._waiting[pid] = exited
        if pid in self._exits:
            self._reactor.callLater(0, self._exited, pid)

    def forget(self, pid: int) -> None:
        self._request("forget", pid=pid)

    def put(self, name: str, descriptors: Sequence[int]) -> None:
        self._request("put", descriptors, name=name)

    def take(self, name: str) -> list[int]:
        return self._held.pop(name, [])

    def drop(self, names: Collection[str]) -> None:
        if names:
            self._request("drop", names=[*names])

    def _request(
        self, what: str, descriptors: Sequence[int] = (), within: float | None = ANSWER, **message: object
    ) -> tuple[Any, list[int]]:
        """Make a request; return the answer with its descriptors. Raises `OSError`."""
        with self._asking:
            self._asked += 1
            self._ask.settimeout(within)
            send(self._ask, {"do": what, "n": self._asked, **message}, descriptors)
            found: list[int] = []
            while True:
                reply, some = _receive(self._ask)
                found += some
                if reply.get("n") == self._asked:
                    if "error" in reply:
                        raise OSError(f"the keeper could not do it: {reply['error']}")
                    return reply, found
                if "n" in reply:
                    # The late answer to a request that was given up. A core that was started for it ends.
                    close(found)
                    found = []
                    if "pid" in reply:
                        send(self._ask, {"do": "forget", "pid": reply["pid"]})

    # IReadDescriptor

    def fileno(self) -> int:
        return self._events.fileno()

    def logPrefix(self) -> str:
        return "keeper"

    def doRead(self) -> None:
        """Take an event. A failure would leave the node deaf to its cores' ends, so it ends the node."""
        try:
            event, _ = _receive(self._events)
            if "exited" in event:
                self._exits[event["exited"]] = event["status"]
                self._exited(event["exited"])
            elif "next" in event:
                for said in self._said:
                    said(event["next"])
        except BlockingIOError:
            return
        except Exception:  # noqa: BLE001 - logged; the next node goes on with the cores
            self.log.failure(
                "the node ends, and its keeper starts it again: a message of the keeper could not be taken"
            )
            os._exit(1)

    def connectionLost(self, reason: Any = None) -> None:
        """The reactor stops."""

    def _exited(self, pid: int) -> None:
        if pid in self._exits and (exited := self._waiting.pop(pid, None)) is not None:
            status = self._exits.pop(pid)
            self.forget(pid)
            exited(status)


def _receive(there: socket.socket) -> tuple[Any, list[int]]:
    # Not `socket.recv_fds`, which ignores the flag in Python 3.11: another thread may start a process just now.
    words, ancillary, *_ = there.recvmsg(MESSAGE, socket.CMSG_SPACE(FEW * 4), socket.MSG_CMSG_CLOEXEC)
    if not words:
        raise ConnectionError("the keeper has ended")
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data[: len(data) // descriptors.itemsize * descriptors.itemsize])
    return json.loads(words), [*descriptors]
