"""Supervise the gRPC server: when it fails, start another one. Runs in the asyncio thread."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from node.base.logs import Logger

# Seconds before an attempt to restart the server: the first one, and the longest.
FIRST_PAUSE = 0.02
LAST_PAUSE = 5.0
# Failed servers whose open calls may go on; beyond it, the oldest one's calls are ended.
FADING = 4
# Seconds for those calls: no limit in effect.
_FOREVER = 10 * 365 * 86_400.0
# Seconds between two log lines about failures.
_QUIET = 600.0

# grpc.aio.Server; grpcio has no types.
Server: TypeAlias = Any


class Serving:
    """Runs one server at a time. `make` returns one that is bound, and not started yet.

    One call whose path is not UTF-8 ends gRPC's serving loop: gRPC decodes the path outside any handler. A failed
    server takes no more calls, but its open ones go on, so that no controller loses a stream.
    """

    log = Logger()

    def __init__(self, make: Callable[[], Server]) -> None:
        self._make = make
        self._server: Server = None
        self._loops: set[asyncio.Task[Any]] = set()
        self._fading: list[Server] = []
        self._releasing: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._quiet_until = 0.0
        # Failures since the last log line.
        self._unlogged = 0

    async def start(self) -> None:
        """Start the server. Raises `OSError` if it cannot bind its socket."""
        asyncio.get_running_loop().set_exception_handler(self._complain)
        await self._serve()
        self._watch = asyncio.create_task(self._replace())

    async def stop(self, grace: float) -> None:
        """Take no more calls, give those under way this many seconds, end the rest."""
        if self._watch is not None:
            self._watch.cancel()
        servers = [*self._fading, *([self._server] if self._server is not None else [])]
        await asyncio.gather(*(server.stop(grace) for server in servers))

    async def _serve(self) -> None:
        server = self._make()
        # gRPC does not report when its serving loops end. They are the tasks that appear at its start and are not
        # Python coroutines; other tasks of the node may begin in the same moment.
        before = asyncio.all_tasks()
        await server.start()
        began = asyncio.all_tasks() - before
        self._loops = {task for task in began if not inspect.iscoroutine(task.get_coro())}
        assert self._loops, "found no serving loop of gRPC's to watch"
        self._server = server

    async def _replace(self) -> None:
        """Start a new server whenever a serving loop fails."""
        while True:
            await asyncio.wait(self._loops, return_when=asyncio.FIRST_EXCEPTION)
            self._log_failure()
            self._fade(self._server)
            self._server = None
            await self._serve_again()

    async def _serve_again(self) -> None:
        pause = FIRST_PAUSE
        while self._server is None:
            await asyncio.sleep(pause)
            try:
                await self._serve()
            except Exception as error:  # noqa: BLE001 - whatever the error, the node needs a server
                if pause == LAST_PAUSE:
                    self.log.error("the gRPC server cannot be restarted: {error}; next try in 5 s", error=str(error))
                pause = min(2 * pause, LAST_PAUSE)

    def _fade(self, server: Server) -> None:
        """Let the open calls of a failed server end, then release it."""
        self._fading.append(server)
        self._release(server, _FOREVER)
        if len(self._fading) > FADING:
            self._release(self._fading[0], None)

    def _release(self, server: Server, grace: float | None) -> None:
        async def release() -> None:
            await server.stop(grace)
            if server in self._fading:
                self._fading.remove(server)

        task = asyncio.create_task(release())
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    def _log_failure(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._quiet_until:
            self._unlogged += 1
            return
        kinds, more, self._unlogged = [type(error).__name__ for error in self._errors()], self._unlogged, 0
        self.log.warn(
            "a call crashed the gRPC server ({kinds}); the node starts another one; {more} more crashes since the last "
            "such line",
            kinds=", ".join(kinds),
            more=more,
        )
        self._quiet_until = now + _QUIET

    def _errors(self) -> list[BaseException]:
        """Return the errors with which serving loops ended."""
        done = [loop for loop in self._loops if loop.done() and not loop.cancelled()]
        return [error for loop in done if (error := loop.exception()) is not None]

    def _complain(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log errors that asyncio's loop reports, instead of a traceback on standard error.

        Errors of the serving loops are left out: gRPC shuts a failed server down in a task that fails like the server,
        and never awaits it.
        """
        if context.get("exception") not in self._errors():
            details = {name: repr(value) for name, value in context.items() if name != "message"}
            self.log.error(
                "error in the thread of the gRPC server: {message} {details}",
                message=context["message"],
                details=str(details),
            )
