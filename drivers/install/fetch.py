"""Download a verified file by HTTP, resuming a download that broke off, now or in an earlier call."""

from __future__ import annotations

import hashlib
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO
from urllib.error import HTTPError

from drivers.install.archive import LIMIT, SILENCE
from drivers.install.releases import DigestMismatch, InstallError, Unavailable

# The number of tries for a download that breaks off, and the seconds between them.
TRIES = 4
PAUSE = 1.0
_CHUNK = 256 * 1024
# The most bytes of a small text, such as a digest.
_TEXT = 4096

# Seconds until the timer signals again, as the first signal may come while Python cannot raise the error.
_REPEAT = 1.0

# Called with the bytes so far and the total, which is 0 if it is unknown.
Progress = Callable[[int, int], None]


class TooSlow(InstallError):
    """The time for a download is over: the bytes so far stay, and the next try resumes."""


def fetch(url: str, sha256: str, into: Path, tell: Progress = lambda _, __: None) -> None:
    """Download `url` to the file `into`. An incomplete download stays at `part_of`.

    Raises `Unavailable` if the file does not arrive whole, `DigestMismatch` if it does with another digest, and
    `InstallError` if `url` is invalid or the file cannot be written.
    """
    part = part_of(into, sha256)
    for left in range(TRIES - 1, -1, -1):
        try:
            _go_on(url, part, tell)
            break
        except Unavailable:
            if not left:
                raise
            time.sleep(PAUSE)
    found = _digest(part)
    if found != sha256:
        part.unlink(missing_ok=True)
        raise DigestMismatch(f"{url} has the SHA-256 {found}, but {sha256} is expected: discarded")
    part.replace(into)


def part_of(into: Path, sha256: str) -> Path:
    """Return the path of an incomplete download; it depends on the digest."""
    return into.with_name(f"{into.name}.{sha256[:16]}.part")


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Limit the time of all downloads within: a server may send its headers, or a text, byte by byte.

    Raises `TooSlow`. For the main thread only: it uses a signal, which interrupts any wait.
    """

    def late(*_: object) -> None:
        raise TooSlow(f"too slow: gave up after {seconds:g} s; ask again to resume the download")

    before = signal.signal(signal.SIGALRM, late)
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, every)
        signal.signal(signal.SIGALRM, before)


def text(url: str) -> str:
    """Return a small text. Raises as `fetch`."""
    try:
        with _opened(url, {}) as reply:
            return reply.read(_TEXT).decode(errors="replace")
    except (OSError, HTTPException) as error:
        raise Unavailable(f"{url}: {error or type(error).__name__}") from error


def _go_on(url: str, part: Path, tell: Progress) -> None:
    """Download the rest of a file, or all of it if the server does not support ranges."""
    there = part.stat().st_size if part.exists() else 0
    try:
        reply = _opened(url, {"Range": f"bytes={there}-"} if there else {})
    except HTTPError as error:
        if error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise Unavailable(f"{url}: {error}") from error
        return  # it is complete, or has another digest
    except (OSError, HTTPException) as error:
        raise Unavailable(f"{url}: {error or type(error).__name__}") from error
    with reply:
        goes_on = reply.status == HTTPStatus.PARTIAL_CONTENT
        there = there if goes_on else 0
        total = there + reply.length if reply.length is not None else 0
        _store(reply, part, "ab" if goes_on else "wb", there, total, tell)


def _store(reply: HTTPResponse, part: Path, mode: str, there: int, total: int, tell: Progress) -> None:
    with _written(part, mode) as write:
        while there != total or not total:
            chunk = _read(reply)
            if not chunk:
                break
            there += len(chunk)
            if there > LIMIT:
                # A later try must not resume it.
                part.unlink()
                raise InstallError(f"{reply.url}: too large: gave up after {there} bytes")
            write(chunk)
            tell(there, total)
    if total and there != total:
        raise Unavailable(f"{reply.url}: received {there} of {total} bytes")


@contextmanager
def _written(part: Path, mode: str) -> Iterator[Callable[[bytes], object]]:
    try:
        with part.open(mode) as file:
            yield file.write
    except OSError as error:
        # It is incomplete, and others need the space on a full disk.
        part.unlink(missing_ok=True)
        raise InstallError(f"{part} cannot be written: {error.strerror}") from error


def _read(reply: HTTPResponse) -> bytes:
    try:
        return reply.read1(_CHUNK)
    except (OSError, HTTPException) as error:
        raise Unavailable(f"{reply.url}: {error or type(error).__name__}") from error


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


def _digest(path: Path) -> str:
    if not path.exists():
        return "of no data"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
