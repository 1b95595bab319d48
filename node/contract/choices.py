"""What the node was told to use in the place of what it finds: executables of cores, lists of addresses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Choices:
    """`executables` by the names of cores, `lists` is a directory. What plans are made from, from the next one on."""

    executables: dict[str, Path] = field(default_factory=dict)
    lists: Path | None = None
