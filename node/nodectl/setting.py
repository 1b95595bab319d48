"""One setting in a file of settings: written beside what stands there."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from node import env_file
from node.secret_file import write_secret


def write(file: Path, name: str, value: str) -> None:
    """Have the file say this. It keeps its owner and its mode. Raises `OSError`, `ValueError`."""
    old, mode = _read(file)
    write_secret(file, changed(old, name, value).encode(), mode)


def _read(file: Path) -> tuple[str, int]:
    """The text and the mode. Root may write in a directory of others: no link of theirs leads to another file."""
    if file.is_symlink():
        raise ValueError(f"{file} is a link to {file.readlink()}: set it there; --print says what")
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return "", 0o600
    with os.fdopen(descriptor) as opened:
        return opened.read(), stat.S_IMODE(os.fstat(descriptor).st_mode)


def changed(text: str, name: str, value: str) -> str:
    """The text with the setting: where it was said before, for the last time, else at the end."""
    line, lines = f"{name}={_quoted(value)}", text.splitlines()
    said = [number for number, each in enumerate(lines) if name in env_file.read(each)]
    if said:
        lines[said[-1]] = line
    else:
        lines.append(line)
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    if re.search(r"[\r\n\"']", value):
        raise ValueError(f"{value!r} cannot stand in a file of settings")
    return f'"{value}"' if re.search(r"[\s#]", value) else value
