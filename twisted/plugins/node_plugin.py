"""Registers `twistd node`."""

from __future__ import annotations

import signal
from typing import Any

from twisted.application.service import ServiceMaker

from node.handover.launch import become_keeper


class NodeMaker(ServiceMaker):
    """The service that twistd runs as `node`."""

    @property
    def options(self) -> Any:
        """The options class. twistd reads this first, and only of the plugin that it runs.

        So the process becomes the keeper here, before the node's modules are imported, and a child goes on. In the
        node, signals are blocked that would end it before it has handlers for them; `Arrival` unblocks them.
        """
        become_keeper()
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP, signal.SIGUSR2))
        return super().options


node = NodeMaker("node", "node.tap", "Run proxy cores for many users, driven over REST and gRPC.", "node")
