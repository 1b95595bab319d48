"""Makes all files of a release from a clean clone, without a network: see docs/releases.md. `scripts/release` runs it.

The same commit gives the same bytes wherever Python and setuptools are the same: times are that of the commit.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from scripts.packaging import version as versions
from scripts.packaging.bill import bill
from scripts.packaging.client import lay_out
from scripts.packaging.version import NUMBERED, ROOT

SUMS, NAMESPACE = "SHA256SUMS", "txnode"
CHANGELOG, CHANGES = Path("CHANGELOG.md"), Path("changes")
# What deploy/Containerfile reads beside a wheel.
RECIPE = (
    "deploy/Containerfile",
    "deploy/compose.yaml",
    "deploy/requirements.txt",
    "deploy/requirements-sbom.txt",
    "deploy/sbom.py",
    "deploy/start",
    "scripts/cores.py",
)
# Runs one hook of a build backend (PEP 517), which prints much and returns the name of the file.
_HOOK = """
import contextlib, importlib, sys
backend, hook, into = sys.argv[1:]
with contextlib.redirect_stdout(sys.stderr):
    made = getattr(importlib.import_module(backend), hook)(into)
print(made)
"""


class Refused(Exception):
    """There is no release; the text says why, and what to do."""


class Packed(NamedTuple):
    """A file of an archive."""

    name: str
    content: bytes
    executable: bool


def parsed(version: str) -> tuple[int, ...]:
    """The three numbers of a version. Raises `Refused` for any other word."""
    found = versions.released(f"v{version}")
    if found is None:
        raise Refused(f"{version!r} is not a version of three numbers, as 1.2.3 (https://semver.org)")
    return found


def archive(files: Iterable[Packed], seconds: int) -> bytes:
    """A .tar.gz of these files, which depends on nothing else; all times in it are `seconds`."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", fileobj=packed, mtime=seconds) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for file in sorted(files):
            info = tarfile.TarInfo(file.name)
            info.size, info.mtime, info.mode = len(file.content), seconds, 0o755 if file.executable else 0o644
            tar.addfile(info, io.BytesIO(file.content))
    return packed.getvalue()


def _in_archive(file: Path) -> Iterator[Packed]:
    with tarfile.open(file) as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is not None:
                yield Packed(member.name, content.read(), bool(member.mode & 0o100))


@dataclass(frozen=True)
class Clone:
    """A clone of the project."""

    root: Path

    def git(self, *arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=self.root, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    @property
    def seconds(self) -> int:
        """The time of the commit."""
        return int(self.git("log", "-1", "--format=%ct"))

    @property
    def changelog(self) -> str:
        return (self.root / CHANGELOG).read_text()

    def require_new(self, version: str) -> None:
        """Raises `Refused` unless the version is newer than each release that led to this commit."""
        tags = self.git("tag", "--list", "v*", "--merged", "HEAD", "--no-contains", "HEAD").splitlines()
        before = [found for tag in tags if (found := versions.released(tag))]
        if before and parsed(version) <= max(before):
            raise Refused(f"{version} is not newer than {'.'.join(map(str, max(before)))}, which is released")
        tag = ("tag", "--list", f"v{version}")
        if self.git(*tag) and not self.git(*tag, "--points-at", "HEAD"):
            raise Refused(f"v{version} is the tag of another commit: check that out, or take another version")

    def require_clean(self) -> None:
        if changed := self.git("status", "--porcelain"):
            raise Refused(f"Commit, ignore or remove these files first:\n{changed}")

    def require_prepared(self, version: str) -> None:
        """Raises `Refused` unless number and changelog are those of this version."""
        fragments = {path.name for path in (self.root / CHANGES).iterdir()} - {"README.md"}
        if (
            fragments
            or versions.number(self.root) != version
            or not re.search(rf"^## \[{re.escape(version)}\] - \d", self.changelog, re.MULTILINE)
        ):
            raise Refused(f"This commit is not {version}: run scripts/release --prepare {version}, then commit")

    def export(self, into: Path) -> None:
        """Copy the files of the commit."""
        into.mkdir()
        packed = into.with_suffix(".tar")
        # Settings of this machine, such as those for the ends of lines, change nothing.
        own = ("core.autocrlf=false", "core.eol=lf", "core.attributesFile=/dev/null", "tar.umask=0022")
        settings = [word for setting in own for word in ("-c", setting)]
        self.git(*settings, "archive", f"--output={packed}", "HEAD")
        subprocess.run(["tar", "-x", "-f", packed, "-C", into], check=True)
        versions.write(into)


@dataclass(frozen=True)
class Maker:
    """Makes files in `out` from the exported commit at `source`; `work` is for files in between."""

    source: Path
    work: Path
    out: Path
    version: str
    seconds: int

    def all(self) -> None:
        wheel = self._distribution(self.source)
        client = self.work / "txnode-client"
        lay_out(self.source, client)
        self._distribution(client)
        lock = (self.source / "deploy" / "requirements.txt").read_text()
        (self.out / f"txnode-{self.version}.cdx.json").write_text(
            bill(self.version, wheel.read_bytes(), lock, self.seconds)
        )
        recipe = f"txnode-image-{self.version}"
        files = [self._packed(recipe, self.source / name, name) for name in RECIPE]
        files.append(self._packed(recipe, wheel, f"wheel/{wheel.name}"))
        (self.out / f"{recipe}.tar.gz").write_bytes(archive(files, self.seconds))
        shutil.copy(self.source / "scripts" / "install", self.out / "txnode-install")
        for kind in ("deb", "rpm"):
            if kind == "rpm" and not shutil.which("rpmbuild"):
                print("No .rpm: rpmbuild is not here (Debian: apt-get install rpm, Fedora: dnf install rpm-build)")
            else:
                self._run(self.source, "-m", f"scripts.packaging.{kind}", str(wheel), self.version, str(self.out))

    def _packed(self, top: str, file: Path, name: str) -> Packed:
        return Packed(f"{top}/{name}", file.read_bytes(), os.access(file, os.X_OK))

    def _distribution(self, project: Path) -> Path:
        """Build the project's sdist, and its wheel from that. Returns the wheel."""
        between = self.work / f"{project.name}-between"
        between.mkdir()
        made = between / self._hook(project, "build_sdist", between)
        sdist = self.out / made.name
        sdist.write_bytes(archive(_in_archive(made), self.seconds))
        subprocess.run(["tar", "-x", "-f", sdist, "-C", between], check=True)
        return self.out / self._hook(between / sdist.name.removesuffix(".tar.gz"), "build_wheel", self.out)

    def _hook(self, project: Path, hook: str, into: Path) -> str:
        backend = tomllib.loads((project / "pyproject.toml").read_text())["build-system"]["build-backend"]
        return self._run(project, "-c", _HOOK, backend, hook, str(into))

    def _run(self, directory: Path, *arguments: str) -> str:
        """Run Python with these arguments and a bare environment. Returns its output. Raises `Refused`."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.work),
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "SOURCE_DATE_EPOCH": str(self.seconds),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Refused(f"{done.stderr}\nA build failed: the lines above say why.")
        return done.stdout.strip()


def release(clone: Clone, version: str, out: Path, key: Path | None) -> None:
    """Make the files of this version. Raises `Refused`."""
    parsed(version)
    clone.require_clean()
    clone.require_prepared(version)
    clone.require_new(version)
    if out.exists() and any(out.iterdir()):
        raise Refused(f"{out} has files already: remove them, or name another directory with --out")
    os.umask(0o022)
    with TemporaryDirectory() as directory:
        work = Path(directory)
        clone.export(work / "txnode")
        made = work / "made"
        made.mkdir()
        Maker(work / "txnode", work, made, version, clone.seconds).all()
        files = sorted(made.iterdir())
        sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
        (made / SUMS).write_text("".join(sums))
        if key:
            for file in [*files, made / SUMS]:
                sign(file, key)
        shutil.copytree(made, out, dirs_exist_ok=True)


def sign(file: Path, key: Path) -> None:
    """Write FILE.sig with an SSH key, or with the agent's key if `key` is its public half. Raises `Refused`."""
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", NAMESPACE, "-f", str(key), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"{done.stderr}\n{file.name} cannot be signed with {key}: the lines above say why.")


def prepare(clone: Clone, version: str) -> None:
    """Set the number, and make the fragments a section of the changelog. Raises `Refused`."""
    clone.require_clean()
    clone.require_new(version)
    now = versions.number(clone.root)
    if parsed(version) < parsed(now):
        raise Refused(f"{version} is older than {now}, the number in {NUMBERED}")
    command = [sys.executable, "-m", "towncrier", "build", "--yes", "--version", version]
    if subprocess.run(command, cwd=clone.root, check=False).returncode:
        raise Refused(
            "The changelog cannot be made: the lines above say why; changes/README.md says what a fragment is."
        )
    # The text that was written by hand before the first release goes below that of the fragments.
    text = clone.changelog.replace(f"## [{version}] - Unreleased\n\n", "")
    (clone.root / CHANGELOG).write_text(text)
    hall = clone.root / NUMBERED
    hall.write_text(hall.read_text().replace(f'NUMBER = "{now}"', f'NUMBER = "{version}"'))


def main() -> None:
    parser = argparse.ArgumentParser(
        "scripts/release", description="Make all files of a release: see docs/releases.md."
    )
    parser.add_argument("version", help="three numbers, as 1.2.3")
    parser.add_argument("--prepare", action="store_true", help="set the number and write the changelog; then commit")
    parser.add_argument("--out", type=Path, help="the directory for the files [default: dist/VERSION]")
    parser.add_argument("--key", type=Path, help="an SSH key to sign them with; its public half, for an agent")
    given = parser.parse_args()
    clone = Clone(ROOT)
    try:
        if given.prepare:
            prepare(clone, given.version)
            print(f'Read the changelog, then: git commit --all --message "Release {given.version}"')
            return
        out = given.out or ROOT / "dist" / given.version
        release(clone, given.version, out, given.key)
        print((out / SUMS).read_text(), end="")
    except Refused as reason:
        raise SystemExit(str(reason))


if __name__ == "__main__":
    main()
