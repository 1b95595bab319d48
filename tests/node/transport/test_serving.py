"""What the asyncio thread has to say stands in the node's log, a line each."""

from __future__ import annotations

import asyncio

from node.aio import Aio  # noqa: F401 - first: it sets gRPC's environment

# isort: split
import grpc
from twisted.logger import capturedLogs, eventAsText

from node.transport.serving import Serving


async def complaints(context: dict[str, object]) -> list[str]:
    """What is logged when something tells the loop that this went wrong."""

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
    """Nothing is lost that gRPC leaves to the loop, and no traceback comes of it on standard error."""
    context = {"message": "Exception in callback", "exception": ValueError("of a\nstranger's"), "handle": "<Handle x>"}
    [line] = asyncio.run(complaints(context))
    for words in ("Exception in callback", "ValueError", "of a", "<Handle x>"):
        assert words in line
    assert "\n" not in line
