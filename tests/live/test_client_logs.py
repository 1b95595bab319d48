"""The client's log streams, with real nodes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from node.client import Client, LogStream, Target, connect
from node.client.stream import GAP
from scripts.staging import background
from scripts.staging.node import NodeProcess
from tests.harness.relay import Relay
from tests.live.test_client import (
    Aim,
    ask,
    deployed,
    each_transport,
    rest,
    rpc,
    some_backend,
)
from tests.live.test_log_streams import NUMBERED, node_with

SAID = 150
# Fewer lines than the node replays to a new reader, so that no gap is too long.
TALK = f"""\
import time
for number in range({SAID}):
    os.write(1, b"line %d of the core\\n" % number)
    time.sleep(0.03)
"""


async def followed(target: Target, relay: Relay) -> list[str]:
    """All lines until the backend runs, over a connection that is cut at every tenth of them."""
    lines: list[str] = []
    async with connect(background.reactor, replace(target, port=relay.port)) as client, client.logs() as stream:
        async for line in stream:
            lines.append(line)
            if line.endswith("0 of the core") and relay.accepted < 6:
                relay.drop()
            if "backend running" in line:
                break
    return lines


@pytest.mark.slow
def test_lines_over_broken_connections(tmp_path: Path) -> None:
    """A stream with a repeatedly broken connection has each line once, in order."""
    with node_with(tmp_path, TALK) as node, ExitStack() as stack:
        targets = [aim(node) for aim in (rest, deployed, rpc)]
        relays = [stack.enter_context(Relay(target.port)) for target in targets]

        async def whole() -> list[list[str]]:
            each = zip(targets, relays, strict=True)
            following = [Deferred.fromCoroutine(followed(target, relay)) for target, relay in each]
            async with connect(background.reactor, targets[0]) as client:
                await client.start(some_backend())
            return [await reading for reading in following]

        found = background.run(whole)
    # How often is a matter of how soon each client comes back; on a busy machine gRPC's takes a second or two.
    assert all(relay.accepted >= 2 for relay in relays)
    for lines in found:
        numbers = [int(said[1]) for said in map(NUMBERED.fullmatch, lines) if said]
        assert numbers == list(range(SAID))
        assert len([line for line in lines if "backend starting" in line]) == 1
        assert GAP not in lines


# More than a new reader is given, less than the node keeps.
FLOOD = 5_000
RUSH = f"""\
for number in range({FLOOD}):
    os.write(1, b"line %d of the core\\n" % number)
"""


@each_transport
def test_many_lines_while_the_connection_is_broken(tmp_path: Path, aim: Aim) -> None:
    """A reader that comes back has all that the node kept meanwhile, however much that is, and nothing twice."""
    with node_with(tmp_path, RUSH) as node, Relay(aim(node).port) as relay:

        async def whole() -> list[str]:
            target = replace(aim(node), port=relay.port)
            async with connect(background.reactor, target) as client, client.logs() as stream:
                lines = await stream.next()
                relay.drop()
                async with connect(background.reactor, aim(node)) as other:
                    await other.start(some_backend())
                while f"line {FLOOD - 1} of the core" not in lines:
                    lines += await stream.next()
            return lines

        lines = background.run(whole)
    numbers = [int(said[1]) for said in map(NUMBERED.fullmatch, lines) if said]
    assert numbers == list(range(FLOOD))
    assert len([line for line in lines if "is ready" in line]) == 1
    assert GAP not in lines


def test_lines_of_the_next_node(own_node: NodeProcess) -> None:
    """A stream goes on with the next node's lines, and says that some of the first may be missing."""

    async def until_running(stream: LogStream) -> list[str]:
        lines = await stream.next()
        while not any("backend running" in line for line in lines):
            lines += await stream.next()
        return lines

    async def whole() -> None:
        clients = [connect(background.reactor, aim(own_node)) for aim in (rest, deployed, rpc)]
        await clients[0].start(some_backend())
        streams = [await client.logs().open() for client in clients]
        for stream in streams:
            await until_running(stream)
        await deferToThread(own_node.kill)
        await deferToThread(own_node.start)
        for stream in streams:
            lines = await until_running(stream)
            assert lines.count(GAP) == 1
            assert any("is ready" in line for line in lines[lines.index(GAP) :])
        for client in clients:
            await client.close()

    background.run(whole)


@each_transport
def test_stream_ends_with_its_client(node: NodeProcess, aim: Aim) -> None:
    """Closing a client ends its streams: a reader gets the end, not an error."""

    async def whole(client: Client) -> list[str]:
        stream = await client.logs().open()
        await stream.next()
        waiting = Deferred.fromCoroutine(stream.next())
        await client.close()
        return await waiting

    assert ask(aim(node), whole) == []


@each_transport
def test_lines_for_a_while(node: NodeProcess, aim: Aim) -> None:
    """The available lines can be read without waiting for more."""

    async def whole(client: Client) -> list[str]:
        async with client.logs() as stream:
            lines = await stream.next()
            while more := await stream.next(0.2):
                lines += more
        return lines

    assert any("is ready" in line for line in ask(aim(node), whole))
