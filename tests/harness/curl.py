"""A stand-in for curl, the only other program that the examples use, for machines without it."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

_CURL = """
import argparse, ssl, sys, urllib.request
parser = argparse.ArgumentParser()
parser.add_argument("-sS", action="store_true")
parser.add_argument("--cacert")
parser.add_argument("-H", type=lambda header: header.split(": "))
parser.add_argument("url")
given = parser.parse_args()
request = urllib.request.Request(given.url, headers=dict([given.H]))
context = ssl.create_default_context(cafile=given.cacert)
sys.stdout.buffer.write(urllib.request.urlopen(request, context=context).read())
"""


def programs_with_curl(directory: Path) -> Path:
    """A directory for PATH, which contains a curl if the machine has none."""
    directory.mkdir(exist_ok=True)
    if shutil.which("curl") is None:
        curl = directory / "curl"
        curl.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-c", _CURL])} "$@"\n')
        curl.chmod(0o755)
    return directory
