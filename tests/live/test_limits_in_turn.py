"""Calls about limits take effect in the order of their arrival, also during a Start."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from protos.service_pb2 import Limits
from scripts.staging.controller import RpcController
from scripts.staging.cover import CoverServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, member, run, settled
from tests.harness.grounds import Ground


def said(node: NodeProcess, method: str) -> int:
    """How often the node got such a call."""
    return sum(f"{method} by key" in line for line in node.lines)


def test_set_limits_while_a_start_is_under_way(
    ground: Ground, own_node: NodeProcess, all_kinds: Mapping[str, Kind], cover: CoverServer
) -> None:
    """SetLimits that arrives after a Start takes precedence over the Start's limits."""
    place, person = Place(all_kinds["vless-raw"], "in", ground=ground), TestUser.new("ann@test")
    user = member(person, place)
    with closing(RpcController(own_node)) as controller, closing(RpcController(own_node)) as other:
        with settled([place], cover):
            run(controller, [place], [user])
        user.limits.addresses = 7
        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(run, controller, [place], [user], log=ground.verbose)
            until(lambda: said(own_node, "Start") == 2, 5, "the Start has come")
            other.set_limits({person.email: Limits(addresses=3)})
            started.result()
        (row,) = controller.limits().users
        assert row.limits.addresses == 3
