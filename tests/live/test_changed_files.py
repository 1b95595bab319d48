"""An executable or geo file that changes on disk causes a warning until a core starts with it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from drivers.process.executable import Files
from drivers.xray.executable import private_geoip
from scripts.staging import transfer
from scripts.staging.backend import backend
from scripts.staging.controller import Controller, RpcController
from scripts.staging.core import find_xray
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, gets_in, member, run
from tests.harness.warned import warned

ANNA = TestUser.new("anna@test")


def replace(path: Path, content: bytes) -> None:
    """Replace a file like an installer does: a new file is renamed over the old one."""
    fresh = path.with_name("fresh")
    fresh.write_bytes(content)
    fresh.chmod(0o755)
    fresh.rename(path)


def test_what_counts_as_changed(tmp_path: Path) -> None:
    """A file that was written, replaced by an equal one or removed; not one that was only read, nor a new one."""
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
    """A confined core can reread a file that was rewritten, but not one that was replaced by a rename."""
    written, replaced = tmp_path / "hosts", tmp_path / "resolv.conf"
    for path in (written, replaced):
        path.write_bytes(b"old")
    files = Files([], [written, replaced])
    written.write_bytes(b"newer")
    assert not files.warnings
    replace(replaced, b"old")
    [warning] = files.warnings
    assert str(replaced) in warning and "resolve host names" in warning


class Machine:
    """A node with its own executable and geo file."""

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
    """The files that the node's warnings name."""
    return {warning.partition(" ")[0] for warning in controller.info().warnings if "changed on disk" in warning}


def test_a_file_that_changed_is_a_warning(machine: Machine, all_kinds: Mapping[str, Kind], echo: EchoServer) -> None:
    """`info` warns while the old core runs, and no longer once a core was started with the new file."""
    home = Place(all_kinds["vless-raw"], "home")
    with closing(RpcController(machine.node)) as controller:
        run(controller, [home], [member(ANNA, home)])
        assert told(controller) == set()
        with connection(home, ANNA, echo) as link:
            machine.install()
            until(lambda: told(controller) == {str(machine.executable)}, 1, "the executable is named")
            replace(machine.geoip, machine.geoip.read_bytes())
            both = {str(machine.executable), str(machine.geoip)}
            until(lambda: told(controller) == both, 1, "both files are named")
            again = controller.start(backend([home.inbound], [member(ANNA, home)]))
            assert "changed on disk" in str(again.warnings)
            transfer.echo(link, b"still there")
        controller.stop()
        assert told(controller) == set()
        run(controller, [home], [member(ANNA, home)])
        assert told(controller) == set()


def test_a_start_brings_it_in(tmp_path: Path, all_kinds: Mapping[str, Kind], echo: EchoServer) -> None:
    """If the operator has set so, an equal Start starts a new core, and no connection is dropped."""
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
