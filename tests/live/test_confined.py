"""A node with few privileges, as under systemd or in a container, with and without those for dropping no connection."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from protos.service_pb2 import User
from scripts.staging import transfer
from scripts.staging.controller import RpcController
from scripts.staging.echo import EchoServer
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, gets_in, member, on, run
from tests.harness import confined
from tests.harness.warned import warned
from tests.live.test_overlap import ended, runs

ANNA, BERT = (TestUser.new(f"{name}@test") for name in ("anna", "bert"))
# The line that a core logs at each start.
STARTED = re.compile(r"(Xray [\d.]+|sing-box) started")


@contextmanager
def changing(directory: Path, home: Place, *refused: str) -> Iterator[tuple[NodeProcess, RpcController]]:
    """A confined node with connected users."""
    with NodeProcess(directory, through=confined.argv(refused)) as node, closing(RpcController(node)) as controller:
        run(controller, [home], users(home), log=home.ground.brief)
        yield node, controller


def users(home: Place) -> list[User]:
    return [member(ANNA, home), member(BERT, home)]


def test_without_capabilities(tmp_path: Path, home: Place, echo: EchoServer) -> None:
    """No capability is needed to keep connections at a change, and to cut a removed user's."""
    with changing(tmp_path, home) as (node, controller):
        assert "CapEff:\t0000000000000000" in Path(f"/proc/{node.node_pid}/status").read_text()
        with connection(home, ANNA, echo) as anna, connection(home, BERT, echo) as bert:
            run(controller, [home], users(home), log=home.ground.verbose)
            assert len(runs(node)) == 2
            controller.sync_user(member(BERT))
            until(lambda: ended(bert), what="his connection ends")
            transfer.small_echo(anna, b"still here")
            assert gets_in(home, ANNA, echo)
        assert not warned(controller.info())


# The kernel refuses it in the same way for each core.
@on(lambda ground: ground.live)
def test_no_duplicates(tmp_path: Path, home: Place, echo: EchoServer) -> None:
    """As in a container: the node finds out at its start, and tells it; a change restarts the core, with one line."""
    with changing(tmp_path, home, "pidfd_getfd") as (node, controller):
        [refused] = warned(controller.info())
        assert refused.startswith("the kernel refuses duplicates of a core's sockets (pidfd_open, pidfd_getfd), so ")
        assert len([line for line in node.lines if refused in line]) == 1
        with connection(home, ANNA, echo) as link:
            run(controller, [home], users(home), log=home.ground.verbose)
            until(lambda: ended(link), what="her connection ends")
        assert gets_in(home, ANNA, echo)
        [warning] = [warning for warning in warned(controller.info()) if warning != refused]
        [line] = [line for line in node.lines if "which ends all connections" in line]
        for told in (warning, line):
            assert "may not call pidfd_open and pidfd_getfd" in told
            assert "SYS_PTRACE" in told
        assert len([line for line in controller.tail() if STARTED.search(line)]) == 2
