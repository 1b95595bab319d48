"""The panel's button *update node* under the recommended unit: a service of root installs what a key has signed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from node.updates.program import NO_SERVICE, REQUEST
from scripts.staging.wait import until
from tests.harness.signing import Signer
from tests.machine.conftest import Server, Wheel

NODECTL = "/opt/txnode/current/bin/nodectl"
SAID = "/run/txnode-update/said"
# Presses the button as a panel, with the node's certificate and a key. Prints the status, and the text that it shows.
_PRESS = """
import json, ssl, sys, urllib.error, urllib.request
request = urllib.request.Request("https://127.0.0.1:62051/node/update", b"", {"x-api-key": sys.argv[2]})
try:
    reply = urllib.request.urlopen(request, context=ssl.create_default_context(cafile=sys.argv[1]))
except urllib.error.HTTPError as error:
    reply = error
print(json.dumps([reply.status, json.load(reply)["detail"]]))
"""

pytestmark = pytest.mark.timeout(1800)


@dataclass(frozen=True)
class Releases:
    """The server of releases: a directory of the machine."""

    directory: Path
    signer: Signer

    def offer(self, wheel: Wheel, signer: Signer | None = None) -> None:
        """Offer a version as the newest."""
        shutil.copy(wheel.file, self.directory)
        signature = (signer or self.signer).sign(wheel.file.read_bytes())
        (self.directory / f"{wheel.file.name}.sig").write_bytes(signature)
        (self.directory / "latest").write_text(f"{wheel.version}\n")


@pytest.fixture
def releases(server: Server, tmp_path: Path) -> Releases:
    """With the service that installs from there; the node may ask it."""
    root = server.guest.root
    (root / "srv" / "releases").mkdir()
    # The guest has no network, and no names.
    (root / "opt" / "txnode" / "wheels").symlink_to("/srv/wheels")
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
    found = Releases(root / "srv" / "releases", Signer(tmp_path / "signer"))
    assert "UPDATES=on" in server.install("--updates", "/srv/releases", "--key", found.signer.public)
    allow(server)
    return found


def allow(server: Server) -> None:
    with (server.guest.root / "etc/txnode/node.env").open("a") as settings:
        settings.write("UPDATES=on\n")
    server.guest.run("systemctl", "restart", "node")


def press(server: Server) -> tuple[int, str]:
    """The status, and what the panel shows."""
    said = server.guest.network(sys.executable, "-c", _PRESS, server.certificate, server.key, timeout=400)
    status, detail = json.loads(said)
    return status, detail


def last_job(server: Server) -> dict[str, str]:
    said = server.guest.run("env", "--chdir=/root", NODECTL, "jobs", "--json")
    found: dict[str, str] = json.loads(said)[0]["result"][-1]
    return found


def test_the_button(server: Server, releases: Releases, wheel: Callable[..., Wheel]) -> None:
    """The node hands over to the newest version, and no user is disconnected; a version that fails changes nothing."""
    server.visit("start")
    guest, broken = server.guest, wheel("9.2.0", "raise SystemExit('broken on purpose')")
    keeper, linked = guest.shows("MainPID"), guest.root / "opt/txnode/current"
    before = linked.readlink()
    with server.staying() as users:
        releases.offer(wheel("9.1.0"))
        status, detail = press(server)
        assert status == 200 and "the next process of the node takes over" in detail
        until(lambda: last_job(server)["state"] != "running", 120, "the job has ended")
        job = last_job(server)
        assert (job["state"], job["after"], job["text"]) == ("done", "9.1.0", "service runs and serves")
        assert server.visit("use")["version"] == "9.1.0"
        installed = linked.readlink()
        # The version before stays on disk.
        guest.run("test", "-x", f"{before}/bin/twistd")
        assert press(server) == (200, "service runs this version already: nothing to do")
        releases.offer(broken)
        status, detail = press(server)
        assert status == 500 and "broken on purpose" in detail and "no connection ended" in detail
        assert server.visit("use")["version"] == "9.1.0" and linked.readlink() == installed
    assert not users["dropped"] and users["echoed"]
    assert (guest.shows("MainPID"), guest.shows("NRestarts")) == (keeper, "0")


def test_what_the_service_refuses(server: Server, releases: Releases, wheel: Callable[..., Wheel]) -> None:
    """Wheels that the key has not signed, old releases, and whatever a node that was broken into writes."""
    before, guest = server.visit("start")["version"], server.guest
    releases.offer(wheel("9.1.0"), Signer(releases.signer.file.with_name("other")))
    status, detail = press(server)
    assert status == 500 and "is not signed by a key of --key: not installed" in detail
    releases.offer(wheel("0.0.1"))
    status, detail = press(server)
    assert status == 500 and "0.0.1 is not newer than" in detail
    # As the node's user, who owns the directory, but cannot go there by its path.
    uid = guest.run("stat", "--format=%u", "/var/lib/private/txnode").strip()
    user = f"cd /var/lib/private/txnode && exec setpriv --reuid={uid} --clear-groups"
    for made in ("ln -s /etc/shadow", "mkfifo", "cp /usr/bin/dpkg"):
        guest.run("rm", "-f", SAID)
        guest.run("sh", "-c", f"{user} {made} {REQUEST}")
        until(lambda: "asks for no version" in guest.run("cat", SAID, check=False), 30, "the service has refused it")
        until(lambda: guest.shows("ActiveState", "txnode-update.service") == "failed", 30, "it has ended")
        assert "root" not in guest.run("cat", SAID)
        assert guest.run("find", "/var/lib/private/txnode", "-name", REQUEST) == ""
    assert guest.shows("ActiveState", "txnode-update.path") == "active"
    assert guest.run("stat", "--format=%U %a", "/etc/txnode/updates.env").strip() == "root 600"
    assert server.visit("use")["version"] == before
    # It goes on after all that.
    releases.offer(wheel("9.1.0"))
    assert press(server)[0] == 200
    until(lambda: last_job(server)["state"] == "done", 120, "the job has ended")
    assert server.visit("use")["version"] == "9.1.0"


def test_without_the_service(server: Server, releases: Releases) -> None:
    """After --updates off, as without it ever, the panel shows what to do."""
    server.install("--updates", "off")
    assert press(server) == (500, NO_SERVICE)
    assert server.guest.run("find", "/etc", "/run", "-name", "*txnode-update*", "-o", "-name", "updates.env") == ""
