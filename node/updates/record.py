"""The file of what updates have chosen: executables of cores, geo files, and what was chosen before each."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from node.base.errors import NodeError
from node.base.logs import Logger
from node.base.secret_file import write_secret
from node.contract.driver import Choices

# The name of the geo files in the record.
LISTS = "geo"


class Refused(NodeError):
    """An update failed, and what ran before goes on, unless the text says otherwise. The text has the reason."""


@dataclass(frozen=True)
class Chosen:
    """A chosen path, empty for what the node finds without updates, and the one before it, None if there is none.

    `configured`: the operator's setting at that time. If they set something else, that takes precedence.
    """

    path: str
    before: str | None = None
    configured: str = ""


@dataclass
class Record:
    """The choices by the name of a core, or `LISTS`, and when the node last checked for geo files (Unix time).

    `configured` has the operator's setting for each. `choices` are those in use.
    """

    file: Path
    configured: Mapping[str, str] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)
    by_name: dict[str, Chosen] = field(default_factory=dict)
    looked: float = 0.0
    # False if the file could not be read: then releases on disk that are not in `by_name` may be chosen.
    whole: bool = True

    log = Logger()

    def load(self) -> None:
        """Read the file, also again, and use the choices that are on disk and were made under the present settings.

        If the file cannot be read, nothing is chosen. Blocking, brief.
        """
        self.by_name, self.looked, self.whole = {}, 0.0, True
        self.choices.executables.clear()
        self.choices.lists = None
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
        for name, chosen in self.by_name.items():
            there = Path(chosen.path).is_dir() if name == LISTS else os.access(chosen.path, os.X_OK)
            if chosen.path and there and chosen.configured == self.configured.get(name, ""):
                self.use(name, Path(chosen.path))

    def in_use(self, name: str) -> Path | None:
        """Return the choice that is in use; None for what the node finds without updates."""
        return self.choices.lists if name == LISTS else self.choices.executables.get(name)

    def use(self, name: str, path: Path | None) -> None:
        """Use a choice, without keeping it."""
        if name == LISTS:
            self.choices.lists = path
        elif path is None:
            self.choices.executables.pop(name, None)
        else:
            self.choices.executables[name] = path

    def before(self, name: str) -> str | None:
        """Return the path that was chosen before, empty for what the node finds itself; None if no update was made."""
        chosen = self.by_name.get(name)
        return chosen.before if chosen else None

    def keep(self, name: str, path: Path | None, before: Path | None) -> None:
        """Keep a choice for the next start, and write the file. Blocking. Raises `Refused`."""
        self.by_name[name] = Chosen(str(path or ""), str(before or ""), self.configured.get(name, ""))
        self.save()

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

    def clear(self, *directories: Path) -> None:
        """Remove the versions in these directories that are neither chosen nor the one before. Blocking."""
        if not self.whole:
            return
        paths = [Path(path) for chosen in self.by_name.values() for path in (chosen.path, chosen.before) if path]
        # A core is a file in the directory of its version.
        spared = {*paths, *(path.parent for path in paths)}
        for place in (place for directory in directories for place in directory.glob("*")):
            if place.is_dir() and place not in spared:
                shutil.rmtree(place, ignore_errors=True)
