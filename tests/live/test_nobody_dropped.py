"""No connection is dropped: not by an unchanged or a refused Start, nor by a panel's Stop, nor by a sync."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from google.protobuf.message import Message

from node.api.methods import METHODS, Method
from node.api.methods import Kind as MethodKind
from node.backend.supervisor import START_TIMEOUT
from protos.service_pb2 import Backend, BackendType, Empty, User, Users, UsersChunk, UsersStat
from scripts.staging import transfer
from scripts.staging.backend import chunks
from scripts.staging.controller import Controller, ControllerError, RestController, RpcController, refused, traffic
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.process import freeze
from scripts.staging.rpc import SERVICE, Rpc
from scripts.staging.target import credentials
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, control, gets_in, member, over, run, stays_out, talking, way
from tests.harness.grounds import GROUNDS, Ground
from tests.harness.rest import Rest, delimited
from tests.live.test_core_faults import as_is, in_state, squatter

ANNA, BERT, CARL, DORA = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl", "dora"))
# Timeout of deployed panels, in seconds.
PATIENCE = 10.0
# Seconds that count as "at once" on a busy machine.
AT_ONCE = 1.0
WAITING = "core is not started yet"
# Deployed panels: they send Stop and then Start for every change.
PANELS: Mapping[str, Callable[[NodeProcess], RestController | RpcController]] = {
    "rest": lambda node: RestController(node, dialect="x-api-key"),
    "grpc": lambda node: RpcController(node, dialect="x-api-key"),
}


@pytest.fixture
def work(all_kinds: Mapping[str, Kind], ground: Ground) -> Place:
    return Place(all_kinds["trojan-tls"], "work", ground=ground)


def over_panel(transport: str) -> pytest.MarkDecorator:
    """For a test that needs `panel` over one transport only."""
    return pytest.mark.parametrize("panel", [transport], indirect=True)


@pytest.fixture(params=list(PANELS))
def panel(node: NodeProcess, request: pytest.FixtureRequest) -> Iterator[RestController | RpcController]:
    with closing(PANELS[request.param](node)) as controller:
        yield controller


class Fickle(NodeProcess):
    """A node whose core runs well, or `fails`, `hangs` or `waits` when it is run; it can always check configurations.

    A waiting core goes on when it `works`.
    """

    def __init__(self, directory: Path, ground: Ground, **environment: str) -> None:
        script = directory / ground.name
        self._mode = directory / "mode"
        script.write_text(
            "#!/bin/sh\n"
            f'if [ "$1" = run ] && [ "$2" != -test ] && [ -e {self._mode} ]; then . {self._mode}; fi\n'
            f'exec {ground.executable()} "$@"\n'
        )
        script.chmod(0o755)
        super().__init__(directory, **{ground.variable: str(script), **environment})

    def hangs(self) -> None:
        self._mode.write_text("echo waiting for nothing; exec sleep 60\n")

    def fails(self) -> None:
        self._mode.write_text("echo it is not my day; exit 1\n")

    def waits(self) -> None:
        self._mode.write_text(f"while [ -e {self._mode} ]; do sleep 0.05; done\n")

    def works(self) -> None:
        self._mode.unlink()


@pytest.fixture
def fickle(tmp_path: Path, ground: Ground) -> Iterator[Fickle]:
    with Fickle(tmp_path, ground) as node:
        yield node


@contextmanager
def undisturbed(node: NodeProcess, place: Place, person: TestUser, echo: EchoServer) -> Iterator[None]:
    """Assert that this user's connection carries bytes throughout the block, and that the core stays the same."""
    before = node.newest_core()
    with connected(place, person, echo):
        yield
    assert node.newest_core() == before


@contextmanager
def connected(place: Place, person: TestUser, echo: EchoServer) -> Iterator[None]:
    """Assert that this user's connection carries bytes throughout the block."""
    with connection(place, person, echo) as link, talking(link):
        yield


def at_ease(node: NodeProcess, place: Place, person: TestUser, echo: EchoServer) -> AbstractContextManager[None]:
    """`connected` while users are added; `undisturbed` on cores where that needs no other core."""
    return undisturbed(node, place, person, echo) if place.ground.live else connected(place, person, echo)


def respelled(config: str) -> str:
    """An equivalent configuration: keys in another order, other white space, comments of every kind."""

    def turned(value: object) -> object:
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return [turned(member) for member in value] if isinstance(value, list) else value

    text = json.dumps(turned(json.loads(config)), indent=3).replace("\n", " // why not\n", 1)
    return f"# written anew\n{text}\n/* the {{end}} */\n"


def known_to_core(node: NodeProcess, place: Place) -> set[str]:
    """The users of the inbound in the core itself: see `Ground.users`."""
    return place.ground.users(node.state, node.newest_core(), place.tag)


def lets_in(node: NodeProcess, place: Place, people: Sequence[TestUser], echo: EchoServer) -> bool:
    """Whether exactly these of the four users may use the inbound; the core may list removed users, and bar them."""
    listed, wanted = known_to_core(node, place), {person.email for person in people}
    others = [person for person in (ANNA, BERT, CARL, DORA) if person.email in listed - wanted]
    return wanted <= listed and all(stays_out(place, person, echo) for person in others)


def reached(port: int, echo: EchoServer) -> bool:
    """Whether a new connection through the SOCKS port reaches the echo server at once."""
    with transfer.connect(port, echo, 0.25):
        return True


def both(node: NodeProcess, stack: ExitStack) -> list[RestController | RpcController]:
    return [stack.enter_context(control(node, transport)) for transport in ("rest", "grpc")]


# Starts


@pytest.mark.both
def test_identical_start(node: NodeProcess, home: Place, work: Place, echo: EchoServer, controller: Controller) -> None:
    """A Start with the same meaning but other text is quick, drops no connection, and gets the same reply."""
    users = [member(person, home, work) for person in (ANNA, BERT, CARL)]
    request = home.ground.backend([home.inbound, work.inbound], users, exclude=["x", "y"])
    first = controller.start(request)
    again = Backend(
        type=request.type, config=respelled(request.config), users=users[::-1], exclude_inbounds=["y", "x", "x"]
    )
    with undisturbed(node, home, ANNA, echo), undisturbed(node, work, BERT, echo):
        before = time.monotonic()
        reply = controller.start(again)
        assert time.monotonic() - before < AT_ONCE
    assert reply == first
    assert reply.running


@over("grpc")
def test_identical_start_renews_keep_alive(node: NodeProcess, home: Place, controller: Controller) -> None:
    """The keep-alive of the last Start applies, although its core ran before."""
    run(controller, [home])
    before = node.newest_core()
    run(controller, [home], keep_alive=1)
    assert node.newest_core() == before
    until(lambda: not node.core_pids(), 15, "the core ends")
    run(controller, [home], keep_alive=1)
    run(controller, [home])
    over_time = time.monotonic() + 1.5
    until(lambda: time.monotonic() > over_time, what="its time is over")
    assert controller.info().running


@over("rest")
@pytest.mark.both
def test_start_with_other_users(node: NodeProcess, home: Place, echo: EchoServer, controller: Controller) -> None:
    """A Start that changes only users changes them live; unchanged users are not affected."""
    changed = TestUser.new(DORA.email)
    run(controller, [home], [member(person, home) for person in (ANNA, BERT, DORA)])
    with at_ease(node, home, ANNA, echo):
        run(controller, [home], [member(person, home) for person in (CARL, ANNA, changed)])
        assert stays_out(home, BERT, echo)
        assert stays_out(home, DORA, echo)
        assert gets_in(home, CARL, echo)
        assert gets_in(home, changed, echo)


def test_two_identical_starts_at_once(own_node: NodeProcess, home: Place) -> None:
    """Concurrent ones, over both transports, run one core, and all callers get the reply that it runs."""
    request = home.ground.backend([home.inbound], [member(ANNA, home)])
    with ExitStack() as stack:
        controllers = both(own_node, stack)
        logs = stack.enter_context(controllers[0].logs())
        pool = stack.enter_context(ThreadPoolExecutor(4))
        replies = [pool.submit(controller.start, request) for controller in controllers * 2]
        assert all(reply.result().running for reply in replies)
        assert len(own_node.core_pids()) == 1
        controllers[0].stop()
        logs.find("backend stopped")
        assert len([line for line in logs.lines if "backend starting" in line]) == 1


@over("grpc")
def test_unknown_type(node: NodeProcess, home: Place, echo: EchoServer, controller: Controller) -> None:
    """A type without a core is refused as such, and all connections stay."""
    run(controller, [home], [member(ANNA, home)])
    with undisturbed(node, home, ANNA, echo), refused(501, "UNIMPLEMENTED"):
        controller.start(Backend(type=BackendType.WIREGUARD, config="{}"))


@over("grpc")
def test_users_of_a_start_that_is_refused(
    node: NodeProcess, home: Place, echo: EchoServer, controller: Controller
) -> None:
    """A refused Start changes no user, and syncs work as before."""
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    with at_ease(node, home, ANNA, echo):
        with undisturbed(node, home, BERT, echo):
            for config, _ in home.ground.refusals.values():
                request = as_is(home.ground, config)
                request.users.append(member(CARL, home))
                with refused(400, "INVALID_ARGUMENT"):
                    controller.start(request)
            assert lets_in(node, home, [ANNA, BERT], echo)
        controller.sync_users([member(ANNA, home), member(DORA, home)])
        assert lets_in(node, home, [ANNA, DORA], echo)


@pytest.mark.slow
@over("rest")
def test_port_of_the_next_is_taken(
    node: NodeProcess, home: Place, work: Place, echo: EchoServer, controller: Controller
) -> None:
    """If another program has the new configuration's port, the error comes in time, and the old backend stays."""
    run(controller, [home], [member(ANNA, home)])
    with squatter(work), undisturbed(node, home, ANNA, echo):
        before = time.monotonic()
        with pytest.raises(ControllerError) as error:
            run(controller, [work], [member(BERT, work)])
        assert time.monotonic() - before < PATIENCE
    assert error.value.status == "500"
    assert "address already in use" in error.value.text
    assert str(work.port) in error.value.text
    assert "the previous backend goes on" in error.value.text
    assert controller.info().running
    assert gets_in(home, ANNA, echo)
    assert lets_in(node, home, [ANNA], echo)


@pytest.mark.slow
def test_core_that_never_comes_up(fickle: Fickle, home: Place, work: Place, echo: EchoServer) -> None:
    """While a Start hangs, other calls and user changes work; it fails in time, and no connection is dropped."""
    with ExitStack() as stack:
        controllers = both(fickle, stack)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        run(controllers[0], [home], [member(ANNA, home)])
        stack.enter_context(at_ease(fickle, home, ANNA, echo))
        fickle.hangs()
        before = time.monotonic()
        start = pool.submit(run, controllers[1], [work], [member(ANNA, work)])
        in_state(controllers[0], "starting")
        for controller in controllers:
            for answered in (*questions(controller), controller.backend_stats):
                asked = time.monotonic()
                answered()
                assert time.monotonic() - asked < AT_ONCE
        controllers[0].sync_user(member(BERT, home, work))
        controllers[1].sync_chunked(chunks([member(CARL, home)]))
        assert not start.done()
        fickle.works()
        with pytest.raises(ControllerError) as error:
            start.result()
        assert START_TIMEOUT - 1 < time.monotonic() - before < PATIENCE
        assert error.value.status == "UNAVAILABLE"
        assert "did not answer within" in error.value.text
        assert "the previous backend goes on" in error.value.text
        assert gets_in(home, ANNA, echo)
        for person in (BERT, CARL):
            until(partial(gets_in, home, person, echo), 5, "a user who came meanwhile is in")


def questions(controller: Controller) -> list[Callable[[], object]]:
    """Calls that never wait for a core."""

    def logs() -> None:
        with controller.logs() as reader:
            reader.find("backend starting", AT_ONCE)

    return [controller.info, controller.system_stats, lambda: controller.stats(UsersStat), logs]


# Stops


def test_panel_that_says_stop_and_start(
    node: NodeProcess, home: Place, echo: EchoServer, panel: RestController | RpcController
) -> None:
    """After a panel's Stop the state is stopped at once; its Start finds all connections alive."""
    users = [member(ANNA, home), member(BERT, home)]
    run(panel, [home], users)
    with undisturbed(node, home, ANNA, echo), undisturbed(node, home, BERT, echo):
        panel.stop()
        info = panel.info()
        assert (info.running, info.state) == (False, "stopped")
        for call in (panel.backend_stats, lambda: panel.sync_users(users)):
            with refused(500, "UNAVAILABLE", "backend not initialized"):
                call()
        assert run(panel, [home], users).running
        panel.stop()
        panel.stop()
        assert run(panel, [home], users).running
        panel.stop()
    with at_ease(node, home, ANNA, echo):
        assert run(panel, [home], [*users, member(CARL, home)]).running
        assert gets_in(home, CARL, echo)


@over_panel("grpc")
def test_removed_in_the_grace(
    node: NodeProcess, home: Place, echo: EchoServer, panel: RestController | RpcController
) -> None:
    """After a panel's Stop a removed user is cut at once, and no new connection is accepted before the Start."""
    run(panel, [home], [member(ANNA, home), member(BERT, home), member(DORA, home)])
    with at_ease(node, home, ANNA, echo):
        with undisturbed(node, home, ANNA, echo):
            panel.stop()
            with refused(500, "UNAVAILABLE", "backend not initialized"):
                panel.sync_user(member(BERT), member(CARL, home))
            until(lambda: lets_in(node, home, [ANNA, DORA], echo), what="he is out")
            with refused(500, "UNAVAILABLE", "backend not initialized"):
                panel.sync_users([member(ANNA, home), member(CARL, home)])
            until(lambda: lets_in(node, home, [ANNA], echo), what="she is out")
        run(panel, [home], [member(ANNA, home), member(CARL, home)])
    assert lets_in(node, home, [ANNA, CARL], echo)


@over_panel("rest")
def test_refused_config_of_a_panel(
    node: NodeProcess, home: Place, echo: EchoServer, panel: RestController | RpcController
) -> None:
    """A panel that repeats Stop and a refused Start drops no connection."""
    run(panel, [home], [member(ANNA, home)])
    with undisturbed(node, home, ANNA, echo):
        for _ in range(3):
            panel.stop()
            with refused(400, "INVALID_ARGUMENT"):
                panel.start(as_is(home.ground, "{"))
            assert panel.info().state == "stopped"
        run(panel, [home], [member(ANNA, home)])


@over("grpc")
def test_other_stops_and_starts(
    node: NodeProcess, home: Place, work: Place, echo: EchoServer, controller: Controller
) -> None:
    """A Stop with a Bearer key stops at once, also after a panel's Stop; another Start replaces the waiting backend."""
    with closing(RestController(node, dialect="x-api-key")) as panel:
        for stops in ([controller], [panel, controller]):
            run(controller, [home], [member(ANNA, home)])
            with connection(home, ANNA, echo):
                live = echo.live
                for each in stops:
                    each.stop()
                assert not node.core_pids()
                until(lambda: echo.live < live, what="her connection ends")  # noqa: B023
        run(controller, [home], [member(ANNA, home)])
        before = node.newest_core()
        panel.stop()
        run(panel, [work], [member(ANNA, work)])
        assert node.newest_core() != before
        assert gets_in(work, ANNA, echo)


def test_grace_that_ends(tmp_path: Path, home: Place, echo: EchoServer) -> None:
    """Without a Start in time the core ends, and its counts until then are kept."""
    with NodeProcess(tmp_path, STOP_GRACE="1") as node, closing(RestController(node, dialect="x-api-key")) as panel:
        run(panel, [home], [member(ANNA, home)])
        with connection(home, ANNA, echo) as link:
            transfer.download(link, 100_000)
            panel.stop()
            assert node.core_pids()
            transfer.download(link, 100_000)
            before = echo.sent
            until(lambda: not node.core_pids(), 15, "the core ends")
        assert traffic(panel.stats(UsersStat))[ANNA.email]["downlink"] >= 200_000
        assert echo.sent == before
        assert run(panel, [home], [member(ANNA, home)]).running
        assert gets_in(home, ANNA, echo)


# Crashes


@over("grpc")
def test_killed_under_load(node: NodeProcess, home: Place, echo: EchoServer, controller: Controller) -> None:
    """A core with fifty users that is killed under load is replaced very quickly."""
    crowd = [member(TestUser.new(f"{number}@test"), home) for number in range(49)]
    controller.stop()
    run(controller, [home], [member(ANNA, home), *crowd])
    with (
        way(home, ANNA) as port,
        transfer.connect(port, echo) as link,
        pytest.raises((OSError, AssertionError)),
        talking(link),
    ):
        os.kill(node.newest_core(), signal.SIGKILL)
        before = time.monotonic()
        until(lambda: reached(port, echo), 15, "she is in again")
        took = time.monotonic() - before
    # Some 0.1 s on an idle machine.
    assert took < 2
    assert len(known_to_core(node, home)) == 50


def test_users_of_the_time_without_a_core(fickle: Fickle, home: Place, echo: EchoServer) -> None:
    """While a core cannot restart, calls that need it report that; syncs succeed, and take effect later."""
    with ExitStack() as stack:
        rest, rpc = both(fickle, stack)
        run(rest, [home], [member(ANNA, home), member(BERT, home)])
        fickle.fails()
        os.kill(fickle.newest_core(), signal.SIGKILL)
        until(lambda: "not my day" in in_state(rpc, "restarting").reason, what="the reason is the core's")
        for controller in (rest, rpc):
            for call in (controller.backend_stats, lambda: controller.online(ANNA.email)):  # noqa: B023
                with refused(503, "UNAVAILABLE", WAITING):
                    call()
        rest.sync_users([member(ANNA, home), member(CARL, home)])
        rpc.sync_users([member(CARL, home), member(DORA, home)])
        rpc.sync_user(member(CARL))
        rest.sync_chunked(chunks([member(ANNA, home)]))
        assert not fickle.core_pids()
        fickle.works()
        in_state(rest, "running")
        assert lets_in(fickle, home, [ANNA, DORA], echo)
        assert gets_in(home, DORA, echo)


@pytest.mark.slow
def test_cores_that_hang(tmp_path: Path, all_kinds: Mapping[str, Kind], echo: EchoServer) -> None:
    """A core that lives without replying is replaced. All at once, as each takes some 15 s."""
    with ExitStack() as stack:
        hung: dict[NodeProcess, int] = {}
        places: dict[NodeProcess, Place] = {}
        for ground in GROUNDS:
            (directory := tmp_path / ground.name).mkdir()
            node = stack.enter_context(NodeProcess(directory))
            home = places[node] = Place(all_kinds["vless-raw"], "home", ground=ground)
            run(stack.enter_context(control(node, "rest")), [home], [member(ANNA, home)])
            hung[node] = node.newest_core()
            freeze(hung[node])
        for node, pid in hung.items():
            until(lambda: node.core_pids() not in ([], [pid]), 25, "another core runs")  # noqa: B023
            in_state(stack.enter_context(control(node, "grpc")), "running")
            assert gets_in(places[node], ANNA, echo)


# Many at once


class Sent:
    """A request in progress: sent completely, its reply not read."""

    def __init__(self, node: NodeProcess, method: Method, request: Message) -> None:
        rest = Rest(node)
        self._connection = rest.connection()
        headers = {**rest.credentials, "Content-Type": "application/x-protobuf"}
        body = b"".join(delimited([request])) if isinstance(request, UsersChunk) else request.SerializeToString()
        self._connection.request(method.verbs[0], method.path, body, headers)

    def outcome(self) -> str:
        """The error of the refusal, if any."""
        with closing(self._connection):
            response = self._connection.getresponse()
            text = response.read().decode(errors="replace")
        return "" if response.status == 200 else text


class Called:
    """The same over gRPC, after earlier calls on this channel."""

    def __init__(self, node: NodeProcess, rpc: Rpc, method: Method, request: Message) -> None:
        call = rpc.channel.unary_unary(f"/{SERVICE.full_name}/{method.name}", type(request).SerializeToString)
        self._future = call.future(request, metadata=list(credentials(node.key, "bearer").items()))

    def outcome(self) -> str:
        fault = self._future.exception()
        return "" if fault is None else f"{fault.code().name}: {fault.details()}"


@pytest.mark.slow
@pytest.mark.parametrize("last", ["Start", "Stop", "SyncUsers"])
@pytest.mark.turns("last")
def test_fifty_at_once(last: str, node: NodeProcess, home: Place, work: Place, echo: EchoServer) -> None:
    """Fifty Starts, Stops and syncs in random order over both transports end in the state of the last one."""
    chance = random.Random(last)
    methods = {method.name: method for method in METHODS}
    # After a Stop there may be no backend for syncs.
    names = ["Start", "SyncUsers", "SyncUser", "SyncUsersChunked", *([] if last == "SyncUsers" else ["Stop"])]

    def some(people: Sequence[TestUser] = (ANNA, BERT, CARL, DORA)) -> list[User]:
        return [member(person, home, work) for person in chance.sample(people, chance.randint(1, len(people)))]

    def request(name: str) -> Message:
        places = chance.choice([[home], [home, work]])
        requests: Mapping[str, Callable[[], Message]] = {
            "Start": lambda: home.ground.backend([place.inbound for place in places], some()),
            "Stop": Empty,
            "SyncUsers": lambda: Users(users=some()),
            "SyncUser": lambda: chance.choice([member(CARL), *some((DORA,))]),
            "SyncUsersChunked": lambda: UsersChunk(users=some(), last=True),
        }
        return requests[name]()

    with control(node, "rest") as rest, closing(Rpc(node)) as rpc:
        run(rest, [home])

        def send(name: str, message: Message) -> Sent | Called:
            """A stream goes over REST, where it is known when all of it was sent."""
            method = methods[name]
            if method.kind is MethodKind.FEED or chance.random() < 0.5:
                return Sent(node, method, message)
            return Called(node, rpc, method, message)

        under_way = [send(name, request(name)) for name in chance.choices(names, k=49)]
        # A reply now means that all earlier requests have arrived.
        assert rest.info()
        assert rpc.GetBaseInfo(Empty())
        two = [member(ANNA, home), member(BERT, home)]
        finals = {"Start": home.ground.backend([home.inbound], two), "Stop": Empty(), "SyncUsers": Users(users=two)}
        outcomes = [each.outcome() for each in [*under_way, send(last, finals[last])]]
        assert outcomes[-1] == ""
        foreseen = ("aborted", "backend not initialized")
        assert not [text for text in outcomes if text and not any(word in text for word in foreseen)]
        assert rest.info().state == ("stopped" if last == "Stop" else "running")
    if last == "Stop":
        # The check of an aborted Start, which was killed, may still be ending.
        until(lambda: not node.core_pids(), what="no core is left")
    else:
        assert lets_in(node, home, [ANNA, BERT], echo)
        assert gets_in(home, ANNA, echo)
        assert stays_out(home, CARL, echo)
        until(lambda: len(node.core_pids()) == 1, what="one core is left")


@over("grpc")
def test_ten_thousand_users(node: NodeProcess, home: Place, echo: EchoServer, controller: Controller) -> None:
    """With ten thousand users an identical Start, the same list and one more user are quick and drop no connection."""
    crowd = [member(TestUser.new(f"{number}@test"), home) for number in range(10_000)]
    users: list[User] = [member(ANNA, home), *crowd]
    run(controller, [home], users)
    with at_ease(node, home, ANNA, echo):
        with undisturbed(node, home, ANNA, echo):
            quick(node, lambda: run(controller, [home], users[::-1]))
            quick(node, lambda: controller.sync_users(users))
        quick(node, lambda: controller.sync_user(member(BERT, home)))
        assert gets_in(home, BERT, echo)


def quick(node: NodeProcess, call: Callable[[], object]) -> None:
    """Some 0.1 s for whole lists, and 0.4 s for another core, of processor time, as the machine may be busy."""
    before, began = spent(node), time.monotonic()
    call()
    assert spent(node) - before < 2 * AT_ONCE
    assert time.monotonic() - began < START_TIMEOUT


def spent(node: NodeProcess) -> float:
    """Processor seconds of the node and its cores, ended ones included."""
    cores = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in node.core_pids()]
    return sum(psutil.Process(node.node_pid).cpu_times()[:4]) + sum(cores)
