"""nodectl as an operator runs it: a process, with a file of nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.process import Child
from tests.harness.terminal import Terminal

ROOT = Path(__file__).parents[2]


class Done(NamedTuple):
    """What a command ended with, and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def rows(self) -> list[list[str]]:
        """The words of each line."""
        return [line.split() for line in self.out.splitlines()]


class Nodectl:
    """Call it with arguments: it asks the nodes that were added, in a directory of its own."""

    def __init__(self, directory: Path, **environment: str) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.file = directory / "nodes.toml"
        self.environment = {
            "PATH": os.defpath,
            "HOME": str(directory),
            "PYTHONPATH": str(ROOT),
            "LANG": "C.UTF-8",
            "NODECTL_NODES": str(self.file),
            **environment,
        }
        self._argv = [sys.executable, "-m", "node.nodectl"]

    def add(self, name: str, node: NodeProcess, transport: str) -> None:
        """A node, by this name and over this transport."""
        key = self.directory / f"{name}.key"
        key.touch(0o600)
        key.write_text(node.key)
        port = node.rest_port if transport == "rest" else node.grpc_port
        self._write(name, node.host, port, transport, str(node.certificate.certificate))

    def add_dead(self, name: str) -> None:
        """One that is not there."""
        (self.directory / f"{name}.key").touch(0o600)
        (self.directory / f"{name}.key").write_text("0123456789abcdef")
        self._write(name, "127.0.0.1", free_port(), "rest", "")

    def __call__(self, *arguments: object, stdin: str = "") -> Done:
        done = subprocess.run(
            [*self._argv, *map(str, arguments)],
            env=self.environment,
            cwd=self.directory,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def following(self, *arguments: object) -> Child:
        """One that goes on: to be left by its `with` block."""
        return Child([*self._argv, *map(str, arguments)], self.environment, directory=self.directory)

    def terminal(self, *arguments: object, **size: int) -> Terminal:
        return Terminal([*self._argv, *map(str, arguments)], self.environment, self.directory, **size)

    def _write(self, name: str, address: str, port: int, transport: str, certificate: str) -> None:
        with self.file.open("a") as file:
            file.write(
                f'[nodes.{name}]\naddress = "{address}"\nport = {port}\ntransport = "{transport}"\n'
                f'certificate = "{certificate}"\nkey_file = "{name}.key"\n'
            )
