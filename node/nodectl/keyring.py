"""The file of keys, for the command line: `node.keys` does the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from node import keys
from node.keyfile import SCOPES as _SCOPES
from node.keyfile import BadKeys
from node.nodectl.exits import Unusable

SCOPES = tuple(_SCOPES)


def new(file: Path, name: str, scope: str) -> str:
    """The key that was made. Raises `Unusable`."""
    with _told(file):
        return keys.new(file, name, scope)


def known(file: Path) -> list[dict[str, Any]]:
    """The name and the scope of each. Raises `Unusable`."""
    with _told(file):
        return [{"name": key.name, "scope": key.scope.word} for key in keys.keys(file)]


def revoke(file: Path, name: str) -> None:
    """Raises `Unusable`, also if there is none of this name."""
    with _told(file):
        keys.revoke(file, name)


@contextmanager
def _told(file: Path) -> Iterator[None]:
    try:
        yield
    except BadKeys as error:
        text = str(error)
        raise Unusable(text if str(file) in text else f"{file}: {text}")
    except OSError as error:
        raise Unusable(f"{file} cannot be used: {error}; be the node's user or root")
