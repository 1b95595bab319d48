"""Download what an update needs: `python -m drivers.install.update core|lists JSON`.

The JSON object has the parameters of `bring_core` or `bring_lists`. A program of its own, like `drivers.install`: it
blocks. The result is complete, verified and tried, or does not exist. Each line on stderr reports progress or the
error; the last line on stdout is the path of the result. The proxy variables are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from drivers.install.fetch import deadline, digest_of, fetch, part_of, text, unpack
from drivers.install.install import say, try_out
from drivers.install.releases import ANY, CORES, Core, DigestMismatch, InstallError, Unavailable, cpu

# The prefix of directories that are not complete.
NEW = ".new-"
# Seconds between two progress lines of a download.
TELL = 0.5
DIGEST = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"\d{1,5}(\.\d{1,5}){1,3}")
_LIST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.dat")


class _File(NamedTuple):
    """A file to download, and its destination."""

    url: str
    sha256: str
    path: Path


def release(name: str, version: str, sha256: str = "") -> Core:
    """Return a release with its archive for this machine: a known one, or one with the given digest.

    Raises `InstallError` if no digest is known, and `DigestMismatch` if the given one is not the known one.
    """
    if not _VERSION.fullmatch(version):
        raise InstallError(f"{version!r} is not a version such as {CORES[name][0].version}")
    if sha256:
        _require_digest(sha256)
    for core in CORES[name]:
        if core.version == version and (own := core.archives.get(cpu())):
            if sha256 not in ("", own.sha256):
                raise DigestMismatch(f"{core.label} has the SHA-256 {own.sha256}, not the one in the request")
            return core
    if not sha256:
        how = f"give the SHA-256 of its archive (nodectl update core {name} {version} --sha256 DIGEST)"
        raise InstallError(f"no digest of {CORES[name][0].title} {version} is known: {how}")
    return ANY[name](version, **{cpu(): sha256})


def _require_digest(sha256: str, of: str = "") -> None:
    if not DIGEST.fullmatch(sha256):
        raise InstallError(f"{of}the digest must be a SHA-256: 64 hexadecimal digits")


def bring_core(name: str, version: str, sha256: str, url: str, into: Path) -> Path:
    """Install a release in a directory of its own below `into`; return its executable. Raises `InstallError`.

    `sha256` of its archive may be empty for a known release.
    """
    core = release(name, version, sha256)
    wanted = core.archive
    place = into / f"{core.name}-{core.version}-{wanted.sha256[:8]}"
    tried = f"trying {core.executable}"
    if place.exists():
        say(tried)
        return try_out(core, place / core.executable)
    file = into / f"{wanted.sha256[:16]}-{wanted.name}"
    with deadline():
        _bring(into, _File(f"{url.rstrip('/')}/v{core.version}/{wanted.name}", wanted.sha256, file))
    with _settled(place) as new:
        unpack(file, wanted.members, new)
        say(tried)
        try_out(core, new / core.executable)
    return place / core.executable


def bring_lists(wanted: Mapping[str, str], url: str, into: Path, kept: str = "") -> Path:
    """Return a directory below `into` with these geo files, by their digests, and the others of the directory `kept`.

    For an empty digest, it reads `NAME.sha256sum` beside the file on the server. Raises `InstallError`.
    """
    with deadline():
        digests = {name: _digest_of(url, name, named) for name, named in wanted.items()}
        present = sorted(Path(kept).iterdir()) if kept and Path(kept).is_dir() else []
        others = [path for path in present if path.name not in digests]
        content = digests | {path.name: digest_of(path) for path in others}
        marks = sorted(f"{name} {digest}" for name, digest in content.items())
        place = into / hashlib.sha256("\n".join(marks).encode()).hexdigest()[:16]
        if place.exists():
            return place
        files = {name: into / f"{digest[:16]}-{name}" for name, digest in digests.items()}
        _bring(into, *(_File(f"{url.rstrip('/')}/{name}", digests[name], file) for name, file in files.items()))
    with _settled(place) as new:
        for name, file in files.items():
            file.replace(new / name)
        for path in others:
            shutil.copy2(path, new / path.name)
    return place


def _digest_of(url: str, name: str, named: str) -> str:
    if not _LIST.fullmatch(name):
        raise InstallError(f"{name!r} is not a name of a geo file such as geoip.dat")
    if named:
        _require_digest(named, f"{name}: ")
        return named
    beside = f"{url.rstrip('/')}/{name}.sha256sum"
    found = DIGEST.match(text(beside))
    if found is None:
        raise InstallError(f"{beside} does not begin with a SHA-256: {name} cannot be verified")
    return found[0]


def _bring(into: Path, *files: _File) -> None:
    """Download these files below `into`, and remove what other tries left there.

    An incomplete download stays for the next try, unless something else than the network failed.
    """
    _clear(into, *files)
    try:
        for file in files:
            _bring_one(file)
    except Unavailable:
        raise
    except (InstallError, OSError):
        _clear(into)
        raise


def _bring_one(file: _File) -> None:
    """Download a file unless an earlier try has, and print the progress now and then."""
    if file.path.exists() and digest_of(file.path) == file.sha256:
        return
    file.path.unlink(missing_ok=True)
    told = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal told
        if (now := time.monotonic()) - told >= TELL or done == total:
            told = now
            say(f"fetched {done} of {total} bytes")

    say(f"fetching {file.url}")
    fetch(file.url, file.sha256, file.path, tell)
    say("verified")


def _clear(into: Path, *kept: _File) -> None:
    """Remove what earlier tries left, except for (parts of) these files."""
    spared = {path for file in kept for path in (file.path, part_of(file.path, file.sha256))}
    for path in into.iterdir():
        if path.name.startswith(NEW):
            shutil.rmtree(path)
        elif path.is_file() and path not in spared:
            path.unlink()


@contextmanager
def _settled(place: Path) -> Iterator[Path]:
    """Fill a new directory, sync it to disk and rename it to `place`: complete or not at all.

    The downloaded files are removed.
    """
    try:
        new = Path(mkdtemp(prefix=NEW, dir=place.parent))
        yield new
        for path in new.iterdir():
            _sync(path)
        new.chmod(0o700)
        _sync(new)
        new.rename(place)
    finally:
        # Verified files that failed would fail again at the next try, and a full disk would stay full.
        _clear(place.parent)
    _sync(place.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


KINDS: Mapping[str, Callable[..., Path]] = {
    "core": bring_core,
    "lists": bring_lists,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: the last line on stdout is the path of the result. Returns the exit code."""
    kind, words = sys.argv[1:] if argv is None else argv
    parameters = json.loads(words)
    into = Path(parameters.pop("into"))
    try:
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
        result = KINDS[kind](into=into, **parameters)
    except InstallError as error:
        say(str(error))
        return 1
    except OSError as error:
        say(f"cannot write below {into}: {error}")
        return 1
    sys.stdout.write(f"{result}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
