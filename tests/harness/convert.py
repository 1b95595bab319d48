"""Convert a controller's configuration to the core's protobuf with `xray convert pb`, as the driver does."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

from scripts.staging.core import ENVIRONMENT, find_xray


@functools.cache
def convert(text: str) -> bytes:
    """The core.Config of a JSON text. Raises `AssertionError` with the core's output if it refuses."""
    done, output = _convert(text, os.devnull)
    assert done.returncode == 0, done.stdout.decode()
    return output


def refuses(text: str, assets: Path | str = os.devnull) -> bool:
    """Whether the core refuses to convert a text; `assets` is the directory of geoip.dat and geosite.dat."""
    return _convert(text, str(assets))[0].returncode != 0


def accepts(message: bytes) -> str:
    """Let the core check a converted configuration without running it. Returns its output if it refuses, else ""."""
    argv = [str(find_xray()), "run", "-test", "-format", "protobuf", "-c", "stdin:"]
    done = subprocess.run(argv, input=message, capture_output=True, env=ENVIRONMENT, check=False)
    return "" if done.returncode == 0 else done.stdout.decode() or "no output"


def _convert(text: str, assets: str) -> tuple[subprocess.CompletedProcess[bytes], bytes]:
    sink = os.memfd_create("converted")
    try:
        done = subprocess.run(
            [find_xray(), "convert", "pb", "-outpbfile", f"/dev/fd/{sink}", "stdin:"],
            input=text.encode(),
            capture_output=True,
            env={**ENVIRONMENT, "XRAY_LOCATION_ASSET": assets},
            pass_fds=(sink,),
            check=False,
        )
        return done, os.pread(sink, os.fstat(sink).st_size, 0)
    finally:
        os.close(sink)
