"""A copy of the node's modules that a test changes while a node runs it, as an upgrade does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from scripts.packaging.version import WRITTEN, text_of

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("node", "drivers", "protos", "twisted")


class Version:
    """The copy below `root`, which belongs in the node's PYTHONPATH."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "version"
        for package in _PACKAGES:
            shutil.copytree(_ROOT / package, self.root / package)

    def name(self, version: str) -> None:
        """Set the version that the modules report."""
        module = self.root / WRITTEN
        later = module.stat().st_mtime + 1 if module.exists() else 0
        module.write_text(text_of(version))
        # Python takes a module for the one that it has compiled if size and second of the last change are the same.
        os.utime(module, (later, max(later, module.stat().st_mtime)))

    def add(self, module: str, code: str) -> None:
        """Append code to a module."""
        with (self.root / module).open("a") as file:
            file.write(f"\n{code}\n")
