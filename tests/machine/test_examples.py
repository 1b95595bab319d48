"""The programs of docs/controllers.md: built by the page's own commands, and run on a real node and on the sandbox.

They need Go, Node.js and npm on PATH.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.target import Target
from tests.harness.sandboxed import Sandbox
from tests.machine.tools import MAKING, run, tools

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/controllers.md").read_text()
PROTOC = "grpcio-tools==1.76.0"


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    """A directory with `protoc`, which the page takes for granted."""
    with tools() as made:
        python = made.python("protoc", PROTOC) / "python"
        directory = made.directory / "bin"
        directory.mkdir(exist_ok=True)
        protoc = directory / "protoc"
        protoc.write_text(f'#!/bin/sh\nexec {python} -m grpc_tools.protoc "$@"\n')
        protoc.chmod(0o755)
        yield directory


@pytest.fixture(params=["real", "sandbox"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Target, Path]]:
    """A node and its certificate."""
    if request.param == "sandbox":
        with Sandbox(tmp_path) as sandbox:
            yield sandbox, sandbox.certificate
    else:
        with NodeProcess(tmp_path) as process:
            yield process, process.certificate.certificate


def commands(heading: str) -> str:
    """The commands below a heading of the page."""
    section = PAGE.partition(f"\n### {heading}\n")[2].partition("\n### ")[0]
    [block] = re.findall(r"```sh\n(.*?)```", section, re.DOTALL) or re.findall(r"`(go run [^`]*)`", section)
    return str(block)


@pytest.mark.timeout(MAKING)
@pytest.mark.parametrize(
    ("headings", "refused"),
    [
        (["Go, REST"], "users_refused"),
        (["Go, REST", "Go, gRPC"], "Internal"),
        (["TypeScript, REST"], "users_refused"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_program(
    headings: list[str], refused: str, node: tuple[Target, Path], programs: Path, tmp_path: Path
) -> None:
    """It prints what happened, from the core's start to its end."""
    target, certificate = node
    place = tmp_path / "example"
    shutil.copytree(ROOT / "docs/examples" / headings[0].partition(",")[0].lower(), place)
    port = str(free_port())
    for source in (*place.rglob("*.go"), *place.rglob("*.ts")):
        source.write_text(source.read_text().replace("21443", port))
    key = tmp_path / "key"
    key.write_text(target.key)
    block = "\n".join(map(commands, headings))
    for word, value in (
        *(("62051", str(target.rest_port)), ("62050", str(target.grpc_port))),
        *(("CLONE", str(ROOT)), ("KEY_FILE", str(key)), ("CERTIFICATE", str(certificate))),
    ):
        block = block.replace(word, value)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "GOBIN": str(programs)}
    printed = run(["bash", "-euc", block], place, **environment).splitlines()
    *_, log, last = printed
    told = [line for line in printed if not line.startswith("bytes ")]
    assert (log.split()[0], last) == ("log", "stopped stopped")
    assert told[-6:-2] == ["started xray running", f"refused {refused}", "user alice", "event backend.running"]
