"""An executable or a geo file that changes on disk is a warning until a core starts from it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from drivers.process.executable import Files
from drivers.xray.geo import private_geoip
from scripts.staging import transfer
from scripts.staging.backend import backend
from scripts.staging.controller import Controller, RpcController
from scripts.staging.core import find_xray
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from tests.conftest import Place, connection, gets_in, member, run
from tests.harness.warned import warned

ANNA = TestUser.new("anna@test")


def replace(path: Path, content: bytes) -> None:
    """As an installer does it: a new file takes the old one's name."""
    fresh = path.with_name("fresh")
    fresh.write_bytes(content)
    fresh.chmod(0o755)
    fresh.rename(path)


def test_what_counts_as_changed(tmp_path: Path) -> None:
    """A file that was written, replaced by an equal one or removed; not one that was merely read or is new."""
    paths = {name: tmp_path / name for name in ("read", "written", "replaced", "removed", "linked")}
    for path in paths.values():
        path.write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to(paths["linked"])
    files = Files([*(path for name, path in paths.items() if name != "linked"), link])
    assert files.changed() == []
    paths["read"].read_bytes()
    paths["written"].write_bytes(b"newer")
    os.utime(paths["linked"], ns=(0, 0))
    replace(paths["replaced"], b"old")
    paths["removed"].unlink()
    (tmp_path / "new").write_bytes(b"new")
    assert {path.name for path in files.changed()} == {"written", "replaced", "removed", "link"}


def test_what_a_confined_core_reads_again(tmp_path: Path) -> None:
    """It may be written; one that takes its name is not known to the kernel as what the core may read."""
    written, replaced = tmp_path / "hosts", tmp_path / "resolv.conf"
    for path in (written, replaced):
        path.write_bytes(b"old")
    files = Files([], [written, replaced])
    written.write_bytes(b"newer")
    assert not files.warnings
    replace(replaced, b"old")
    [warning] = files.warnings
    assert str(replaced) in warning and "no host's name" in warning


class Machine:
    """A node with an executable and a geo file of its own."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.executable, self.geoip = directory / "bin" / "xray", directory / "lists" / "geoip.dat"
        for path in (self.executable, self.geoip):
            path.parent.mkdir()
        self.install()
        self.geoip.write_bytes(private_geoip())
        (directory / "node").mkdir()
        self.node = NodeProcess(
            directory / "node",
            XRAY_EXECUTABLE_PATH=str(self.executable),
            XRAY_ASSETS_PATH=str(self.geoip.parent),
            **settings,
        )

    def install(self) -> None:
        replace(self.executable, find_xray().read_bytes())


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    with made.node:
        yield made


def told(controller: Controller) -> set[str]:
    """The files that the node warns of."""
    return {warning.partition(" ")[0] for warning in controller.info().warnings if "changed on disk" in warning}


def test_a_file_that_changed_is_a_warning(machine: Machine, all_kinds: Mapping[str, Kind], echo: EchoServer) -> None:
    """It is told in info while the core of before goes on, and not any more once one was started from it."""
    home = Place(all_kinds["vless-raw"], "home")
    with closing(RpcController(machine.node)) as controller:
        run(controller, [home], [member(ANNA, home)])
        assert told(controller) == set()
        with connection(home, ANNA, echo) as link:
            machine.install()
            assert told(controller) == {str(machine.executable)}
            replace(machine.geoip, machine.geoip.read_bytes())
            assert told(controller) == {str(machine.executable), str(machine.geoip)}
            again = controller.start(backend([home.inbound], [member(ANNA, home)]))
            assert "changed on disk" in str(again.warnings)
            transfer.echo(link, b"still there")
        controller.stop()
        assert told(controller) == set()
        run(controller, [home], [member(ANNA, home)])
        assert told(controller) == set()


def test_a_start_brings_it_in(tmp_path: Path, all_kinds: Mapping[str, Kind], echo: EchoServer) -> None:
    """Where an operator wishes that, an equal Start does, and nobody is dropped."""
    home = Place(all_kinds["vless-raw"], "home")
    machine = Machine(tmp_path, UPGRADE_ON_START="on")
    with machine.node, closing(RpcController(machine.node)) as controller:
        run(controller, [home], [member(ANNA, home)])
        with connection(home, ANNA, echo) as link:
            assert warned(controller.start(backend([home.inbound], [member(ANNA, home)]))) == []
            machine.install()
            assert warned(controller.start(backend([home.inbound], [member(ANNA, home)]))) == []
            transfer.echo(link, b"still there")
            assert gets_in(home, ANNA, echo)
