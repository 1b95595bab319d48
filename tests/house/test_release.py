"""`scripts/release` in a clone of its own: what it refuses, what it makes, and that it makes it twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.packaging.release import SUMS, Clone, prepare
from scripts.packaging.version import ROOT

VERSION = "1.7.0"


class Copy(Clone):
    """A repository with the files of this clone, changed ones too."""

    @classmethod
    def at(cls, root: Path) -> Copy:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        root.mkdir()
        here = [file for file in files if file and (ROOT / file).exists()]
        subprocess.run(["cp", "--parents", "-t", root, *here], cwd=ROOT, check=True)
        copy = cls(root)
        copy.git("init", "--quiet")
        copy.commit()
        return copy

    def commit(self) -> None:
        self.git("add", "--all")
        who = ("-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
        self.git(*who, "commit", "--quiet", "--message=A change")

    def release(self, out: Path, *options: str | Path, umask: int = 0o022, zone: str = "UTC") -> str:
        """Run the script; return what it printed. Raises `CalledProcessError`."""
        environment = {"PATH": os.environ["PATH"], "TZ": zone, "TXNODE_VENV": sys.prefix}
        command = [self.root / "scripts" / "release", VERSION, "--out", out, *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, umask=umask)
        return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A release: its clone, its files in `out`, the key that signed them, and what `scripts/release` printed."""
    place = tmp_path_factory.mktemp("release")
    clone = Copy.at(place / "clone")
    prepare(clone, VERSION)
    clone.commit()
    key = place / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    yield SimpleNamespace(clone=clone, out=place / "out", key=key, said=clone.release(place / "out", "--key", key))


@pytest.mark.slow
def test_twice_the_same_bytes(made: SimpleNamespace, tmp_path: Path) -> None:
    """Another directory, umask and time zone, and files with other times, change nothing."""
    again = Copy(tmp_path / "elsewhere")
    shutil.copytree(made.clone.root, again.root, copy_function=shutil.copyfile)
    for script in (again.root / "scripts").iterdir():
        script.chmod(0o755)
    again.git("config", "core.fileMode", "false")
    again.release(tmp_path / "out", umask=0o077, zone="Asia/Tehran")
    assert (tmp_path / "out" / SUMS).read_text() == (made.out / SUMS).read_text()
    assert made.said.endswith((made.out / SUMS).read_text())
    subprocess.run(["sha256sum", "--quiet", "--check", SUMS], cwd=made.out, check=True)
