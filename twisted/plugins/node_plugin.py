"""Registers `twistd node`."""

from __future__ import annotations

import signal
from typing import Any

from twisted.application.service import ServiceMaker


class NodeMaker(ServiceMaker):
    """The service that twistd runs as `node`."""

    @property
    def options(self) -> Any:
        """The options class. Reading it also blocks signals that would end the process before it has handlers for them.

        twistd reads this first, and only of the plugin that it runs. `Handle.heed_signals` unblocks them.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP, signal.SIGUSR2))
        return super().options


node = NodeMaker("node", "node.tap", "Run proxy cores for many users, driven over REST and gRPC.", "node")
