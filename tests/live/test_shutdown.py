"""Shutdown of the node: each part ends, whatever happens in the others, and errors are logged."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from node.state.database import Database
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from tests.conftest import Place, control, member, run
from tests.harness.pool import Pool

ANNA = TestUser.new("anna@test")
ROOT = Path(__file__).parents[2]
# Python imports a module of this name first.
SITE = """
import os

def fail(*_):
    raise ValueError("an odd end")

from node.api.calls import Calls
from node.door.rpc import RpcServer
from node.backend.runner import Runner
from node.door.site import Site
from node.machine.systemd import Systemd

parts = {part.__name__: part for part in (Calls, RpcServer, Runner, Site, Systemd)}
part, name = os.environ["ODD"].split(".")
setattr(parts[part], name, fail)
"""


def test_connections_that_are_kept(tmp_path: Path) -> None:
    """A client that calls continuously on one connection gets a reply to each call that the node accepted."""
    with NodeProcess(tmp_path) as node, closing(Pool(node)) as pool:
        assert pool.get("/info") == 200
        with ThreadPoolExecutor() as others:
            caller = others.submit(ask_on, pool)
            node.stop()
            assert caller.exception() is None, caller.exception()


def ask_on(pool: Pool) -> None:
    """Call until the port is closed. Raises any other error of a call."""
    with suppress(ConnectionRefusedError):
        while True:
            assert pool.get("/info") == 200


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["RpcServer.stop", "Calls.close", "Runner.close"])
def test_a_part_that_does_not_end_well(tmp_path: Path, all_kinds: Mapping[str, Kind], odd: str) -> None:
    """The log names it; the store is closed and complete all the same; the process ends normally."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    home = Place(all_kinds["vless-raw"], "home")
    with NodeProcess(tmp_path, PYTHONPATH=f"{tmp_path / 'site'}:{ROOT}", ODD=odd) as node:
        with control(node, "rest") as controller:
            run(controller, [home], [member(ANNA, home)])
        assert node.stop() == -15
        said = "\n".join(node.lines)
        assert "could not stop" in said
        assert "an odd end" in said
        # SQLite removes its second file when it is closed.
        assert not (node.state / "state.db-wal").exists()
        assert not list(node.state.glob("run/*.sock"))
        saved = Database(node.state / "state.db").load()
        assert len(saved.users) == 1
