"""What updates fetch, from servers that are broken or hostile, onto disks that are full."""

from __future__ import annotations

import errno
import io
import shutil
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from drivers.install import archive, fetch, update
from drivers.install.releases import DigestMismatch, InstallError, Unavailable
from drivers.install.update import bring_core, bring_lists, bring_wheel, release
from scripts.staging.mirror import Mirror
from scripts.staging.mirror import release as packed
from scripts.staging.ports import free_port

NEW = "26.3.28"
ROOT = Path(__file__).parents[3]

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def server(answer: Answer, own: Sequence[Path] = ()) -> Iterator[str]:
    """On HTTPS with a key and a certificate of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", free_port()), Handler) as serving:
        if own:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(own[1], own[0])
            serving.socket = context.wrap_socket(serving.socket, server_side=True)
        thread = threading.Thread(target=serving.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"http{'s' if own else ''}://127.0.0.1:{serving.server_port}"
        finally:
            serving.shutdown()
            thread.join()


def answering(code: int, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()

    return answer


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    with Mirror() as mirror:
        yield mirror


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PAUSE", 0.0)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def offered(mirror: Mirror, program: bytes) -> str:
    return mirror.put(*packed("xray", NEW, program))


def test_what_is_not_that_version_leaves_no_copy(tmp_path: Path, mirror: Mirror) -> None:
    """Unpacked it is three times the size of the archive; no release of that name would ever take its place."""
    digest = offered(mirror, b"#!/bin/sh\necho Xray 1.2.3 of another version")
    with pytest.raises(InstallError):
        bring_core(release("xray", NEW, digest), mirror.url, tmp_path)
    assert not [name for name in names(tmp_path) if name.startswith(update.NEW)]


def test_lists_that_do_not_go_onto_the_disk_leave_no_copy(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept beside them cannot be copied."""
    digest = mirror.put("/geoip.dat", b"list")
    kept, into = tmp_path / "kept", tmp_path / "into"
    for directory in (kept, into):
        directory.mkdir()
    (kept / "other.dat").touch()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(OSError, match="No space"):
        bring_lists([f"geoip.dat={digest}"], mirror.url, into, kept)
    assert not [name for name in names(into) if name.startswith(update.NEW)]


@pytest.mark.parametrize("room", [40_000, 99_000])
def test_a_full_disk_is_named_and_freed(room: int, tmp_path: Path, mirror: Mirror) -> None:
    """Also where it is full in the middle of the last piece: the server's file is not the one to blame."""
    digest = mirror.put("/one.whl", b"x" * 100_000)
    words = ["wheel", "--url", f"{mirror.url}/one.whl", "--into", str(tmp_path), "--sha256", digest]
    script = f"""
import resource
from drivers.install.update import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, resource.RLIM_INFINITY))
raise SystemExit(main({words}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert done.returncode == 1 and "cannot be written: File too large" in done.stderr.splitlines()[-1]
    assert not names(tmp_path)


def test_a_download_that_is_too_large_is_not_kept(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it stays, and no later one could be had from any server."""
    monkeypatch.setattr(fetch, "LIMIT", 1000)
    digest = mirror.put("/one.whl", b"x" * 2000)
    with pytest.raises(InstallError, match="too large"):
        bring_wheel(f"{mirror.url}/one.whl", digest, tmp_path)
    assert not names(tmp_path)


def test_a_server_without_parts_to_give(tmp_path: Path) -> None:
    """Nothing is there that another range could be of."""
    with server(answering(416)) as url, pytest.raises(DigestMismatch):
        bring_wheel(f"{url}/one.whl", "0" * 64, tmp_path)


REDIRECTS: Mapping[str, str] = {"a file": "file:///etc/passwd", "FTP": "ftp://127.0.0.1:1/one", "no address": "gopher:"}


@pytest.mark.parametrize("to", REDIRECTS)
def test_redirects_lead_nowhere_else(to: str, tmp_path: Path) -> None:
    """It is told so, in a sentence."""
    with server(answering(302, Location=REDIRECTS[to])) as url, pytest.raises(Unavailable, match=r"redirect|HTTP"):
        bring_wheel(f"{url}/one.whl", "0" * 64, tmp_path)


def test_a_redirect_does_not_leave_https(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way from there anybody could write another digest, and another file of it."""
    own = [tmp_path / "key", tmp_path / "certificate"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    made += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(own[0])]
    subprocess.run([*made, "-out", str(own[1])], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(own[1]))
    mirror.put("/geoip.dat.sha256sum", b"0" * 64)
    leading = answering(302, Location=f"{mirror.url}/geoip.dat.sha256sum")
    with server(leading, own) as url, pytest.raises(Unavailable, match="leaves HTTPS"):
        bring_lists(["geoip.dat"], url, tmp_path, None)
    assert mirror.asked == []


def test_an_archive_with_a_password_is_told(tmp_path: Path) -> None:
    """And any other that is packed in a way nobody here knows."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("xray", b"program")
    raw = bytearray(content.getvalue())
    # The bit for a password, in the member's own header and in the directory's.
    for mark, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        raw[raw.index(mark) + flags] |= 1
    packed_file = tmp_path / "xray.zip"
    packed_file.write_bytes(raw)
    with pytest.raises(Unavailable, match="password"):
        archive.unpack(packed_file, ["xray"], tmp_path)
