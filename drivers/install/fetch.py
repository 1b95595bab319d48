"""A file by HTTP, verified; a download that broke off goes on where it did, also when it is asked for again later."""

from __future__ import annotations

import hashlib
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO
from urllib.error import HTTPError

from drivers.install.archive import LIMIT, PATIENCE, SILENCE
from drivers.install.releases import DigestMismatch, InstallError, Unavailable

# How often a download that breaks off goes on, and the seconds before that.
TRIES = 4
PAUSE = 1.0
_CHUNK = 256 * 1024
# Bytes of a small text, such as a digest.
_TEXT = 4096

# Told how many bytes there are by now, and of how many; 0 where that is not known.
Progress = Callable[[int, int], None]


def fetch(url: str, sha256: str, into: Path, tell: Progress = lambda _, __: None) -> None:
    """Have the file `into` with this digest: what came of it stays there as `.part` where it does not come whole.

    Raises `Unavailable` if it does not come, `DigestMismatch` if it does and is another one, `InstallError` for what is
    no address, or does not go onto the disk.
    """
    part = into.with_name(f"{into.name}.part")
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
        raise DigestMismatch(f"{url} has the SHA-256 {found}, and not {sha256}: nothing of it is used")
    part.replace(into)


def text(url: str) -> str:
    """A few words. Raises as `fetch`."""
    try:
        with _opened(url, {}) as reply:
            return reply.read(_TEXT).decode(errors="replace")
    except (OSError, HTTPException) as error:
        raise Unavailable(f"{url}: {error or type(error).__name__}") from error


def _go_on(url: str, part: Path, tell: Progress) -> None:
    """Bring the rest of it, or all where the server does not give parts."""
    there = part.stat().st_size if part.exists() else 0
    try:
        reply = _opened(url, {"Range": f"bytes={there}-"} if there else {})
    except HTTPError as error:
        if error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise Unavailable(f"{url}: {error}") from error
        return  # all of it is there, or what is has another digest
    except (OSError, HTTPException) as error:
        raise Unavailable(f"{url}: {error or type(error).__name__}") from error
    with reply:
        goes_on = reply.status == HTTPStatus.PARTIAL_CONTENT
        there = there if goes_on else 0
        total = there + reply.length if reply.length is not None else 0
        _store(reply, part, "ab" if goes_on else "wb", there, total, tell)


def _store(reply: HTTPResponse, part: Path, mode: str, there: int, total: int, tell: Progress) -> None:
    deadline = time.monotonic() + PATIENCE
    with _written(part, mode) as write:
        while there != total or not total:
            chunk = _read(reply)
            if not chunk:
                break
            there += len(chunk)
            if there > LIMIT:
                # No later try could go on with it.
                part.unlink()
                raise InstallError(f"{reply.url}: given up after {there} bytes: too large")
            if time.monotonic() > deadline:
                raise InstallError(f"{reply.url}: given up after {there} bytes: too slow")
            write(chunk)
            tell(there, total)
    if total and there != total:
        raise Unavailable(f"{reply.url}: {there} bytes came, {total} were announced")


@contextmanager
def _written(part: Path, mode: str) -> Iterator[Callable[[bytes], object]]:
    try:
        with part.open(mode) as file:
            yield file.write
    except OSError as error:
        # It is not whole, and a disk that is full has others who need it.
        part.unlink(missing_ok=True)
        raise InstallError(f"{part} cannot be written: {error.strerror}") from error


def _read(reply: HTTPResponse) -> bytes:
    try:
        return reply.read1(_CHUNK)
    except (OSError, HTTPException) as error:
        raise Unavailable(f"{reply.url}: {error or type(error).__name__}") from error


def _opened(url: str, headers: dict[str, str]) -> HTTPResponse:
    if not url.startswith(("https://", "http://")):
        raise InstallError(f"{url}: an address to fetch from must start with https:// or http://")
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "txnode", **headers})  # noqa: S310
        reply: HTTPResponse = urllib.request.build_opener(_Redirects).open(request, timeout=SILENCE)
    except ValueError as error:
        raise InstallError(f"{url} is no address to fetch from: {error}") from error
    return reply


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Those that lead away from HTTP, or from where nobody on the way can read and write, are not followed."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        if not newurl.lower().startswith(("https://",) if req.type == "https" else ("https://", "http://")):
            raise HTTPError(req.full_url, code, "a redirect that is not followed, for it leaves HTTPS", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _digest(path: Path) -> str:
    if not path.exists():
        return "of nothing"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
