"""The real node: `twistd node` of this environment as a process, with its own state directory, key and certificate."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import psutil

from drivers.install import install
from drivers.install.releases import SING_BOX_BUILT
from scripts.staging import certs
from scripts.staging.core import find_xray
from scripts.staging.ports import free_port
from scripts.staging.process import Child
from scripts.staging.wait import accepts, until

_ROOT = Path(__file__).parents[2]
_TWISTD = Path(sys.executable).with_name("twistd")
# Seconds between two readings of counters by the node itself.
TRAFFIC_INTERVAL = 0.1
# For tests that follow each other faster than cores drain: no change of users waits for room for another core.
ROOMY = {"DRAIN_GENERATIONS": "100"}
_PORTS = ("REST_PORT", "GRPC_PORT", "SERVICE_PORT", "METRICS_PORT")
# For users whose targets are on this machine.
LOCAL_TARGETS = {"PROXY_TO_SERVER": "allow"}
# An address where nothing listens.
NOWHERE = "http://127.0.0.1:1"
_READY = 20.0
_STOP = 20.0


class NodeProcess:
    """A node on free ports of 127.0.0.1, started by the `with` statement; tests may stop and start it inside.

    `directory` is an empty one for its files; `environment` adds settings (an empty value removes one), `through` is a
    command prefix, and `twistd` are options of twistd.
    The end of the block stops the node and raises `AssertionError` if it or any of its processes is left.
    """

    # The class of its process, and the program.
    child: ClassVar[type[Child]] = Child
    program: Path = _TWISTD

    def __init__(
        self, directory: Path, *, through: Sequence[str] = (), twistd: Sequence[str] = (), **environment: str
    ) -> None:
        self.directory = directory
        self._through = through
        self._twistd = twistd
        self.host = "127.0.0.1"
        self.rest_port, self.grpc_port = free_port(), free_port()
        self.key = str(uuid.uuid4())
        self.certificate = certs.make(directory, ["localhost", self.host])
        self.core = find_xray().resolve()
        # If it is missing, a Start of sing-box fails with the node's message.
        self.sing_box = install.find(SING_BOX_BUILT, pinned=True)
        self.environment = {name: value for name, value in (self._settings() | environment).items() if value}
        self._child: Child | None = None
        # psutil compares pid and start time: pids are reused within minutes on a machine that starts many threads.
        self._seen: set[psutil.Process] = set()

    @property
    def pem(self) -> str:
        """The certificate that a controller pins."""
        return self.certificate.certificate.read_text()

    @property
    def state(self) -> Path:
        return self.directory / "state"

    @property
    def pid(self) -> int:
        """The PID of the process that was started: the keeper, which gets signals, and whose end is the end of all."""
        return self._running.pid

    @property
    def node_pid(self) -> int:
        """The PID of the node below the keeper. Raises `AssertionError` if none runs."""
        return self.pid if self.environment.get("KEEPER") == "off" else node_below(self.pid)

    @property
    def lines(self) -> list[str]:
        """The node's output since its last start."""
        return self._running.lines

    def last_lines(self, number: int) -> list[str]:
        """The last `number` lines; none before the first start."""
        return self.lines[-number:] if self._child else []

    def start(self) -> None:
        """Run the node and wait until its ports accept. Raises `AssertionError` with its output if they do not."""
        argv = [*self._through, str(self.program), "--nodaemon", "--pidfile=", *self._twistd, "node"]
        self._child = self.child(argv, self.environment, directory=self.directory)
        ports = [int(self.environment[name]) for name in _PORTS if name in self.environment]
        self._child.ready(lambda: all(map(accepts, ports)), _READY, f"the node accepts on {ports}")

    def stop(self) -> int:
        """Send TERM and return the exit status: -15, as twistd raises the same signal after a clean shutdown."""
        self._look()
        return self._running.stop(_STOP)

    def kill(self) -> int:
        """Send KILL to the keeper, which ends all at once: nothing is cleaned up. Returns the exit status."""
        self._look()
        return self._running.kill()

    def kill_node(self) -> int:
        """Send KILL to the node, as a crash: the keeper starts the next one. Returns the PID of the killed one."""
        self._look()
        pid = self.node_pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def core_pids(self) -> list[int]:
        """The pids of the node's descendants that have executed a core, the oldest first."""
        self._look()
        cores = {core.resolve() for core in (self.core, self.sing_box) if core}
        found = [process for process in self._seen if _runs(process, cores)]
        return [process.pid for process in sorted(found, key=lambda process: (process.create_time(), process.pid))]

    def newest_core(self) -> int:
        """The pid of the newest core; older ones drain. Raises `AssertionError` if there is none."""
        pids = self.core_pids()
        assert pids, f"no core runs among {[*self._seen]}"
        return pids[-1]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._child and self._child.running:
                self.stop()
        finally:
            self._clear()

    @property
    def _running(self) -> Child:
        assert self._child, "the node was not started"
        return self._child

    def _settings(self) -> dict[str, str]:
        """Default settings. PYTHONPATH, as the node runs in `directory` (and so reads no developer's `.env`)."""
        return {
            "PATH": os.defpath,
            "HOME": str(self.directory),
            "TMPDIR": tempfile.gettempdir(),
            "PYTHONPATH": str(_ROOT),
            "PYTHONUNBUFFERED": "1",
            "API_KEY": self.key,
            "STATE_DIR": str(self.state),
            # The certificates of tests and benches are below it.
            "CORE_PATHS": tempfile.gettempdir(),
            "NODE_HOST": self.host,
            "REST_PORT": str(self.rest_port),
            "GRPC_PORT": str(self.grpc_port),
            "SSL_CERT_FILE": str(self.certificate.certificate),
            "SSL_KEY_FILE": str(self.certificate.key),
            "XRAY_EXECUTABLE_PATH": str(self.core),
            "SING_BOX_EXECUTABLE_PATH": str(self.sing_box or ""),
            "TRAFFIC_INTERVAL": str(TRAFFIC_INTERVAL),
            **LOCAL_TARGETS,
            # The node downloads nothing from outside.
            "GEO_URL": NOWHERE,
            "XRAY_DOWNLOAD_URL": NOWHERE,
            "SING_BOX_DOWNLOAD_URL": NOWHERE,
        }

    def _look(self) -> None:
        """Record every process of the node: after its end they cannot be found any more."""
        self._seen.update(_family(self._running.pid))

    def _clear(self) -> None:
        """Wait up to 10 s for the node's processes to end; kill and report those that are left."""
        if self._child is None:
            return
        self._look()
        try:
            until(lambda: not self._left(), 10, "the node's processes end")
        except AssertionError as error:
            left = [(process.pid, process.cmdline()) for process in self._left()]
            for process in self._left():
                process.kill()
            raise AssertionError(
                f"the node left processes behind: {left}; its output:\n{self._child.output}"
            ) from error

    def _left(self) -> list[psutil.Process]:
        return [process for process in self._seen if _alive(process)]


def node_below(keeper: int) -> int:
    """The PID of the node below a keeper, the older one of two. Raises `AssertionError` if there is none."""
    there = psutil.Process(keeper)
    for child in sorted(there.children(), key=lambda child: (child.create_time(), child.pid)):
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_node(child, there):
                return child.pid
    raise AssertionError("no node runs below the keeper")


def is_node(child: psutil.Process, keeper: psutil.Process) -> bool:
    """Whether a child of a keeper is a node: it runs the keeper's interpreter, and is not about to execute a core."""
    return bool(child.exe() == keeper.exe()) and not any("leash" in word for word in child.cmdline())


def _family(pid: int) -> Iterator[psutil.Process]:
    """Descendants of the node, and all processes of its session: orphans stay in it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from psutil.Process(pid).children(recursive=True)
    # psutil caches processes by pid, and could return an ended one for a new one with the same pid.
    psutil.process_iter.cache_clear()
    for process in psutil.process_iter():
        try:
            if process.pid != pid and os.getsid(process.pid) == pid:
                yield process
        except ProcessLookupError:
            continue


def _alive(process: psutil.Process) -> bool:
    """Whether the process runs. `is_running` compares start times too, so a reused pid does not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _runs(process: psutil.Process, executables: set[Path]) -> bool:
    """Whether the process runs one of these. Read from /proc each time: psutil caches the program before the exec."""
    try:
        return _alive(process) and Path(f"/proc/{process.pid}/exe").readlink() in executables
    except (FileNotFoundError, ProcessLookupError):
        return False
