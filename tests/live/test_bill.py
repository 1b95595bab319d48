"""The bill of a node with real traffic: what the core counts, beside an interface whose counters the test sets."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from protos import service_pb2 as pb
from protos.service_pb2 import Bill, BilledBytes
from scripts.staging import transfer
from scripts.staging.controller import Controller, ControllerError
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, control, member, settled
from tests.harness.grounds import Ground
from tests.harness.upgraded import upgrade
from tests.live.test_overlap import Changes
from tests.live.test_own_quota import wire

ROOT = Path(__file__).parents[2]
ZONE = "Pacific/Apia"
DOWN, UP = 4 * 1024**2, 1024**2
GB = 10**9
SOON = 20.0


def bill(controller: Controller, since: str = "") -> Bill:
    return controller.call("GetBill", Bill, pb.BillRequest(since=since))


def both(count: BilledBytes) -> int:
    return count.received + count.sent


@pytest.mark.slow
def test_the_bill(
    tmp_path: Path, ground: Ground, all_kinds: dict[str, Kind], cover: CoverServer, echo: EchoServer
) -> None:
    """Users' bytes count once in each day's sums: over another core, a kill, an upgrade and a restart."""
    anna, place = TestUser.new("anna@test"), Place(all_kinds["vless-raw"], "in", ground=ground)
    carried = wire(tmp_path)
    settings = {"NODE_QUOTA_INTERFACE": "wire", "TIMEZONE": ZONE, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    moved = 0

    with (
        NodeProcess(tmp_path / "node", **settings) as node,
        control(node, "grpc") as controller,
        control(node, "rest") as other,
        settled([place], cover),
    ):
        changes = Changes([place])

        def counts() -> Bill:
            """The bill, once it has all bytes that moved so far: once, and some headers of the protocol."""
            until(lambda: both(bill(controller).users) >= moved, SOON, "all is counted")
            found = bill(other)
            for scope in (found.users, found.inbounds, found.outbounds):
                assert both(scope) == pytest.approx(moved, rel=0.02)
            assert found.users.sent > found.users.received and found.outbounds.received > found.outbounds.sent
            return found

        def moves() -> None:
            nonlocal moved
            with connection(place, anna, echo) as link:
                transfer.download(link, DOWN)
                transfer.upload(link, UP)
            moved += DOWN + UP

        changes.start(controller, [member(anna, place)])
        moves()
        carried(2 * moved)
        first = counts()
        assert (first.timezone, list(first.names), list(first.transports)) == (ZONE, ["wire"], ["local"])
        assert first.interfaces == BilledBytes(sent=2 * moved) and not first.warnings
        assert first.core == pytest.approx(2 * moved, rel=0.02)

        changes.next()
        changes.start(controller, [member(anna, place)])
        moves()
        counts()
        killed = node.kill_node()
        until(lambda: node.node_pid != killed and controller.info().running, SOON, "the backend is back")
        moves()
        counts()
        upgrade(node)
        moves()
        counts()
        carried(2 * moved + 3 * GB)
        node.stop()
        node.start()
        until(lambda: controller.info().running, SOON, "the backend is back")
        last = counts()

        # The node is on this machine, and its controllers' bytes are on loopback.
        assert last.interfaces == BilledBytes(sent=2 * moved + 3 * GB) and not both(last.controllers)
        assert last.others == pytest.approx(3 * GB, rel=0.02)
        assert len(last.warnings) == 1 and "other programs use this machine" in last.warnings[0]
        today = datetime.fromtimestamp(last.until, ZoneInfo(ZONE))
        assert bill(other, f"{today:%Y-%m-%d}").users == last.users
        for wrong in ("today", "2999-01-01"):
            with pytest.raises(ControllerError) as refused:
                bill(controller, wrong)
            assert refused.value.status == "INVALID_ARGUMENT"
