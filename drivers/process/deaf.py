"""Whether the inbounds of a core accept TCP connections, seen from outside and without making one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Looks in a row, a second or so apart, at which connections wait for a core to accept them: then it does not. And those
# at which a listener is not there: an inbound that is swapped has none for a moment.
WAITING, CLOSED = 5, 2


class Ears:
    """Remembers at which ports there was a listener once: an inbound over UDP has none."""

    def __init__(self) -> None:
        self._ports: set[int] = set()
        # Looks in a row at which somebody waited, and at which there was no listener, by port.
        self._waited: dict[int, int] = {}
        self._missed: dict[int, int] = {}

    def look(self, listening: Mapping[int, int]) -> list[str]:
        """What is wrong, by how many connections wait at each port that takes some."""
        self._ports |= listening.keys()
        self._missed = _again(self._missed, self._ports - listening.keys())
        self._waited = _again(self._waited, (port for port, waiting in listening.items() if waiting))
        closed = [f"nobody listens on port {port} any more" for port in _since(self._missed, CLOSED)]
        silent = _since(self._waited, WAITING)
        return closed + [f"{listening[port]} connections to port {port} wait to be accepted" for port in silent]


def _again(times: Mapping[int, int], ports: Iterable[int]) -> dict[int, int]:
    return {port: times.get(port, 0) + 1 for port in ports}


def _since(times: Mapping[int, int], looks: int) -> list[int]:
    return sorted(port for port, seen in times.items() if seen >= looks)
