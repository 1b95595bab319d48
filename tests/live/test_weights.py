"""With WEIGHTS a quota ends where the weighted bytes do; both counts are shown, and outlive the node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from protos.service_pb2 import ListedUser, ListUsersRequest, ListUsersResponse, UserStat
from scripts.staging import transfer
from scripts.staging.controller import Controller, traffic
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, control, gets_in, run, settled, stays_out
from tests.harness.figures import value
from tests.harness.grounds import Ground
from tests.harness.nodectl import Nodectl
from tests.harness.rest import Rest
from tests.harness.upgraded import RealNode, upgrade
from tests.live.test_limits import MIB, OVER, SOON, backend, greedy, limited, quota, say, told

ANNA, BERT = TestUser.new("anna@test"), TestUser.new("bert@test")
DOUBLE, HALF = "00:00-24:00: 2", "00:00-24:00: 0.5"


def crash(node: NodeProcess) -> None:
    """The keeper starts the next node."""
    killed = node.kill_node()
    until(lambda: node.node_pid != killed, SOON, "the next node")


def kill(node: NodeProcess) -> None:
    node.kill()
    node.start()


def reweigh(node: NodeProcess) -> None:
    """Restart the node with other weights."""
    node.stop()
    node.environment["WEIGHTS"] = HALF
    node.start()


ENDS = crash, upgrade, kill, reweigh


def both(controller: Controller, person: TestUser) -> tuple[int, int]:
    """The bytes in GetLimits, as counted and as they weigh."""
    row = told(controller, person)
    return row.used_up + row.used_down, row.weighted_up + row.weighted_down


def listed(controller: Controller) -> Mapping[str, ListedUser]:
    rows = controller.call("ListUsers", ListUsersResponse, ListUsersRequest()).users
    return {row.name: row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["rest", "grpc"])
@pytest.mark.each_once("transport", "ground")
def test_a_quota_by_weight(
    *, ground: Ground, transport: str, tmp_path: Path, all_kinds: dict[str, Kind], cover: CoverServer, echo: EchoServer
) -> None:
    """At twice the weight a quota ends at half of its bytes; after a kill, a restart and other weights all is kept."""
    with (
        RealNode(tmp_path, WEIGHTS=DOUBLE, METRICS_USERS="on") as node,
        backend(
            *(node, ground, all_kinds["vless-raw"], cover, transport),
            lambda place: limited(ANNA, quota(64 * MIB), place),
            lambda place: limited(BERT, quota(1024 * MIB), place),
        ) as (controller, place),
    ):
        with connection(place, ANNA, echo) as link:
            greedy(link)
        until(lambda: told(controller, ANNA).off_for == ["quota"], SOON, "the user is off")
        used, weighted = both(controller, ANNA)
        assert 32 * MIB <= used <= 32 * MIB + OVER and weighted == 2 * used
        assert told(controller, ANNA).left == 0 and stays_out(place, ANNA, echo)
        with connection(place, BERT, echo) as link:
            transfer.download(link, 3 * MIB)
        until(lambda: both(controller, BERT)[0] >= 3 * MIB, SOON, "it is counted")
        shown(controller, node, tmp_path, transport)

        # The node replies after all counts are on disk.
        say(controller, BERT, quota(1024 * MIB))
        before = {person: both(controller, person) for person in (ANNA, BERT)}
        for end in ENDS:
            end(node)
            until(lambda: controller.info().running, 20, "the backend is back")
            assert {person: both(controller, person) for person in (ANNA, BERT)} == before
        assert stays_out(place, ANNA, echo) and gets_in(place, BERT, echo)
        used, weighted = both(controller, BERT)
        with connection(place, BERT, echo) as link:
            transfer.download(link, 2 * MIB)
        until(lambda: both(controller, BERT)[0] >= used + 2 * MIB, SOON, "it is counted")
        row = told(controller, BERT)
        assert row.left == 1024 * MIB - (row.weighted_up + row.weighted_down)
        now = both(controller, BERT)
        assert weighted + MIB <= now[1] <= weighted + (now[0] - before[BERT][0]) // 2 + 1


def shown(controller: Controller, node: NodeProcess, directory: Path, transport: str) -> None:
    """Both counts of a user are in ListUsers, the metrics and nodectl; other counts are not weighted."""
    # First what reads all counters.
    counted = traffic(controller.stats(UserStat, BERT.email))[BERT.email]
    state, row = told(controller, BERT), listed(controller)[BERT.email]
    for name in ("used_up", "used_down", "weighted_up", "weighted_down"):
        assert getattr(row, name) == getattr(state, name) > 0
    assert (counted["uplink"], counted["downlink"]) == (state.used_up, state.used_down)
    page = Rest(node).call("GET", "/metrics").text
    for count, down in (("raw", state.used_down), ("weighted", state.weighted_down)):
        assert value(page, "txnode_user_quota_bytes", user=BERT.email, direction="downlink", count=count) == down
    ctl = Nodectl(directory / "nodectl")
    ctl.add("one", node, transport)
    for command, heads, cells in (
        ("limits", ["used", "raw", "of"], "6.0 MiB 3.0 MiB 1.0 GiB"),
        ("list", ["weighted", "raw"], "6.0 MiB 3.0 MiB"),
    ):
        head, row_of_bert = ctl("--node", "one", "users", command, BERT.email).rows
        assert " ".join(heads) in " ".join(head) and cells in " ".join(row_of_bert)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["rest", "grpc"])
@pytest.mark.each_once("transport", "ground")
def test_weights_of_inbounds(
    *, ground: Ground, transport: str, tmp_path: Path, all_kinds: dict[str, Kind], cover: CoverServer, echo: EchoServer
) -> None:
    """A byte weighs what its inbound does, also near the quota; an inbound that is free bars no user."""
    free, dear = (Place(all_kinds["vless-raw"], tag, ground=ground) for tag in ("free", "dear"))
    words = {"WEIGHTS": "free: 0; dear: 2; missing 00:00-06:00: 3", "USER_INBOUNDS": "on"}
    with NodeProcess(tmp_path, **words) as node, control(node, transport) as controller, settled([free, dear], cover):
        run(controller, [free, dear], [limited(ANNA, quota(64 * MIB), free, dear)])
        assert any("no inbound 'missing'" in warning for warning in controller.info().warnings)
        with connection(free, ANNA, echo) as link:
            transfer.download(link, 96 * MIB)
        until(lambda: both(controller, ANNA)[0] >= 96 * MIB, SOON, "it is counted")
        assert both(controller, ANNA)[1] == 0 and not told(controller, ANNA).off_for
        before = both(controller, ANNA)[0]
        with connection(dear, ANNA, echo) as link:
            greedy(link)
        until(lambda: told(controller, ANNA).off_for == ["quota"], SOON, "the user is off")
        used, weighted = both(controller, ANNA)
        assert 32 * MIB <= used - before <= 32 * MIB + OVER and weighted == 2 * (used - before)
        assert stays_out(free, ANNA, echo) and stays_out(dear, ANNA, echo)
