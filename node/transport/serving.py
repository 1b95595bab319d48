"""Keeps a gRPC server on a socket: when one fails, another takes its place. Runs in the asyncio thread."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from node.logs import Logger

# Seconds before each attempt to serve again, first and longest.
FIRST_PAUSE = 0.02
LAST_PAUSE = 5.0
# Failed servers whose open calls may go on; of more the oldest one's are ended.
FADING = 4
# Seconds for those calls: as long as they like.
_FOREVER = 10 * 365 * 86_400.0
# Seconds that one line about failures stands for.
_QUIET = 600.0

# grpc.aio.Server; grpcio has no types.
Server: TypeAlias = Any


class Serving:
    """One server at a time, made by `make`: bound, not started yet.

    A stranger ends gRPC's serving loop with one call whose path is not UTF-8: gRPC decodes it outside any handler. A
    server that failed takes no more calls, but its open ones go on, so that no controller loses a stream by it.
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
        # Failures that no line told of.
        self._untold = 0

    async def start(self) -> None:
        """Serve. Raises `OSError` if there can be no socket."""
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
        # gRPC tells nobody when its loops end. They are the tasks that appear when it starts, in its own kind of
        # coroutine: calls of the node to its core may begin in the same moment.
        before = asyncio.all_tasks()
        await server.start()
        began = asyncio.all_tasks() - before
        self._loops = {task for task in began if not inspect.iscoroutine(task.get_coro())}
        assert self._loops, "nothing serves that could be watched"
        self._server = server

    async def _replace(self) -> None:
        """See that there is a new server whenever the loop of one fails."""
        while True:
            await asyncio.wait(self._loops, return_when=asyncio.FIRST_EXCEPTION)
            self._tell()
            self._fade(self._server)
            self._server = None
            await self._serve_again()

    async def _serve_again(self) -> None:
        pause = FIRST_PAUSE
        while self._server is None:
            await asyncio.sleep(pause)
            try:
                await self._serve()
            except Exception as error:  # noqa: BLE001 - whatever it is, a node without it is worse
                if pause == LAST_PAUSE:
                    self.log.error("the gRPC server does not come back, next try in 5 s: {error}", error=str(error))
                pause = min(2 * pause, LAST_PAUSE)

    def _fade(self, server: Server) -> None:
        """Let its open calls end by themselves, then release it."""
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

    def _tell(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._quiet_until:
            self._untold += 1
            return
        kinds, more, self._untold = [type(error).__name__ for error in self._errors()], self._untold, 0
        self.log.warn(
            "a call ended the gRPC server, a new one takes its place: {kinds}; {more} more did since such a line",
            kinds=", ".join(kinds),
            more=more,
        )
        self._quiet_until = now + _QUIET

    def _errors(self) -> list[BaseException]:
        """What the loops failed with."""
        done = [loop for loop in self._loops if loop.done() and not loop.cancelled()]
        return [error for loop in done if (error := loop.exception()) is not None]

    def _complain(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """gRPC forgets the task in which it shuts a failed server down, which fails like the server.

        What else the loop is told goes to the log, where asyncio would print a traceback on standard error.
        """
        if context.get("exception") not in self._errors():
            said = {name: repr(value) for name, value in context.items() if name != "message"}
            self.log.error("in gRPC's thread: {message} {said}", message=context["message"], said=str(said))
