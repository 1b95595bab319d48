"""Metrics and health of a running node: who may read them, their content, and that counters never decrease."""

from __future__ import annotations

import base64
import http.client
import os
import signal
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.service_pb2 import Inbounds
from scripts.staging import socks, transfer
from scripts.staging.controller import RestController, RpcController
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.process import freeze
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, member, run, way
from tests.harness.figures import series, value
from tests.harness.grounds import Ground
from tests.harness.rest import Response, Rest

SCOPED = {scope: str(uuid.uuid4()) for scope in ("metrics", "read", "all")}


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node with a key of each scope, a metrics port and series by user."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    keys = state / "api_keys"
    keys.write_text("".join(f"{scope} {scope} {key}\n" for scope, key in SCOPED.items()))
    keys.chmod(0o600)
    more = {"METRICS_PORT": str(free_port()), "METRICS_USERS": "on"}
    with NodeProcess(tmp_path, **more) as node:
        yield node


def page(node: NodeProcess, path: str = "/metrics", verb: str = "GET", **headers: str) -> Response:
    """GET a page; without credentials unless the headers have some."""
    return Rest(node, key="").call(verb, path, headers=headers)


def figures(node: NodeProcess) -> str:
    found = page(node, Authorization=f"Bearer {node.key}")
    assert found.status == 200
    return found.text


def basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"prometheus:{key}".encode()).decode()


@pytest.mark.parametrize("scope", SCOPED)
def test_who_may_have_figures(keyed: NodeProcess, scope: str) -> None:
    """A key of any scope may, as Bearer, as x-api-key or as the password of basic authentication."""
    key = SCOPED[scope]
    assert page(keyed, Authorization=f"Bearer {key}").status == 200
    assert page(keyed, Authorization=basic(key)).status == 200
    assert page(keyed, **{"x-api-key": key}).status == 200


def test_who_may_not(keyed: NodeProcess) -> None:
    """Missing and wrong keys are refused, also from this machine; basic authentication is only for these pages."""
    for refusal in (
        page(keyed),
        page(keyed, Authorization="Bearer wrong-wrong-wrong"),
        page(keyed, Authorization=basic("wrong-wrong-wrong")),
        page(keyed, Authorization="Basic %%%"),
        page(keyed, "/info", Authorization=basic(SCOPED["all"])),
        page(keyed, "/metrics", "POST", Authorization=basic(SCOPED["all"])),
        page(keyed, "/readyz", Authorization="Bearer wrong-wrong-wrong"),
    ):
        assert refusal.status == 401
    assert page(keyed, "/info", Authorization=f"Bearer {SCOPED['metrics']}").status == 403
    told = figures(keyed)
    assert value(told, "txnode_key_refusals_total", reason="missing") == 1
    assert value(told, "txnode_key_refusals_total", reason="wrong") == 6
    assert value(told, "txnode_key_refusals_total", reason="forbidden") == 1


def test_both_forms(keyed: NodeProcess) -> None:
    """Text, and OpenMetrics on request, with the same series; HEAD has no body."""
    key = f"Bearer {keyed.key}"
    text = page(keyed, Authorization=key)
    assert text.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    accept = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1"
    other = page(keyed, Authorization=key, Accept=accept)
    assert other.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert other.text.endswith("# EOF\n")
    assert {name for name, _ in series(other.text)} == {name for name, _ in series(text.text)}
    head = page(keyed, "/metrics", "HEAD", Authorization=key)
    assert (head.status, head.body) == (200, b"")


def test_the_port_of_its_own(keyed: NodeProcess) -> None:
    """It listens on loopback; processes of the node's user, such as cores for proxied users, need a key there."""
    port = int(keyed.environment["METRICS_PORT"])

    def ask(**headers: str) -> int:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        link.request("GET", "/metrics", headers=headers)
        status = link.getresponse().status
        link.close()
        return status

    assert ask() == 401
    assert ask(Authorization=f"Bearer {SCOPED['metrics']}") == 200
    with pytest.raises(OSError):
        http.client.HTTPConnection("127.0.0.2", port, timeout=5).request("GET", "/metrics")


@pytest.fixture
def home(all_kinds: Mapping[str, Kind]) -> Place:
    return Place(all_kinds["vless-raw"], "in")


def moved(place: Place, ann: TestUser, echo: EchoServer) -> None:
    with connection(place, ann, echo) as link:
        transfer.download(link, 50_000)


def inbound_bytes(node: NodeProcess) -> float:
    return sum(number for (name, _), number in series(figures(node)).items() if name == "txnode_inbound_bytes_total")


@pytest.mark.slow
def test_counters_never_go_back(keyed: NodeProcess, home: Place, echo: EchoServer) -> None:
    """Neither a controller's reset nor the death of the core or of the node decreases them."""
    ann = TestUser.new("ann@test")
    controller = RestController(keyed)
    run(controller, [home], [member(ann, home)])
    told = [0.0]

    def grown() -> None:
        moved(home, ann, echo)
        until(lambda: inbound_bytes(keyed) >= told[-1] + 50_000, what="they are counted")
        told.append(inbound_bytes(keyed))

    def kept() -> None:
        told.append(inbound_bytes(keyed))
        assert told == sorted(told)

    grown()
    rows = controller.stats(Inbounds, reset=True).stats
    assert sum(row.value for row in rows) <= inbound_bytes(keyed)
    kept()
    grown()
    before = keyed.newest_core()
    os.kill(before, signal.SIGKILL)
    kept()
    until(lambda: keyed.core_pids() not in ([], [before]), what="the core is back")
    until(lambda: controller.info().running, what="it serves")
    kept()
    # The node caches a page for a second.
    until(lambda: value(figures(keyed), "txnode_core_restarts_total", reason="signal") == 1, what="it is told why")
    grown()
    keyed.kill()
    keyed.start()
    assert ready(keyed).status == 503 or controller.info().running
    kept()
    until(lambda: controller.info().running, what="it is resumed")
    grown()
    assert value(figures(keyed), "txnode_user_bytes_total", user="ann@test", direction="downlink") >= 150_000


def test_metrics_of_a_core(keyed: NodeProcess, home: Place, echo: EchoServer) -> None:
    """Its version, users, bytes and memory."""
    ann = TestUser.new("ann@test")
    controller = RestController(keyed)
    info = run(controller, [home], [member(ann, home), member(TestUser("", ann.uuid, ann.password), home)])
    moved(home, ann, echo)
    down = "txnode_outbound_bytes_total", (("direction", "downlink"), ("outbound", "direct"))
    until(lambda: series(figures(keyed))[down], what="the bytes are counted")
    told = figures(keyed)
    assert value(told, "txnode_core_info", core="xray", version=info.core_version) == 1
    assert value(told, "txnode_users_wanted") == value(told, "txnode_users_confirmed") == 1
    assert value(told, "txnode_users_refused_total") == 1
    assert value(told, "txnode_inbound_users", inbound="in", state="confirmed") == 1
    assert value(told, "txnode_core_resident_memory_bytes", generation="current") > 1e7
    assert value(told, "txnode_generations", state="current") == 1
    assert value(told, "txnode_call_duration_seconds_count", method="Start", status="2xx") == 1
    assert value(told, "txnode_state_writable") == value(told, "txnode_core_running") == 1
    assert value(told, "txnode_inbound_bytes_total", direction="downlink", inbound="in") >= 50_000


@pytest.mark.slow
def test_a_core_that_hangs_keeps_nobody_waiting(keyed: NodeProcess, home: Place, echo: EchoServer) -> None:
    """The last known figures are served with their age, fast enough for any scrape."""
    ann = TestUser.new("ann@test")
    run(RestController(keyed), [home], [member(ann, home)])
    moved(home, ann, echo)
    before = inbound_bytes(keyed)
    core = keyed.newest_core()
    freeze(core)
    try:
        until(lambda: value(figures(keyed), "txnode_counters_age_seconds") > 1, what="the age is told")
        assert inbound_bytes(keyed) >= before
    finally:
        os.kill(core, signal.SIGCONT)


def ready(node: NodeProcess, key: str = "", accept: str = "") -> Response:
    return page(node, "/readyz", **({"Authorization": f"Bearer {key}"} if key else {}), Accept=accept)


def test_readiness_follows_the_core(keyed: NodeProcess, home: Place) -> None:
    """Without a backend the node is ready; with a repeatedly killed core it is not; /livez, gRPC and metrics agree."""
    until(lambda: ready(keyed).status == 200, what="it was looked at")
    assert ready(keyed).text == "ok\n"
    controller = RpcController(keyed)
    run(controller, [home])
    health = health_pb2_grpc.HealthStub(controller.rpc.channel)
    key = [("authorization", f"Bearer {SCOPED['metrics']}")]

    def check(name: str = "") -> Any:
        return health.Check(health_pb2.HealthCheckRequest(service=name), metadata=key, timeout=10).status

    states = health_pb2.HealthCheckResponse
    until(lambda: check() == states.SERVING and ready(keyed).status == 200, what="gRPC says so")
    watched = health.Watch(health_pb2.HealthCheckRequest(service="readyz"), metadata=key, timeout=60)
    assert next(watched).status == states.SERVING

    def unwell() -> bool:
        for pid in keyed.core_pids():
            os.kill(pid, signal.SIGKILL)
        return ready(keyed).status == 503

    until(unwell, 20, "it is not ready")
    stranger, known = ready(keyed), ready(keyed, SCOPED["metrics"], "application/json")
    assert next(watched).status == states.NOT_SERVING
    assert stranger.text in ("not ok\n", "ok\n")
    assert page(keyed, "/livez").text == "ok\n"
    assert check("livez") == states.SERVING
    assert known.headers["Content-Type"] == "application/json"
    assert set(known.json()["checks"]) == {"state", "core", "inbounds"}
    until(lambda: ready(keyed).status == 200, 60, "the core is back")
    assert next(watched).status == states.SERVING
    assert page(keyed, "/readyz", "HEAD").status == 200
    controller.close()


def test_a_stranger_on_this_machine_learns_a_word_alone(keyed: NodeProcess) -> None:
    """No name of a check, no reason; nor anything more by sending a body."""
    assert ready(keyed, accept="application/json").json().keys() == {"ok"}
    refusal = Rest(keyed, key="").call("GET", "/readyz", b"some body")
    assert refusal.status == 401


def test_a_proxied_user_gets_no_figures(
    keyed: NodeProcess, all_kinds: Mapping[str, Kind], ground: Ground, echo: EchoServer
) -> None:
    """A proxied user reaches the metrics port through the core, but the node recognizes the core and demands a key."""
    place, ann = Place(all_kinds["vless-raw"], "in", ground=ground), TestUser.new("ann@test")
    run(RestController(keyed), [place], [member(ann, place)])
    with way(place, ann) as port:
        transfer.connect(port, echo).close()
        with socks.connect(port, "127.0.0.1", int(keyed.environment["METRICS_PORT"])) as link:
            link.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert link.recv(100).startswith(b"HTTP/1.1 401 ")
