"""Which core a configuration is for: said by its name, or seen by how its inbounds and outbounds are written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from node.nodectl.exits import Unusable
from protos import service_pb2 as pb

# By the name on the command line.
CORES = {"xray": pb.XRAY, "sing-box": pb.SING_BOX}
# The core that reads geoip.dat and geosite.dat.
WITH_GEO = "xray"
# The word by which each core's inbounds and outbounds say what they are.
_WORDS = {"protocol": pb.XRAY, "type": pb.SING_BOX}


def read(path: Path) -> str:
    """A configuration's text, of - from standard input. Raises `Unusable`."""
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"{path} cannot be read: {error}")


def recognised(config: str) -> pb.BackendType:
    """Raises `Unusable` where it is not certain."""
    try:
        said = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise Unusable(
            f"which core this configuration is for cannot be seen: it is no plain JSON ({error}); say --core"
        )
    found = {core for word, core in _WORDS.items() if any(word in part for part in _parts(said))}
    if len(found) != 1:
        raise Unusable(f"which core this configuration is for cannot be seen; say --core ({' or '.join(CORES)})")
    return found.pop()


def _parts(said: Any) -> list[dict[str, Any]]:
    """Its inbounds and outbounds."""
    lists = [said.get(name) for name in ("inbounds", "outbounds")] if isinstance(said, dict) else []
    return [part for found in lists if isinstance(found, list) for part in found if isinstance(part, dict)]
