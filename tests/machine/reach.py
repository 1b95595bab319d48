"""The parts of the tests of deploy/reach: a panel in a process of its own, daemons, and both ends of WireGuard.

`python -m tests.machine.reach` runs in network and mount namespaces of its own: it is the node in the test of
WireGuard, and makes the namespaces of the panel. It prints, as JSON, what the panel has got.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from scripts.staging import certs
from scripts.staging.node import NodeProcess
from scripts.staging.process import tied
from scripts.staging.version import Version
from scripts.staging.wait import until
from tests.harness.upgraded import RealNode, kept, upgrade

ROOT = Path(__file__).parents[2]
FILES = ROOT / "deploy" / "reach"
# The node's name in the files.
NAME = "node1.example.com"
# For each protocol the answered calls, the errors of the others, and the log lines.
Got = dict[str, tuple[int, list[str], list[str]]]


def written(file: str, place: Path, changes: Mapping[str, object]) -> Path:
    """A file of deploy/reach in another place, with values of this test. Raises `AssertionError` for one not in it."""
    text = (FILES / file).read_text()
    for old, new in changes.items():
        assert old in text, f"{file} has no {old}"
        text = text.replace(old, str(new))
    copy = place / file
    copy.write_text(text)
    return copy


def certify(node: NodeProcess, *names: str) -> None:
    """Give the node a certificate for these names, before it starts."""
    node.certificate = certs.make(node.directory, names)
    node.environment["SSL_CERT_FILE"] = str(node.certificate.certificate)
    node.environment["SSL_KEY_FILE"] = str(node.certificate.key)


class Panel:
    """Calls the node in the `with` block; `got` is what it has got, afterwards."""

    def __init__(self, node: NodeProcess, host: str, port: int, name: str = "", through: Sequence[str] = ()) -> None:
        target = {"host": host, "port": port, "key": node.key, "trust": node.pem, "certificate_name": name}
        command = [*through, sys.executable, "-m", "tests.machine.panel", json.dumps(target)]
        self.got: Got = {}
        self._process = tied(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def __enter__(self) -> Panel:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the panel does not reach the node"
        return self

    def __exit__(self, *_: object) -> None:
        output, _ = self._process.communicate(timeout=60)
        self.got = json.loads(output.splitlines()[-1]) if output else {}


@contextmanager
def daemon(*command: str | Path, through: Sequence[str] = ()) -> Iterator[subprocess.Popen[Any]]:
    """A daemon that runs inside the block."""
    process = tied([*through, *map(str, command)])
    try:
        yield process
        assert process.poll() is None, f"{command} has ended"
    finally:
        process.kill()
        process.wait()


def hand_over(node: NodeProcess, version: Version, number: str = "9.0.0") -> None:
    """Upgrade the node in place."""
    version.name(number)
    upgrade(node, f"txnode {number} is ready")


def wireguard() -> dict[str, Any]:
    """Run node and panel, each in a namespace, with wg-quick's two files, over a pair of interfaces."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        there = stack.enter_context(daemon("unshare", "--net", "--mount", "sleep", "infinity"))
        here = Path("/proc/self/ns/net").readlink()
        until(lambda: Path(f"/proc/{there.pid}/ns/net").readlink() != here, what="the panel has a namespace")
        panel = ("nsenter", f"--target={there.pid}", "--net", "--mount", f"--wd={ROOT}")
        # wireguard-go, which wg-quick runs where the kernel has no WireGuard, has its sockets there.
        for inside in ((), panel):
            _run(*inside, "mount", "-t", "tmpfs", "tmpfs", "/run")
            _run(*inside, "ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "out0", "type", "veth", "peer", "name", "in0", "netns", str(there.pid))
        for inside, device, address in (((), "out0", "192.0.2.10/24"), (panel, "in0", "192.0.2.1/24")):
            _run(*inside, "ip", "address", "add", address, "dev", device)
            _run(*inside, "ip", "link", "set", device, "up")
        keys = {name: _run("wg", "genkey").strip() for name in ("PANEL", "NODE")}
        public = {f"{name}_PUBLIC_KEY": _piped("wg", "pubkey", text=key).strip() for name, key in keys.items()}
        own = {f"{name}_PRIVATE_KEY": key for name, key in keys.items()}
        of_panel = {"PANEL_PRIVATE_KEY": own["PANEL_PRIVATE_KEY"], "NODE_PUBLIC_KEY": public["NODE_PUBLIC_KEY"]}
        of_node = {"NODE_PRIVATE_KEY": own["NODE_PRIVATE_KEY"], "PANEL_PUBLIC_KEY": public["PANEL_PUBLIC_KEY"]}
        for inside, file, changes in (
            (panel, "wg-panel.conf", of_panel),
            ((), "wg-node.conf", {**of_node, "panel.example.com": "192.0.2.1"}),
        ):
            copy = written(file, place, changes)
            copy.chmod(0o600)
            _run(*inside, "wg-quick", "up", str(copy))
            stack.callback(_run, *inside, "wg-quick", "down", str(copy))
        version = Version(place)
        node = RealNode(place, PYTHONPATH=str(version.root), NODE_HOST="")
        certify(node, "10.77.0.2")
        stack.enter_context(node)
        kept(node)
        until(lambda: "latest handshake" in _run("wg"), 20, "the ends have shaken hands: the node dials, none else")
        with Panel(node, "10.77.0.2", node.grpc_port, through=panel) as calls:
            hand_over(node, version)
            _run("ip", "link", "set", "out0", "down")
            _run("ip", "link", "set", "out0", "up")
            hand_over(node, version, "9.0.1")
        carried = re.findall(r"transfer: (.*) received", _run(*panel, "wg"))
        return {"got": calls.got, "carried": carried}


def _run(*command: str) -> str:
    return _piped(*command, text="")


def _piped(*command: str, text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    print(json.dumps(wireguard()))
