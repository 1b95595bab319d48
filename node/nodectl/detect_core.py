"""Detect which core a configuration is for, by the keys in its inbounds and outbounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from node.nodectl.output import Unusable
from protos import service_pb2 as pb

# By the names on the command line.
CORES = {"xray": pb.XRAY, "sing-box": pb.SING_BOX}
# The core that reads geoip.dat and geosite.dat.
WITH_GEO = "xray"
# The key that names the protocol in inbounds and outbounds of each core.
_KEYS = {"protocol": pb.XRAY, "type": pb.SING_BOX}


def read(path: Path) -> str:
    """Read a configuration from a file, or for - from standard input. Raises `Unusable`."""
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"{path} cannot be read: {error}")


def detect(config: str) -> pb.BackendType:
    """The core that a configuration is for. Raises `Unusable` where it is not certain."""
    try:
        document = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise Unusable(
            f"cannot detect which core the configuration is for, as it is not plain JSON ({error}): give --core"
        )
    found = {core for key, core in _KEYS.items() if any(key in part for part in _parts(document))}
    if len(found) != 1:
        raise Unusable(f"cannot detect which core the configuration is for: give --core {' or --core '.join(CORES)}")
    return found.pop()


def _parts(document: Any) -> list[dict[str, Any]]:
    """The inbounds and outbounds of a configuration."""
    lists = [document.get(name) for name in ("inbounds", "outbounds")] if isinstance(document, dict) else []
    return [part for found in lists if isinstance(found, list) for part in found if isinstance(part, dict)]
