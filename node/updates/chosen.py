"""What updates have chosen, on disk: the executables of cores, the lists, and what was chosen before each."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from node.contract.choices import Choices
from node.logs import Logger
from node.secret_file import write_secret
from node.updates.jobs import Refused


@dataclass(frozen=True)
class Chosen:
    """A path, empty for what the node finds by itself, and the one before it, None if there is no way back.

    `configured` is what the operator had set then: another setting of theirs goes before it.
    """

    path: str
    before: str | None = None
    configured: str = ""


NOTHING = Chosen("")


@dataclass
class Record:
    """In a file: by the name of a core, or `LISTS`; and when lists were last looked for, in Unix time."""

    file: Path
    by_name: dict[str, Chosen] = field(default_factory=dict)
    looked: float = 0.0
    # Whether this is all that was chosen, as far as is known.
    whole: bool = True

    log = Logger()

    def load(self) -> None:
        """Blocking, brief. What cannot be read is as if nothing was chosen."""
        try:
            said: Any = json.loads(self.file.read_text())
            self.by_name = {name: Chosen(**chosen) for name, chosen in said["chosen"].items()}
            self.looked = float(said["looked"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self.by_name, self.whole = {}, False
            self.log.error("what updates chose cannot be read, and is left: {error}", error=str(error))

    def save(self) -> None:
        """Blocking. Raises `Refused`."""
        said = {"chosen": {name: asdict(chosen) for name, chosen in self.by_name.items()}, "looked": self.looked}
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_secret(self.file, json.dumps(said).encode())
        except OSError as error:
            raise Refused(f"what updates chose cannot be written to {self.file}: {error.strerror or error}") from error
        self.whole = True

    def check(self) -> None:
        """Whether the disk takes it, as it is. One that could not be read is left. Blocking. Raises `Refused`."""
        if self.whole:
            self.save()

    def choices(self, configured: Mapping[str, str]) -> Choices:
        """What holds of it: what is there, and was chosen under the settings of now. `configured` by the same names."""
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


# The name of the lists in a record.
LISTS = "geo"
