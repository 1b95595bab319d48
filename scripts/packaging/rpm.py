"""Makes an RPM of a wheel: `python -m scripts.packaging.rpm WHEEL VERSION OUT_DIR`.

It needs rpmbuild. The package has the files of the Debian package (`scripts/packaging/deb.py`), and
`deploy/packages/txnode.spec` says the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.packaging.deb import PARTS, File, package_version, payload, require_version, run


def package(wheel: Path, version: str, out: Path, seconds: int) -> Path:
    """Make the package in `out`. Raises `ValueError` if the wheel has another version, `OSError` without rpmbuild."""
    require_version(wheel, version)
    with TemporaryDirectory() as directory:
        work = Path(directory)
        lay_out(payload(wheel), work / "payload")
        macros = {
            "_topdir": work,
            "_tmppath": work,
            "_rpmdir": work / "made",
            "payload": work / "payload",
            "package_version": package_version(version),
            "wheel": wheel.name,
        }
        defined = [word for name, value in macros.items() for word in ("--define", f"{name} {value}")]
        command = ["rpmbuild", "--quiet", "-bb", *defined, str(PARTS / "txnode.spec")]
        subprocess.run(command, env={**os.environ, "SOURCE_DATE_EPOCH": str(seconds)}, check=True)
        [made] = (work / "made").rglob("*.rpm")
        return Path(made.replace(out / made.name))


def lay_out(files: Iterable[File], into: Path) -> None:
    for file in files:
        path = into / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.mode:
            path.write_bytes(file.content)
            path.chmod(file.mode)
        else:
            path.symlink_to(file.content.decode())


def main(arguments: Sequence[str]) -> None:
    try:
        run("rpm", package, arguments)
    except FileNotFoundError as error:
        raise SystemExit(f"{error}: rpmbuild is in the packages rpm (Debian) and rpm-build (Fedora)")


if __name__ == "__main__":
    main(sys.argv[1:])
