"""The file of what updates have chosen: executables of cores, geo files, and what was chosen before each."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from node.base.logs import Logger
from node.base.secret_file import write_secret
from node.contract.choices import Choices
from node.updates.jobs import Refused


@dataclass(frozen=True)
class Chosen:
    """A chosen path, empty for what the node finds without updates, and the one before it, None if there is none.

    `configured`: the operator's setting at that time. If they set something else, that takes precedence.
    """

    path: str
    before: str | None = None
    configured: str = ""


NOTHING = Chosen("")


@dataclass
class Record:
    """The choices by the name of a core, or `LISTS`, and when the node last checked for geo files (Unix time)."""

    file: Path
    by_name: dict[str, Chosen] = field(default_factory=dict)
    looked: float = 0.0
    # False if the file could not be read: then releases on disk that are not in `by_name` may be chosen.
    whole: bool = True

    log = Logger()

    def load(self) -> None:
        """Read the file, also again. If that fails, nothing is chosen. Blocking, brief."""
        self.by_name, self.looked, self.whole = {}, 0.0, True
        try:
            found: Any = json.loads(self.file.read_text())
            self.by_name = {name: Chosen(**chosen) for name, chosen in found["chosen"].items()}
            self.looked = float(found["looked"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self.by_name, self.whole = {}, False
            self.log.error(
                "{file} cannot be read, the node ignores which cores and geo files updates chose: {error}",
                file=self.file,
                error=str(error),
            )

    def save(self) -> None:
        """Write the file. Blocking. Raises `Refused`."""
        content = {"chosen": {name: asdict(chosen) for name, chosen in self.by_name.items()}, "looked": self.looked}
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_secret(self.file, json.dumps(content).encode())
        except OSError as error:
            raise Refused(f"the chosen version cannot be written to {self.file}: {error.strerror or error}") from error
        self.whole = True

    def check(self) -> None:
        """Rewrite the file to see that the disk works, unless it could not be read. Blocking. Raises `Refused`."""
        if self.whole:
            self.save()

    def choices(self, configured: Mapping[str, str]) -> Choices:
        """Return the choices that exist on disk and were made under the present settings, `configured`."""
        found = Choices()
        for name, chosen in self.by_name.items():
            path = Path(chosen.path)
            if not chosen.path or chosen.configured != configured.get(name, ""):
                continue
            if name == LISTS and path.is_dir():
                found.lists = path
            elif name != LISTS and os.access(path, os.X_OK):
                found.executables[name] = path
        return found


# The name of the geo files in a record.
LISTS = "geo"
