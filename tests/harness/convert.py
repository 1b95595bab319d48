"""A controller's text as the real core's own message: `xray convert pb`, as the driver has it done."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

from scripts.staging.core import ENVIRONMENT, find_xray


@functools.cache
def convert(text: str) -> bytes:
    """The core.Config that the core makes of a text. Raises `AssertionError` with its words if it refuses."""
    done, output = _convert(text, os.devnull)
    assert done.returncode == 0, done.stdout.decode()
    return output


def refuses(text: str, assets: Path | str = os.devnull) -> bool:
    """Whether the core refuses to convert a text, where geoip.dat and geosite.dat are looked for in `assets`."""
    return _convert(text, str(assets))[0].returncode != 0


def accepts(message: bytes) -> str:
    """Has the core build a whole configuration without running it: what it says if it refuses, else nothing."""
    argv = [str(find_xray()), "run", "-test", "-format", "protobuf", "-c", "stdin:"]
    done = subprocess.run(argv, input=message, capture_output=True, env=ENVIRONMENT, check=False)
    return "" if done.returncode == 0 else done.stdout.decode() or "it said nothing"


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
