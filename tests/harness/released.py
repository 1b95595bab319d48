"""A repository with the files of this clone, and a release made in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.packaging.release import Clone, prepare
from scripts.packaging.version import ROOT

VERSION = "1.7.0"


class Copy(Clone):
    """A clone that a test may change and commit to."""

    @classmethod
    def of_files(cls, root: Path, *files: str) -> Copy:
        """A repository with one commit of these files of this clone."""
        root.mkdir()
        subprocess.run(["cp", "--parents", "-r", "-t", root, *files], cwd=ROOT, check=True)
        copy = cls(root)
        copy.git("init", "--quiet")
        copy.commit()
        return copy

    @classmethod
    def of_all(cls, root: Path) -> Copy:
        """A repository with all files of this clone, changed ones too."""
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        return cls.of_files(root, *(file for file in files if file and (ROOT / file).exists()))

    def commit(self) -> None:
        self.git("add", "--all")
        who = ("-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
        self.git(*who, "commit", "--quiet", "--message=A change")

    def prepare(self) -> None:
        """Make the next commit that of the release."""
        prepare(self, VERSION)
        self.commit()

    def release(self, out: Path, *options: str | Path, umask: int = 0o022, zone: str = "UTC") -> str:
        """Run `scripts/release` with this environment's packages. Returns its output."""
        environment = {"PATH": os.environ["PATH"], "TZ": zone, "TXNODE_VENV": sys.prefix}
        command = [self.root / "scripts" / "release", VERSION, "--out", out, *options]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, umask=umask)
        return done.stdout
