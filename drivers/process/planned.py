"""What the drivers of all cores have in common, and their plans."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from drivers import json_text
from drivers.process.confinement import Touched
from drivers.process.executable import Executable, Installation
from drivers.process.shared import SharedRun
from drivers.sockets import left
from drivers.sockets.sharing import Sharing
from node.contract.accounts import Account
from node.contract.driver import Generation, Host, NotShared, Plan, Together
from node.errors import CoreFailed
from protos.handover_pb2 import Common
from protos.service_pb2 import User


class Made(Protocol):
    """A configuration that was taken over."""

    @property
    def tags(self) -> Sequence[str]: ...

    @property
    def inbounds(self) -> Mapping[str, object]:
        """What accounts depend on, by the tags of the managed inbounds."""

    @property
    def warnings(self) -> Sequence[str]: ...

    def account(self, tag: str, user: User) -> Account | None: ...


M = TypeVar("M", bound=Made)


class Core:
    """The part of `node.contract.driver.LeavesAll` that is the same for all cores."""

    def __init__(self, host: Host, installation: Installation) -> None:
        self._host = host
        self._installation = installation
        self._sharing = Sharing(host.reactor)

    def fingerprint(self, config_text: str) -> str:
        return json_text.fingerprint(config_text)

    async def version(self) -> str:
        return await self._installation.version()

    async def leave(self) -> Together:
        common = self._installation.packed
        common.sharing.CopyFrom(await self._sharing.leave())
        return Together(common.SerializeToString(), left.descriptors(common.sharing))

    def rehearse(self, begin: bool) -> None:
        self._installation.keep(begin)

    def go_on(self, packed: bytes) -> None:
        common = Common.FromString(packed)
        self._installation.go_on(common)
        try:
            self._sharing.go_on(common.sharing)
        except OSError as error:
            raise CoreFailed(f"the listeners of the cores cannot be had: {error}") from error

    async def regain(self, runs: Sequence[Generation]) -> None:
        try:
            await self._sharing.regain([run.reach for run in runs if isinstance(run, SharedRun)])
        except NotShared as error:
            raise CoreFailed(str(error)) from error

    def remain(self, pids: Collection[int]) -> None:
        self._sharing.remain(pids)
        self._installation.look_again()


class Planned(Generic[M]):
    """The part of `node.contract.driver.Plan` that is the same for all cores.

    `made` is what was taken over, `touched` what it names, `chosen` the executable that had been chosen for it.
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
        # Asked for each user and inbound.
        self.account = made.account
        self._touched = touched
        self._chosen = chosen

    @property
    def tags(self) -> Sequence[str]:
        return self.made.tags

    @property
    def warnings(self) -> Sequence[str]:
        return [*self.made.warnings, *filter(None, [self._installation.unconfined])]

    async def _executable(self) -> Executable:
        """As it is now, for this configuration."""
        return (await self._installation.current(self._chosen)).touching(self._touched)

    def alike(self, other: Plan) -> bool:
        return isinstance(other, type(self)) and self.made.inbounds == other.made.inbounds
