"""Which builds of Python count as optimised."""

from __future__ import annotations

import subprocess
import sys

import pytest

from node.doctor import interpreter


@pytest.mark.parametrize(
    ("arguments", "shared", "expected"),
    [
        ("'--enable-optimizations' '--with-lto'", False, True),
        ("'--with-lto=full' '--enable-shared'", True, True),
        ("'--prefix=/usr' '--enable-shared'", False, True),
        ("'--prefix=/opt' '--enable-shared'", True, False),
        ("'--prefix=/opt' 'CFLAGS=-g'", False, False),
        ("", False, False),
    ],
)
def test_builds(arguments: str, shared: bool, expected: bool) -> None:
    """By configure's arguments, and for Debian's by the interpreter that is apart from the library."""
    assert interpreter.optimised(arguments, shared) == expected


def test_as_a_program() -> None:
    """Its status is the answer, with nothing but the standard library."""
    done = subprocess.run([sys.executable, "-I", interpreter.__file__], check=False, capture_output=True)
    assert (done.returncode == 0, done.stdout, done.stderr) == (interpreter.is_optimised(), b"", b"")
