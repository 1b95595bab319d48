"""Rules and balancers changed while the core runs, with traffic that follows them, over both transports."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from protos import service_pb2 as pb
from scripts.staging.controller import Controller, RestController, refused
from scripts.staging.core import Json
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import TRANSPORTS, Place, control, gets_in, member, run
from tests.harness.grounds import SING_BOX

ANNA = TestUser.new("anna@test")
FREE = {"finalRules": [{"action": "allow"}]}


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[EchoServer]:
    with EchoServer() as server:
        yield server


@dataclass
class Ways:
    """A backend with three outbounds: `direct`, `other`, which leads to another server, and `block`.

    The balancer `both` routes connections to the port of `balanced`. The first rule has no name, the second has
    one.
    """

    place: Place
    echo: EchoServer
    elsewhere: EchoServer
    balanced: EchoServer

    def other(self) -> Json:
        redirect = {**FREE, "redirect": f"127.0.0.1:{self.elsewhere.port}"}
        rules = [
            {"domain": ["full:a.test"], "outboundTag": "block"},
            {"domain": ["full:b.test"], "outboundTag": "block", "ruleTag": "named"},
            {"port": self.balanced.port, "balancerTag": "both", "ruleTag": "balanced"},
        ]
        return {
            "outbounds": [
                {"tag": "direct", "protocol": "freedom", "settings": FREE},
                {"tag": "other", "protocol": "freedom", "settings": redirect},
                {"tag": "block", "protocol": "blackhole"},
            ],
            "routing": {"rules": rules, "balancers": [{"tag": "both", "selector": ["direct"]}]},
        }

    def start(self, controller: Controller, **more: object) -> None:
        run(controller, [self.place], [member(ANNA, self.place)], **{**self.other(), **more})

    def taken(self, to: EchoServer | None = None) -> str:
        """The outbound of a new connection."""
        to = to or self.echo
        here, there = to.connections, self.elsewhere.connections
        if not gets_in(self.place, ANNA, to, timeout=1):
            return "block"
        assert to.connections - here + self.elsewhere.connections - there == 1
        return "direct" if to.connections > here else "other"

    def rule(self, outbound: str, tag: str = "mine") -> str:
        """A rule for connections to the echo server."""
        return json.dumps({"port": self.echo.port, "outboundTag": outbound, "ruleTag": tag})


CONFIGURED = [("block", ""), ("block", "named"), ("", "balanced")]


@pytest.fixture
def ways(all_kinds: Mapping[str, Kind], echo: EchoServer, elsewhere: EchoServer) -> Iterator[Ways]:
    with EchoServer() as balanced:
        yield Ways(Place(all_kinds["vless-raw"], "home"), echo, elsewhere, balanced)


def asked(controller: Controller, **route: object) -> pb.RouteResult:
    return controller.test_route(pb.TestRouteRequest(inbound_tag="home", network="tcp", **route))  # type: ignore[arg-type]


def test_a_rule_moves_traffic(controller: Controller, ways: Ways) -> None:
    """An added rule follows those of the configuration and is listed; after its removal all is as before."""
    ways.start(controller)
    assert controller.routing_rules() == CONFIGURED
    assert ways.taken() == "direct"
    controller.add_routing_rule(ways.rule("other"))
    assert controller.routing_rules() == [*CONFIGURED, ("other", "mine")]
    assert ways.taken() == "other"
    assert asked(controller, target_ip="127.0.0.1", target_port=ways.echo.port).outbound_tag == "other"
    controller.add_routing_rule(ways.rule("block", "late"))
    assert ways.taken() == "other"
    controller.remove_routing_rule("mine")
    assert ways.taken() == "block"
    controller.remove_routing_rule("late")
    assert controller.routing_rules() == CONFIGURED
    assert ways.taken() == "direct"


def test_a_rule_of_the_configuration_goes(controller: Controller, ways: Ways) -> None:
    """It is removed by name; another one may have that name then."""
    ways.start(controller)
    assert asked(controller, target_domain="b.test").outbound_tag == "block"
    controller.remove_routing_rule("named")
    assert controller.routing_rules() == [("block", ""), ("", "balanced")]
    assert asked(controller, target_domain="b.test").outbound_tag == "direct"
    controller.remove_routing_rule("named")
    assert controller.routing_rules() == [("block", ""), ("", "balanced")]
    controller.add_routing_rule(ways.rule("other", "named"))
    assert ways.taken() == "other"


def test_the_only_rule(controller: Controller, ways: Ways) -> None:
    """With a reset it replaces all other rules, also one with its name; the node's own rules stay."""
    ways.start(controller)
    for outbound in ("other", "block"):
        controller.add_routing_rule(ways.rule(outbound, "named"), should_reset=True)
        assert controller.routing_rules() == [(outbound, "named")]
        assert ways.taken() == outbound
    assert asked(controller, target_domain="a.test").outbound_tag == "direct"
    controller.remove_routing_rule("named")
    assert controller.routing_rules() == []
    assert controller.backend_stats().uptime >= 0
    assert ways.taken() == "direct"


def test_a_balancer_is_led(controller: Controller, ways: Ways) -> None:
    """An override decides its outbound until it is removed."""
    ways.start(controller)
    assert ways.taken(ways.balanced) == "direct"
    for target in ("other", "block"):
        controller.override_balancer("both", target)
        told = controller.balancer_info("both")
        assert (told.override_target, list(told.principle_target)) == (target, ["direct"])
        assert ways.taken(ways.balanced) == target
    controller.override_balancer("both", "")
    assert controller.balancer_info("both").override_target == ""
    assert ways.taken(ways.balanced) == "direct"
    controller.add_routing_rule(json.dumps({"port": ways.echo.port, "balancerTag": "both"}))
    controller.override_balancer("both", "other")
    assert ways.taken() == "other"


def test_routes(controller: Controller, ways: Ways) -> None:
    """The core's answer for a connection; without a matching rule it is the first outbound."""
    ways.start(controller)
    told = asked(controller, target_domain="a.test")
    assert (told.outbound_tag, told.target_domain, told.network) == ("block", "a.test", "tcp")
    told = asked(controller, target_domain="c.test", user=ANNA.email)
    assert (told.outbound_tag, told.target_domain, told.inbound_tag) == ("direct", "c.test", "home")
    with refused(400, "INVALID_ARGUMENT", "'smoke'"):
        controller.test_route(pb.TestRouteRequest(network="smoke"))


HOOK = {"domain": ["c.test"], "outboundTag": "direct", "webhook": {"url": "/run/docker.sock:/x"}}
REFUSED: Mapping[str, tuple[str, int, str, str]] = {
    "not JSON": ("{", 400, "INVALID_ARGUMENT", "not JSON"),
    "a list": ("[]", 400, "INVALID_ARGUMENT", "object"),
    "two rules": ('{"domain":["c.test"],"outboundTag":"direct"},{}', 400, "INVALID_ARGUMENT", "not JSON"),
    "what no rule has": ('{"port": "x", "outboundTag": "direct"}', 400, "INVALID_ARGUMENT", "port"),
    "nothing to match": ('{"outboundTag": "direct"}', 400, "INVALID_ARGUMENT", "no effective fields"),
    "a pattern that has no end": ('{"attrs": {"a": "("}, "outboundTag": "direct"}', 400, "INVALID_ARGUMENT", "regexp"),
    "nowhere to go": ('{"port": 1, "outboundTag": "nowhere"}', 404, "NOT_FOUND", "'nowhere'"),
    "no balancer": ('{"port": 1, "balancerTag": "nobody"}', 404, "NOT_FOUND", "'nobody'"),
    "a name that is taken": (
        '{"port": 1, "outboundTag": "direct", "ruleTag": "named"}',
        400,
        "INVALID_ARGUMENT",
        "named",
    ),
    "a name of ours": ('{"port": 1, "outboundTag": "direct", "RULETAG": "~txnode-x"}', 400, "INVALID_ARGUMENT", "own"),
    "a socket": (json.dumps(HOOK), 400, "INVALID_ARGUMENT", "CORE_PATHS"),
    "a list elsewhere": (
        '{"ip": ["ext:/etc/x:y"], "outboundTag": "direct"}',
        400,
        "INVALID_ARGUMENT",
        "XRAY_ASSETS_PATH",
    ),
    "a list elsewhere, behind another": (
        '{"domain": "c.test,ext:../../etc/x:y", "outboundTag": "direct"}',
        400,
        "INVALID_ARGUMENT",
        "XRAY_ASSETS_PATH",
    ),
}


def test_what_is_refused(controller: Controller, ways: Ways, node: NodeProcess) -> None:
    """Each with a text; nothing changes, and the core runs on."""
    ways.start(controller)
    core = node.newest_core()
    for rule, http, code, words in REFUSED.values():
        with refused(http, code, words):
            controller.add_routing_rule(rule)
        if words != "named":
            with refused(http, code, words):
                controller.add_routing_rule(rule, should_reset=True)
    with refused(400, "INVALID_ARGUMENT"):
        controller.remove_routing_rule("")
    for tag in ("nobody", "~txnode-rule-0:"):
        controller.remove_routing_rule(tag)
    for balancer, target in (("nobody", "direct"), ("both", "nowhere"), ("nobody", "")):
        with refused(404, "NOT_FOUND"):
            controller.override_balancer(balancer, target)
    with refused(404, "NOT_FOUND", "'nobody'"):
        controller.balancer_info("nobody")
    assert node.newest_core() == core
    assert controller.routing_rules() == CONFIGURED
    assert ways.taken() == "direct"


def changed(controller: Controller, ways: Ways) -> None:
    """A backend whose routing differs from its configuration."""
    ways.start(controller)
    controller.remove_routing_rule("named")
    controller.add_routing_rule(ways.rule("other"))
    controller.override_balancer("both", "block")


def is_changed(controller: Controller, ways: Ways) -> bool:
    rules = [("block", ""), ("", "balanced"), ("other", "mine")]
    return controller.routing_rules() == rules and ways.taken() == "other" and ways.taken(ways.balanced) == "block"


def crash(node: NodeProcess, _: Controller, __: Ways) -> None:
    before = node.newest_core()
    os.kill(before, signal.SIGKILL)
    until(lambda: node.core_pids() not in ([], [before]), what="another core is there")


def the_same_start(_: NodeProcess, controller: Controller, ways: Ways) -> None:
    ways.start(controller)


def another_core(node: NodeProcess, controller: Controller, ways: Ways) -> None:
    """Another core takes over, since a list that it had read has changed."""
    before = node.newest_core()
    (node.directory / "lists" / "more.dat").write_bytes(b"")
    until(lambda: any("more.dat" in warning for warning in controller.info().warnings), what="that is seen")
    ways.start(controller)
    assert node.newest_core() != before


def another_node(node: NodeProcess, _: Controller, __: Ways) -> None:
    node.kill()
    node.start()


EVENTS: Mapping[str, Callable[[NodeProcess, Controller, Ways], None]] = {
    "crash": crash,
    "the same Start": the_same_start,
    "overlap": another_core,
    "resume": another_node,
}


@pytest.fixture
def lasting(tmp_path: Path) -> Iterator[NodeProcess]:
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "more.dat").write_bytes(b"x")
    with NodeProcess(tmp_path, UPGRADE_ON_START="on", XRAY_ASSETS_PATH=str(lists)) as node:
        yield node


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_it_outlives(lasting: NodeProcess, ways: Ways, transport: str) -> None:
    """Changed routing survives each of these; another configuration has its own rules, and a Stop forgets all."""
    with control(lasting, transport) as controller:
        changed(controller, ways)
    for name, event in EVENTS.items():
        with control(lasting, transport) as controller:
            event(lasting, controller, ways)
            until(lambda: controller.info().running, what="it runs")
            assert is_changed(controller, ways), name
    with control(lasting, transport) as controller:
        ways.start(controller, log={"loglevel": "error"})
        assert controller.routing_rules() == CONFIGURED
        assert (ways.taken(), ways.taken(ways.balanced)) == ("direct", "direct")
        changed(controller, ways)
        controller.stop()
        ways.start(controller)
        assert controller.routing_rules() == CONFIGURED


@pytest.mark.slow
def test_a_start_that_fails_changes_nothing(own_node: NodeProcess, ways: Ways) -> None:
    with closing(RestController(own_node)) as controller:
        changed(controller, ways)
        with refused(400, "INVALID_ARGUMENT"):
            ways.start(controller, dns=5)
        assert is_changed(controller, ways)


CALLS: Mapping[str, Callable[[Controller], object]] = {
    "list": lambda controller: controller.routing_rules(),
    "balancer": lambda controller: controller.balancer_info("both"),
    "test": lambda controller: controller.test_route(pb.TestRouteRequest()),
    "add": lambda controller: controller.add_routing_rule('{"port": 1, "outboundTag": "direct"}'),
    "remove": lambda controller: controller.remove_routing_rule("mine"),
    "override": lambda controller: controller.override_balancer("both", "direct"),
}


def test_on_sing_box(controller: Controller, all_kinds: Mapping[str, Kind]) -> None:
    """It supports none of it."""
    run(controller, [Place(all_kinds["vless-raw"], "home", ground=SING_BOX)])
    for call in CALLS.values():
        with refused(501, "UNIMPLEMENTED"):
            call(controller)


def test_without_a_backend(controller: Controller) -> None:
    controller.stop()
    for call in CALLS.values():
        with refused(500, "UNAVAILABLE", "backend not initialized"):
            call(controller)
