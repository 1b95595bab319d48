"""Detect inbounds that no longer accept TCP connections, from their listeners' backlogs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Checks in a row, about a second apart, with connections in the backlog until the core counts as not accepting; and
# checks without a listener until it counts as closed: an inbound that is replaced has none for a moment.
WAITING, CLOSED = 5, 2


class ListenerWatch:
    """Remembers at which ports a TCP listener existed: an inbound over UDP has none."""

    def __init__(self) -> None:
        self._ports: set[int] = set()
        # Checks in a row with connections in the backlog, and without a listener, by port.
        self._waited: dict[int, int] = {}
        self._missed: dict[int, int] = {}

    def look(self, listening: Mapping[int, int]) -> list[str]:
        """Return what is wrong, each in a line. `listening` maps ports with a listener to the length of the backlog."""
        self._ports |= listening.keys()
        self._missed = _again(self._missed, self._ports - listening.keys())
        self._waited = _again(self._waited, (port for port, waiting in listening.items() if waiting))
        closed = [f"the core no longer listens on port {port}" for port in _since(self._missed, CLOSED)]
        silent = _since(self._waited, WAITING)
        return closed + [
            f"{listening[port]} connections to port {port} wait for the core to accept them" for port in silent
        ]


def _again(times: Mapping[int, int], ports: Iterable[int]) -> dict[int, int]:
    return {port: times.get(port, 0) + 1 for port in ports}


def _since(times: Mapping[int, int], looks: int) -> list[int]:
    return sorted(port for port, seen in times.items() if seen >= looks)
