"""A steady mix of all kinds of work for a node, each repeated at its own rate."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import count, cycle, product
from typing import NamedTuple

from node.base.errors import NodeError
from protos.service_pb2 import Backend, Inbounds, Outbounds, UsersStat
from scripts.bench.load import Load
from scripts.bench.stage import Crowd, Stage
from scripts.staging.backend import chunks
from scripts.staging.controller import Controller, ControllerError, LogReader, RestController, RpcController
from scripts.staging.wait import until

# Users who never change, and keep connections through the core.
STEADY = 20
# Users in one sync of some, and in one round of visits.
SOME, VISITORS = 100, 20
# Seconds until another core must serve after one was killed.
_BACK = 60.0
# Every duty runs for the first time within so many seconds.
_SPREAD = 60.0


class Duty(NamedTuple):
    """A piece of work, and the seconds between two runs of it."""

    name: str
    every: float
    work: Callable[[], object]


@dataclass
class Tally:
    """Statistics of one duty: runs, seconds and failures."""

    times: int = 0
    total: float = 0.0
    worst: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        self.times += 1
        self.total += seconds
        self.worst = max(self.worst, seconds)


Request = Callable[[int, Crowd, int], Backend]


class Mixed:
    """The duties of one node. One thread runs those that change something, another one the polls."""

    def __init__(self, on: Stage, load: Load, request: Request, port: int, crowd: Crowd, calm: int) -> None:
        """`request` makes the Start of a numbered configuration; `calm` multiplies the pauses of single syncs."""
        self._on, self._load, self._request, self._port, self._crowd = on, load, request, port, crowd
        self._calm = calm
        self._rest, self._rpc = RestController(on.node), RpcController(on.node)
        both: tuple[Controller, ...] = self._rest, self._rpc
        self._turns = cycle(both)
        self._asked = cycle(product(both, self._polls()))
        self._version, self._newcomers = 0, count()
        self._outages, self._out = 0, False
        self._reader: LogReader | None = None
        self.tallies: dict[str, Tally] = {}

    def run(self, seconds: float) -> None:
        self._start()
        self._reopen()
        over = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._work, args=(duties, over)) for duties in (self._controls(), self._reading())
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def __enter__(self) -> Mixed:
        self._stack = ExitStack()
        self._stack.enter_context(closing(self._rpc))
        self._stack.callback(self._forget)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _controls(self) -> list[Duty]:
        return [
            Duty("one user changed", 1 * self._calm, self._change),
            Duty("one user in, one out", 5 * self._calm, self._exchange),
            Duty("some users changed", 30, self._some),
            Duty("all users replaced", 30, self._replace),
            Duty("the same Start", 15, self._start),
            Duty("another Start", 45, self._another),
            Duty("Stop and Start", 180, self._stop),
            Duty("the core killed", 90, self._kill),
            Duty("connections reopened", 15, self._reopen),
            Duty("bytes of users", 1, self._load.move),
            Duty("visits of users", 2, self._visit),
        ]

    def _reading(self) -> list[Duty]:
        return [
            Duty("polls", 0.2, self._poll),
            Duty("a log stream for a moment", 10, self._glance),
            Duty("a log stream for a minute", 60, self._listen),
        ]

    def _work(self, duties: Sequence[Duty], over: float) -> None:
        """Run each duty when it is due, with staggered starts; missed runs are skipped."""
        begun = time.monotonic()
        due = {duty: begun + min(duty.every, _SPREAD) * (n + 1) / len(duties) for n, duty in enumerate(duties)}
        while (now := time.monotonic()) < over:
            duty = min(due, key=lambda each: due[each])
            if due[duty] > now:
                time.sleep(min(due[duty], over) - now)
                continue
            due[duty] = max(due[duty] + duty.every, now)
            self._do(duty)

    def _do(self, duty: Duty) -> None:
        tally, begun = self.tallies.setdefault(duty.name, Tally()), time.monotonic()
        try:
            duty.work()
        except (ControllerError, NodeError, AssertionError, OSError) as error:
            tally.failures.append(f"{time.strftime('%T', time.gmtime())} {type(error).__name__}: {error}")
        tally.add(time.monotonic() - begun)

    def _change(self) -> None:
        next(self._turns).sync_user(*self._crowd.change(1))

    def _exchange(self) -> None:
        next(self._turns).sync_user(*self._crowd.exchange(f"{next(self._newcomers)}.new"))

    def _some(self) -> None:
        next(self._turns).sync_chunked(chunks(self._crowd.change(SOME), SOME // 4))

    def _replace(self) -> None:
        self._crowd.change(SOME // 4)
        next(self._turns).sync_users(self._crowd.users)

    def _start(self) -> None:
        next(self._turns).start(self._request(self._port, self._crowd, self._version))

    def _another(self) -> None:
        """Start with another configuration; the previous core serves until the new one is ready."""
        self._version += 1
        self._start()

    def _stop(self) -> None:
        with self._outage():
            self._load.close()
            next(self._turns).stop()
            self._start()
        self._reopen()

    def _kill(self) -> None:
        """Kill the core, wait until another one serves, and reopen the connections."""
        with self._outage():
            core = self._on.core
            os.kill(core, signal.SIGKILL)
            until(lambda: core not in self._on.node.core_pids() and self._serves(), _BACK, "another core")
        self._reopen()

    def _serves(self) -> bool:
        self._load.visit([self._crowd.live.uuid], self._port)
        return self._rpc.info().state == "running"

    def _reopen(self) -> None:
        self._load.close()
        self._load.open([user.proxies.vless.id for user in self._crowd.users[:STEADY]], self._port)

    def _visit(self) -> None:
        self._load.visit([user.proxies.vless.id for user in self._crowd.users[-VISITORS:]], self._port)

    def _poll(self) -> None:
        """Make the next poll, protocols in turn. The node may refuse it while no core serves."""
        controller, ask = next(self._asked)
        before = self._outages, self._out
        try:
            ask(controller)
        except ControllerError:
            if before == (self._outages, False) and not self._out:
                raise

    def _polls(self) -> list[Callable[[Controller], object]]:
        name = self._crowd.users[0].email
        return [
            lambda node: node.stats(UsersStat, reset=True),
            lambda node: node.info(),
            lambda node: node.system_stats(),
            lambda node: node.online(name),
            lambda node: node.stats(Inbounds),
            lambda node: node.backend_stats(),
            lambda node: node.online_ips(name),
            lambda node: node.stats(Outbounds, reset=True),
        ]

    def _glance(self) -> None:
        with next(self._turns).logs() as reader:
            until(lambda: reader.lines, what="a line of the log")

    def _listen(self) -> None:
        """Open a log stream, and close the one of the last run, which must not have ended before."""
        before, self._reader = self._reader, next(self._turns).logs()
        if before is not None:
            ended = before.ended
            before.close()
            assert not ended, f"a log stream ended: {before.error}"

    def _forget(self) -> None:
        if self._reader is not None:
            self._reader.close()

    @contextmanager
    def _outage(self) -> Iterator[None]:
        self._outages, self._out = self._outages + 1, True
        try:
            yield
        finally:
            self._out = False
