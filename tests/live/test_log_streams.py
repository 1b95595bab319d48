"""Log streams of the real node over both transports: every line for every reader, whatever happens to the core."""

from __future__ import annotations

import itertools
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from os import kill
from pathlib import Path
from typing import Any

import pytest

from node.base.logs import NODE_MARK, REPLAY
from protos import service_pb2
from protos.service_pb2 import Empty
from scripts.staging.backend import user
from scripts.staging.controller import Controller, LogReader, RestController, RpcController, refused
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.protocols import vless
from scripts.staging.rpc import Rpc
from scripts.staging.target import Dialect
from scripts.staging.transports import raw
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.harness.grounds import XRAY, Ground
from tests.harness.rest import Rest

LINES = 10_000
LONG = 3_000
MAX_LINE = 64 * 1024
DROPPED = re.compile(re.escape(NODE_MARK) + r"(\d+) lines were dropped")
NUMBERED = re.compile(r"line (\d+) of the core")

VLESS = Kind("vless-raw", vless(), raw())
PERSON = TestUser.new("42")

Make = Callable[[NodeProcess], Controller]


def bearer(node: NodeProcess) -> Controller:
    return RestController(node)


def deployed(node: NodeProcess) -> Controller:
    return RestController(node, dialect="x-api-key")


def rpc(node: NodeProcess) -> Controller:
    return RpcController(node)


each_way = pytest.mark.parametrize("aim", [bearer, deployed, rpc], ids=["bearer", "x-api-key", "grpc"])

_CORE = """\
import os, sys
if sys.argv[1] == "run" and "-test" not in sys.argv:
{talk}
os.execv({real!r}, [{real!r}, *sys.argv[1:]])
"""


def talking_core(directory: Path, talk: str, ground: Ground) -> Path:
    """An executable that runs these lines of Python before it becomes the real core."""
    path = directory / "core"
    indented = "".join(f"    {line}\n" for line in talk.splitlines())
    program = _CORE.format(talk=indented, real=str(ground.executable().resolve()))
    # With a shell in between: the kernel splits the line after #! only once.
    path.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-ISc", program])} "$@"\n')
    path.chmod(0o755)
    return path


@contextmanager
def node_with(directory: Path, talk: str, ground: Ground = XRAY, **environment: str) -> Iterator[NodeProcess]:
    core = talking_core(directory, talk, ground)
    with NodeProcess(directory, **{ground.variable: str(core)}, **environment) as node:
        yield node


def a_backend(ground: Ground = XRAY, verbose: bool = False) -> service_pb2.Backend:
    """A Start whose core logs at least its start."""
    log = ground.verbose if verbose else ground.brief
    return ground.backend([ground.inbound(VLESS, free_port(), "in")], [user(PERSON, {"in": VLESS})], log=log)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node with the real core that has logged only that it is ready."""
    with NodeProcess(tmp_path) as node:
        yield node


@contextmanager
def reading(aim: Make, node: NodeProcess) -> Iterator[LogReader]:
    """An open reader: the node has replied."""
    controller = aim(node)
    with controller.logs() as reader:
        until(lambda: reader.lines, what="the tail of the ring")
        yield reader
    controller.close()


@each_way
def test_stream_outlives_everything(node: NodeProcess, ground: Ground, aim: Make) -> None:
    """A stream opens without a backend and survives Start, the core's death, Stop and the next Start."""
    controller = RestController(node)
    with reading(aim, node) as reader:
        for expected, do in (
            ("backend running", lambda: controller.start(a_backend(ground))),
            ("backend restarting: the core ended", lambda: kill(node.core_pids()[0], signal.SIGKILL)),
            ("backend starting", lambda: controller.start(a_backend(ground))),
            ("backend stopped", controller.stop),
            ("backend running", lambda: controller.start(a_backend(ground))),
            ("backend stopped", controller.stop),
        ):
            seen = len(reader.lines)
            do()
            until(lambda: any(expected in line for line in reader.lines[seen:]), what=expected)  # noqa: B023
        assert not reader.ended
    assert reader.error is None


FLOOD = f"""\
for number in range({LINES}):
    os.write(1 + number % 2, b"line %d of the core\\n" % number)
"""


@pytest.mark.slow
def test_every_reader_gets_every_line(tmp_path: Path, ground: Ground) -> None:
    """Each of nine readers, three of each kind, gets each of 10,000 lines of both outputs once, in the same order."""
    with node_with(tmp_path, FLOOD, ground, LOG_BUFFER_SIZE=str(2 * LINES)) as node, ExitStack() as stack:
        readers = [stack.enter_context(reading(aim, node)) for aim in (bearer, deployed, rpc) for _ in range(3)]
        RestController(node).start(a_backend(ground))
        for reader in readers:
            reader.find("backend running", 30)
            reader.find(" started", 10)
            # A core may be running before the node has read all that it said.
            for last in (LINES - 1, LINES - 2):
                reader.find(f"line {last} of the core", 30)
        expected = list(range(LINES))
        for reader in readers:
            numbers = [int(match[1]) for match in map(NUMBERED.fullmatch, reader.lines) if match]
            assert sorted(numbers) == expected
            # Each output is a separate pipe, whose lines are in order.
            for output in (0, 1):
                assert [number for number in numbers if number % 2 == output] == expected[output::2]
            assert not any(map(DROPPED.match, reader.lines))
        for reader in readers[1:]:
            assert tail_of(reader) == tail_of(readers[0])


def tail_of(reader: LogReader) -> list[str]:
    """A reader's lines from the start of the backend on."""
    begin = next(index for index, line in enumerate(reader.lines) if "backend starting" in line)
    end = next(index for index, line in enumerate(reader.lines) if "backend running" in line)
    return reader.lines[begin:end]


LONG_FLOOD = f"""\
for number in range({LINES}):
    os.write(1, b"line %d of the core".ljust({LONG}, b".") % number + b"\\n")
"""


@each_way
def test_slow_reader_gets_a_notice(tmp_path: Path, aim: Make) -> None:
    """A reader that reads nothing loses its oldest lines, gets a line with the exact number, and delays no other."""
    with node_with(tmp_path, LONG_FLOOD) as node, ExitStack() as stack:
        stream = stack.enter_context(unread(aim, node))
        began = time.monotonic()
        RestController(node).start(a_backend())
        # A delay would last until the slow reader reads.
        assert time.monotonic() - began < 20
        # A core may be running before the node has read all that it said.
        lines = list(itertools.takewhile(lambda line: not line.startswith(f"line {LINES - 1} of"), stream))
    assert dropped_of(lines) > 0


def dropped_of(lines: Iterable[str]) -> int:
    """The number of lost lines in the reader's notice: exactly those that are missing, from the start's own on."""
    following, dropped, running = 0, 0, False
    for line in lines:
        if lost := DROPPED.match(line):
            following += int(lost[1])
            dropped += int(lost[1])
        elif line.startswith("line "):
            # The line that the backend runs is among them, and may be the lost one.
            if not running and line.startswith(f"line {following - 2} "):
                following, running = following - 1, True
            assert line.partition(".")[0] == f"line {following - 1} of the core"
            following += 1
        elif "backend starting" in line:
            following += 1
        running |= "backend running" in line
    assert following >= LINES
    return dropped


@contextmanager
def unread(aim: Make, node: NodeProcess) -> Iterator[Iterator[str]]:
    """A stream that is open at the node, and that the caller has not read yet."""
    if aim is rpc:
        with Rpc(node) as client:
            call: Any = client.GetLogs(Empty())
            call.initial_metadata()
            yield (log.detail for log in call)
            call.cancel()
        return
    stream = Rest(node, dialect="bearer" if aim is bearer else "x-api-key").logs(timeout=30)
    yield iter(stream)
    stream.close()


@each_way
def test_late_reader_gets_the_tail(tmp_path: Path, aim: Make) -> None:
    """A late reader gets the newest lines first, up to the replay's limit, and then new ones."""
    with node_with(tmp_path, FLOOD) as node, reading(bearer, node) as early:
        controller = RestController(node)
        controller.start(a_backend())
        early.find("backend running", 20)
        early.find(" started")
        # A core may be running before the node has read all that it said.
        for last in (LINES - 1, LINES - 2):
            early.find(f"line {last} of the core", 30)
        with reading(aim, node) as late:
            until(lambda: len(late.lines) >= REPLAY, what="the tail")
            assert late.lines[:REPLAY] == early.lines[-REPLAY:]
            controller.stop()
            late.find("backend stopped")
            early.find("backend stopped")
            assert late.lines == early.lines[-len(late.lines) :]


LONG_LINES = f"""\
for size in ({MAX_LINE - 1}, {MAX_LINE}, {MAX_LINE + 1}, 5 * {MAX_LINE}):
    sys.stdout.write("x" * size + "\\nshort after %d\\n" % size)
    sys.stdout.flush()
sys.stdout.buffer.write(b"not \\xff UTF-8, and \\xd1\\x8f is\\r\\n\\n\\tindented")
sys.stdout.flush()
"""


@each_way
def test_long_and_odd_lines(tmp_path: Path, aim: Make) -> None:
    """A line over 64 KiB is cut, those around it are whole; invalid UTF-8 does no harm."""
    with node_with(tmp_path, LONG_LINES) as node, reading(aim, node) as reader:
        RestController(node).start(a_backend())
        reader.find("backend running", 20)
        reader.find("indented")
        sizes = [MAX_LINE - 1, MAX_LINE, MAX_LINE + 1, 5 * MAX_LINE]
        long = [len(line) for line in reader.lines if line.startswith("xxx")]
        assert long == [min(size, MAX_LINE) for size in sizes]
        assert [line for line in reader.lines if line.startswith("short")] == [f"short after {size}" for size in sizes]
        assert "not \ufffd UTF-8, and \u044f is" in reader.lines


# The form of REST's streams


@pytest.mark.slow
def test_events_and_heartbeat(node: NodeProcess) -> None:
    """A Bearer client gets events of one line with an id, and comments when idle; the other kind gets bare lines."""
    with ExitStack() as stack:
        events, lines = (stack.enter_context(raw_stream(node, dialect)) for dialect in DIALECTS)
        began = time.monotonic()
        assert len(list(itertools.islice(comments(events), 2))) == 2
        assert 10 < time.monotonic() - began < 20
        RestController(node).start(a_backend())
        RestController(node).stop()
        bare = list(read_until(lines, "backend stopped"))
        framed = list(read_until(events, "backend stopped"))
    assert not [line for line in bare if line.startswith((":", "data:")) or not line]
    told = [event for event in "\n".join(framed).split("\n\n") if not event.startswith(":")]
    own = [said[2] for said in map(EVENT.fullmatch, told) if said]
    assert own == bare[1:], "the ready line came before the comments"
    assert len(own) == len(told)
    first = int(told[0].split("@")[0].removeprefix("id: "))
    assert [int(said[1]) for said in map(EVENT.fullmatch, told) if said] == list(range(first, first + len(told)))


EVENT = re.compile(r"id: (\d+)@[0-9a-f]+\ndata: (.*)")
DIALECTS: tuple[Dialect, Dialect] = ("bearer", "x-api-key")


@contextmanager
def raw_stream(node: NodeProcess, dialect: Dialect) -> Iterator[HTTPResponse]:
    """`GET /logs` as raw bytes, with its headers checked."""
    rest = Rest(node, dialect=dialect, timeout=20)
    connection = rest.connection()
    try:
        connection.request("GET", "/logs", headers=rest.credentials)
        with connection.getresponse() as response:
            assert response.status == 200
            assert response.getheader("Content-Type", "").startswith("text/event-stream")
            assert response.getheader("Content-Length") is None
            assert response.getheader("Cache-Control") == "no-store"
            yield response
    finally:
        connection.close()


def comments(response: HTTPResponse) -> Iterator[str]:
    """The comments of an event stream, each followed by an empty line; events in between are skipped."""
    while line := response.readline().decode():
        if line.startswith(":"):
            assert response.readline() == b"\n"
            yield line


def read_until(response: HTTPResponse, last: str) -> Iterator[str]:
    line = ""
    while last not in line:
        line = response.readline().decode()
        assert line.endswith("\n")
        yield line.removesuffix("\n")


# Content of the logs


@each_way
def test_own_events_are_marked(node: NodeProcess, ground: Ground, aim: Make) -> None:
    """Lines of the node itself begin with its mark, lines of the core do not."""
    controller = RestController(node)
    with reading(aim, node) as reader:
        controller.start(a_backend(ground))
        reader.find(" started")
        controller.stop()
        reader.find("backend stopped")
        lines = list(reader.lines)
    own = [line for line in lines if line.startswith(NODE_MARK)]
    assert [line.removeprefix(NODE_MARK).partition(":")[0] for line in own if "backend " in line] == [
        "backend starting",
        "backend running",
        "backend stopped",
    ]
    assert any(" started" in line for line in lines if line not in own)


def test_api_is_not_in_the_logs(node: NodeProcess, ground: Ground) -> None:
    """The node's calls to the core's API are not in the logs, at any log level."""
    controller = RestController(node)
    with reading(bearer, node) as reader:
        controller.start(a_backend(ground, verbose=True))
        for _ in range(2):
            controller.stats(service_pb2.UsersStat)
            controller.backend_stats()
            controller.sync_users([user(TestUser.new("7"), {"in": VLESS})])
            controller.online("7")
        until(lambda: any(ground.detail in line for line in reader.lines), what="the core tells much")
        controller.stop()
        reader.find("backend stopped")
        lines = list(reader.lines)
    for trace in (*ground.traces, str(node.state)):
        assert not [line for line in lines if trace in line]


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.turns("debug")
def test_no_secrets_in_the_log(tmp_path: Path, debug: str, ground: Ground) -> None:
    """Neither keys, right or wrong, nor credentials, good or bad, are in the node's log or in log streams."""
    wrong, odd = secrets.token_urlsafe(24), service_pb2.User(email="odd", inbounds=["in"])
    odd.proxies.vless.id = secrets.token_urlsafe(24)
    with NodeProcess(tmp_path, DEBUG=debug) as node, reading(bearer, node) as reader:
        for make in (RestController, RpcController):
            for key in (wrong, f"{node.key}0"):
                with refused(401, "UNAUTHENTICATED"):
                    make(node, key).info()
            with refused(400, "INVALID_ARGUMENT"):
                bad = service_pb2.Backend(config=f'{{"inbounds": "{odd.proxies.vless.id}"}}')
                bad.type = ground.type  # type: ignore[assignment]
                make(node).start(bad)
            make(node).start(a_backend(ground))
            with refused(500, "INTERNAL", "odd"):
                make(node).sync_users([odd, user(PERSON, {"in": VLESS})])
            started = a_backend(ground)
            started.users.append(odd)
            make(node).start(started)
            make(node).stop()
        reader.find("odd")
        node.stop()
        lines = [*node.lines, *reader.lines]
    for secret in (node.key, wrong, odd.proxies.vless.id, PERSON.uuid):
        assert not [line for line in lines if secret in line]


@pytest.mark.parametrize(("debug", "logged"), [("0", False), ("1", True)])
def test_requests_are_logged_on_demand(tmp_path: Path, debug: str, logged: bool) -> None:
    """DEBUG=1 logs every request; without it none is logged."""
    with NodeProcess(tmp_path, DEBUG=debug) as node:
        RestController(node).info()
        node.stop()
        assert any("GET /info" in line for line in node.lines) is logged
