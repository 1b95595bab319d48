"""The parts of drivers and plans that are the same for all cores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from drivers.process import json_text
from drivers.process.confinement import Touched
from drivers.process.executable import Executable, Installation
from drivers.sockets.held import Shelf
from drivers.sockets.sharing import Sharing
from node.base.errors import CoreFailed
from node.contract.abilities import NotShared
from node.contract.accounts import Account
from node.contract.driver import Host, Plan
from node.contract.leaving import Leaves
from protos.handover_pb2 import Common
from protos.service_pb2 import User


class Made(Protocol):
    """A parsed configuration."""

    @property
    def tags(self) -> Sequence[str]: ...

    @property
    def inbounds(self) -> Mapping[str, object]:
        """The managed inbounds by tag, with what accounts depend on."""

    @property
    def warnings(self) -> Sequence[str]: ...

    def account(self, tag: str, user: User) -> Account | None: ...

    def same_credential(self, one: bytes, other: bytes) -> bool: ...


M = TypeVar("M", bound=Made)


class Core:
    """The part of `node.contract.leaving.LeavesAll` that is the same for all cores."""

    def __init__(self, host: Host, installation: Installation) -> None:
        self._host = host
        self._installation = installation
        self._sharing = Sharing(host.reactor, Shelf(host.keeper, f"sharing/{installation.core.name}"))

    def fingerprint(self, config_text: str) -> str:
        return json_text.fingerprint(config_text)

    async def version(self) -> str:
        return await self._installation.version()

    async def leave(self) -> bytes:
        await self._sharing.leave()
        return self._installation.packed.SerializeToString()

    def rehearse(self, begin: bool) -> None:
        self._installation.keep(begin)

    def go_on(self, packed: bytes) -> None:
        self._installation.go_on(Common.FromString(packed))
        try:
            self._sharing.go_on()
        except OSError as error:
            raise CoreFailed(f"the listeners of the cores could not be taken over: {error}") from error

    async def recover(self, plan: Plan, left: bytes, exact: bool) -> Leaves:
        assert isinstance(plan, Planned)
        return await plan.recover(left, exact)

    async def remain(self, pids: Collection[int], lead: int | None) -> None:
        self._installation.look_again()
        try:
            await self._sharing.remain(pids, lead)
        except NotShared as error:
            raise CoreFailed(str(error)) from error


class Planned(Generic[M]):
    """The part of `node.contract.driver.Plan` that is the same for all cores.

    `made` is the parsed configuration, `touched` the files and ports that it names, `chosen` the executable that an
    update had chosen when it was made.
    """

    def __init__(
        self,
        host: Host,
        installation: Installation,
        sharing: Sharing,
        made: M,
        touched: Touched,
        chosen: Path | None = None,
    ) -> None:
        self._host = host
        self._installation = installation
        self._sharing = sharing
        self.made = made
        # Bound here, as they are called for each user and inbound.
        self.account = made.account
        self.same_credential = made.same_credential
        self._touched = touched
        self._chosen = chosen

    @property
    def tags(self) -> Sequence[str]:
        return self.made.tags

    @property
    def warnings(self) -> Sequence[str]:
        return [*self.made.warnings, *filter(None, [self._installation.unconfined])]

    async def _executable(self) -> Executable:
        """Return the executable to run now, confined to this configuration."""
        return (await self._installation.current(self._chosen)).touching(self._touched)

    async def recover(self, left: bytes, exact: bool) -> Leaves:
        """Take over a run of this plan: see `node.contract.leaving.LeavesAll.recover`."""
        raise NotImplementedError

    def alike(self, other: Plan) -> bool:
        return isinstance(other, type(self)) and self.made.inbounds == other.made.inbounds
