"""What a configuration may have: what the node knows, and what the operator allows beyond that, by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from drivers.process.paths import Paths
from drivers.process.settings import CORE_ALLOW, CORE_PATHS
from node.contract.driver import Host
from node.errors import InvalidConfig

# How the names of sockets begin that are the node's own, where they are in no directory ("abstract").
OWN = "txnode"
_UNKNOWN = "the node does not know it"
# Characters of a configuration that an error shows.
_SHOWN = 60


@dataclass(frozen=True)
class Allowed:
    """What the operator allows: types by name, and where sockets may be."""

    names: frozenset[str] = frozenset()
    paths: Paths = Paths()  # noqa: RUF009  it is frozen, too

    @classmethod
    def of(cls, host: Host) -> Allowed:
        names = map(str.strip, host.settings.get(CORE_ALLOW.name, "").lower().split(","))
        return cls(frozenset(filter(None, names)), Paths.of(host))

    def judge(self, name: str, where: str, known: Collection[str], dangers: Mapping[str, str]) -> None:
        """Raises `InvalidConfig` for what is neither known nor allowed: where it is, why, and what allows it."""
        if name not in known and name.lower() not in self.names:
            why, name = dangers.get(name, _UNKNOWN), shown(name)
            raise InvalidConfig(f"{where}: {name} is refused, because {why}; {CORE_ALLOW.name}={name} would allow it")

    def judge_socket(self, address: str, where: str) -> None:
        """The same for a unix socket, by its path or its abstract name, which begins with `@`."""
        if address.startswith("@"):
            if address.lstrip("@").startswith(OWN):
                raise InvalidConfig(f"{where}: sockets whose names begin with @{OWN} are the node's own")
        elif not self.paths.allows_socket(address):
            what = f"the socket {shown(address)} is in no directory that {CORE_PATHS.name} allows"
            raise InvalidConfig(f"{where}: {what}, nor directly in the node's run/")


NOTHING_MORE = Allowed()


def shown(text: str) -> str:
    """Some of the configuration for the text of an error."""
    return ascii(text)[1:-1][:_SHOWN]
