"""`nodectl sandbox`: a node with a pretended core behaves as one with a core, and does what it is ordered to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from drivers.registry import REGISTRY
from node.tap import make_node
from protos import service_pb2 as pb
from scripts.staging.backend import backend_config
from scripts.staging.controller import Controller, ControllerError, RestController, RpcController
from scripts.staging.inbounds import Kind
from scripts.staging.protocols import vless
from scripts.staging.target import Address
from scripts.staging.transports import raw
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conformance.__main__ import chosen
from tests.conformance.registry import Level
from tests.conformance.runner import Outcome, run_all
from tests.conformance.stage import Options, Stage
from tests.conftest import Place, member
from tests.harness.nodectl import Nodectl
from tests.harness.sandboxed import Sandbox

HOME = Place(Kind("vless-raw", vless(), raw()), "home")
ANNA, BERT = TestUser.new("Anna@test"), TestUser.new("bert@test")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with Sandbox(tmp_path_factory.mktemp("sandbox"), "--quiet") as running:
        yield running


@pytest.fixture(params=[RestController, RpcController], ids=["rest", "grpc"])
def controller(request: pytest.FixtureRequest, quiet: Sandbox) -> Iterator[Controller]:
    """A controller of the quiet sandbox, whose core runs with Anna and Bert."""
    with closing(request.param(quiet)) as controller:
        begin(controller)
        yield controller


def begin(controller: Controller, **extra: object) -> pb.BaseInfoResponse:
    users = [member(ANNA, HOME), member(BERT, HOME)]
    return controller.start(pb.Backend(config=backend_config([HOME.inbound], **extra), users=users))


def of(controller: Controller, kind: pb.StatType, name: str, reset: bool = False) -> dict[str, int]:
    """The bytes of a name, by direction."""
    return {row.type: row.value for row in controller.stats(kind, name, reset=reset).stats}


def test_what_it_reports(controller: Controller) -> None:
    """It has the core's name, a version that no core has, and a warning."""
    info = begin(controller)
    assert (info.running, info.core_type, info.core_version) == (True, "xray", "0.0.0-sandbox")
    assert "sandbox" in info.warnings[0]
    assert controller.backend_stats().num_goroutine > 0


def test_traffic(quiet: Sandbox, controller: Controller) -> None:
    """Ordered bytes are counted once, for the user as they are spelled, the inbound and the outbound."""
    for kind in (pb.UsersStat, pb.Inbounds, pb.Outbounds):
        controller.stats(kind, reset=True)
    assert quiet.order("traffic anna@TEST 1000 5000000000") == "ok"
    expected = {"uplink": 1000, "downlink": 5_000_000_000}
    for kind, name in (pb.UserStat, ANNA.email), (pb.Inbound, "home"), (pb.Outbound, "direct"):
        assert of(controller, kind, name, reset=True) == expected
        assert set(of(controller, kind, name).values()) == {0}
    assert quiet.order("traffic nobody 1 1").startswith("error: the core has no user")


def test_limits(quiet: Sandbox, controller: Controller) -> None:
    """A user over their quota is out of the core, and their connections are cut."""
    assert quiet.order(f"online {ANNA.email} 203.0.113.1") == "ok"
    controller.set_limits({ANNA.email: pb.Limits(bytes=pb.Quota(bytes=1000))})
    try:
        until(lambda: controller.online(ANNA.email).value == 1)
        quiet.order(f"traffic {ANNA.email} 0 2000")
        [row] = until(lambda: [row for row in controller.limits(ANNA.email).users if row.off_for])
        assert list(row.off_for) == ["quota"]
        until(lambda: controller.online(ANNA.email).value == 0)
    finally:
        controller.set_limits({ANNA.email: None})
        quiet.order(f"online {ANNA.email}")


def test_addresses(quiet: Sandbox, controller: Controller) -> None:
    """Connections from more addresses than allowed end, and come again; the first address stays."""
    controller.set_limits({ANNA.email: pb.Limits(addresses=1)})
    try:
        assert quiet.order(f"online {ANNA.email} 203.0.113.1 203.0.113.2") == "ok"
        until(lambda: set(controller.online_ips(ANNA.email).ips) == {"203.0.113.1"})
        until(lambda: set(controller.online_ips(ANNA.email).ips) == {"203.0.113.1", "203.0.113.2"})
    finally:
        controller.set_limits({ANNA.email: None})
        quiet.order(f"online {ANNA.email}")


def test_online(quiet: Sandbox, controller: Controller) -> None:
    """Users are online from the ordered addresses; dropped, they are back in a moment."""
    try:
        assert quiet.order(f"online {BERT.email} 203.0.113.1 2001:db8::1") == "ok"
        assert controller.online(BERT.email).value == 2
        [row] = controller.call("ListOnline", pb.ListOnlineResponse, pb.ListOnlineRequest()).users
        assert (row.name, set(row.ips)) == (BERT.email, {"203.0.113.1", "2001:db8::1"})
        dropped = controller.call(
            "DropConnections", pb.DropConnectionsResponse, pb.DropConnectionsRequest(name=row.name)
        )
        assert (dropped.ended, controller.online(BERT.email).value) == (2, 0)
        until(lambda: controller.online(BERT.email).value == 2)
        assert quiet.order(f"online {BERT.email} home").startswith("error: ")
    finally:
        assert quiet.order(f"online {BERT.email}") == "ok"
    assert controller.online(BERT.email).value == 0


def test_a_refused_user(quiet: Sandbox, controller: Controller) -> None:
    """The core refuses a user until it is to accept them."""
    cora = TestUser.new("cora@test")
    assert quiet.order("refuse cora@test") == "ok"
    with pytest.raises(ControllerError, match=r"failed to update users.*cora@test.*the core says no"):
        controller.sync_user(member(cora, HOME))
    assert quiet.order("accept cora@test") == "ok"
    controller.sync_user(member(cora, HOME))
    controller.sync_user(member(cora))


@pytest.mark.slow
def test_a_crash(quiet: Sandbox, controller: Controller) -> None:
    """A core that has ended is started again, a start that fails is tried again; the log has both."""
    with controller.logs() as log:
        assert (quiet.order("fail"), quiet.order("crash")) == ("ok", "ok")
        assert controller.info().state == "restarting"
        with pytest.raises(ControllerError, match="core is not started yet"):
            controller.backend_stats()
        until(lambda: any("`fail` was asked for" in line for line in log.lines))
        until(lambda: controller.info().running, 20)


def test_a_hung_core(quiet: Sandbox, controller: Controller) -> None:
    """A core that does not answer is an error."""
    quiet.order("hang")
    with pytest.raises(ControllerError, match="before it answered"):
        controller.backend_stats()
    assert quiet.order("crash") == "ok"


def test_another_configuration(quiet: Sandbox, controller: Controller) -> None:
    """A changed Start brings another core without a restart, and keeps the counters; a refused one changes nothing."""
    quiet.order(f"traffic {ANNA.email} 7 8")
    info = begin(controller, log={"loglevel": "error"})
    assert not [warning for warning in info.warnings if "restarted" in warning]
    assert of(controller, pb.UserStat, ANNA.email, reset=True)["uplink"] == 7
    for config, reason in (("{", "cannot be read"), ('{"inbounds": [{"protocol": "nonsense"}]}', "nonsense")):
        with pytest.raises(ControllerError, match=reason):
            controller.start(pb.Backend(config=config))
    assert controller.info().running


def test_orders(quiet: Sandbox) -> None:
    """A wrong order is answered by an error, and changes nothing."""
    assert quiet.order("explode").startswith("error: explode is none of traffic, online, ")
    assert quiet.order("traffic anna").startswith("error: traffic takes other words")
    for sizes in ("many bytes", "-1 0", f"0 {10**16}"):
        assert quiet.order(f"traffic {ANNA.email} {sizes}").startswith("error: ")


def test_traffic_that_nobody_ordered(tmp_path: Path) -> None:
    """Unless it is quiet, users are online and their counters grow. Its files are gone when it has ended."""
    with Sandbox(tmp_path) as sandbox, closing(RestController(sandbox)) as controller:
        begin(controller)
        until(lambda: of(controller, pb.UserStat, ANNA.email)["downlink"] > 0)
        assert controller.online(ANNA.email).value == 1
        [(address, seen)] = controller.online_ips(ANNA.email).ips.items()
        assert address.startswith("198.51.100.")
        assert abs(seen - time.time()) < 60
        assert sandbox.certificate.exists()
    assert sandbox.status == 0
    assert not sandbox.certificate.parent.exists()


def test_it_ends_with_its_pipe(tmp_path: Path) -> None:
    """It does not outlive the tests that started it, and clears up."""
    with Sandbox(tmp_path) as sandbox:
        assert sandbox.hang_up() == 0
    assert not sandbox.certificate.parent.exists()


def test_ports(quiet: Sandbox, tmp_path: Path) -> None:
    """Ports that cannot be used end it with a line that says why."""
    nodectl = Nodectl(tmp_path)
    taken = nodectl("sandbox", "--rest-port", quiet.rest_port)
    assert (taken.code, str(quiet.rest_port) in taken.err, "Traceback" in taken.err) == (1, True, False)
    same = nodectl("sandbox", "--rest-port", 20000, "--grpc-port", 20000)
    assert (same.code, "set two different ports" in same.err) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("core", ["xray", "sing-box"])
def test_conformance(quiet: Sandbox, core: str) -> None:
    """Each check of each level holds, as far as it goes without traffic, for the configurations of each core."""
    where = Address(quiet.host, quiet.rest_port, quiet.grpc_port, quiet.key, quiet.pem)
    with Stage(Options(where, core, traffic=False)) as stage:
        results = list(run_all(chosen(Level.BEYOND, None), ["rest", "grpc"], stage))
    assert [(each.check.id, each.detail) for each in results if each.outcome is Outcome.FAILED] == []
    passed = {each.check.id for each in results if each.outcome is Outcome.PASSED}
    assert {"users.sync-users", "users.limited", "start.again", "logs.never-ended", "buttons.off"} <= passed
    lacking = {each.check.id for each in results if each.outcome is Outcome.UNSUPPORTED}
    assert {name.partition(".")[0] for name in lacking} <= {"latency", "routing"}


def test_only_the_sandbox_has_it() -> None:
    """The cores that `twistd node` can run are real ones."""
    assert make_node.__defaults__ == (REGISTRY,)
    assert not [kind for kind in REGISTRY.values() if "pretended" in repr(kind.load)]
