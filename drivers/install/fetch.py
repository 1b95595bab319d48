"""Download a verified file by HTTP, resuming a download that broke off, now or in an earlier call; unpack archives."""

from __future__ import annotations

import hashlib
import lzma
import signal
import tarfile
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.error import HTTPError

from drivers.install.releases import DigestMismatch, InstallError, Unavailable

# Seconds for a connection to open, and for the next bytes to come.
SILENCE = 10.0
# Seconds that all downloads of one request may take together.
PATIENCE = 600.0
# The most bytes of a download, and of one member of an archive.
LIMIT = 256 * 1024 * 1024
# The number of tries for a download that breaks off, and the seconds between them.
TRIES = 4
PAUSE = 1.0
_CHUNK = 256 * 1024
# The most bytes of a small text, such as a digest.
_TEXT = 4096
# Seconds until the timer signals again, as the first signal may come while Python cannot raise the error.
_REPEAT = 1.0

# The exceptions of the standard library for a bad archive; RuntimeError for one with a password or an unknown method.
_DAMAGED = (
    *(OSError, EOFError, KeyError, RuntimeError, ValueError),
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError),
)

# Called with the bytes so far and the total, which is 0 if it is unknown.
Progress = Callable[[int, int], None]


class GaveUp(Unavailable):
    """A download takes too long: it is not tried again at once."""


def fetch(url: str, sha256: str, into: Path, tell: Progress = lambda _, __: None, tries: int = TRIES) -> None:
    """Download `url` to the file `into`. An incomplete download stays at `part_of`.

    Raises `Unavailable` if the file does not arrive whole, `DigestMismatch` if it does with another digest, and
    `InstallError` if `url` is invalid, the file is too large or cannot be written.
    """
    part = part_of(into, sha256)
    for left in range(tries - 1, -1, -1):
        try:
            _go_on(url, part, tell)
            break
        except Unavailable as error:
            if isinstance(error, GaveUp) or not left:
                raise
            time.sleep(PAUSE)
    if (found := digest_of(part) if part.exists() else "of no data") != sha256:
        part.unlink(missing_ok=True)
        raise DigestMismatch(f"{url} has the SHA-256 {found}, but {sha256} is expected: discarded, nothing installed")
    part.replace(into)


def part_of(into: Path, sha256: str) -> Path:
    """Return the path of an incomplete download; it depends on the digest."""
    return into.with_name(f"{into.name}.{sha256[:16]}.part")


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(file: Path, sha256: str) -> None:
    """Raises `DigestMismatch` if a file does not have the pinned digest."""
    if (found := digest_of(file)) != sha256:
        raise DigestMismatch(f"{file.name} has the SHA-256 {found}, but {sha256} is pinned: nothing installed")


@contextmanager
def deadline() -> Iterator[None]:
    """Limit the time of all downloads within to `PATIENCE`: a server may send its headers, or a text, byte by byte.

    Raises `GaveUp`. For the main thread only: it uses a signal, which interrupts any wait.
    """

    def late(*_: object) -> None:
        raise GaveUp(f"too slow: gave up after {PATIENCE:g} s; ask again to resume the download")

    before = signal.signal(signal.SIGALRM, late)
    left, every = signal.setitimer(signal.ITIMER_REAL, PATIENCE, _REPEAT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, every)
        signal.signal(signal.SIGALRM, before)


def text(url: str) -> str:
    """Return a small text. Raises as `fetch`."""
    with _network(url), _opened(url, {}) as reply:
        return reply.read(_TEXT).decode(errors="replace")


def unpack(archive: Path, members: Iterable[str], into: Path) -> None:
    """Extract each of `members` to the directory `into`, under the last part of its name.

    Paths, modes and sizes in the archive are not trusted. Raises Unavailable if a member is missing, damaged or larger
    than LIMIT.
    """
    take = _from_tar if archive.name.endswith(".tar.gz") else _from_zip
    try:
        take(archive, members, into)
    except _DAMAGED as error:
        raise Unavailable(f"cannot unpack {archive.name}: {error}") from error


def _from_zip(archive: Path, members: Iterable[str], into: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        for name in members:
            with opened.open(name) as source:
                _extract(source, into, name)


def _from_tar(archive: Path, members: Iterable[str], into: Path) -> None:
    with tarfile.open(archive, "r:gz") as opened:
        for name in members:
            source = opened.extractfile(name)
            if source is None:
                raise KeyError(f"{name} is not a file")
            with source:
                _extract(source, into, name)


def _extract(source: IO[bytes], into: Path, name: str) -> None:
    size = 0
    with (into / PurePosixPath(name).name).open("xb") as file:
        while chunk := source.read(_CHUNK):
            size += len(chunk)
            if size > LIMIT:
                raise OSError(f"{name} has more than {LIMIT} bytes")
            file.write(chunk)


def _go_on(url: str, part: Path, tell: Progress) -> None:
    """Download the rest of a file, or all of it if the server does not support ranges."""
    there = part.stat().st_size if part.exists() else 0
    with _network(url):
        try:
            reply = _opened(url, {"Range": f"bytes={there}-"} if there else {})
        except HTTPError as error:
            if error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            return  # it is complete, or has another digest
    with reply:
        goes_on = reply.status == HTTPStatus.PARTIAL_CONTENT
        there = there if goes_on else 0
        total = there + reply.length if reply.length is not None else 0
        _store(reply, part, "ab" if goes_on else "wb", there, total, tell)


def _store(reply: HTTPResponse, part: Path, mode: str, there: int, total: int, tell: Progress) -> None:
    with _written(part, mode) as write:
        while there != total or not total:
            with _network(reply.url):
                chunk = reply.read1(_CHUNK)
            if not chunk:
                break
            there += len(chunk)
            if there > LIMIT:
                # A later try must not resume it.
                part.unlink()
                raise InstallError(f"{reply.url}: too large: gave up after {there} bytes")
            write(chunk)
            tell(there, total)
    # http.client does not report a connection that closes before the announced end.
    if total and there != total:
        raise Unavailable(f"{reply.url}: received {there} of {total} bytes")


@contextmanager
def _network(url: str) -> Iterator[None]:
    """Raises `Unavailable` for what the network raises."""
    try:
        yield
    except (OSError, HTTPException) as error:
        raise Unavailable(f"{url}: {error or type(error).__name__}") from error


@contextmanager
def _written(part: Path, mode: str) -> Iterator[Callable[[bytes], object]]:
    try:
        with part.open(mode) as file:
            yield file.write
    except OSError as error:
        # It is incomplete, and others need the space on a full disk.
        part.unlink(missing_ok=True)
        raise InstallError(f"{part} cannot be written: {error.strerror}") from error


def _opened(url: str, headers: dict[str, str]) -> HTTPResponse:
    if not url.startswith(("https://", "http://")):
        raise InstallError(f"{url}: a download URL must begin with https:// or http://")
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "txnode", **headers})  # noqa: S310
        reply: HTTPResponse = urllib.request.build_opener(_Redirects).open(request, timeout=SILENCE)
    except ValueError as error:
        raise InstallError(f"{url} is not a URL to download from: {error}") from error
    return reply


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects to other schemes, and from HTTPS to HTTP, where others can read and change the reply."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        if not newurl.lower().startswith(("https://",) if req.type == "https" else ("https://", "http://")):
            raise HTTPError(req.full_url, code, "refusing a redirect that leaves HTTPS", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)
