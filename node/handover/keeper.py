"""The keeper: the parent of the node and of its cores. Users stay connected while the node dies or is upgraded.

A script of the standard library alone: `python -I -S keeper.py COMMAND...`, where COMMAND runs the node. It starts the
node, and starts it again when it dies or hangs. It spawns cores for the node, and holds their pidfds and outputs, and
other descriptors by name, for the next node. It ends with the node's ordered end, and ends the cores if no node comes
up. It never blocks. Only the node reaches it, over two sockets that it inherits: one for requests, which are all
answered, and one for events. A message is a JSON object with descriptors; {"more": true} has some of the next message.
"""

from __future__ import annotations

import array
import ctypes
import errno
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
    from collections.abc import Callable, Collection, Sequence
    from typing import Any

    # What it adds to the environment, and its words; an answer to a request, and its descriptors.
    Command = Sequence[Any]
    Answer = tuple[dict[str, Any], Sequence[int]]

# Raised with each change of this file: a node that has a newer keeper makes the running one execute it.
VERSION = 1
# Environment variables: the node's sockets and our PID; why the next version failed; what a new keeper goes on with.
VARIABLE, FAILED, STATE = "TXNODE_KEEPER", "TXNODE_HANDOVER_FAILED", "TXNODE_KEEPER_STATE"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_PTRACER = 1, 36, 0x59616D61
FORWARDED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
# Signals that would end a node that has no handlers yet. If there are cores to end in order, the last two wait, too.
WAITING = (signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
# The longest message, and the most descriptors in one.
MESSAGE, FEW = 1 << 20, 250
# Seconds: of silence until a node is killed, once it is up and before; between two starts.
SILENCE, STARTING, PAUSES = 20.0, 90.0, (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
MOST_DESCRIPTORS = 65_536
# Seconds for a new process to close what it has inherited; between two looks, if the machine was not suspended.
MOMENT, STOOD = 1.0, 5.0
LIBC = ctypes.CDLL(None, use_errno=True)


def say(text: str) -> None:
    """Write a line to standard error, unless that would block."""
    try:
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"txnode keeper: {text}\n".encode(errors="replace")[:4096])
    except OSError:  # a full disk, or a reader that has gone: no reason to end
        pass


class Node:
    """A node's process and sockets. `back`: the command to go back to if it does not come up within `patience`."""

    def __init__(self, command: Command, pid: int, ask: socket.socket, events: socket.socket) -> None:
        self.command, self.pid, self.ask, self.events = command, pid, ask, events
        self.patience, self.back = STARTING, None
        # Whether it has come up; whether it ends in order; the number of a `hello` that waits for an answer.
        self.is_up, self.ends, self.waits = False, False, 0
        # Descriptors of an unfinished request; why it is killed; when it gave a sign of life.
        self.parts, self.reason, self.heard = list[int](), "", time.monotonic()
        # When it was started, or got the answer to `hello`.
        self.began = self.heard

    def send(self, there: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send a message; a node that does not read is killed."""
        more = True
        while more:
            part, descriptors = descriptors[:FEW], descriptors[FEW:]
            more = bool(descriptors)
            try:
                words = json.dumps({"more": True} if more else message).encode()
                # Not `socket.send_fds`, which ignores the flags in Python 3.11, as `recv_fds` does.
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", part))] if part else []
                there.sendmsg([words], rights, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self.kill("it does not read")
                return
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET):  # it has ended
                    self.kill(f"it cannot be sent to: {error}")
                return

    def kill(self, reason: str) -> None:
        self.reason, self.heard = reason, time.monotonic()
        say(f"node {self.pid} is killed: {reason}")
        os.kill(self.pid, signal.SIGKILL)


class Keeper:
    """`start` runs instead of the commands, for tests."""

    def __init__(self, command: Command, start: Callable[[], object] | None = None) -> None:
        self.command, self.start, self.me = command, start, os.getpid()
        self.notify = os.environ.pop("NOTIFY_SOCKET", "")
        self.watchdog = int(os.environ.pop("WATCHDOG_USEC", "") or 0) / 1e6
        # Descriptors by name; the status of cores by PID, None while they run; cores to forget when they end.
        self.held: dict[str, list[int]] = {}
        self.cores: dict[int, int | None] = {}
        self.unwanted: set[int] = set()
        # The node, and the next version that waits for its end.
        self.node: Node | None = None
        self.next: Node | None = None
        # The last node's status; whether any has come up; whether all is to end; why the next version failed.
        self.status, self.served, self.ending, self.failed, self.orderly = 0, False, False, "", False
        # Seconds without any node, and for how many cores go on then; when the next start is due, after how many.
        self.absent, self.seconds, self.due, self.tries = 0.0, 300.0, 0.0, 0
        self.poll, self.clock, self.heard, self.wake = select.poll(), time.monotonic(), -1, -1
        self.readers: dict[int, Callable[[], object]] = {}

    @property
    def nodes(self) -> list[Node]:
        return [node for node in (self.node, self.next) if node]

    def run(self) -> None:
        """Run nodes until one ends in order, then end like it."""
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.umask(0o077)  # only this user may read what cores write, such as the sockets of their APIs
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        self.heard, self.wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        for number in (*FORWARDED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self.watch(self.heard, self.listen)
        for node in self.nodes:
            self.watch(node.ask.fileno(), lambda node=node: self.hear(node))  # type: ignore[misc]
        self.reap()
        while True:
            self.look()
            wait = 1.0 if self.node else min(1.0, self.due - time.monotonic())
            for ready, _ in self.poll.poll(max(0.0, wait) * 1000 + 1):
                self.readers.get(ready, lambda: None)()

    def watch(self, descriptor: int, reader: Callable[[], object]) -> None:
        self.readers[descriptor] = reader
        self.poll.register(descriptor, select.POLLIN)

    def ignore(self, descriptor: int) -> None:
        if self.readers.pop(descriptor, None):
            self.poll.unregister(descriptor)

    def listen(self) -> None:
        try:
            numbers = os.read(self.heard, 4096)
        except BlockingIOError:
            return
        for number in numbers:
            self.signalled(number)

    def look(self) -> None:
        """Do what is due: start a node, end one that hangs, end the cores if no node came up."""
        passed, self.clock = time.monotonic() - self.clock, time.monotonic()
        if self.watchdog:
            self.report("WATCHDOG=1")
        for node in self.nodes:
            if passed > STOOD:  # the machine stood still, not the node
                node.heard, node.began = self.clock, node.began + passed
            silence = min(SILENCE, self.watchdog * 2 / 3 or SILENCE) if node.is_up else node.patience
            quiet = self.clock - (node.heard if node.is_up else node.began)
            if not node.waits and not node.ends and quiet > silence:
                node.began = self.clock
                node.kill(f"it did not {'answer' if node.is_up else 'come up'} within {silence:g} s")
        if self.node is None:
            self.absent += passed
            if self.absent > self.seconds:
                say(f"no node came up within {self.seconds:g} s: all cores end")
                self.finish()
            if self.clock >= self.due:
                try:
                    self.node = self.launch(self.command)
                except OSError as error:
                    if os.getpid() != self.me:
                        os._exit(1)
                    self.due = self.clock + PAUSES[-1]
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
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self.unwanted:
                self.forget(pid)
            elif pid in self.cores:
                self.cores[pid] = status
                for node in self.nodes[:1]:
                    node.send(node.events, {"exited": pid, "status": status})
            for node in self.nodes:
                if node.pid == pid:
                    self.gone(node, status)

    def gone(self, node: Node, status: int) -> None:
        """A node has ended: another one goes on, or all ends."""
        self.ignore(node.ask.fileno())
        node.ask.close()
        node.events.close()
        for number in node.parts:
            os.close(number)
        code = os.waitstatus_to_exitcode(status)
        how = node.reason or (f"it ended by signal {-code}" if code < 0 else f"it ended with exit status {code}")
        if node is self.next:
            self.next = None
            for other in self.nodes:
                other.send(other.events, {"next": how})
            return
        self.node, self.status, self.orderly = None, status, node.ends
        if self.next and not node.ends:
            self.node, self.next = self.next, None
            self.node.heard = self.node.began = time.monotonic()
            if self.node.waits:
                self.answer(self.node, {"do": "hello", "n": self.node.waits}, [])
        elif node.ends or self.ending or (code >= 0 and not self.served and not node.back):
            self.finish()
        else:
            pause = 0.0 if node.back else PAUSES[min(self.tries, len(PAUSES) - 1)]
            if node.back:
                self.command, self.failed = node.back, how
            self.tries, self.due = self.tries + 1, time.monotonic() + pause
            say(f"node {node.pid}: {how}; cores go on, and {'the version before' if node.back else 'it'} starts again")

    def finish(self) -> None:
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

    def launch(self, command: Command) -> Node:
        """Start a node."""
        (ask, its_ask), (events, its_events) = (socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in "ae")
        for there in (ask, events, its_ask):
            there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
        pid = self.fork(WAITING if None in self.cores.values() else WAITING[:2])
        if not pid:
            os.setpgid(0, 0)  # else Ctrl-C would reach it twice
            for there in (its_ask, its_events):
                os.set_inheritable(there.fileno(), True)
            added = {VARIABLE: f"{its_ask.fileno()} {its_events.fileno()} {self.me}", **command[0]}
            os.environ.update(added, **({FAILED: self.failed} if self.failed else {}))
            words = command[1]
            self.execute(self.start or (lambda: os.execve(words[0], words, os.environ)))  # noqa: S606 - the purpose
        its_ask.close()
        its_events.close()
        node = Node(command, pid, ask, events)
        self.watch(ask.fileno(), lambda: self.hear(node))
        return node

    def spawn(self, message: Any, descriptors: Sequence[int]) -> Answer:
        """Start a core, with these descriptors as its `targets`. Answers with its pidfd and both outputs."""
        pipes = [*os.pipe2(os.O_CLOEXEC), *os.pipe2(os.O_CLOEXEC)]
        out, its_out, err, its_err = pipes
        pid = -1
        try:
            pid = self.fork(())
            if not pid:
                self.become_core(
                    message, {**dict(zip(message["targets"], descriptors, strict=True)), 1: its_out, 2: its_err}
                )
            for pipe in (out, err):
                os.set_blocking(pipe, False)
            self.held[f"core/{pid}"] = [os.pidfd_open(pid), out, err]
        except OSError:
            if pid > 0:
                self.unwanted.add(pid)
                os.kill(pid, signal.SIGKILL)
            os.close(out)
            os.close(err)
            raise
        finally:
            for number in (its_out, its_err, *descriptors):
                os.close(number)
        self.cores[pid] = None
        return {"pid": pid}, self.held[f"core/{pid}"]

    def become_core(self, message: Any, targets: dict[int, int]) -> None:
        """Execute the core in a new process. Yama lets all below this process trace it."""
        try:
            LIBC.prctl(PR_SET_PTRACER, ctypes.c_ulong(self.me), 0, 0, 0)
            for heard in (*FORWARDED, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two
                signal.signal(heard, signal.SIG_DFL)
            high = {target: fcntl.fcntl(number, fcntl.F_DUPFD, 100) for target, number in targets.items()}
            for target, number in high.items():
                os.dup2(number, target)
            os.closerange(max(high) + 1, MOST_DESCRIPTORS)
            words, environment = message["argv"], message["environment"]
            self.execute(lambda: os.execve(words[0], words, environment))  # noqa: S606 - the purpose
        finally:
            os._exit(1)

    def fork(self, blocked: Collection[int]) -> int:
        """Start a process that ends with this one.

        Returns when it has closed what is held: a duplicate of a listener would keep the kernel's order of listeners.
        """
        ready, its_ready = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            os.close(ready)
            os.close(its_ready)
            raise
        if pid:
            os.close(its_ready)
            poll = select.poll()
            poll.register(ready, select.POLLIN)
            poll.poll(MOMENT * 1000)
            os.close(ready)
            return pid
        signal.set_wakeup_fd(-1)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self.me:
            os._exit(1)
        for number in (*(each for some in self.held.values() for each in some), its_ready):
            os.close(number)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return 0

    def execute(self, start: Callable[[], object]) -> None:
        try:
            start()
        except OSError as error:
            os.write(2, f"cannot run {error.filename}: {error.strerror}\n".encode(errors="replace"))
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)
        os._exit(1)

    def hear(self, node: Node) -> None:
        """Take a request, and answer it."""
        flags, some = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC, array.array("i")
        try:
            words, rights, *_ = node.ask.recvmsg(MESSAGE, socket.CMSG_SPACE(FEW * some.itemsize), flags)
        except OSError:
            return
        for *_, numbers in rights:
            some.frombytes(numbers[: len(numbers) // some.itemsize * some.itemsize])
        if not words:  # it is ending
            self.ignore(node.ask.fileno())
            return
        node.heard, node.parts, message = time.monotonic(), [*node.parts, *some], json.loads(words)
        if "do" in message:
            descriptors, node.parts = node.parts, []
            self.answer(node, message, descriptors)

    def answer(self, node: Node, message: Any, descriptors: list[int]) -> None:
        if message["do"] == "hello" and node is self.next:
            node.waits = message["n"]
            for other in self.nodes[:1]:
                other.send(other.events, {"next": ""})
            return
        node.waits = 0
        try:
            reply, some = self.do(node, message, descriptors)
        except (OSError, KeyError, TypeError, ValueError) as error:
            if os.getpid() != self.me:
                os._exit(1)
            reply, some = {"error": str(error)}, ()
        if "n" in message:
            node.send(node.ask, {"n": message["n"], **reply}, some)

    def do(self, node: Node, message: Any, descriptors: list[int]) -> Answer:
        """Do what a node asks for."""
        match message["do"]:
            case "hello":  # it takes all that is held
                exits = {pid: status for pid, status in self.cores.items() if status is not None}
                names = [(name, len(some)) for name, some in self.held.items()]
                reply = {"version": VERSION, "names": names, "exits": exits}
                return reply, [each for some in self.held.values() for each in some]
            case "spawn":
                return self.spawn(message, descriptors)
            case "put":
                self.drop(message["name"])
                self.held[message["name"]] = descriptors
            case "drop":
                self.drop(*message["names"])
            case "forget":  # it is killed, if it runs
                if self.cores.get(message["pid"], 0) is None:
                    self.unwanted.add(message["pid"])
                    os.kill(message["pid"], signal.SIGKILL)
                else:
                    self.forget(message["pid"])
            case "up":  # it is the one to start again; `seconds`: how long cores go on without any
                self.command, self.seconds, node.is_up, node.back = node.command, message["seconds"], True, None
                self.served, self.failed, self.absent, self.tries = True, "", 0.0, 0
            case "alive":
                if "text" in message:
                    self.report(message["text"])
            case "next":  # it says `hello` when it could go on, and is answered when this node has ended
                self.next = self.launch(message["command"])
                # Once it has come up, a plain command starts it again.
                self.next.command = message["plain"]
                self.next.patience, self.next.back = message["patience"], message["back"]
            case "cancel" if self.next:
                self.next.kill(message["reason"])
            case "failed":
                node.kill(message["reason"])
            case "bye":
                node.ends = True
            case "become":
                node.send(node.ask, {"n": message["n"]})
                self.become(node, message["argv"])
        return {}, ()

    def forget(self, pid: int) -> None:
        self.cores.pop(pid, None)
        self.unwanted.discard(pid)
        self.drop(f"core/{pid}")

    def drop(self, *names: str) -> None:
        for name in names:
            for number in self.held.pop(name, ()):
                os.close(number)

    def report(self, text: str) -> None:
        """Tell systemd (sd_notify(3)), which listens to its main process alone."""
        if not (name := "\0" + self.notify[1:] if self.notify[:1] == "@" else self.notify):
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as there:
                there.sendto(text.encode(), name)
        except OSError as error:
            say(f"systemd did not get {text.split('=')[0]}: {error}")

    def become(self, node: Node, argv: list[str]) -> None:
        """Execute another version of this script, with everything that is held. Returns, or raises, if it cannot."""
        signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, signal.SIGCHLD))
        self.listen()
        names = "command", "notify", "watchdog", "held", "cores", "served", "seconds", "ending"
        state = {name: getattr(self, name) for name in names} | {"unwanted": [*self.unwanted]}
        state["node"] = [node.pid, node.ask.fileno(), node.events.fileno()]
        kept = (*state["node"][1:], *(each for some in self.held.values() for each in some))
        memory = os.memfd_create("txnode-keeper", 0)
        try:
            os.write(memory, json.dumps(state).encode())
            for number in kept:
                os.set_inheritable(number, True)
            signal.set_wakeup_fd(-1)
            os.execve(argv[0], argv, {**os.environ, STATE: str(memory)})  # noqa: S606 - the purpose
        finally:
            os.close(memory)
            for number in kept:
                os.set_inheritable(number, False)
            signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())


def resumed(memory: int) -> Keeper:
    """Go on as the keeper that was executed before."""
    with os.fdopen(memory, "rb") as file:
        file.seek(0)
        state = json.load(file)
    keeper = Keeper(state.pop("command"))
    pid, *sockets = state.pop("node")
    keeper.node = Node(keeper.command, pid, *(socket.socket(fileno=number) for number in sockets))
    keeper.node.is_up = True
    keeper.cores = {int(pid): status for pid, status in state.pop("cores").items()}
    vars(keeper).update(state, unwanted={*state["unwanted"]})
    for number in (*sockets, *(each for some in keeper.held.values() for each in some)):
        os.set_inheritable(number, False)
    return keeper


def main() -> None:
    left = os.environ.pop(STATE, "")
    (resumed(int(left)) if left else Keeper(({}, sys.argv[1:]))).run()


if __name__ == "__main__":
    main()
