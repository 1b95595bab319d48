"""Which types a configuration may contain: those that the node knows, and those that CORE_ALLOW names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from drivers.process.paths import Paths
from drivers.process.settings import CORE_ALLOW, CORE_PATHS
from node.base.errors import InvalidConfig
from node.contract.driver import Host

# The start of the names of the node's own abstract sockets.
OWN = "txnode"
_UNKNOWN = "the node does not know it"
# The most characters of a configuration that an error shows.
_SHOWN = 60


@dataclass(frozen=True)
class Allowed:
    """The operator's permissions: types by name, and directories of sockets."""

    names: frozenset[str] = frozenset()
    paths: Paths = Paths()

    @classmethod
    def of(cls, host: Host) -> Allowed:
        names = map(str.strip, host.settings.get(CORE_ALLOW.name, "").lower().split(","))
        return cls(frozenset(filter(None, names)), Paths.of(host))

    def judge(self, name: str, where: str, known: Collection[str], dangers: Mapping[str, str]) -> None:
        """Raises `InvalidConfig`, with the remedy, for a type that is neither known nor allowed."""
        if name not in known and name.lower() not in self.names:
            why, name = dangers.get(name, _UNKNOWN), shown(name)
            raise InvalidConfig(f"{where}: {name} is refused, because {why}; {CORE_ALLOW.name}={name} would allow it")

    def judge_socket(self, address: str, where: str) -> None:
        """Raises `InvalidConfig` for a unix socket that is not allowed; abstract names begin with `@`."""
        if address.startswith("@"):
            if address.lstrip("@").startswith(OWN):
                raise InvalidConfig(f"{where}: names of sockets that begin with @{OWN} are reserved for the node")
        elif not self.paths.allows_socket(address):
            what = f"the socket {shown(address)} is neither in a directory that {CORE_PATHS.name} allows"
            raise InvalidConfig(f"{where}: {what} nor directly in the node's run/")


NOTHING_MORE = Allowed()


def shown(text: str) -> str:
    """Quote a part of the configuration for an error: ASCII, and cut."""
    return ascii(text)[1:-1][:_SHOWN]
