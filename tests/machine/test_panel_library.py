"""The client library of the PasarGuard panel, from the package index, presses the panel's buttons."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from scripts.staging.controller import RestController
from scripts.staging.echo import EchoServer
from scripts.staging.mirror import Mirror, listing
from scripts.staging.users import TestUser
from tests.conftest import Place, connection, member, run, talking
from tests.live.test_buttons import RealNode
from tests.machine.tools import MAKING, tools

pytestmark = [pytest.mark.machine, pytest.mark.core, pytest.mark.timeout(MAKING)]

LIBRARY = "pasarguard-node-bridge==0.9.4"
ANNA = TestUser.new("anna@test")
PRESSED = """
import asyncio, json, sys
from PasarGuardNodeBridge import NodeAPIError, NodeType, create_node

async def main(protocol, port, api_port, key, certificate):
    node = create_node(NodeType(protocol), address="127.0.0.1", port=int(port), api_port=int(api_port), api_key=key,
                       server_ca=open(certificate).read())
    found = {}
    for name, press in (
        ("geo", lambda: node.update_geofiles({"region": "iran"})),
        ("core", lambda: node.update_core({"core_version": "v1.2.3"})),
        ("node", node.update_node),
        ("reset", node.hard_reset),
    ):
        try:
            reply = await press()
            found[name] = [reply.status_code, reply.json()["detail"]]
        except NodeAPIError as error:
            found[name] = [error.code, error.detail]
    print(json.dumps(found))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def library() -> Iterator[Path]:
    """The interpreter of an environment with the library, which needs Python 3.12."""
    newer = next(filter(None, map(shutil.which, ("python3.14", "python3.13", "python3.12"))), None)
    assert newer, "the library needs Python 3.12 or newer on PATH"
    with tools() as kept:
        yield kept.python("panel", LIBRARY, interpreter=newer) / "python"


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
@pytest.mark.parametrize("allowed", ["on", "off"])
def test_buttons(library: Path, tmp_path: Path, protocol: str, allowed: str, home: Place, echo: EchoServer) -> None:
    """All four, by both ports as the API's; no connection ends."""
    with Mirror() as mirror, RealNode(tmp_path, UPDATES=allowed, GEO_URL=f"{mirror.url}/geo") as node:
        for name, content in (("geoip.dat", listing(private="10.0.0.0/8")), ("geosite.dat", b"")):
            mirror.put(f"/geo/{name}.sha256sum", f"{mirror.put(f'/geo/{name}', content)}  {name}\n".encode())
        ports = (node.rest_port, node.grpc_port) if protocol == "rest" else (node.grpc_port, node.rest_port)
        with closing(RestController(node)) as controller:
            run(controller, [home], [member(ANNA, home)])
            words = [protocol, *map(str, ports), node.key, str(node.certificate.certificate)]
            with connection(home, ANNA, echo) as link, talking(link):
                output = subprocess.check_output([str(library), "-c", PRESSED, *words], text=True)
        found = json.loads(output.splitlines()[-1])
    assert found["geo"][0] == found["reset"][0] == 200, found
    if allowed == "on":
        assert "--sha256" in found["core"][1], found
        assert found["node"][0] == 200, found
    else:
        assert "UPDATES=on" in found["core"][1], found
        assert "UPDATES=on" in found["node"][1], found
