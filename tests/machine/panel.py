"""A panel that calls a node over both protocols until its standard input ends, for tests of ways to a node.

`python -m tests.machine.panel TARGET`, where TARGET are the fields of `Target` without `transport`, as JSON, prints a
line when both streams are open. In the end it prints, as JSON, for each protocol the number of answered calls, the
errors of the others, and the lines of the log stream.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater

from node.base.errors import NodeError
from node.client import Client, Target, connect
from scripts.staging import background

# Seconds between two calls, for which a stream may be gone, and without a line after which it has been read.
_PAUSE, _PATIENCE, _QUIET = 0.05, 60.0, 3.0


class _Calls:
    """What the calls over one protocol have got."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.answered, self.faults, self.lines = 0, list[str](), list[str]()
        self.opened: Deferred[None] = Deferred()

    async def call(self, over: threading.Event) -> None:
        while not over.is_set():
            try:
                await self.client.info()
                self.answered += 1
            except NodeError as error:
                self.faults.append(f"{error.code}: {error.text}")
            await deferLater(background.reactor, _PAUSE)

    async def read(self, over: threading.Event) -> None:
        async with self.client.logs(patience=_PATIENCE) as stream:
            self.opened.callback(None)
            while (found := await stream.next(_QUIET)) or not over.is_set():
                self.lines += found


def main(target: dict[str, Any]) -> None:
    over = threading.Event()
    background.aio()
    clients = {name: connect(background.reactor, Target(name, **target)) for name in ("rest", "grpc")}
    calls = {name: _Calls(client) for name, client in clients.items()}

    async def work() -> None:
        reading = [Deferred.fromCoroutine(each.read(over)) for each in calls.values()]
        await gatherResults([each.opened for each in calls.values()])
        print("ready", flush=True)
        await gatherResults([*reading, *(Deferred.fromCoroutine(each.call(over)) for each in calls.values())])
        for client in clients.values():
            await client.close()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    background.run(work)
    print(json.dumps({name: [each.answered, each.faults, each.lines] for name, each in calls.items()}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
