"""Downloads of updates, from broken or hostile servers, to full disks."""

from __future__ import annotations

import contextlib
import errno
import io
import json
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

from drivers.install import fetch, update
from drivers.install.releases import DigestMismatch, InstallError, Unavailable
from drivers.install.update import bring_core, bring_lists
from scripts.staging.mirror import Mirror
from scripts.staging.mirror import release as packed
from scripts.staging.ports import free_port

NEW = "26.3.28"
ROOT = Path(__file__).parents[3]

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def server(answer: Answer, own: Sequence[Path] = ()) -> Iterator[str]:
    """A server on HTTPS with a key and certificate of its own."""

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


def zipped(**members: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        for name, program in members.items():
            file.writestr(name, program)
    return content.getvalue()


def damaged() -> bytes:
    """Make an LZMA archive with damaged contents."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_LZMA) as file:
        file.writestr("xray", b"program" * 1000)
    raw = bytearray(content.getvalue())
    # After the header (30 bytes), the name, and the properties of the method (9 bytes).
    raw[30 + 4 + 9 : 30 + 4 + 29] = b"\xff" * 20
    return bytes(raw)


WRONG: Mapping[str, bytes] = {
    "another version": packed("xray", NEW, b"#!/bin/sh\necho Xray 1.2.3 of another version")[1],
    "no program": packed("xray", NEW, b"text")[1],
    "no archive": b"<html>",
    "half an archive": packed("xray", NEW, b"#!/bin/sh\n")[1][:-40],
    "no member of that name": zipped(other=b"program"),
    "damaged": damaged(),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_bad_archive_leaves_nothing(wrong: str, tmp_path: Path, mirror: Mirror) -> None:
    """Its digest is right, so another try would fail as well; the error is one sentence."""
    path, _ = packed("xray", NEW, b"")
    digest = mirror.put(path, WRONG[wrong])
    with pytest.raises(InstallError):
        bring_core("xray", NEW, digest, mirror.url, tmp_path)
    assert not names(tmp_path)


def brought(kind: str, room: int, into: Path, **parameters: object) -> subprocess.CompletedProcess[str]:
    """Run the command with files limited to `room` bytes, and return its error."""
    words = [kind, json.dumps({"into": str(into), **parameters})]
    script = f"""
import resource
from drivers.install.update import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, resource.RLIM_INFINITY))
raise SystemExit(main({words}))
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, cwd=ROOT)


def test_a_disk_that_is_full_when_an_archive_is_unpacked(tmp_path: Path, mirror: Mirror) -> None:
    """There was room for the archive itself, which is removed."""
    digest = offered(mirror, b"\0" * 200_000)
    done = brought("core", 100_000, tmp_path, name="xray", version=NEW, url=mirror.url, sha256=digest)
    assert done.returncode == 1 and "File too large" in done.stderr.splitlines()[-1]
    assert not names(tmp_path)


def test_a_disk_that_is_full_at_the_second_list(tmp_path: Path, mirror: Mirror) -> None:
    """The first one is removed, too."""
    lists = {name: mirror.put(f"/{name}", b"x" * size) for name, size in (("a.dat", 1000), ("b.dat", 200_000))}
    done = brought("lists", 100_000, tmp_path, wanted=lists, url=mirror.url)
    assert done.returncode == 1 and "cannot be written: File too large" in done.stderr.splitlines()[-1]
    assert not names(tmp_path)


def test_another_file_of_the_same_name(tmp_path: Path, mirror: Mirror) -> None:
    """A list was replaced on the server after half of it was downloaded: that half is not used."""
    mirror.breaks = [500] * fetch.TRIES
    before = mirror.put("/one.dat", b"x" * 10_000)
    with pytest.raises(Unavailable):
        bring_lists({"one.dat": before}, mirror.url, tmp_path)
    mirror.breaks, mirror.asked = [], []
    digest = mirror.put("/one.dat", b"y" * 10_000)
    place = bring_lists({"one.dat": digest}, mirror.url, tmp_path)
    assert (place / "one.dat").read_bytes() == b"y" * 10_000
    assert mirror.asked == [("/one.dat", 0)] and names(tmp_path) == {place.name}


def dribbling(head: bytes, piece: bytes) -> Answer:
    """A reply that never ends, and never pauses for long."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):
            handler.wfile.write(head)
            while not threading.Event().wait(0.02):
                handler.wfile.write(piece)

    return answer


DRIBBLES = {
    "headers": (b"HTTP/1.1 200 OK\r\nX-One: ", b"1"),
    "a body": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"1"),
}


@pytest.mark.parametrize("dribble", DRIBBLES)
@pytest.mark.parametrize("text", [False, True], ids=["a file", "its digest"])
def test_one_deadline_for_all_downloads(
    dribble: str, text: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that sends a byte now and then delays the updates behind it no longer than that."""
    monkeypatch.setattr(fetch, "PATIENCE", 0.5)
    with (
        server(dribbling(*DRIBBLES[dribble])) as url,
        pytest.raises(InstallError, match=r"too slow: gave up after 0\.5 s"),
    ):
        if text:
            bring_lists({"geoip.dat": ""}, url, tmp_path)
        else:
            bring_lists({"one.dat": "0" * 64}, url, tmp_path)
    # The download stays, and the next try resumes it.
    assert len(names(tmp_path)) == (dribble == "a body" and not text)


def test_lists_that_do_not_go_onto_the_disk_leave_no_copy(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other files cannot be copied."""
    digest = mirror.put("/geoip.dat", b"list")
    kept, into = tmp_path / "kept", tmp_path / "into"
    for directory in (kept, into):
        directory.mkdir()
    (kept / "other.dat").touch()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(OSError, match="No space"):
        bring_lists({"geoip.dat": digest}, mirror.url, into, str(kept))
    assert not [name for name in names(into) if name.startswith(update.NEW)]


@pytest.mark.parametrize("room", [40_000, 99_000])
def test_a_full_disk_is_named_and_freed(room: int, tmp_path: Path, mirror: Mirror) -> None:
    """Also if the last piece does not fit: the error does not blame the server."""
    digest = mirror.put("/one.dat", b"x" * 100_000)
    done = brought("lists", room, tmp_path, wanted={"one.dat": digest}, url=mirror.url)
    assert done.returncode == 1 and "cannot be written: File too large" in done.stderr.splitlines()[-1]
    assert not names(tmp_path)


def test_a_download_that_is_too_large_is_not_kept(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would stay and make later downloads fail, from any server."""
    monkeypatch.setattr(fetch, "LIMIT", 1000)
    digest = mirror.put("/one.dat", b"x" * 2000)
    with pytest.raises(InstallError, match="too large"):
        bring_lists({"one.dat": digest}, mirror.url, tmp_path)
    assert not names(tmp_path)


def test_a_server_that_refuses_the_range(tmp_path: Path) -> None:
    """There is no rest to download."""
    with server(answering(416)) as url, pytest.raises(DigestMismatch):
        bring_lists({"one.dat": "0" * 64}, url, tmp_path)


REDIRECTS: Mapping[str, str] = {"a file": "file:///etc/passwd", "FTP": "ftp://127.0.0.1:1/one", "no address": "gopher:"}


@pytest.mark.parametrize("to", REDIRECTS)
def test_redirects_lead_nowhere_else(to: str, tmp_path: Path) -> None:
    """The error is one sentence."""
    with server(answering(302, Location=REDIRECTS[to])) as url, pytest.raises(Unavailable, match=r"redirect|HTTP"):
        bring_lists({"one.dat": "0" * 64}, url, tmp_path)


def test_a_redirect_does_not_leave_https(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """On plain HTTP others could replace both the digest and the file."""
    own = [tmp_path / "key", tmp_path / "certificate"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    made += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(own[0])]
    subprocess.run([*made, "-out", str(own[1])], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(own[1]))
    mirror.put("/geoip.dat.sha256sum", b"0" * 64)
    leading = answering(302, Location=f"{mirror.url}/geoip.dat.sha256sum")
    with server(leading, own) as url, pytest.raises(Unavailable, match="leaves HTTPS"):
        bring_lists({"geoip.dat": ""}, url, tmp_path)
    assert mirror.asked == []


def test_an_archive_with_a_password(tmp_path: Path) -> None:
    """It is reported, as is any unknown compression method."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("xray", b"program")
    raw = bytearray(content.getvalue())
    # The bit for a password, in the member's header and in the directory's.
    for mark, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        raw[raw.index(mark) + flags] |= 1
    packed_file = tmp_path / "xray.zip"
    packed_file.write_bytes(raw)
    with pytest.raises(Unavailable, match="password"):
        fetch.unpack(packed_file, ["xray"], tmp_path)
