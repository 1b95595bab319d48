"""The version of this clone, from its history: `python -m scripts.packaging.version [FILE]` writes it for `node`.

| State of the clone | Version |
|---|---|
| HEAD has the tag v1.0.0, and no file is changed | 1.0.0 |
| N commits after the newest release that led to HEAD | 1.1.0.devN+gHASH |
| N commits, and no release yet: the release of `NUMBER` is still to come | 1.0.0.devN+gHASH |
| a file is changed | as between releases, with .dirty at the end |
| no history: an archive, a copy without .git, no git | what node/_version.py has; else `NUMBER` |

It needs only the standard library: the build backend and `scripts/install` run it before anything is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The file with the version, which git ignores, and the one with the number of the newest release.
WRITTEN, NUMBERED = Path("node", "_version.py"), Path("node", "__init__.py")

_NUMBER = re.compile(r'^NUMBER = "(\d+\.\d+\.\d+)"$', re.MULTILINE)
_RELEASE = re.compile(r"v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)", re.ASCII)


def released(tag: str) -> tuple[int, int, int] | None:
    """The version of a release's tag, as numbers; None for any other tag."""
    found = _RELEASE.fullmatch(tag)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def version(number: str, newest: tuple[int, int, int] | None, since: int, commit: str) -> str:
    """The version of a commit.

    `number`: that of the files. `newest`: the newest release that led here. `since`: the commits since then; all
    of them without one. `commit`: its hash, with `-dirty` at the end if a file is changed.
    """
    commit, dirty, _ = commit.partition("-dirty")
    if newest and not since and not dirty:
        return ".".join(map(str, newest))
    following = f"{newest[0]}.{newest[1] + 1}.0" if newest else number
    return f"{following}.dev{since}+g{commit}{'.dirty' if dirty else ''}"


def number(root: Path) -> str:
    """`NUMBER` in node/__init__.py."""
    [found] = _NUMBER.findall((root / NUMBERED).read_text())
    return str(found)


def of_history(root: Path) -> str | None:
    """The version of this clone; None without a history."""
    # Below another project's clone, a copy of ours has no .git of its own.
    if not (root / ".git").exists():
        return None
    commit = _git(root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    if commit is None:
        return None
    # Not the nearest tag, as `git describe` takes it: after the merge of a patch that may be an older release's.
    tags = {released(tag): tag for tag in (_git(root, "tag", "--merged", "HEAD") or "").splitlines()}
    newest = max(filter(None, tags), default=None)
    since = f"refs/tags/{tags[newest]}..HEAD" if newest else "HEAD"
    return version(number(root), newest, int(_git(root, "rev-list", "--count", since) or 0), commit)


def write(root: Path = ROOT, file: Path | None = None) -> None:
    """Write the version of the clone at `root` into `file`, unless it has it already."""
    file = file or root / WRITTEN
    found = of_history(root)
    if found is None and file.exists():
        return
    text = text_of(found or number(root))
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def text_of(version: str) -> str:
    """The content of node/_version.py."""
    return f'__version__ = "{version}"\n'


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails, or is not there."""
    # For a root who installs from a clone of another user.
    command = ["git", "-C", str(root), "-c", f"safe.directory={root.resolve()}", *arguments]
    # Git's hooks have variables that name a repository, and that need not be ours.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    write(file=Path(sys.argv[1]) if len(sys.argv) > 1 else None)
