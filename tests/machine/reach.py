"""The parts of the tests of deploy/reach: a panel in a process of its own, daemons, and the machines of panel and node.

`python -m tests.machine.reach ssh|wireguard` runs in network and mount namespaces of its own, which are the node's
machine, and makes those of the panel's. It prints, as JSON, what the panel has got.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.doctor.network import reach
from scripts.staging import certs
from scripts.staging.node import NodeProcess
from scripts.staging.process import tied
from scripts.staging.version import Version
from scripts.staging.wait import accepts, until
from tests.harness.upgraded import RealNode, kept, upgrade

ROOT = Path(__file__).parents[2]
FILES = ROOT / "deploy" / "reach"
# Seconds for which a panel stays in each way, besides the time that the hand-over takes.
STAY = float(os.environ.get("REACH_SECONDS", "0"))
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
        process.terminate()  # a kill would leave nginx's workers
        process.wait()


def hand_over(node: NodeProcess, version: Version, number: str = "9.0.0") -> None:
    """Upgrade the node in place, in the middle of `STAY`."""
    time.sleep(STAY / 2)
    version.name(number)
    upgrade(node, f"txnode {number} is ready")
    time.sleep(STAY / 2)


@dataclass(frozen=True)
class Scene:
    """Two machines with a line between them: this process is on the node's, 192.0.2.10; the panel's is 192.0.2.1.

    `panel` begins a command that runs on the panel's. Both have a directory /run of their own.
    """

    place: Path
    panel: tuple[str, ...]


@contextmanager
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        there = stack.enter_context(daemon("unshare", "--net", "--mount", "sleep", "infinity"))
        here = Path("/proc/self/ns/net").readlink()
        until(lambda: Path(f"/proc/{there.pid}/ns/net").readlink() != here, what="the panel has a namespace")
        panel = ("nsenter", f"--target={there.pid}", "--net", "--mount", f"--wd={ROOT}")
        run("ip", "link", "add", "out0", "type", "veth", "peer", "name", "in0", "netns", str(there.pid))
        for inside, device, address in (((), "out0", "192.0.2.10/24"), (panel, "in0", "192.0.2.1/24")):
            # Also for the sockets of wireguard-go, which wg-quick runs where the kernel has no WireGuard.
            run(*inside, "mount", "-t", "tmpfs", "tmpfs", "/run")
            run(*inside, "ip", "link", "set", "lo", "up")
            run(*inside, "ip", "address", "add", address, "dev", device)
            run(*inside, "ip", "link", "set", device, "up")
        yield Scene(place, panel)


def wireguard() -> dict[str, Any]:
    """Let the panel call by wg-quick's two files, over two hand-overs and a line that is down for a moment."""
    with scene() as both, ExitStack() as stack:
        keys = {name: run("wg", "genkey").strip() for name in ("PANEL", "NODE")}
        public = {f"{name}_PUBLIC_KEY": run("wg", "pubkey", text=key).strip() for name, key in keys.items()}
        own = {f"{name}_PRIVATE_KEY": key for name, key in keys.items()}
        of_panel = {"PANEL_PRIVATE_KEY": own["PANEL_PRIVATE_KEY"], "NODE_PUBLIC_KEY": public["NODE_PUBLIC_KEY"]}
        of_node = {"NODE_PRIVATE_KEY": own["NODE_PRIVATE_KEY"], "PANEL_PUBLIC_KEY": public["PANEL_PUBLIC_KEY"]}
        for inside, file, changes in (
            (both.panel, "wg-panel.conf", of_panel),
            ((), "wg-node.conf", {**of_node, "panel.example.com": "192.0.2.1"}),
        ):
            copy = written(file, both.place, changes)
            copy.chmod(0o600)
            run(*inside, "wg-quick", "up", str(copy))
            stack.callback(run, *inside, "wg-quick", "down", str(copy))
        version = Version(both.place)
        node = RealNode(both.place, PYTHONPATH=str(version.root), NODE_HOST="")
        certify(node, "10.77.0.2")
        stack.enter_context(node)
        kept(node)
        until(lambda: "latest handshake" in run("wg"), 20, "the node has dialled the panel")
        serve = "import signal, socket; own = socket.create_server(('10.77.0.1', 7070)); signal.pause()"
        stack.enter_context(daemon(sys.executable, "-c", serve, through=both.panel))
        until(lambda: _panel_listens(both, 7070), what="a program on the panel's machine listens")
        dialled = reach("10.77.0.1", 7070, 2)
        with Panel(node, "10.77.0.2", node.grpc_port, through=both.panel) as calls:
            hand_over(node, version)
            run("ip", "link", "set", "out0", "down")
            run("ip", "link", "set", "out0", "up")
            hand_over(node, version, "9.0.1")
        carried = re.findall(r"transfer: (.*) received", run(*both.panel, "wg"))
        return {"got": calls.got, "carried": carried, "dialled": dialled}


def ssh() -> dict[str, Any]:
    """Run the commands of docs/reach.md on both machines, and the unit's; use the key for other things, too."""
    with scene() as both, ExitStack() as stack:
        of_node, of_panel = blocks("## ssh")
        stub = both.place / "systemctl"
        stub.write_text("#!/bin/sh\n")
        stub.chmod(0o755)
        for inside in ((), both.panel):
            # Changes of /etc and /home are the scene's own.
            run(*inside, "mkdir", "/run/etc", "/run/work", "/run/sshd")
            layers = "lowerdir=/etc,upperdir=/run/etc,workdir=/run/work"
            run(*inside, "mount", "-t", "overlay", "overlay", "-o", layers, "/etc")
            run(*inside, "mount", "-t", "tmpfs", "tmpfs", "/home")
            run(*inside, "sh", "-c", "echo 192.0.2.1 panel.example.com >>/etc/hosts")
        pasted = ("env", f"PATH={both.place}:/usr/sbin:/usr/bin:/sbin:/bin", "bash", "-euo", "pipefail", "-c")
        run(*both.panel, *pasted, of_panel)
        stack.enter_context(daemon("/usr/sbin/sshd", "-D", "-e", through=both.panel))
        until(lambda: _panel_listens(both, 22), what="sshd listens")
        run(*pasted, of_node)
        public = Path("/etc/txnode/reach/id_ed25519.pub").read_text().split()[1]
        keys = "~txnode-reach/.ssh/authorized_keys"
        run(*both.panel, "bash", "-c", f"sed -i s,AAAA_THE_NODES_PUBLIC_KEY,{public}, {keys}")
        unit = Path("/etc/systemd/system/reach-ssh.service").read_text()
        [command] = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
        version = Version(both.place)
        node = RealNode(both.place, PYTHONPATH=str(version.root), GRPC_PORT="62050")
        certify(node, "127.0.0.1")
        stack.enter_context(node)
        kept(node)
        got = []
        for number in ("9.0.0", "9.0.1"):
            with daemon(*command.split()):
                until(lambda: _panel_listens(both, 62050), what="the panel has the node's port")
                with Panel(node, "127.0.0.1", 62050, through=both.panel) as calls:
                    hand_over(node, version, number)
            got.append(calls.got)
            until(lambda: not _panel_listens(both, 62050), 10, "the port has gone with the connection")
        return {"got": got, **_misused()}


def _misused() -> dict[str, str]:
    """What the key gets for a command, for another port of the panel, and for a connection to the panel's sshd."""
    config = Path("/etc/txnode/reach/ssh_config")
    alone = config.with_name("alone")
    alone.write_text("".join(line for line in config.read_text().splitlines(True) if "RemoteForward" not in line))

    def tried(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["ssh", "-F", str(alone), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)

    with daemon("ssh", "-F", alone, "-N", "-L", "127.0.0.1:7022:127.0.0.1:22", "panel"):
        until(lambda: accepts(7022), what="ssh listens")
        with socket.create_connection(("127.0.0.1", 7022), 5) as link:
            inside = link.recv(100).decode()
    other = tried("-N", "-R", "127.0.0.1:7070:127.0.0.1:7070", "panel").stderr
    return {"shell": tried("panel", "echo", "entered").stdout, "inside": inside, "other": other}


def _panel_listens(both: Scene, port: int) -> bool:
    """Whether a program on the panel's machine listens on this port."""
    return f":{port} " in run(*both.panel, "ss", "-Hltn")


def blocks(heading: str) -> list[str]:
    """The commands of docs/reach.md in the section with this heading."""
    section = (ROOT / "docs" / "reach.md").read_text().partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def run(*command: str, text: str = "") -> str:
    """Run a command with this input. Returns its output; raises `AssertionError` with it if it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    print(json.dumps({"ssh": ssh, "wireguard": wireguard}[sys.argv[1]]()))
