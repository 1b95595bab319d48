"""Read users files: tables, JSON of this interface, exports of panels. See docs/nodectl-users.md."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from node.nodectl.exits import Unusable
from node.nodectl.output import note
from node.nodectl.users import document, tabular
from node.nodectl.users.supply import Supply
from protos import service_pb2 as pb

# How JSON begins; all else is a table.
_JSON = ("{", "[")


def read(path: Path, inbounds: Sequence[str] = ()) -> list[pb.User]:
    """Read the users of a file, print how many were left out. `inbounds`: for users without. Raises `Unusable`."""
    try:
        supply = parse(path.read_text("utf-8-sig"), inbounds, time.time())
    except (OSError, ValueError) as error:
        lines = str(error).splitlines()
        faults = lines[0] if len(lines) == 1 else "\n".join(["", *(f"  {line}" for line in lines)])
        raise Unusable(f"{path} cannot be used: {faults}")
    for reason, count in sorted(supply.left_out.items()):
        note(f"{path}: {count} {'user' if count == 1 else 'users'} left out: {reason}")
    return list(supply.users.values())


def parse(text: str, inbounds: Sequence[str] = (), now: float = 0.0) -> Supply:
    """Parse the users of a text. Raises `ValueError` with one fault a line, and where it is."""
    supply = Supply(inbounds)
    if text.lstrip().startswith(_JSON):
        document.read(text, supply, now)
    else:
        tabular.read(text, supply)
    return supply.finish()
