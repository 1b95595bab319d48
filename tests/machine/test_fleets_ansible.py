"""deploy/ansible, run by Ansible: on a server with systemd, and in a chroot, where nothing runs."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scripts.staging import certs
from scripts.staging.core import find_xray
from scripts.staging.sing_box import find_sing_box
from tests.harness.guest import Guest, Layers
from tests.machine.conftest import CLONE, Wheel
from tests.machine.tools import MAKING, Tools, run, tools

_PLAYBOOKS = CLONE / "deploy" / "ansible"
_PACKAGES = ("ansible==12.*", "ansible-lint==26.*")
_INSIDE = "env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8"
# Called like chroot: with the tree, then the command.
_INTO_GUEST = f"""#!/bin/sh
shift
exec nsenter --target=%s --pid --mount --uts --ipc --net --cgroup -- {_INSIDE} "$@"
"""
_INTO_TREE = f"""#!/bin/sh
exec unshare --mount sh -ec '
mount -t proc proc "$0/proc"
mount --bind /dev "$0/dev"
exec chroot "$0" {_INSIDE} "$@"' "$@"
"""
_TASKS = """---
- name: Tell
  ansible.builtin.command: systemctl show --property MainPID node
  changed_when: true
"""

pytestmark = [pytest.mark.machine, pytest.mark.timeout(MAKING)]


@pytest.fixture(scope="module")
def ansible() -> Iterator[Path]:
    with tools() as made:
        yield _of(made)


def _of(made: Tools) -> Path:
    return made.python("ansible", *_PACKAGES)


def _core(executable: Path) -> dict[str, str]:
    """A core as the role expects it: in a directory with its name and version."""
    return {"name": executable.name, "version": executable.parent.name.removeprefix(f"{executable.name}-")}


@dataclass
class Host:
    """A host for Ansible, and the variables of its play."""

    ansible: Path
    directory: Path
    connection: dict[str, Any]
    variables: dict[str, Any] = field(default_factory=dict)

    def play(self, *arguments: str, playbook: str = "site.yml") -> list[str]:
        """Run a play. Returns the tasks with changes; raises `AssertionError` with Ansible's output if one failed."""
        inventory = self.directory / "inventory.json"
        group = {"hosts": {"host": self.connection}, "vars": self.variables}
        inventory.write_text(json.dumps({"txnode": group}))
        program = self.ansible / "ansible-playbook"
        said = run([program, "-i", inventory, _PLAYBOOKS / playbook, *arguments], self.directory, **self._environment())
        assert re.search(r"^host +: .*unreachable=0 +failed=0 ", said, re.MULTILINE), said
        secrets = [self.variables.get("txnode_api_key"), self.variables.get("txnode_certificate_key")]
        assert not [secret for secret in secrets if secret and secret in said]
        parts = re.split(r"^(?:TASK|RUNNING HANDLER) \[txnode : (.*)\] \**$", said, flags=re.MULTILINE)
        return [name for name, text in zip(parts[1::2], parts[2::2], strict=True) if "\nchanged: [" in text]

    def _environment(self) -> dict[str, str]:
        path = f"{self.ansible}:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self.directory), "ANSIBLE_NOCOLOR": "1", "ANSIBLE_FORCE_COLOR": "0"}


@pytest.fixture
def host(
    ansible: Path, wheel: Callable[..., Wheel], scratch: Path, request: pytest.FixtureRequest
) -> Callable[[Path, str], Host]:
    """Make a `Host` of a tree and of the command that enters it, with a separate version to install."""
    made = wheel(f"7.0.{abs(hash(request.node.name)) % 1000}")
    directory = scratch / f"{request.node.name}-ansible"
    directory.mkdir()
    variables = {
        "txnode_version": made.version,
        "txnode_sha256": made.digest,
        "txnode_wheel": str(made.file),
        "txnode_environment": {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/srv/wheels"},
        "txnode_cores": [_core(path) for path in (find_xray(), find_sing_box())],
        "txnode_settings": {"RESUME": True, "LOG_BUFFER_SIZE": 5000},
        "txnode_sans": ["node.example.com"],
        "txnode_certificates_to": str(directory / "certificates"),
    }

    def of(root: Path, enter: str) -> Host:
        into = directory / "enter"
        into.write_text(enter)
        into.chmod(0o755)
        connection = {
            "ansible_connection": "community.general.chroot",
            "ansible_host": str(root),
            "ansible_chroot_exe": str(into),
            "ansible_python_interpreter": "/usr/bin/python3",
            "ansible_remote_tmp": "/root/.ansible/tmp",
        }
        return Host(ansible, directory, connection, variables)

    return of


@pytest.fixture
def guest(supplied: Layers, scratch: Path, request: pytest.FixtureRequest) -> Iterator[Guest]:
    """A server without a node."""
    layers = Layers(supplied.all, scratch / request.node.name)
    with layers.mounted() as root, Guest(root) as running:
        yield running


def test_the_linter_has_nothing_to_say(ansible: Path) -> None:
    """The linter accepts the role with its strictest profile."""
    path = f"{ansible}:{os.environ['PATH']}"
    run([ansible / "ansible-lint", "--offline", "--strict", "--profile", "production"], _PLAYBOOKS, PATH=path)


def test_a_server_is_what_the_variables_say(guest: Guest, host: Callable[[Path, str], Host]) -> None:
    """A check run on a new server changes nothing; the first run starts the node, the second changes nothing.

    Then the running node reloads a certificate and keys, and a changed setting restarts it after a drain.
    """
    at = host(guest.root, _INTO_GUEST % guest.pid)
    assert at.play("--check")
    assert not (guest.root / "etc/txnode").exists()
    stale = guest.root / "opt/txnode/cores/xray-0.1"
    stale.mkdir()
    assert "Restart the service" in at.play()
    assert guest.shows("ActiveState") == "active"
    assert not stale.exists()
    assert (at.directory / "certificates" / "host.pem").read_text().startswith("-----BEGIN CERTIFICATE")
    assert at.play() == []
    assert at.play("--check") == []
    _reloaded(guest, at)
    _restarted(guest, at)


def _reloaded(guest: Guest, at: Host) -> None:
    """New keys and certificates are reloaded without a restart, from files of the service's user."""
    pair = certs.make(at.directory, ["node.example.com"])
    running = guest.shows("MainPID")
    at.variables["txnode_certificate"] = pair.certificate.read_text()
    at.variables["txnode_certificate_key"] = pair.key.read_text()
    at.variables["txnode_keys"] = [{"name": "panel", "scope": "all", "key": str(uuid.uuid4())}]
    changed = at.play("--diff")
    assert "Reload the service" in changed
    assert "Restart the service" not in changed
    assert guest.shows("MainPID") == running
    assert at.play() == []
    state = guest.root / "var/lib/private/txnode"
    assert {(state / name).stat().st_uid for name in ("key.pem", "api_keys")} == {state.stat().st_uid}
    served = guest.network("openssl", "s_client", "-connect", "127.0.0.1:62051")
    assert at.variables["txnode_certificate"].strip() in served


def _restarted(guest: Guest, at: Host) -> None:
    """The host is taken out of service, restarted and brought back, with the operator's commands."""
    told = at.directory / "tell.yml"
    told.write_text(_TASKS)
    running = guest.shows("MainPID")
    at.variables["txnode_settings"]["LOG_BUFFER_SIZE"] = 6000
    at.variables |= {"txnode_drain_tasks": str(told), "txnode_return_tasks": str(told), "txnode_api_key": "k" * 20}
    changed = at.play("--diff", playbook="rolling.yml")
    assert [task for task in changed if task in ("Tell", "Restart the service")] == [
        "Tell",
        "Restart the service",
        "Tell",
    ]
    assert guest.shows("MainPID") != running
    assert at.play(playbook="rolling.yml") == []


def test_another_version_takes_over(
    guest: Guest, host: Callable[[Path, str], Host], wheel: Callable[..., Wheel]
) -> None:
    """The node hands over to another version without a restart. One that does not start leaves all as it was."""
    at = host(guest.root, _INTO_GUEST % guest.pid)
    at.play()
    running, current = guest.shows("MainPID"), guest.root / "opt/txnode/current"

    def play(made: Wheel) -> list[str]:
        at.variables |= {
            "txnode_version": made.version,
            "txnode_sha256": made.digest,
            "txnode_wheel": str(made.file),
        }
        return at.play(playbook="rolling.yml")

    changed = play(good := wheel("7.1.1"))
    assert "Reload the service" in changed
    assert "Restart the service" not in changed
    serving = current.readlink()
    with pytest.raises(AssertionError, match=r"Version 7\.1\.2 did not take over within 20 seconds"):
        at.variables["txnode_ready_seconds"] = 20
        play(wheel("7.1.2", "raise RuntimeError"))
    assert current.readlink() == serving
    assert play(good) == []
    assert guest.shows("MainPID") == running
    assert guest.shows("StatusText") == f"txnode {good.version} serves"


def test_a_setting_that_the_node_does_not_have(guest: Guest, host: Callable[[Path, str], Host]) -> None:
    """An unknown setting is refused by name before any change."""
    at = host(guest.root, _INTO_GUEST % guest.pid)
    at.variables["txnode_settings"]["LOG_BUFER_SIZE"] = 1
    with pytest.raises(AssertionError, match="LOG_BUFER_SIZE"):
        at.play()
    assert not (guest.root / "opt/txnode/versions").exists()


def test_a_chroot(
    supplied: Layers, scratch: Path, host: Callable[[Path, str], Host], request: pytest.FixtureRequest
) -> None:
    """As for an image: everything is written and enabled, nothing is started; a second run changes nothing."""
    with Layers(supplied.all, scratch / request.node.name).mounted() as root:
        at = host(root, _INTO_TREE)
        assert "Write the unit" in at.play()
        assert (root / "etc/systemd/system/multi-user.target.wants/node.service").is_symlink()
        assert at.play() == []
        assert at.play("--check") == []
