"""Run nodectl as an operator does: as a process, with a file of nodes."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.process import Child
from scripts.staging.terminal import Terminal
from tests.harness.forked import Done, nodectl

ROOT = Path(__file__).parents[2]


class Nodectl:
    """Callable with arguments: runs nodectl for the nodes that were added, in its own directory."""

    def __init__(self, directory: Path, **environment: str) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.file = directory / "nodes.toml"
        self.environment = {
            "PATH": os.defpath,
            "HOME": str(directory),
            "TMPDIR": tempfile.gettempdir(),
            "PYTHONPATH": str(ROOT),
            "LANG": "C.UTF-8",
            "NODECTL_NODES": str(self.file),
            **environment,
        }
        self._argv = [sys.executable, "-m", "node.nodectl"]

    def add(self, name: str, node: NodeProcess, transport: str) -> None:
        """Add a node under this name, with this transport."""
        key = self.directory / f"{name}.key"
        key.touch(0o600)
        key.write_text(node.key)
        port = node.rest_port if transport == "rest" else node.grpc_port
        self._write(name, node.host, port, transport, str(node.certificate.certificate))

    def add_dead(self, name: str) -> None:
        """Add a node that does not run."""
        (self.directory / f"{name}.key").touch(0o600)
        (self.directory / f"{name}.key").write_text("0123456789abcdef")
        self._write(name, "127.0.0.1", free_port(), "rest", "")

    def __call__(self, *arguments: object, stdin: str = "") -> Done:
        return nodectl(list(map(str, arguments)), self.environment, self.directory, stdin)

    def following(self, *arguments: object) -> Child:
        """Start a command that runs until the end of its `with` block."""
        return Child([*self._argv, *map(str, arguments)], self.environment, directory=self.directory)

    def terminal(self, *arguments: object, **size: int) -> Terminal:
        return Terminal([*self._argv, *map(str, arguments)], self.environment, self.directory, **size)

    def _write(self, name: str, address: str, port: int, transport: str, certificate: str) -> None:
        with self.file.open("a") as file:
            file.write(
                f'[nodes.{name}]\naddress = "{address}"\nport = {port}\ntransport = "{transport}"\n'
                f'certificate = "{certificate}"\nkey_file = "{name}.key"\n'
            )
