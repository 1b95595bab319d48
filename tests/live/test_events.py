"""Events of the real node across crashes of the core and of the node: each once, in order, over both protocols."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPResponse
from pathlib import Path

import psutil
import pytest

from node.api.framing import arrived
from protos.service_pb2 import Backend, Event, EventsRequest
from scripts.staging.controller import ControllerError
from scripts.staging.echo import EchoServer
from scripts.staging.node import NodeProcess
from scripts.staging.rpc import Rpc
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, control, live, member, run
from tests.harness.listening import Listener
from tests.harness.rest import Rest

ANNA, BERT = (TestUser.new(f"{name}@test") for name in ("anna", "bert"))

each_way = pytest.mark.parametrize("transport", ["rest", "grpc"])


@pytest.fixture
def node(own_node: NodeProcess) -> NodeProcess:
    """A node for one test, as each test crashes it."""
    return own_node


def past(node: NodeProcess) -> list[Event]:
    """All kept events."""
    with Rpc(node) as rpc:
        return list(rpc.StreamEvents(EventsRequest(), timeout=10))


@each_way
def test_over_a_crash_of_the_core_and_of_the_node(node: NodeProcess, home: Place, transport: str) -> None:
    """The core and then the node are killed: a resumed reader has each event once, and the reason of the exit."""
    with control(node, transport) as controller, Listener(controller) as listener:
        run(controller, [home], [member(ANNA, home)])
        started = listener.find("core.started")
        assert int(started.fields["pid"]) == node.newest_core()
        os.kill(node.newest_core(), signal.SIGKILL)
        exited = listener.find("core.exited", started.sequence)
        assert "signal 9" in exited.fields["reason"]
        assert exited.fields["pid"] == started.fields["pid"]
        assert (exited.severity, listener.find("core.retry").fields["seconds"]) == ("error", "0")
        listener.find("core.started", exited.sequence)
        before = listener.last
        node.kill()
        node.start()
        again = listener.find("node.started", before)
        assert again.fields["clean"] == "False"
        served = listener.find("core.started", again.sequence)
        os.kill(node.newest_core(), signal.SIGKILL)
        listener.find("core.exited", served.sequence)
        node.stop()
        node.start()
        assert listener.find("node.started", again.sequence).fields["clean"] == "True"
    numbers = [event.sequence for event in listener.events]
    assert numbers == sorted(set(numbers))
    assert len({event.epoch for event in listener.events}) == 1
    assert listener.find("node.stopping").sequence in numbers
    # A new reader gets the same.
    assert [event for event in past(node) if event.sequence <= numbers[-1]] == listener.events


def test_a_killed_node_uses_no_number_again(node: NodeProcess) -> None:
    """Not even that of an event read just before the kill."""
    seen: dict[int, Event] = {}
    for _ in range(3):
        for event in until(lambda: past(node), what="the first event"):
            assert seen.setdefault(event.sequence, event) == event
        node.kill()
        node.start()


@live
def test_users(node: NodeProcess, home: Place) -> None:
    """Events of refused users, with the reason, and of cut ones: the first by name, all by number."""
    with control(node, "rest") as controller, Listener(controller, kinds=["users"]) as listener:
        crowd = [TestUser.new(f"{number}@test") for number in range(30)]
        run(controller, [home], [member(person, home) for person in crowd])
        controller.sync_users([member(ANNA, home)])
        cut = listener.find("users.cut")
        assert cut.fields["count"] == "30"
        assert len(cut.fields["names"].split(", ")) == 5
        twin = member(BERT, home)
        twin.proxies.CopyFrom(member(ANNA, home).proxies)
        with pytest.raises(ControllerError):
            controller.sync_user(twin)
        refused = listener.find("users.refused")
        assert (refused.fields["names"], refused.fields["count"]) == (BERT.email, "1")
        assert refused.fields["reason"]


def test_configurations_and_states(node: NodeProcess, home: Place) -> None:
    """Refused configurations have an event with the core's message; states have one with their reason."""
    with control(node, "grpc") as controller, Listener(controller) as listener:
        with pytest.raises(ControllerError) as caught:
            controller.start(Backend(type=home.ground.backend([]).type, config="{"))
        assert listener.find("config.refused").text == caught.value.text
        run(controller, [home])
        listener.find("backend.running")
        controller.stop()
        assert "a controller asked" in listener.find("backend.stopped").fields["reason"]
        listener.find("core.ended")
    assert not [event for event in listener.events if event.kind == "core.exited"]


def test_a_drain_that_is_cut(tmp_path: Path, home: Place, echo: EchoServer) -> None:
    """A change begins a drain; if there is no room for another core, an event reports its early end and its cost."""
    with (
        NodeProcess(tmp_path, DRAIN_GENERATIONS="1") as node,
        control(node, "grpc") as controller,
        Listener(controller) as listener,
        ExitStack() as stack,
    ):
        run(controller, [home], [member(ANNA, home)])
        first = listener.find("core.started").fields["pid"]
        with connection(home, ANNA, echo):
            run(controller, [home], [member(ANNA, home)], **home.ground.other)
            assert listener.find("drain.begun").fields["pid"] == first
            # The next draining core has more connections.
            for _ in range(2):
                stack.enter_context(connection(home, ANNA, echo))
            run(controller, [home], [member(ANNA, home)])
            cut = listener.find("drain.cut")
            assert (cut.fields["pid"], cut.fields["connections"]) == (first, "1")
            assert cut.severity == "warning"


def test_files(node: NodeProcess) -> None:
    """Events of a reloaded certificate and keys, and of unusable ones."""
    with control(node, "grpc") as controller, Listener(controller) as listener:
        os.kill(node.pid, signal.SIGHUP)
        for kind in ("certificate.loaded", "keys.loaded"):
            listener.find(kind)
        good = node.certificate.key.read_bytes()
        node.certificate.key.write_text("no key")
        (node.state / "api_keys").write_text("no keys at all, in no form\n")
        os.kill(node.pid, signal.SIGHUP)
        for kind in ("certificate.refused", "keys.refused"):
            assert listener.find(kind).severity == "error"
        node.certificate.key.write_bytes(good)


@pytest.mark.slow
def test_a_disk_in_trouble(node: NodeProcess) -> None:
    """Events that cannot be written are served from memory, and written later."""
    process = psutil.Process(node.node_pid)
    with control(node, "rest") as controller, Listener(controller) as listener:
        listener.find("node.started")
        process.rlimit(psutil.RLIMIT_FSIZE, (1, psutil.Process().rlimit(psutil.RLIMIT_FSIZE)[1]))
        os.kill(node.pid, signal.SIGHUP)
        trouble = listener.find("disk.trouble")
        os.kill(node.pid, signal.SIGHUP)
        loaded = listener.find("certificate.loaded", trouble.sequence)
        process.rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
        well = listener.find("disk.well", loaded.sequence)
        node.kill()
        node.start()
        listener.find("node.started", well.sequence)
    numbers = [event.sequence for event in listener.events]
    assert numbers == sorted(set(numbers))
    assert [event for event in past(node) if event.sequence <= well.sequence] == [
        event for event in listener.events if event.sequence <= well.sequence
    ]


class Sse:
    """`GET /events` as a browser reads it."""

    def __init__(self, node: NodeProcess, **headers: str) -> None:
        self._connection = Rest(node).connection()
        self._connection.request(
            "GET", "/events", headers={**Rest(node).credentials, "Accept": "text/event-stream", **headers}
        )
        self.response: HTTPResponse = self._connection.getresponse()

    def close(self) -> None:
        self._connection.close()

    def __iter__(self) -> Iterator[tuple[str, dict[str, object]]]:
        """The id and the JSON of each event."""
        identity = ""
        while raw := self.response.readline():
            name, _, value = raw.decode().rstrip("\n").partition(": ")
            if name == "id":
                identity = value
            elif name == "data":
                yield identity, json.loads(value)


def test_server_sent_events(node: NodeProcess, home: Place) -> None:
    """JSON with ids; Last-Event-ID resumes after a number, with its epoch or without."""
    with control(node, "rest") as controller:
        run(controller, [home])
    with closing(Sse(node)) as stream:
        assert stream.response.getheader("Content-Type", "").startswith("text/event-stream")
        events = iter(stream)
        first, told = next(events)
        assert first == f"{told['sequence']}@{told['epoch']}"
        assert (told["kind"], told["severity"], type(told["time"])) == ("node.started", "info", float)
        second, told_next = next(events)
    for identity in (first, str(told["sequence"])):
        with closing(Sse(node, **{"Last-Event-ID": identity})) as stream:
            assert next(iter(stream)) == (second, told_next)
    with closing(Sse(node, **{"Last-Event-ID": f"{told['sequence']}@another"})) as stream:
        events = iter(stream)
        assert next(events)[1]["kind"] == "events.lost"
        assert next(events)[0] == first
    with closing(Sse(node, **{"Last-Event-ID": "nonsense"})) as stream:
        assert stream.response.status == 400


@pytest.mark.parametrize("dialect", ["bearer", "x-api-key"])
def test_messages_over_rest(node: NodeProcess, dialect: str) -> None:
    """Without `follow` the body ends: length-prefixed messages in both dialects, the same as over gRPC."""
    rest = Rest(node, dialect="bearer" if dialect == "bearer" else "x-api-key")
    until(lambda: past(node), what="the first event")
    response = rest.call("GET", "/events", EventsRequest())
    assert (response.status, response.headers["Content-Type"]) == (200, "application/x-protobuf")
    bodies, rest_of_it = arrived(response.body.lstrip(b"\0"))
    assert ([Event.FromString(body) for body in bodies], rest_of_it) == (past(node), b"")
    assert rest.call("GET", "/events", b"\x0a\xff").status == 400
    assert Rest(node, key="a wrong key, long enough").call("GET", "/events").status == 401


def test_the_client_reads_what_there_is(node: NodeProcess) -> None:
    """Without `follow` the client's stream ends, over both protocols."""
    until(lambda: past(node), what="the first event")
    for transport in ("rest", "grpc"):
        with control(node, transport) as controller, Listener(controller, follow=False) as listener:
            until(lambda: listener._over.is_set(), what="the end")
        assert (listener.events, listener.error) == (past(node), None)
