"""Faults of cores and nodes are reported, leave nothing behind, and the next Start works."""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import psutil
import pytest

from drivers.process.orphans import MARK, mark
from node.backend.starts import MAX_CONFIG
from node.backend.supervisor import START_TIMEOUT
from node.state.directory import StateDirectory
from protos.service_pb2 import Backend, BaseInfoResponse
from scripts.staging import transfer
from scripts.staging.controller import Controller, ControllerError, RestController
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.process import Child
from scripts.staging.rpc import Rpc
from scripts.staging.target import credentials
from scripts.staging.users import TestUser
from scripts.staging.wait import accepts, until
from tests.conftest import Place, connection, control, gets_in, live, member, over, run, stays_out, talking
from tests.harness.grounds import FAULTS, Ground
from tests.harness.rest import Rest

ANNA = TestUser.new("anna@test")
# By this text controllers know that the core will restart; other failures must not use it.
WAITING = "core is not started yet"


def refused(call: Callable[[], object], *statuses: str) -> str:
    """The text with which the node refuses the call, with one of these statuses."""
    with pytest.raises(ControllerError) as error:
        call()
    assert error.value.status in statuses, error.value
    return error.value.text


def ends(pid: int) -> None:
    until(lambda: not psutil.pid_exists(pid), 15, f"process {pid} is gone")


def in_state(controller: Controller, state: str) -> BaseInfoResponse:
    def info() -> BaseInfoResponse | None:
        reply = controller.info()
        return reply if reply.state == state else None

    reply = until(info, 15, f"the state is {state}")
    assert reply is not None
    return reply


def as_is(ground: Ground, config: str) -> Backend:
    """A Start with exactly this configuration."""
    return Backend(type=ground.type, config=config)  # type: ignore[arg-type]


@contextmanager
def squatter(place: Place) -> Iterator[None]:
    """Another program listens on the inbound's port without sharing it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM if place.kind.quic else socket.SOCK_STREAM) as holder:
        holder.bind(("127.0.0.1", place.port))
        if not place.kind.quic:
            holder.listen()
        yield


def test_killed_core(node: NodeProcess, home: Place, echo: EchoServer, controller: Controller) -> None:
    """The node restarts a core that dies, with its users; the log has its exit."""
    controller.stop()
    run(controller, [home], [member(ANNA, home)])
    with connection(home, ANNA, echo) as link:
        transfer.download(link, 1000)
    (core,) = node.core_pids()
    with controller.logs() as logs:
        os.kill(core, signal.SIGKILL)
        ends(core)
        in_state(controller, "running")
        assert "signal 9" in logs.find("backend restarting")
    assert controller.info().running
    (another,) = node.core_pids()
    assert another != core
    assert gets_in(home, ANNA, echo)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vless-raw", "hysteria2"])
@over("grpc")
def test_taken_port(
    name: str,
    all_kinds: Mapping[str, Kind],
    ground: Ground,
    node: NodeProcess,
    echo: EchoServer,
    controller: Controller,
) -> None:
    """A taken port fails the Start in time, with the core's message; once it is free, Start works."""
    place = Place(all_kinds[name], "taken", ground=ground)
    controller.stop()
    with squatter(place):
        before = time.monotonic()
        text = refused(lambda: run(controller, [place], [member(ANNA, place)]), "500", "UNAVAILABLE")
        assert time.monotonic() - before < START_TIMEOUT + 5
    assert "address already in use" in text
    assert str(place.port) in text
    assert WAITING not in text
    assert not node.core_pids()
    assert controller.info().state == "failed"
    run(controller, [place], [member(ANNA, place)])
    assert gets_in(place, ANNA, echo)


@pytest.mark.parametrize("fault", FAULTS)
@over("rest")
def test_refused_config(fault: str, node: NodeProcess, home: Place, echo: EchoServer, controller: Controller) -> None:
    """A configuration that the core refuses is a bad request with its reason; the running backend is unaffected."""
    config, reason = home.ground.refusals[fault]
    run(controller, [home], [member(ANNA, home)])
    core = node.newest_core()
    with connection(home, ANNA, echo) as link, talking(link):
        text = refused(lambda: controller.start(as_is(home.ground, config)), "400", "INVALID_ARGUMENT")
        assert reason in text
        assert controller.info().running
        assert node.newest_core() == core
        assert gets_in(home, ANNA, echo)


@pytest.mark.parametrize("fault", FAULTS)
@over("grpc")
def test_refused_config_without_a_backend(
    fault: str, ground: Ground, node: NodeProcess, controller: Controller
) -> None:
    """The same without a backend: a bad request with the core's reason, and nothing runs afterwards."""
    config, reason = ground.refusals[fault]
    controller.stop()
    assert reason in refused(lambda: controller.start(as_is(ground, config)), "400", "INVALID_ARGUMENT")
    assert not controller.info().running
    assert not node.core_pids()


@pytest.mark.parametrize(("transport", "drain"), [("rest", "0"), ("grpc", "")], ids=["restart", "beside"])
def test_start_replaces(tmp_path: Path, home: Place, echo: EchoServer, transport: str, drain: str) -> None:
    """A second Start with another configuration starts another core without the earlier users; none drains with 0."""
    elsewhere, bert = Place(home.kind, "elsewhere", ground=home.ground), TestUser.new("bert@test")
    with NodeProcess(tmp_path, DRAIN_GENERATIONS=drain) as node, control(node, transport) as controller:
        run(controller, [home], [member(ANNA, home)])
        (first,) = node.core_pids()
        run(controller, [elsewhere], [member(bert, elsewhere)])
        cores = node.core_pids()
        assert cores[-1] != first
        assert len(cores) == (1 if drain else 2)
        assert not accepts(home.port)
        assert gets_in(elsewhere, bert, echo)
        assert stays_out(elsewhere, ANNA, echo)


def test_stop_ends_the_core(node: NodeProcess, home: Place, controller: Controller) -> None:
    """Stop ends the core and frees its ports; a second Stop is no error."""
    run(controller, [home])
    controller.stop()
    assert not node.core_pids()
    assert not accepts(home.port)
    assert controller.info().state == "stopped"
    controller.stop()


@over("rest")
def test_keep_alive(node: NodeProcess, home: Place, controller: Controller) -> None:
    """A backend with keep-alive runs while its controller calls, and ends after calls stop."""
    run(controller, [home], keep_alive=2)
    core, over_time = node.newest_core(), time.monotonic() + 4
    until(lambda: controller.system_stats().mem_total and time.monotonic() > over_time, what="twice the time is over")
    assert psutil.Process(core).is_running()
    ends(core)
    info = controller.info()
    assert not info.running
    assert info.state == "stopped"
    assert "2 s" in info.reason


@pytest.mark.parametrize("request_", ["REST", "gRPC", "health"])
@live
@over("rest")
def test_any_request_keeps_alive(node: NodeProcess, home: Place, controller: Controller, request_: str) -> None:
    """Requests with the key for unknown paths, or to gRPC's standard services, keep it alive, too."""
    run(controller, [home], keep_alive=1)
    core = node.newest_core()
    over_time = time.monotonic() + 2
    with Rpc(node) as rpc:
        service = "grpc.health.v1.Health/Check" if request_ == "health" else "service.NodeService/Nothing"
        call = rpc.channel.unary_unary(f"/{service}")
        while time.monotonic() < over_time:
            if request_ == "REST":
                assert Rest(node).call("GET", "/nothing").status == 404
            else:
                with suppress(grpc.RpcError):
                    call(b"", metadata=tuple(credentials(node.key, "bearer").items()))
    assert psutil.pid_exists(core)
    controller.stop()


@over("grpc")
def test_strangers_do_not_keep_alive(node: NodeProcess, home: Place, controller: Controller) -> None:
    """Calls without the node's key do not keep a backend alive."""
    stranger = RestController(node, key=str(uuid.uuid4()))
    run(controller, [home], keep_alive=1)
    core = node.newest_core()

    def gone() -> bool:
        refused(stranger.info, "401")
        return not psutil.pid_exists(core)

    until(gone, 15, "the core ends")


def test_node_that_is_killed(own_node: NodeProcess, home: Place) -> None:
    """A core does not outlive a killed node, and the next node starts one on the same ports."""
    with control(own_node, "rest") as controller:
        run(controller, [home])
    (core,) = own_node.core_pids()
    own_node.kill()
    ends(core)
    assert not accepts(home.port)
    own_node.start()
    with control(own_node, "grpc") as controller:
        assert run(controller, [home]).running


def test_node_that_is_terminated(own_node: NodeProcess, home: Place) -> None:
    """A node that is terminated ends its core first."""
    with control(own_node, "grpc") as controller:
        run(controller, [home])
    (core,) = own_node.core_pids()
    assert own_node.stop() == -signal.SIGTERM
    assert not psutil.pid_exists(core)
    assert not accepts(home.port)
    assert not list(StateDirectory(own_node.state).run_dir.glob("*.sock"))


def test_orphans_are_swept(own_node: NodeProcess) -> None:
    """The next node of a directory ends what an earlier one left, and nothing else."""
    own_node.stop()
    owners = (StateDirectory(own_node.state).run_dir, own_node.directory)
    orphan, other = (Child(["/bin/sleep", "60"], {MARK: mark(owner)}) for owner in owners)
    try:
        with ThreadPoolExecutor(1) as pool:
            # Reaped at once, as init does.
            status = pool.submit(orphan.wait, 10)
            own_node.start()
            assert status.result() == -signal.SIGKILL
        assert other.running
    finally:
        for child in (orphan, other):
            if child.running:
                child.kill()


@over("rest")
def test_long_configuration(node: NodeProcess, home: Place, controller: Controller) -> None:
    """A long configuration works, and is recognized again; one over the limit is refused."""
    request = home.ground.backend([home.inbound], [member(ANNA, home)])
    request.config += " " * 200_000
    assert controller.start(request).running
    core = node.newest_core()
    request.config += "\n"
    assert controller.start(request).running
    request.config += " " * MAX_CONFIG
    assert "longer than 8 MiB" in refused(lambda: controller.start(request), "400")
    assert node.newest_core() == core


@pytest.mark.slow
@over("rest")
def test_one_node_a_directory(node: NodeProcess, tmp_path: Path, home: Place, controller: Controller) -> None:
    """A second node with the same STATE_DIR refuses to start and reports why; the first and its core are unaffected."""
    run(controller, [home])
    core = node.newest_core()
    second = NodeProcess(tmp_path, STATE_DIR=str(node.state))
    with pytest.raises(AssertionError, match="another node uses STATE_DIR"), second:
        pass
    assert node.newest_core() == core
    assert controller.info().running


def test_unusable_executable(tmp_path: Path, home: Place) -> None:
    """Without a usable core, Start reports what to do, and works as soon as that is done."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "node").mkdir()
    ground = home.ground
    executable = tmp_path / "bin" / ground.name
    with (
        NodeProcess(tmp_path / "node", **{ground.variable: str(executable)}) as poor,
        control(poor, "rest") as rest,
        control(poor, "grpc") as grpc,
    ):
        text = refused(lambda: run(rest, [home]), "500")
        assert ground.variable in text
        assert str(executable) in text
        executable.write_text("#!/bin/sh\necho I am something else\n")
        assert str(executable) in refused(lambda: run(grpc, [home]), "UNAVAILABLE")
        executable.chmod(0o755)
        assert ground.stranger in refused(lambda: run(grpc, [home]), "UNAVAILABLE")
        assert not rest.info().running
        executable.unlink()
        executable.symlink_to(ground.executable())
        assert run(rest, [home]).running


@over("grpc")
def test_caller_that_hangs_up(node: NodeProcess, home: Place, echo: EchoServer, controller: Controller) -> None:
    """A Start takes effect although its caller has disconnected."""
    controller.stop()
    rest = Rest(node)
    impatient = rest.connection()
    headers = {**rest.credentials, "Content-Type": "application/x-protobuf"}
    impatient.request(
        "POST", "/start", home.ground.backend([home.inbound], [member(ANNA, home)]).SerializeToString(), headers
    )
    impatient.close()
    in_state(controller, "running")
    assert gets_in(home, ANNA, echo)
