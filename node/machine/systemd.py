"""Notifications of a Type=notify service to systemd (sd_notify(3)), without its library."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from twisted.internet.interfaces import IReactorTime

from node.base.logs import Logger
from node.base.part import Part
from node.base.periodic import Periodic

_PATIENCE = 1.0  # seconds; systemd's queue is full only when the machine is in trouble


@dataclass(frozen=True)
class Notifier:
    """Sends notifications to systemd; does nothing if `address` is None.

    `watchdog_interval`: seconds of silence after which systemd restarts the service; None without a watchdog. `through`
    passes them on instead: systemd listens to the main process alone.
    """

    address: str | None
    watchdog_interval: float | None = None
    through: Callable[[str], None] | None = None

    log: ClassVar[Logger] = Logger()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Notifier:
        """From systemd's environment variables NOTIFY_SOCKET (a path, or @name), WATCHDOG_USEC, WATCHDOG_PID."""
        address = environ.get("NOTIFY_SOCKET") or None
        if address is not None and address[0] not in "/@":
            cls.log.warn(
                "NOTIFY_SOCKET={address} is not a unix socket: the node cannot notify systemd", address=address
            )
            address = None
        return cls(address, _watchdog(environ) if address else None)

    def ready(self, version: str) -> None:
        """Report that the node serves, in this version, which `systemctl status` shows."""
        self._send(f"READY=1\nSTATUS=txnode {version} serves")

    def reloading(self) -> None:
        """Report that another program takes over in this process, which sends `ready` again."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        """Report that the node is shutting down."""
        self._send("STOPPING=1")

    def watchdog(self) -> None:
        """Send the sign of life of the reactor."""
        self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if self.through is not None:
            self.through(message)
        if self.address is None:
            return
        name = "\0" + self.address[1:] if self.address[0] == "@" else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_PATIENCE)
                sender.sendto(message.encode(), name)
        except OSError as error:
            self.log.error(
                "cannot send {message} to systemd at {address}: {reason}; is NotifyAccess=main set in the unit?",
                message=message,
                address=self.address,
                reason=str(error),
            )


def _watchdog(environ: Mapping[str, str]) -> float | None:
    # WATCHDOG_PID is the process that the watchdog applies to, which may be our parent.
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    microseconds = environ.get("WATCHDOG_USEC", "")
    return int(microseconds) / 1e6 if microseconds.isdecimal() and int(microseconds) else None


class Systemd(Part):
    """Sends READY=1 when the node serves, WATCHDOG=1 twice in each interval, and STOPPING=1 at the end."""

    title = "the systemd notifier"

    def __init__(self, notifier: Notifier, clock: IReactorTime, version: str) -> None:
        self._notifier = notifier
        self._version = version
        # No ping at once: a node that stalls while it starts has not sent READY=1 yet, which has a timeout of its own.
        interval = notifier.watchdog_interval
        name = "the watchdog ping to systemd"
        self._pings = Periodic(name, notifier.watchdog, interval / 2, clock) if interval else None

    def start(self) -> None:
        if self._pings:
            self._pings.start()

    def stop(self) -> None:
        self._notifier.stopping()
        if self._pings:
            self._pings.stop()

    @property
    def warnings(self) -> list[str]:
        """Whether the watchdog pings fail, so that systemd may take the node for dead."""
        return self._pings.warnings if self._pings else []

    def reloading(self) -> None:
        """Report an upgrade in place. No pings are sent until the next version is ready."""
        self._notifier.reloading()
        if self._pings:
            self._notifier.watchdog()

    def begin(self) -> None:
        self._notifier.ready(self._version)
        if self._pings:
            # The last ping may be that of the program before an upgrade, and the next one comes late.
            self._notifier.watchdog()
