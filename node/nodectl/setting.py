"""Write one setting into a file of settings, and keep the others."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from node.base import env_file
from node.base.secret_file import write_secret


def write(file: Path, name: str, value: str) -> None:
    """Set one setting in a file, which keeps its owner and mode. Raises `OSError`, `ValueError`."""
    old, mode = _read(file)
    write_secret(file, changed(old, name, value).encode(), mode)


def _read(file: Path) -> tuple[str, int]:
    """The text and the mode. Follows no link: root may run this in another user's directory."""
    if file.is_symlink():
        raise ValueError(f"{file} is a link to {file.readlink()}: write the setting there; --print prints it")
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return "", 0o600
    with os.fdopen(descriptor) as opened:
        return opened.read(), stat.S_IMODE(os.fstat(descriptor).st_mode)


def changed(text: str, name: str, value: str) -> str:
    """The text with the setting: in place of its last occurrence, else at the end."""
    line, lines = f"{name}={_quoted(value)}", text.splitlines()
    found = [number for number, each in enumerate(lines) if name in env_file.read(each)]
    if found:
        lines[found[-1]] = line
    else:
        lines.append(line)
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    if re.search(r"[\r\n\"']", value):
        raise ValueError(f"{value!r} cannot be written to a file of settings: it has quotes or line breaks")
    return f'"{value}"' if re.search(r"[\s#]", value) else value
