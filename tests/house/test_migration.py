"""docs/migrate.md: its commands, run on a directory in place of a machine."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

from node.command_line import SETTINGS
from scripts.staging import certs
from scripts.staging.controller import RpcController
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from tests.live.test_startup import Address

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrate.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
# Calls of the machine's programs are recorded, and have no effect.
TOLD = ("pg-node", "systemctl", "docker")
KEY = str(uuid.uuid4())


class Machine:
    """A directory in place of `/`, with a PasarGuard node as installed by its installer."""

    def __init__(self, directory: Path) -> None:
        self.root = directory
        self.port = free_port()
        self.calls = directory / "calls"
        for name in ("opt/pg-node", "var/lib/pg-node/certs", "etc/systemd/system", "bin"):
            (directory / name).mkdir(parents=True)
        for name in TOLD:
            (directory / "bin" / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{self.calls}\n')
            (directory / "bin" / name).chmod(0o755)
        pair = certs.make(directory, ["localhost"])
        pair.certificate.rename(directory / "var/lib/pg-node/certs/ssl_cert.pem")
        pair.key.rename(directory / "var/lib/pg-node/certs/ssl_key.pem")
        (directory / "opt/pg-node/.env").write_text(
            f'SERVICE_PORT= {self.port}\nNODE_HOST = "127.0.0.1"\n\n# XRAY_ASSETS_PATH = /usr/local/share/xray\n'
            "XRAY_EXECUTABLE_PATH = /var/lib/pg-node/xray-core/xray\n"
            "SSL_CERT_FILE= /var/lib/pg-node/certs/ssl_cert.pem\n"
            "SSL_KEY_FILE= /var/lib/pg-node/certs/ssl_key.pem\n"
            f'API_KEY= {KEY}  # of the panel\nSERVICE_PROTOCOL= "grpc"\n'
            "# DEBUG = false\nGENERATED_CONFIG_PATH = /var/lib/pg-node/generated\n"
        )

    def run(self, line: str) -> None:
        """A command of the page, with the directories of this machine."""
        here = re.sub(r"(?<=[ <>])/(?=opt/|etc/|var/)", f"{self.root}/", line)
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        subprocess.run(["sh", "-euc", here], cwd=ROOT, env={"PATH": path}, check=True, timeout=20)

    def settings(self) -> Mapping[str, str]:
        """The file of settings as systemd reads it: systemd.exec(5), EnvironmentFile."""
        lines = (self.root / "etc/txnode/node.env").read_text().splitlines()
        pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
        return {name: value.strip().strip('"') for name, value in pairs}


def test_every_way_takes_five_commands_and_one_back() -> None:
    """From a PasarGuard node and from the others, and back from each; the first two are those of the install page."""
    there, back, others_there, others_back = BLOCKS
    install = (ROOT / "docs" / "install.md").read_text()
    for block in (there, others_there):
        assert len(block.splitlines()) == 5
        for command in re.split(r" && |\n", "\n".join(block.splitlines()[:2])):
            assert command.split(" >")[0] in install
    for block in (back, others_back):
        assert block.splitlines()[0] == "systemctl disable --now node"
        assert len(block.splitlines()) == 2


def test_the_settings_of_other_nodes() -> None:
    """Those that mean the same, and those to set instead, are settings here; the ignored ones are not."""
    names = {setting.name for setting in SETTINGS}
    same, _, others = PAGE.partition("\n## Settings\n")[2].partition("logs nothing about them:")
    rows = [line.split("|") for line in others.splitlines() if line.startswith("| ") and "`" in line]
    theirs, here = (re.findall(r"`(\w+)`", " ".join(row[place] for row in rows)) for place in (2, 3))
    assert len(theirs) == len({*theirs}) > 30 and not names & {*theirs}
    assert {*re.findall(r"`(\w+)`", same.partition(". The node reads")[0]), *here} <= names


@pytest.mark.core
def test_from_a_pasarguard_node(tmp_path: Path) -> None:
    """This node takes over its port, key, protocol and certificate, by which the panel knows it; then the unit."""
    machine = Machine(tmp_path)
    _, _, settings, pair, service = BLOCKS[0].splitlines()
    for line in (settings, pair, service):
        machine.run(line)
    state = tmp_path / "var/lib/txnode"
    files = (tmp_path / "etc/txnode/node.env", state / "certificate.pem", state / "key.pem")
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert (tmp_path / "etc/systemd/system/node.service").read_text() == (ROOT / "deploy/node.service").read_text()
    assert machine.calls.read_text().splitlines() == [
        *("pg-node down", "systemctl daemon-reload", "systemctl enable --now node"),
    ]
    given = {**machine.settings(), "STATE_DIR": str(state)}
    assert not {name for name in given if name.startswith(("SSL_", "XRAY_"))}
    absent = dict.fromkeys(("REST_PORT", "GRPC_PORT", "SSL_CERT_FILE", "SSL_KEY_FILE"), "")
    (tmp_path / "node").mkdir()
    with NodeProcess(tmp_path / "node", **absent, **given):
        pem = (tmp_path / "var/lib/pg-node/certs/ssl_cert.pem").read_text()
        controller = RpcController(Address("localhost", machine.port, machine.port, pem, KEY), dialect="x-api-key")
        assert controller.info().version
        controller.close()


def test_the_settings_of_the_others(tmp_path: Path) -> None:
    """The third line writes a new key that only root can read."""
    machine = Machine(tmp_path)
    machine.run(BLOCKS[2].splitlines()[2])
    assert uuid.UUID(machine.settings()["API_KEY"]).int
    assert stat.S_IMODE((tmp_path / "etc/txnode/node.env").stat().st_mode) == 0o600


@pytest.mark.parametrize("block", [0, 2])
def test_settings_that_are_there_stay(tmp_path: Path, block: int) -> None:
    """A second run keeps the key that a panel knows, and lines that an operator has added."""
    machine, line = Machine(tmp_path), BLOCKS[block].splitlines()[2]
    machine.run(line)
    file = tmp_path / "etc/txnode/node.env"
    file.write_text(file.read_text() + "CORE_PATHS=/etc/letsencrypt\n")
    before = file.read_text()
    with pytest.raises(subprocess.CalledProcessError):
        machine.run(line)
    assert file.read_text() == before


def test_without_the_settings_of_the_other_node(tmp_path: Path) -> None:
    """It writes nothing that would prevent a later run."""
    machine = Machine(tmp_path)
    (tmp_path / "opt/pg-node/.env").unlink()
    with pytest.raises(subprocess.CalledProcessError):
        machine.run(BLOCKS[0].splitlines()[2])
    assert not (tmp_path / "etc/txnode/node.env").exists()
