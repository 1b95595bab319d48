"""Errors of the asyncio thread are lines in the node's log."""

from __future__ import annotations

import asyncio

from node.base.aio import Aio  # noqa: F401 - first: it sets gRPC's environment

# isort: split
import grpc
from twisted.logger import capturedLogs, eventAsText

from node.door.rpc import Serving


async def complaints(context: dict[str, object]) -> list[str]:
    """Return what is logged when the loop reports this error."""

    def make() -> grpc.aio.Server:
        server = grpc.aio.server()
        server.add_insecure_port("127.0.0.1:0")
        return server

    serving = Serving(make)
    await serving.start()
    try:
        with capturedLogs() as events:
            asyncio.get_running_loop().call_exception_handler(context)
    finally:
        await serving.stop(0)
    return [eventAsText(event, includeTimestamp=False) for event in events]


def test_a_complaint_is_one_line() -> None:
    """Errors that gRPC leaves to the loop are logged, and put no traceback on standard error."""
    context = {"message": "Exception in callback", "exception": ValueError("of a\nstranger's"), "handle": "<Handle x>"}
    [line] = asyncio.run(complaints(context))
    for words in ("Exception in callback", "ValueError", "of a", "<Handle x>"):
        assert words in line
    assert "\n" not in line
