"""Parser of `.env` files, in the form that deployed nodes write. Pure."""

from __future__ import annotations

import re


def read(text: str) -> dict[str, str]:
    """Parse lines of NAME=value. Comments, quotes around a value and `export` before a name are dropped."""
    values = {}
    for line in text.removeprefix("\ufeff").splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and not name.startswith("#"):
            values[name.strip()] = _value(value)
    return values


def _value(text: str) -> str:
    """Parse the text after `=`: a quoted value, or all up to a `#` that follows a space."""
    quoted = re.fullmatch(r"""\s*(['"])(.*?)\1\s*(?:\s#.*)?""", text)
    return quoted[2] if quoted else re.sub(r"\s#.*", "", text).strip()
