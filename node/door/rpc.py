"""The gRPC server, on a unix socket: supervised, with health and reflection beside METHODS. Runs in the asyncio thread.

`node.door` in front of it terminates TLS and enforces limits; each connection here belongs to one client.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeAlias
from urllib.parse import quote

from node.base.aio import Aio  # first: it sets gRPC's environment

# isort: split
import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from node.api.auth import Authenticator
from node.api.calls import Calls
from node.api.methods import MAX_BODY, SERVICE
from node.base.logs import Logger
from node.door.rpc_calls import Gate
from node.door.upstream import Upstream

# Seconds that calls under way have to end at shutdown.
GRACE = 1.0
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_BODY),
    ("grpc.max_send_message_length", MAX_BODY),
    # Half-open connections: a PING after 30 s of silence, closed after 20 s without an answer.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # The door limits PINGs: gRPC's own limits differ from the documented ones.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", 1000),
]

# The names of the health service: the whole server, the service, and the readiness check.
_HEALTH = ("", SERVICE.full_name, "readyz")
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

_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_REFLECTION = "grpc.reflection.v1alpha.ServerReflection"


class RpcServer:
    """Serves METHODS to the clients that the door admits."""

    log = Logger()

    def __init__(self, aio: Aio, calls: Calls, authenticator: Authenticator, upstream: Upstream) -> None:
        self._aio = aio
        self._upstream = upstream
        self._serving = Serving(self._bound)
        # Reports what /readyz does, for each server that is started.
        self._health = Health()
        self._gate = Gate(aio, calls, authenticator, upstream)

    async def start(self) -> None:
        """Bind and serve. Raises `OSError` if the socket cannot be bound."""
        await self._health.set(False, *_HEALTH)
        # Any reply means alive.
        await self._health.set(True, "livez")
        await self._serving.start()

    async def stop(self) -> None:
        """Take no more calls, give those under way a moment, end the rest."""
        await self._serving.stop(GRACE)

    def set_ready(self, ready: bool) -> None:
        """Set whether the node is ready. To be called on the reactor."""
        self._aio.run(self._health.set(ready, *_HEALTH)).addErrback(
            lambda failure: self.log.failure(
                "the gRPC health service was not updated; it reports an old state", failure
            )
        )

    def _bound(self) -> Any:
        server = grpc.aio.server(options=_OPTIONS, interceptors=(self._gate,))
        add_services(server, self._health)
        path = self._upstream.next_path()
        try:
            server.add_insecure_port(f"unix:{quote(str(path))}")
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {path}: {error}") from error
        path.chmod(0o600)
        self._aio.tell(self._upstream.listens, path)
        return server


class Serving:
    """Runs one server at a time. `make` returns one that is bound, and not started yet.

    A call can end gRPC's serving loop. A failed server takes no more calls, but its open ones go on, so that no
    controller loses a stream.
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


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Replaces grpcio's servicer, which writes with its lock held: a watcher that reads nothing blocks all others."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        # Set at each change, and then replaced.
        self._news = asyncio.Event()

    async def set(self, serving: bool, *services: str) -> None:
        """Set whether these services serve. To be awaited in the asyncio loop that serves them."""
        states = health_pb2.HealthCheckResponse
        self._states |= dict.fromkeys(services, states.SERVING if serving else states.NOT_SERVING)
        self._news.set()
        self._news = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:
        state = self._states.get(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return health_pb2.HealthCheckResponse(status=state)

    async def Watch(self, request: Any, context: Any) -> None:
        last = None
        while True:
            news, state = self._news, self._states.get(request.service, _UNKNOWN)
            if state != last:
                await context.write(health_pb2.HealthCheckResponse(status=state))
            last = state
            await news.wait()


class Reflection(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Describes these services, and itself. Few nodes are ever asked, so it imports its modules with the first call."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = (*services, _REFLECTION)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handler if details.method == f"/{_REFLECTION}/ServerReflectionInfo" else None

    @cached_property
    def _handler(self) -> Any:
        from grpc_reflection.v1alpha import reflection, reflection_pb2

        return grpc.stream_stream_rpc_method_handler(
            reflection.aio.ReflectionServicer(self._services).ServerReflectionInfo,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )


def add_services(server: Any, health: Health) -> None:
    """Add both to gRPC's server."""
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = [service.full_name for service in (SERVICE, *health_pb2.DESCRIPTOR.services_by_name.values())]
    server.add_generic_rpc_handlers((Reflection(names),))
