"""The keeper: the parent of the node and of its cores. Users stay connected while the node dies or is upgraded.

A script of the standard library alone: `python -I -S keeper.py COMMAND...`, where COMMAND runs the node. It starts the
node, unless it is given one that runs, and starts it again when it dies or hangs. It spawns cores for the node, and
holds their pidfds and outputs, and other descriptors by name, for the next node. It ends with the node's ordered end,
and ends the cores if no node comes up. It never blocks. Only the node reaches it, over two sockets that it inherits:
one for requests, which are all answered, and one for events. A message is a JSON object with descriptors;
{"more": true} has some of the next message.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import time

# Importing the module `typing` would cost a megabyte.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from typing import Any, NoReturn

    # What it adds to the environment, and its words; an answer to a request, and its descriptors.
    Command = Sequence[Any]
    Answer = tuple[dict[str, Any], Sequence[int]]

# Raised with each change of this file: a node that has a newer keeper makes the running one execute its own.
VERSION = 4
# Environment variables: the node's sockets and our PID; why the next version failed; what a new keeper goes on with.
VARIABLE, FAILED, STATE = "TXNODE_KEEPER", "TXNODE_HANDOVER_FAILED", "TXNODE_KEEPER_STATE"
# The one with the key for controllers, if they have it from there.
KEY = b"API_KEY"
# Those by which systemd reaches its main process alone.
SYSTEMD = "NOTIFY_SOCKET", "WATCHDOG_USEC"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_PTRACER = 1, 36, 0x59616D61
FORWARDED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
# Signals that would end a node that has no handlers yet. If there are cores to end in order, the last two wait, too.
WAITING = (signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
# The longest message, and the most descriptors in one.
MESSAGE, FEW = 1 << 20, 250
# Seconds: of silence until a node is killed, once it is up and before; between two starts.
SILENCE, STARTING, PAUSES = 20.0, 90.0, (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
# Seconds for a new process to close what it has inherited; between two looks, if the machine was not suspended.
MOMENT, STOOD = 1.0, 5.0
# Open files that each process allows itself, if the system permits: for the connections on both ports, with a reserve.
DESCRIPTORS = 65_536
NEVER = float("inf")
LIBC = ctypes.CDLL(None, use_errno=True)


def say(text: str) -> None:
    """Write a line to standard error, unless that would block."""
    try:
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"txnode keeper: {text}\n".encode(errors="replace")[:4096])
    except OSError:  # a full disk, or a reader that has gone: no reason to end
        pass


def close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def inherit(descriptors: Iterable[int], on: bool) -> None:
    for descriptor in descriptors:
        os.set_inheritable(descriptor, on)


def send(there: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    """Send a message; more than FEW descriptors go ahead in messages of their own."""
    while len(descriptors) > FEW:
        socket.send_fds(there, [b'{"more": true}'], descriptors[:FEW])
        descriptors = descriptors[FEW:]
    socket.send_fds(there, [json.dumps(message).encode()], descriptors)


def blank_key() -> None:
    """Overwrite the key in the memory that /proc/PID/environ shows as long as this process runs.

    `os.environ` keeps it, for the next node. Settings that are spaces count as not set.
    """
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - `pathlib` takes memory
        fields = file.read().rpartition(b")")[2].split()
    place, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc(5)
    for entry in ctypes.string_at(place, end - place).split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == KEY:
            ctypes.memset(place + len(name) + 1, ord(" "), len(value))
        place += len(entry) + 1
    if KEY in os.environb:
        os.environb[KEY] = os.environb[KEY]  # the C library's own was overwritten, too


def raise_descriptor_limit() -> None:
    """Raise the limit of open files: strangers could use up the 1,024 of many systems, and no core could start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def prepare() -> None:
    """Set what the node and the cores inherit."""
    os.umask(0o077)  # only this user may read what cores write, such as the sockets of their APIs
    raise_descriptor_limit()


def pairs() -> tuple[tuple[socket.socket, socket.socket], tuple[socket.socket, socket.socket]]:
    """The sockets for requests, and those for events: ours, and the node's."""
    ask, events = (socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in "ae")
    for there in (*ask, events[0]):
        there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
    return ask, events


def execute(argv: list[str], state: object, kept: Iterable[int]) -> None:
    """Execute a version of this script in place of this process, which goes on with this state and these descriptors.

    Signals and the ends of processes wait for it, if they are blocked.
    """
    with os.fdopen(os.memfd_create("txnode-keeper", 0), "wb") as memory:
        memory.write(json.dumps(state).encode())
        memory.flush()
        inherit(kept, True)
        os.execve(argv[0], argv, {**os.environ, STATE: str(memory.fileno())})  # noqa: S606 - the purpose


def end_with(parent: int) -> None:
    """In a new process: end when the parent does, and leave its process group: Ctrl-C would reach both."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.setpgid(0, 0)


class Node:
    """A node's process and sockets. Its PID is its own until it is out of `Keeper.nodes`: the keeper reaps it."""

    def __init__(self, command: Command, pid: int, ask: socket.socket, events: socket.socket) -> None:
        self.command, self.pid, self.ask, self.events = command, pid, ask, events
        for there in (ask, events):
            there.setblocking(False)
        # The command to go back to if it does not come up; whether it has; whether it ends in order.
        self.back: Command | None = None
        self.is_up, self.ends = False, False
        # The number of a `hello` that waits for an answer; descriptors of an unfinished request; why it was killed.
        self.waits, self.parts, self.reason = 0, list[int](), ""
        # Seconds that it has to come up, then between two signs of life; when they have passed.
        self.patience, self.due = STARTING, NEVER

    def wait(self, seconds: float) -> None:
        self.patience, self.due = seconds, time.monotonic() + seconds

    def close(self) -> None:
        self.ask.close()
        self.events.close()
        while self.parts:
            os.close(self.parts.pop())


class Keeper:
    """Runs nodes until one ends in order, then ends like it."""

    def __init__(self, command: Command) -> None:
        self.command, self.me = command, os.getpid()
        self.notify, watchdog = (os.environ.pop(name, "") for name in SYSTEMD)
        self.watchdog = int(watchdog or 0) / 1e6
        self.silence = min(SILENCE, self.watchdog * 2 / 3 or SILENCE)
        # Descriptors by name; the status of cores by PID, None while they run.
        self.held: dict[str, list[int]] = {}
        self.cores: dict[int, int | None] = {}
        # The node, and the next version that waits for its end; the script that is to take the place of this one.
        self.node: Node | None = None
        self.next: Node | None = None
        self.newer: list[str] = []
        # The last node's status; whether any has come up; whether all is to end; why the next version failed.
        self.status = 0
        self.served, self.ending, self.failed, self.orderly = False, False, "", False
        # Seconds without any node, and for how many cores go on then; when the next start is due, after how many.
        self.absent, self.seconds, self.due, self.tries = 0.0, 300.0, 0.0, 0
        # Both ends of the pipe of signals; when `look` was last called.
        self.signals: Sequence[int] = ()
        self.clock = time.monotonic()

    @property
    def nodes(self) -> list[Node]:
        return [node for node in (self.node, self.next) if node]

    @property
    def descriptors(self) -> list[int]:
        """All that is held."""
        return [each for some in self.held.values() for each in some]

    def run(self) -> NoReturn:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        prepare()
        self.signals = self.signals or os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.signals[1], warn_on_full_buffer=False)
        for each in (*FORWARDED, signal.SIGCHLD):
            signal.signal(each, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self.reap()
        while True:
            self.look()
            poll = select.poll()
            for descriptor in (self.signals[0], *(node.ask.fileno() for node in self.nodes)):
                if descriptor >= 0:
                    poll.register(descriptor, select.POLLIN)
            wait = 1.0 if self.node else min(1.0, self.due - time.monotonic())
            ready = dict(poll.poll(max(0.0, wait) * 1000 + 1))
            if self.signals[0] in ready:
                for number in os.read(self.signals[0], 4096):
                    self.signalled(number)
            for node in self.nodes:
                if node.ask.fileno() in ready:
                    self.hear(node)

    def look(self) -> None:
        """Do what is due: start a node, end one that hangs, end the cores if no node came up."""
        now = time.monotonic()
        passed, self.clock = now - self.clock, now
        if self.watchdog:
            self.report("WATCHDOG=1")
        if self.newer:
            self.become(self.newer)
        for node in self.nodes:
            node.due += passed if passed > STOOD else 0.0  # the machine stood still, not the node
            if now > node.due and not node.ends:
                self.kill(node, f"it did not {'answer' if node.is_up else 'come up'} within {node.patience:g} s")
        if self.node is None:
            self.absent += passed
            if self.absent > self.seconds:
                say(f"no node came up within {self.seconds:g} s: all cores end")
                self.finish()
            if now >= self.due:
                try:
                    self.node = self.launch(self.command, STARTING)
                except OSError as error:
                    self.due = now + PAUSES[-1]
                    say(f"no node can be started, and it is tried again: {error}")

    def signalled(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self.reap()
            return
        if number in (signal.SIGTERM, signal.SIGINT):
            self.ending = True
            if self.node is None:
                self.status = number
                self.finish()
        for node in self.nodes if self.ending else self.nodes[:1]:
            os.kill(node.pid, number)

    def reap(self) -> None:
        """Take the statuses of processes that have ended."""
        ended = {}
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = found[1]
        except ChildProcessError:
            pass
        for node in self.nodes:
            if node.pid in ended:
                node.close()
        for pid, status in ended.items():
            if self.cores.get(pid, 0) is None:
                self.cores[pid] = status
                self.tell({"exited": pid, "status": status})
        # The next version first: one that has ended, too, does not go on.
        for node in reversed(self.nodes):
            if node.pid in ended:
                self.gone(node, ended[node.pid])

    def gone(self, node: Node, status: int) -> None:
        """A node has ended: another one goes on, or all ends."""
        code = os.waitstatus_to_exitcode(status)
        how = node.reason or (f"it ended by signal {-code}" if code < 0 else f"it ended with exit status {code}")
        if node is self.next:
            self.next = None
            node.close()
            self.tell({"next": how})
            return
        self.node, self.status, self.orderly = None, status, node.ends
        if self.next and not node.ends:
            self.node, self.next = self.next, None
            self.node.wait(self.node.patience)
            if self.node.waits:
                self.answer(self.node, {"do": "hello", "n": self.node.waits}, [])
        elif node.ends or self.ending or (code >= 0 and not self.served):
            self.finish()
        else:
            pause = 0.0 if node.back else PAUSES[min(self.tries, len(PAUSES) - 1)]
            if node.back:
                self.command, self.failed = node.back, how
            self.tries, self.due = self.tries + 1, time.monotonic() + pause
            say(f"node {node.pid}: {how}; cores go on, and {'the version before' if node.back else 'it'} starts again")

    def kill(self, node: Node, reason: str) -> None:
        say(f"node {node.pid} is killed: {reason}")
        os.kill(node.pid, signal.SIGKILL)
        node.reason, node.due = reason, NEVER
        if node is self.next:  # it is of no use from here on; the node's end has to be waited for
            self.gone(node, 0)

    def finish(self) -> NoReturn:
        """End all processes, and this one as the node ended."""
        cores = (pid for pid, status in self.cores.items() if status is None)
        for pid in (*cores, *(node.pid for node in self.nodes)):
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(self.status)
        if code < 0:
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(self.me, -code)
            # The kernel ignores that in the first process of a container.
            code = 0 if self.orderly else 128 - code
        os._exit(code)

    def launch(self, command: Command, patience: float) -> Node:
        """Start a node, which has to come up within `patience`."""
        (ask, its_ask), (events, its_events) = pairs()
        environment = {**os.environ, VARIABLE: f"{its_ask.fileno()} {its_events.fileno()} {self.me}", **command[0]}
        if self.failed:
            environment[FAILED] = self.failed
        blocked = WAITING if None in self.cores.values() else WAITING[:2]
        with its_ask, its_events:
            inherit([its_ask.fileno(), its_events.fileno()], True)
            node = Node(command, self.fork(lambda: self.execute(command[1], environment), blocked), ask, events)
        node.wait(patience)
        return node

    def execute(self, words: list[str], environment: dict[str, str]) -> None:
        """Become a node, in a new process."""
        os.execve(words[0], words, environment)  # noqa: S606 - the purpose

    def spawn(self, message: Any, descriptors: Sequence[int]) -> Answer:
        """Start a core, with these descriptors as its `targets`. Answers with its pidfd and both outputs."""
        opened, kept = [*descriptors], list[int]()
        try:
            for _ in "oe":
                opened += os.pipe2(os.O_CLOEXEC)
            out, its_out, err, its_err = opened[-4:]
            targets = dict(zip([*message["targets"], 1, 2], [*descriptors, its_out, its_err], strict=True))
            pid = self.fork(lambda: self.become_core(message, targets), ())
            try:
                kept = [os.pidfd_open(pid), out, err]
            except OSError:
                os.kill(pid, signal.SIGKILL)
                raise
        finally:
            close({*opened} - {*kept})
        for pipe in (out, err):
            os.set_blocking(pipe, False)
        self.forget(pid)  # the number of a core that has ended
        self.held[f"core/{pid}"], self.cores[pid] = kept, None
        return {"pid": pid}, kept

    def become_core(self, message: Any, targets: dict[int, int]) -> None:
        """Execute the core in a new process. Yama lets all below this process trace it."""
        LIBC.prctl(PR_SET_PTRACER, ctypes.c_ulong(self.me), 0, 0, 0)
        high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, max(targets) + 1) for number in targets.values()]
        for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - `pathlib` takes memory
            try:
                os.set_inheritable(int(number), False)
            except OSError:  # the listing's own
                continue
        for target, its in zip(targets, high, strict=True):
            os.dup2(its, target)
        os.execve(message["argv"][0], message["argv"], message["environment"])  # noqa: S606 - the purpose

    def fork(self, run: Callable[[], object], blocked: Collection[int]) -> int:
        """Start a process that executes something in `run`, in its own process group, and ends with this one.

        Returns when it has closed what is held: a duplicate of a listener would keep the kernel's order of listeners.
        """
        ready, its_ready = socket.socketpair()
        if pid := os.fork():
            its_ready.close()
            poll = select.poll()
            poll.register(ready, select.POLLIN)
            poll.poll(MOMENT * 1000)
            return pid
        try:
            signal.set_wakeup_fd(-1)
            for number in (*FORWARDED, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            end_with(self.me)
            close([*self.descriptors, its_ready.detach()])
            run()
        except OSError as error:
            os.write(2, f"cannot run {error.filename}: {error.strerror}\n".encode(errors="replace"))
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)
        finally:
            os._exit(1)

    def hear(self, node: Node) -> None:
        """Take a request, and answer it."""
        try:
            words, some, *_ = socket.recv_fds(node.ask, MESSAGE, FEW)
        except OSError:
            return
        inherit(some, False)
        if not words:  # it is ending
            node.ask.close()
            return
        node.parts += some
        if node.is_up:
            node.wait(node.patience)
        message = json.loads(words)
        if "do" in message:
            descriptors, node.parts = node.parts, []
            self.answer(node, message, descriptors)

    def answer(self, node: Node, message: Any, descriptors: list[int]) -> None:
        if message["do"] == "hello" and node is self.next:
            node.waits, node.due = message["n"], NEVER
            self.tell({"next": ""})
            return
        try:
            reply, some = self.do(node, message, descriptors)
        except (OSError, KeyError, TypeError, ValueError) as error:
            reply, some = {"error": str(error)}, ()
        if "n" in message:
            self.send(node, node.ask, {"n": message["n"], **reply}, some)

    def do(self, node: Node, message: Any, descriptors: list[int]) -> Answer:
        """Do what a node asks for."""
        match message["do"]:
            case "hello":  # it takes all that is held
                exits = {pid: status for pid, status in self.cores.items() if status is not None}
                names = [(name, len(some)) for name, some in self.held.items()]
                return {"version": VERSION, "names": names, "exits": exits}, self.descriptors
            case "spawn":
                return self.spawn(message, descriptors)
            case "put":
                self.drop(message["name"])
                self.held[message["name"]] = descriptors
            case "drop":
                self.drop(*message["names"])
            case "forget":
                self.forget(message["pid"])
            case "up":  # it is the one to start again; `seconds`: how long cores go on without any
                self.command, self.seconds, node.is_up, node.back = node.command, message["seconds"], True, None
                self.served, self.failed, self.absent, self.tries = True, "", 0.0, 0
                node.wait(self.silence)
            case "alive" if "text" in message:
                self.report(message["text"])
            case "next":  # it says `hello` when it could go on, and is answered when this node has ended
                if self.next:
                    os.kill(self.next.pid, signal.SIGKILL)
                    self.next.close()
                    self.next = None
                self.next = self.launch(message["command"], message["patience"])
                # Once it has come up, a plain command starts it again.
                self.next.command, self.next.back = message["plain"], message["back"]
            case "cancel" if self.next:
                self.kill(self.next, message["reason"])
            case "failed":
                self.kill(node, message["reason"])
            case "bye":
                node.ends = True
            case "become":
                self.newer = message["argv"]
        return {}, ()

    def tell(self, event: object) -> None:
        if self.node:
            self.send(self.node, self.node.events, event)

    def send(self, node: Node, there: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send a message; a node that does not read is killed."""
        try:
            if there.fileno() >= 0:
                send(there, message, descriptors)
        except ConnectionError:  # it has ended
            pass
        except BlockingIOError:
            self.kill(node, "it does not read")
        except OSError as error:
            self.kill(node, f"it cannot be sent to: {error}")

    def forget(self, pid: int) -> None:
        """Forget a core, and kill it if it runs."""
        if self.cores.pop(pid, 0) is None:
            os.kill(pid, signal.SIGKILL)
        self.drop(f"core/{pid}")

    def drop(self, *names: str) -> None:
        for name in names:
            close(self.held.pop(name, ()))

    def report(self, text: str) -> None:
        """Tell systemd (sd_notify(3)), which listens to its main process alone."""
        if not (name := "\0" + self.notify[1:] if self.notify[:1] == "@" else self.notify):
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as there:
                there.sendto(text.encode(), name)
        except OSError as error:
            say(f"systemd did not get {text.split('=')[0]}: {error}")

    def become(self, argv: list[str]) -> None:
        """Execute another version of this script, with everything that is held. Returns if it cannot.

        Signals and the ends of processes wait for that version, also the end of the node.
        """
        self.newer = []
        node = self.node
        if node is None or node.ask.fileno() < 0:
            return  # it has ended, and the next one asks again
        if self.next:
            self.kill(self.next, "the keeper changes its version")
        signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, signal.SIGCHLD))
        names = "command", "notify", "watchdog", "silence", "held", "cores", "served", "seconds", "ending", "signals"
        state = {name: getattr(self, name) for name in names}
        state["unwanted"] = []  # read by version 1
        state["node"] = [node.pid, node.ask.fileno(), node.events.fileno()]
        kept = [*self.signals, *state["node"][1:], *self.descriptors]
        try:
            execute(argv, state, kept)
        except (OSError, TypeError, ValueError) as error:
            say(f"its next version cannot be executed: {error}")
        inherit(kept, False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def resumed(memory: int) -> Keeper:
    """Go on as the keeper that was executed before, or above a node that was started for this one."""
    with os.fdopen(memory, "rb") as file:
        file.seek(0)
        state = json.load(file)
    keeper = Keeper(state.pop("command"))
    pid, *sockets = state.pop("node")
    keeper.cores = {int(pid): status for pid, status in state.pop("cores", {}).items()}
    vars(keeper).update(state)
    keeper.node = node = Node(keeper.command, pid, *(socket.socket(fileno=number) for number in sockets))
    node.is_up = keeper.served
    node.wait(keeper.silence if node.is_up else STARTING)
    inherit([*keeper.signals, *sockets, *keeper.descriptors], False)
    return keeper


def main() -> None:
    blank_key()
    left = os.environ.pop(STATE, "")
    (resumed(int(left)) if left else Keeper(({}, sys.argv[1:]))).run()


if __name__ == "__main__":
    main()
