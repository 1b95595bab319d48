"""Files that updates have installed in place of the default ones: core executables, geo lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Choices:
    """Executables by core name, and the directory of geo lists. A change applies to plans made from then on."""

    executables: dict[str, Path] = field(default_factory=dict)
    lists: Path | None = None
