"""A download mirror on loopback that serves ranges and can break off; and archives of cores for it."""

from __future__ import annotations

import hashlib
import io
import ipaddress
import re
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from drivers.install.releases import CORES
from protos.xray_pb2 import Cidr, GeoIp, GeoIpList
from scripts.staging.ports import free_port


class Mirror:
    """HTTP server of `files` (by path). `asked` records each request: its path and the first byte of its range.

    Each number in `breaks` makes it close one connection after so many bytes.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, int]] = []
        self.breaks: list[int] = []
        # While cleared, replies wait.
        self.open = threading.Event()
        self.open.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", free_port()), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def put(self, path: str, content: bytes) -> str:
        """Serve `content` at `path`. Returns its SHA-256."""
        self.files[path] = content
        return hashlib.sha256(content).hexdigest()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
                begin = int(asked[1]) if asked else 0
                mirror.asked.append((self.path, begin))
                mirror.open.wait(30)
                content = mirror.files.get(self.path)
                if content is None or begin > len(content) or (asked and begin == len(content)):
                    self.send_error(404 if content is None else 416)
                    return
                self.send_response(206 if asked else 200)
                self.send_header("Content-Length", str(len(content) - begin))
                self.end_headers()
                end = begin + mirror.breaks.pop(0) if mirror.breaks else len(content)
                self.wfile.write(content[begin:end])

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def release(core: str, version: str, program: bytes) -> tuple[str, bytes]:
    """An archive with this program, as the official release for this machine: its path on a mirror, and its bytes."""
    newest = CORES[core][0]
    name = newest.archive.name.replace(newest.version, version)
    member = newest.archive.members[0].replace(newest.version, version)
    packed = io.BytesIO()
    if name.endswith(".zip"):
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
            for each in newest.archive.members:
                file.writestr(each, program if each == member else b"")
    else:
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            info = tarfile.TarInfo(member)
            info.size = len(program)
            tar.addfile(info, io.BytesIO(program))
    return f"/v{version}/{name}", packed.getvalue()


def renamed(executable: Path, version: str, new: str, before: str = "") -> bytes:
    """A shell script that runs this core but reports version `new`. It runs `before` first, except for `version`."""
    return f"""#!/bin/sh
if [ "$1" = version ]; then {executable} version | sed s/{version}/{new}/; exit; fi
{before}
exec {executable} "$@"
""".encode()


def listing(**networks: str) -> bytes:
    """A geoip.dat with a list of one network for each name."""
    entries = []
    for name, network in networks.items():
        at = ipaddress.ip_network(network)
        cidr = Cidr(ip=at.network_address.packed, prefix=at.prefixlen)
        entries.append(GeoIp(country_code=name.upper(), cidr=[cidr]))
    return GeoIpList(entry=entries).SerializeToString()
