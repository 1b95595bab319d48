"""What the doctor reads from a real kernel (sockets, limits, locks), and from files of the test."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

from node.doctor import kernel, network
from node.doctor.config import Inbound
from node.doctor.machine import check
from scripts.staging.wait import until


def test_this_machine(tmp_path: Path) -> None:
    """Every value is known or left out, and nothing is changed."""
    seen = kernel.look(tmp_path)
    assert seen.disk_free
    assert seen.memory_free
    assert seen.somaxconn == int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert list(check(seen))
    assert list(tmp_path.iterdir()) == []


def test_another_kernel(tmp_path: Path) -> None:
    """The values are those of its files; without a file a value is unknown."""
    for name, text in {
        "proc/sys/net/netfilter/nf_conntrack_count": "900",
        "proc/sys/net/netfilter/nf_conntrack_max": "1000",
        "proc/sys/net/ipv4/tcp_congestion_control": "reno\n",
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  2048 kB\n",
        "sys/fs/cgroup/memory.max": "3000000",
        "sys/fs/cgroup/memory.current": "2000000",
        "proc/7/limits": "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024   4096   files\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    seen = kernel.look(tmp_path / "nowhere", 7, tmp_path)
    assert (seen.conntrack, seen.congestion) == ((900, 1000), "reno")
    assert (seen.memory_free, seen.open_files, seen.somaxconn, seen.tcp_rmem) == (1_000_000, 1024, None, None)
    assert "No such file" in seen.disk_fault


# A keeper that has the lock: it starts a node, prints its PID, and ends with its input, as the node does.
KEEPER = """
import subprocess, sys
command = [sys.executable, "-c", "import sys; sys.stdin.read()", "twistd"]
print(subprocess.Popen(command, pass_fds=[int(sys.argv[1])]).pid, flush=True)
sys.stdin.read()
"""


def test_the_process_of_the_node(tmp_path: Path) -> None:
    """The process that holds the lock is the node."""
    assert kernel.node_of(tmp_path) is None
    with (tmp_path / "lock").open("w") as lock:
        assert kernel.node_of(tmp_path) is None
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert kernel.node_of(tmp_path) == os.getpid()
        kept = subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(lock.fileno()), "twistd"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[lock.fileno()],
        )
    with kept:
        assert kept.stdin is not None and kept.stdout is not None
        node = int(kept.stdout.readline())
        # The one that took the lock has let go of it, as after an upgrade. A new process has no command line at first.
        until(lambda: kernel.node_of(tmp_path) == node, 10, "the node has the lock")
        kept.stdin.close()
    until(lambda: kernel.node_of(tmp_path) is None, 10, "both have ended")


def test_ports() -> None:
    """Ours, another program's, and free ones."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert network.ports([port], os.getpid()) == {port: "ours"}
        assert network.ports([port], None) == {port: "another program has the port"}
        assert network.inbounds([Inbound("a", "", (port,), udp=False)]) == {"a": ""}
        assert network.reach("127.0.0.1", port, 1) == ""
    assert network.ports([port], None) == {port: "free"}
    assert network.ports([port], os.getpid()) == {port: "the node does not listen there"}
    assert network.inbounds([Inbound("a", "", (port,), udp=False)]) == {"a": f"no program listens on port {port}"}
    assert network.destinations([("127.0.0.1", port)]) == {f"127.0.0.1:{port}": "Connection refused"}


def test_an_inbound_by_udp() -> None:
    """Only whether the port is bound can be known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert network.inbounds([Inbound("a", "127.0.0.1", (port,), udp=True)]) == {"a": ""}


def test_a_port_that_does_not_accept() -> None:
    """It listens, and accepts no further connection."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        try:
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(address)
            [fault] = network.inbounds([Inbound("a", "127.0.0.1", (address[1],), udp=False)]).values()
        finally:
            for one in waiting:
                one.close()
    assert fault == f"port {address[1]} accepts no connection: no answer within {network.HERE:g} s"
