"""deploy/Containerfile, built by buildah on a base of Debian's packages, and run by crun as in compose.yaml."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil
import pytest

from node import NUMBER, __version__
from scripts.staging.core import find_xray
from scripts.staging.node import is_node
from scripts.staging.wait import until
from tests.harness.container import Container, Image
from tests.harness.released import VERSION as RELEASED
from tests.harness.released import Copy
from tests.machine.conftest import CLONE

_WHEEL_OF_SING_BOX = "1.14.4"
KEY = "8a7c1a52-3c7e-4a53-9d0b-6c8b7f8f3d11"


class Builder:
    """buildah with separate storage."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        storage = ("--root", directory / "storage", "--runroot", directory / "run", "--storage-driver", "overlay")
        self._command = ("buildah", *map(str, storage))

    def __call__(self, *arguments: str | Path) -> str:
        done = subprocess.run([*self._command, *arguments], stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()


@pytest.fixture(scope="module", params=["clone", "wheel"])
def image(debian: Path, scratch: Path, clone: Path, request: pytest.FixtureRequest) -> Iterator[Image]:
    """The image of a clone, and that of a release, built and mounted: Xray is copied in, sing-box is downloaded."""
    buildah = Builder(scratch / f"builder-{request.param}")
    buildah.directory.mkdir()
    context, given = (clone, []) if request.param == "clone" else _released(buildah.directory)
    base = buildah("from", "scratch")
    buildah("add", "--quiet", base, debian, "/")
    buildah("commit", "--quiet", "--rm", base, "localhost/base")
    cores = buildah.directory / "cores"
    shutil.copytree(find_xray().parent, cores / find_xray().parent.name)
    settings = {"BASE": "localhost/base", "SING_BOX": _WHEEL_OF_SING_BOX, "VERSION": __version__}
    given += [f"--build-arg={name}={value}" for name, value in settings.items()]
    secrets = [f"--secret=id={name},src={path}" for name, path in _ways_out(buildah.directory).items()]
    where = (f"--build-context=cores={cores}", "--file", context / "deploy" / "Containerfile", context)
    docker = ("--isolation=chroot", "--format=docker", "--tag=localhost/txnode")
    buildah("build", "--quiet", *docker, *given, *secrets, *where)
    container = buildah("from", "--pull-never", "localhost/txnode")
    described = json.loads(buildah("inspect", "--type=image", "localhost/txnode"))
    yield Image(Path(buildah("mount", container)), described["Docker"]["config"])
    buildah("umount", container)


def _released(directory: Path) -> tuple[Path, list[str]]:
    """The recipe of a release, unpacked, and the argument for its wheel."""
    made = Copy.of_all(directory / "clone")
    made.prepare()
    made.release(directory / "out")
    recipe = f"txnode-image-{RELEASED}"
    subprocess.run(["tar", "-x", "-f", directory / "out" / f"{recipe}.tar.gz", "-C", directory], check=True)
    return directory / recipe, [f"--build-context=wheel={directory / recipe / 'wheel'}"]


def _ways_out(directory: Path) -> dict[str, Path]:
    """Files with this machine's pip settings and certificates, only for the build."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = re.findall(r"\.((?:extra-)?index-url|proxy|trusted-host)='(.*)'$", listed.stdout, re.MULTILINE)
    lines = ["[global]", "cert = /run/secrets/ca", *(f"{name} = {value}" for name, value in found)]
    (directory / "pip.conf").write_text("\n".join(lines) + "\n")
    authorities = os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile
    assert authorities
    shutil.copy(authorities, directory / "ca.pem")
    return {"pip": directory / "pip.conf", "ca": directory / "ca.pem"}


def test_what_is_in_it(image: Image) -> None:
    """The image has both cores, labels and a complete bill of materials, but no network settings of the build."""
    labels = image.config["Labels"]
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.licenses"] == "MIT"
    bill = json.loads((image.root / "opt/txnode/sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    components = {component["name"]: component for component in bill["components"]}
    assert components.keys() >= {"Twisted", "grpcio", "cryptography", "txnode", "xray", "sing-box"}
    assert components["sing-box"]["version"] == _WHEEL_OF_SING_BOX
    assert components["txnode"]["version"] in (NUMBER, RELEASED)
    [xray] = components["xray"]["hashes"]
    assert xray["content"] == hashlib.sha256(find_xray().read_bytes()).hexdigest()
    assert not (image.root / "etc" / "pip.conf").exists()
    assert not (image.root / "run" / "secrets").exists()


def test_it_serves_users(image: Image, scratch: Path) -> None:
    """It runs without root, capabilities and a writable root: a Start, traffic, a health check, a clean stop.

    A node that is killed leaves its core running, and the next one goes on with it. Another container with the same
    volume resumes the backend.
    """
    container = _placed(image, scratch)
    for what in ("start", "use"):
        with container.start() as running:
            running.ready(lambda: _healthy(container), 60, "the container is healthy")
            assert _status(container)["Uid"].split() == ["65532"] * 4
            assert int(_status(container)["CapEff"], 16) == 0
            said = _visited(container, what)
            assert said["warnings"] == []
            before = _children(container)
            node, cores = before.pop("twistd"), before
            node.kill()
            until(lambda: "goes on with the core" in running.output, 30, "the next node goes on")
            after = _children(container)
            assert (after.pop("twistd") == node, after) == (False, cores)
            _visited(container, "use")
            began = time.monotonic()
            container.stop()
            assert running.wait(30) == 0, running.output
            assert time.monotonic() - began < 20
    assert {path.name for path in container.volume.iterdir()} >= {"certificate.pem", "key.pem", "state.db"}


def test_it_serves_the_conformance_suite(image: Image, scratch: Path) -> None:
    """Both levels of the suite pass, over both protocols."""
    container = _placed(image, scratch)
    with container.start() as running:
        running.ready(lambda: _healthy(container), 60, "the container is healthy")
        ports = ("--address", "127.0.0.1:62051", "--grpc-port", "62050", "--level", "beyond")
        certificate = str(container.volume / "certificate.pem")
        said = _beside(container, "tests.conformance", *ports, "--key", KEY, "--certificate", certificate)
        assert "FAILED" not in said
        container.stop()
        assert running.wait(30) == 0, running.output


def _placed(image: Image, scratch: Path) -> Container:
    """A container of this image, with an empty volume."""
    place = Path(mkdtemp(dir=scratch))
    settings = {"API_KEY": KEY, "PROXY_TO_SERVER": "allow"}  # users' targets are on the container's loopback
    container = Container(image, place / "txnode-bundle", place / "volume", settings)
    container.bundle.mkdir()
    container.volume.mkdir(mode=0o700)
    os.chown(container.volume, 65532, 65532)
    return container


def _healthy(container: Container) -> bool:
    kind, *command = container.image.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    return container.run(*command) == ""


def _children(container: Container) -> dict[str, psutil.Process]:
    """The children of the keeper, the first process: the node as `twistd`, cores by the names of their programs."""
    keeper = psutil.Process(container.pid)
    return {"twistd" if is_node(child, keeper) else child.name(): child for child in keeper.children()}


def _status(container: Container) -> dict[str, str]:
    lines = Path(f"/proc/{container.pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _visited(container: Container, what: str) -> dict[str, Any]:
    certificate, visitor = container.volume / "certificate.pem", container.bundle / "visitor"
    said = _beside(container, "tests.machine.visit", what, str(certificate), KEY, str(visitor))
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def _beside(container: Container, module: str, *arguments: str) -> str:
    """Run a module of this clone in the container's network. Returns its output."""
    command = ["nsenter", f"--net=/proc/{container.pid}/ns/net", sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=CLONE, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
