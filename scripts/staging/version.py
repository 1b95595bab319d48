"""A copy of the node's own modules that may be changed while a node runs it: what an upgrade has brought."""

from __future__ import annotations

import shutil
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("node", "drivers", "protos", "twisted")


class Version:
    """Below `root`, which is to be in PYTHONPATH."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "version"
        for package in _PACKAGES:
            shutil.copytree(_ROOT / package, self.root / package)

    def name(self, version: str) -> None:
        """It is this version from now on."""
        (self.root / "node" / "__init__.py").write_text(f'__version__ = "{version}"\n')

    def add(self, module: str, code: str) -> None:
        """At its end this module does something more."""
        with (self.root / module).open("a") as file:
            file.write(f"\n{code}\n")
