"""The project of the distribution `txnode-client`: the modules of `node.client`, and those that they import."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from modulefinder import ModuleFinder
from pathlib import Path

_START = "node.client"
# What stands beside a module: its types, and the messages of which it was made.
_BESIDE = (".pyi", ".proto")


def closure(root: Path) -> tuple[frozenset[Path], frozenset[str]]:
    """The files of the modules that the client imports anywhere, and the names of other projects' packages."""
    # Twisted is not here, but the folder of its plugins is.
    finder = ModuleFinder([str(root)], excludes=["twisted"])
    finder.import_hook(_START)
    files = (getattr(module, "__file__", None) for module in finder.modules.values())
    return frozenset(map(Path, filter(None, files))), frozenset(name.partition(".")[0] for name in finder.badmodules)


def lay_out(source: Path, into: Path) -> None:
    """Make the project in the directory `into` from the clone at `source`."""
    shutil.copytree(source / "scripts" / "packaging" / "client", into)
    shutil.copy(source / "LICENSE", into)
    for file in _files(source):
        place = into / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)


def _files(source: Path) -> Iterator[Path]:
    modules, _ = closure(source)
    for module in modules:
        yield module
        stems = (module.stem, module.stem.removesuffix("_pb2"))
        beside = {module.with_name(stem + ending) for stem in stems for ending in _BESIDE}
        yield from filter(Path.exists, beside)
    yield source / "node" / "py.typed"
