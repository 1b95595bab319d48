"""Makes a Debian package of a wheel: `python -m scripts.packaging.deb WHEEL VERSION OUT_DIR`.

It needs no Debian, and no more than the standard library: the archives have no compression, so the same wheel gives the
same bytes everywhere. Times in it are SOURCE_DATE_EPOCH's. The package has the wheel and `scripts/install`, which does
the rest on the server: see docs/install.md.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "deploy" / "packages"
# Where the wheel and the installer are on a server.
PLACE = Path("usr", "lib", "txnode")
# As zip files, which know no earlier time.
EARLIEST = 315_532_800
_PRE_RELEASE = re.compile(r"[-.]?(a|b|rc|dev|alpha|beta)\.?(?=\d|$)")
_CONTROL = """\
Package: txnode
Version: {version}
Architecture: all
Maintainer: The txnode authors <txnode@localhost>
Installed-Size: {size}
Depends: python3 (>= 3.11), python3-venv, ca-certificates
Suggests: openssh-client
Section: net
Priority: optional
Description: node service that runs proxy cores for many users
 It runs Xray or sing-box for a controller, which it serves over REST and gRPC.
 An upgrade disconnects no users.
 .
 The installation gets the Python packages that it needs by pinned digests from
 PyPI, and the cores from their authors; or from directories for servers without
 a network.
"""


class File(NamedTuple):
    """A file of an archive; a link if `mode` is 0, and then `content` is its target."""

    name: str
    content: bytes
    mode: int = 0o644


def package_version(version: str) -> str:
    """The version as dpkg and rpm sort it: what comes before a release begins with a tilde."""
    public, plus, local = version.partition("+")
    return _PRE_RELEASE.sub(r"~\1", public) + plus + local


def package(wheel: Path, version: str, seconds: int) -> bytes:
    """The package. Raises `ValueError` if the wheel has another version."""
    require_version(wheel, version)
    files = sorted(payload(wheel))
    size = sum(-(-len(file.content) // 1024) for file in files)
    sums = [f"{hashlib.md5(file.content).hexdigest()}  {file.name}\n" for file in files if file.mode]
    control = {
        "control": _CONTROL.format(version=package_version(version), size=size),
        "conffiles": "/etc/default/txnode\n",
        "md5sums": "".join(sums),
    }
    own = [File(name, text.encode()) for name, text in control.items()]
    own += [File(name, text.encode(), 0o755) for name, text in scripts(wheel.name).items()]
    members = {
        "debian-binary": b"2.0\n",
        "control.tar": archive(sorted(own), seconds),
        "data.tar": archive(files, seconds),
    }
    return ar(members, seconds)


def require_version(wheel: Path, version: str) -> None:
    """Raises `ValueError` if the wheel has another version."""
    named = wheel.name.split("-")
    if named[:2] != ["txnode", version]:
        raise ValueError(f"{wheel.name} is not the wheel of txnode {version}: give a wheel and its own version")


def payload(wheel: Path) -> list[File]:
    """The files that the package brings."""
    return [
        File(f"{PLACE}/{wheel.name}", wheel.read_bytes()),
        File(f"{PLACE}/txnode-install", (ROOT / "scripts" / "install").read_bytes(), 0o755),
        File(f"{PLACE}/configure", (PARTS / "configure").read_bytes(), 0o755),
        File("etc/default/txnode", (PARTS / "default").read_bytes()),
        File("usr/bin/nodectl", b"/opt/txnode/current/bin/nodectl", 0),
        File("usr/share/doc/txnode/copyright", (ROOT / "LICENSE").read_bytes()),
    ]


def scripts(wheel: str) -> Mapping[str, str]:
    """The scripts that dpkg runs, by name."""
    installer = (ROOT / "scripts" / "install").read_text()
    found = {name: (PARTS / name).read_text() for name in ("postinst", "prerm", "postrm")}
    return {name: text.replace("@WHEEL@", wheel).replace("@INSTALLER@\n", installer) for name, text in found.items()}


def archive(files: Sequence[File], seconds: int) -> bytes:
    """A tar archive that belongs to root and has only what is given, with the directories above each file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for directory in _above(files):
            tar.addfile(_info(f"./{directory}/" if directory else "./", seconds, tarfile.DIRTYPE, 0o755))
        for file in files:
            if file.mode:
                info = _info(f"./{file.name}", seconds, tarfile.REGTYPE, file.mode)
                info.size = len(file.content)
            else:
                info = _info(f"./{file.name}", seconds, tarfile.SYMTYPE, 0o777)
                info.linkname = file.content.decode()
            tar.addfile(info, io.BytesIO(file.content) if file.mode else None)
    return packed.getvalue()


def _above(files: Iterable[File]) -> list[str]:
    """All directories above these files, each behind the one above it; "" is the root."""
    found = {str(above) for file in files for above in Path(file.name).parents}
    return sorted("" if name == "." else name for name in found)


def _info(name: str, seconds: int, kind: bytes, mode: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.mtime, info.uname, info.gname = kind, mode, seconds, "root", "root"
    return info


def ar(members: Mapping[str, bytes], seconds: int) -> bytes:
    """The archive around it all: deb(5)."""
    packed = b"!<arch>\n"
    for name, content in members.items():
        packed += f"{name:<16}{seconds:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        packed += content + b"\n" * (len(content) % 2)
    return packed


def write(wheel: Path, version: str, out: Path, seconds: int) -> Path:
    """Write the package into `out`. Raises as `package`."""
    file = out / f"txnode_{package_version(version)}_all.deb"
    file.write_bytes(package(wheel, version, seconds))
    return file


def run(kind: str, make: Callable[[Path, str, Path, int], Path], arguments: Sequence[str]) -> None:
    """The command of a kind of package: it makes the package, and prints its path."""
    if len(arguments) != 3:
        raise SystemExit(f"Usage: python -m scripts.packaging.{kind} WHEEL VERSION OUT_DIR")
    wheel, version, out = arguments
    try:
        print(make(Path(wheel), version, Path(out), int(os.environ.get("SOURCE_DATE_EPOCH", EARLIEST))))
    except (ValueError, subprocess.CalledProcessError) as error:
        raise SystemExit(str(error))


if __name__ == "__main__":
    run("deb", write, sys.argv[1:])
