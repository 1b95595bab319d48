"""What tests of the backend have beside the scripted driver: users, cores that share listeners, and a record."""

from __future__ import annotations

from collections.abc import Mapping

from drivers.pretended.scripted import Gate
from protos.service_pb2 import Proxy, Trojan, User


def person(email: str, password: str = "", *inbounds: str) -> User:
    return User(email=email, proxies=Proxy(trojan=Trojan(password=password)), inbounds=inbounds)


class MemoryRecord:
    """What would be on disk; stands in for `node.state.store.Store`. `flush` waits at `gate`."""

    def __init__(self) -> None:
        self.request = self.changes = b""
        self.kept: dict[str, bytes] = {}
        self.staged: dict[str, bytes] = {}
        self.written = 0
        self.gate = Gate()

    def accept(self, request: bytes, routing: bytes = b"") -> None:
        self.request, self.changes = request, routing

    def routing(self, packed: bytes) -> None:
        self.changes = packed

    def forget(self) -> None:
        self.request, self.changes, self.kept = b"", b"", {}

    def users(self, changed: Mapping[str, bytes | None], clean: bool = False) -> None:
        if clean:
            self.kept = {}
        for key, packed in changed.items():
            self.written += 1
            self.kept.pop(key, None)
            if packed is not None:
                self.kept[key] = packed

    def stage(self, users: Mapping[str, bytes]) -> None:
        """Keep staged users apart from `kept`."""
        self.staged = dict(users)

    async def flush(self) -> None:
        await self.gate.passed()
