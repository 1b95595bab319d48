"""The version of this clone, from its history: `python -m scripts.packaging.version [FILE]` writes it for `node`.

| State of the clone | Version |
|---|---|
| HEAD has the tag v1.0.0, and no file is changed | 1.0.0 |
| N commits after the newest such tag | 1.1.0.devN+gHASH |
| N commits, and no such tag yet: the release of `NUMBER` is still to come | 1.0.0.devN+gHASH |
| a file is changed | as between releases, with .dirty at the end |
| no history: an archive, a copy without .git, no git | what node/_version.py has; else `NUMBER` |

It needs only the standard library: the build backend and `scripts/install` run it before anything is installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The file with the version, which git ignores, and the one with the number of the newest release.
WRITTEN, NUMBERED = Path("node", "_version.py"), Path("node", "__init__.py")

_NUMBER = re.compile(r'^NUMBER = "(\d+\.\d+\.\d+)"$', re.MULTILINE)
# A tag with other characters, or with four numbers, is not that of a release.
_RELEASES = ("--match=v*.*.*", "--exclude=*[!v0-9.]*", "--exclude=*.*.*.*")
_DESCRIBED = re.compile(r"(?:v(\d+)\.(\d+)\.(\d+)-(\d+)-g)?([0-9a-f]+)(-dirty)?")


def version(number: str, described: str, commits: int) -> str:
    """The version of a commit, from `NUMBER`, the words of `git describe`, and the commits that lead to it."""
    found = _DESCRIBED.fullmatch(described)
    if found is None:
        raise ValueError(f"git describe printed {described!r}, which has no tag of a release and no commit")
    major, minor, patch, since, commit, dirty = found.groups()
    if since == "0" and not dirty:
        return f"{major}.{minor}.{patch}"
    following = f"{major}.{int(minor) + 1}.0" if since else number
    return f"{following}.dev{since or commits}+g{commit}{'.dirty' if dirty else ''}"


def number(root: Path) -> str:
    """`NUMBER` in node/__init__.py."""
    [found] = _NUMBER.findall((root / NUMBERED).read_text())
    return str(found)


def of_history(root: Path) -> str | None:
    """The version of this clone; None without a history."""
    # Below another project's clone, a copy of ours has no .git of its own.
    if not (root / ".git").exists():
        return None
    described = _git(root, "describe", "--tags", "--long", "--always", "--dirty", "--abbrev=12", *_RELEASES)
    if described is None:
        return None
    return version(number(root), described, int(_git(root, "rev-list", "--count", "HEAD") or 0))


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
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    write(file=Path(sys.argv[1]) if len(sys.argv) > 1 else None)
