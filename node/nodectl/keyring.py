"""Make, list and revoke keys in the file of keys. `node.keys` does the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from node.keys import manage as keys
from node.keys.keyfile import SCOPES as _SCOPES
from node.keys.keyfile import BadKeys
from node.nodectl.exits import Unusable

SCOPES = tuple(_SCOPES)


def new(file: Path, name: str, scope: str) -> str:
    """Make a key and return it. Raises `Unusable`."""
    with _reporting(file):
        return keys.new(file, name, scope)


def known(file: Path) -> list[dict[str, Any]]:
    """The names and scopes of the keys. Raises `Unusable`."""
    with _reporting(file):
        return [{"name": key.name, "scope": key.scope.word} for key in keys.keys(file)]


def revoke(file: Path, name: str) -> None:
    """Remove a key. Raises `Unusable`, also for an unknown name."""
    with _reporting(file):
        keys.revoke(file, name)


@contextmanager
def _reporting(file: Path) -> Iterator[None]:
    try:
        yield
    except BadKeys as error:
        text = str(error)
        raise Unusable(text if str(file) in text else f"{file}: {text}")
    except OSError as error:
        raise Unusable(f"{file} cannot be used: {error}; run this as the node's user or as root")
