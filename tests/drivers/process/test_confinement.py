"""What a confined process can use, tried by one, and the rules for it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from drivers.install import leash
from drivers.install.leash import attributes, handled, leashed
from drivers.process import confinement
from drivers.process.confinement import NO_LANDLOCK, Confinement, Script, Touched, interpreter, named_places, unconfined
from drivers.process.paths import Paths
from scripts.staging.ports import free_port

PYTHON = Path(sys.executable).resolve()
# Tries each of these and prints those that succeed.
PROBE = """
import json, os, signal, socket, sys
def bind(port):
    socket.socket().bind(("127.0.0.1", port))
def connect(name):
    socket.socket(socket.AF_UNIX).connect(chr(0) + name)
def attempt(what, value):
    try:
        {"read": lambda: open(value, "rb").read(1), "list": lambda: os.listdir(value), "bind": lambda: bind(value),
         "write": lambda: open(value, "a"), "run": lambda: os.posix_spawn(value, [value], {}), "signal":
         lambda: os.kill(value, 0), "truncate": lambda: os.truncate(value, 0), "connect": lambda: connect(value),
         "link": lambda: os.link(value, os.path.join(os.path.dirname(sys.argv[1]), "link")), "remove":
         lambda: os.remove(value), "mount": lambda: os.chroot(value), "dgram": lambda:
         socket.socket(socket.AF_INET, socket.SOCK_DGRAM).bind(("127.0.0.1", value))}[what]()
        return True
    except OSError:
        return False
print(json.dumps([attempt(*each) for each in json.loads(sys.argv[2])]))
"""
Tries = list[tuple[str, object]]


class Ground:
    """Directories of a node: allowed ones, writable ones, and its own."""

    def __init__(self, root: Path) -> None:
        self.certs, self.run, self.state = root / "certs", root / "state" / "run", root / "state"
        self.certs.mkdir()
        self.run.mkdir(parents=True)
        for file in (self.certs / "a.pem", self.state / "state.db", root / "other"):
            file.write_text("secret")
        self.other = root / "other"
        self.paths = Paths((self.certs,), (self.state,), self.run, (str(self.certs),))

    def tried(self, tries: Tries, touched: Touched | None = None) -> list[bool]:
        """Return which of these succeed in a process that is confined to such a configuration."""
        touched = touched or Touched([str(self.certs / "a.pem")])
        rules = Confinement(self.paths, self.run, [Path(sys.base_prefix)]).rules(PYTHON, touched)
        command = [str(PYTHON), "-I", "-S", "-c", PROBE, str(self.run / "x"), json.dumps(tries)]
        done = subprocess.run(leashed(command, rules=rules), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found: list[bool] = json.loads(done.stdout)
        return found


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path.resolve())


@pytest.fixture
def without_landlock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    confinement.supported.cache_clear()
    monkeypatch.setattr(leash, "version", lambda: 0)
    yield
    confinement.supported.cache_clear()


def test_needed_files_and_ports_are_allowed(ground: Ground) -> None:
    tries: Tries = [
        ("read", str(ground.certs / "a.pem")),
        ("read", "/etc/hosts"),
        ("read", "/proc/self/status"),
        ("write", str(ground.run / "new")),
        ("remove", str(ground.run / "new")),
        ("write", "/dev/null"),
        ("bind", 0),
        ("dgram", free_port()),
    ]
    assert ground.tried(tries) == [True] * len(tries)


def test_a_resolver_that_is_replaced(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is root or has a key there, the node lets cores read all of /etc, so also a replaced file."""

    def made(withheld: tuple[Path, ...] = ()) -> Confinement:
        return Confinement(replace(ground.paths, withheld=withheld), ground.run)

    key = made((Path("/etc/txnode/key"),))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "read=/etc" not in made().rules(PYTHON, Touched())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "read=/etc" in made().rules(PYTHON, Touched())
    assert made().pinned() == []
    assert "read=/etc" not in key.rules(PYTHON, Touched())
    assert set(key.pinned()) == {
        path for path in map(Path, ("/etc/resolv.conf", "/etc/hosts")) if not path.is_symlink()
    }


def test_everything_else_is_forbidden(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the node and the machine, programs, ports, and other processes; also through links and detours."""
    # With the rules of a node that is root: others let cores list /etc, see above.
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (ground.certs / "link").symlink_to(ground.state / "state.db")
    (ground.run / "link").symlink_to("/etc/shadow")
    tries: Tries = [
        ("read", str(ground.state / "state.db")),
        ("read", str(ground.certs / ".." / "other")),
        ("read", str(ground.certs / "link")),
        ("read", str(ground.run / "link")),
        ("read", "/etc/shadow"),
        ("read", f"/proc/{os.getpid()}/environ"),
        *(("read", str(Path("/proc", process, "root", "etc", "shadow"))) for process in ("self", str(os.getpid()))),
        ("read", "/dev/zero"),
        ("list", "/etc"),
        ("list", str(ground.state)),
        ("write", str(ground.certs / "a.pem")),
        ("write", str(ground.certs / "new")),
        ("write", "/tmp/txnode-escape"),
        ("truncate", str(ground.other)),
        ("remove", str(ground.certs / "a.pem")),
        ("link", str(ground.state / "state.db")),
        ("run", "/bin/sh"),
        ("run", "/usr/bin/env"),
        ("bind", free_port()),
        ("signal", os.getpid()),
    ]
    could = [attempt for attempt, done in zip(tries, ground.tried(tries), strict=True) if done]
    assert could == []
    assert ground.other.read_text() == (ground.certs / "a.pem").read_text() == "secret"


def test_without_rules_it_could(ground: Ground) -> None:
    """The attempts above succeed without rules."""
    command = [str(PYTHON), "-I", "-S", "-c", PROBE, str(ground.run / "x")]
    tries: Tries = [("read", str(ground.state / "state.db")), ("run", "/bin/true"), ("bind", free_port())]
    tries += [("signal", os.getpid()), ("truncate", str(ground.other)), ("link", str(ground.other))]
    done = subprocess.run(leashed([*command, json.dumps(tries)]), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True] * len(tries)


def test_a_named_port_is_allowed(ground: Ground) -> None:
    port = free_port()
    touched = Touched(ports=[range(port, port + 1)])
    assert ground.tried([("bind", port), ("bind", free_port())], touched) == [True, False]


def test_abstract_sockets_of_others(ground: Ground) -> None:
    """Only if the configuration names such sockets."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(b"\0txnode-test-%d" % os.getpid())
        listener.listen()
        name = f"txnode-test-{os.getpid()}"
        assert ground.tried([("connect", name)]) == [False]
        assert ground.tried([("connect", name)], Touched(abstract=True)) == [True]


def test_a_file_that_is_not_allowed_is_no_rule(ground: Ground) -> None:
    """Naming a file that is withheld or not allowed does not open it."""
    names = ["/etc/shadow", str(ground.state / "state.db"), str(ground.other), str(ground.certs / ".." / "other")]
    rules = Confinement(ground.paths, ground.run).rules(PYTHON, Touched(names, ["/etc/a.sock"]))
    assert rules == Confinement(ground.paths, ground.run).rules(PYTHON, Touched())


def test_a_renewed_file_is_found(ground: Ground) -> None:
    """The directory of a file is readable, also that of a link's target, as with certbot."""
    (ground.certs / "live").mkdir()
    (ground.certs / "archive").mkdir()
    target, link = ground.certs / "archive" / "cert1.pem", ground.certs / "live" / "cert.pem"
    target.write_text("one")
    link.symlink_to(target)
    assert list(named_places(ground.paths, str(link))) == [link.parent, target.parent]
    alone = Paths((target,), (), ground.run)
    assert list(named_places(alone, str(target))) == [target, target]


def test_a_kernel_without_landlock(ground: Ground, without_landlock: None) -> None:
    """There are no rules, and a warning."""
    assert Confinement(ground.paths, ground.run).rules(PYTHON, Touched()) == ()
    assert unconfined(PYTHON) == NO_LANDLOCK


def test_a_script_is_not_confined(ground: Ground, tmp_path: Path) -> None:
    script = tmp_path / "core"
    script.write_text("#!/bin/sh\n")
    assert Confinement(ground.paths, ground.run).rules(script, Touched()) == ()
    assert str(script) in (unconfined(script) or "")
    with pytest.raises(Script):
        interpreter(script)


def test_the_dynamic_linker_of_an_executable(tmp_path: Path) -> None:
    """A static one, like a core's, needs none."""
    static = tmp_path / "static"
    static.write_bytes(b"\x7fELF\x02\x01" + bytes(58))
    assert interpreter(static) is None
    assert "ld" in Path(interpreter(Path("/bin/sh")) or "").name


@pytest.mark.parametrize(("known", "size"), [(1, 8), (3, 8), (4, 16), (5, 16), (6, 24), (7, 24), (20, 24)])
def test_attributes_fit_the_version(known: int, size: int) -> None:
    assert len(attributes(known, [])) == size


def test_rights_grow() -> None:
    assert [handled(known).bit_count() for known in (1, 2, 3, 4, 5, 6, 7)] == [13, 14, 15, 15, 16, 16, 16]
