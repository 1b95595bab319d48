"""Run a core that the kernel kills together with the node (PR_SET_PDEATHSIG) and confines by Landlock.

posix_spawn, the only way to spawn while gRPC's threads run, has no hook for this. So another program sets it up and
then executes the core: this file as a script, `python -I -S leash.py PARENT_PID RULE... -- EXECUTABLE ARGUMENTS...`.
PR_SET_PDEATHSIG is kept over execve(2) (see prctl(2)) unless the file has capabilities, and is sent when the *thread*
that spawned ends. Cores that escape it are killed by the sweep at the node's next start.

With `-` for the parent only the rules are set: the keeper has its children end with itself.

Rules are for Landlock (landlock(7)): `read=PATH`, `write=PATH`, `device=PATH` and `run=PATH` allow that for a file or
all below a directory, `bind=FIRST-LAST` TCP ports, `abstract` abstract sockets of other processes. All else that the
kernel can restrict is forbidden. A path that does not exist is skipped.
"""

import ctypes
import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
# The module `signal` takes 4 ms to import.
SIGKILL = 9
# The exit codes of this script for a command that cannot be run.
MISSING = 127
UNFIT = 126

# System calls: the same numbers on every architecture that cores are built for.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ASK_VERSION = 1
PATH_BENEATH, NET_PORT = 1, 2
# Rights to files, by the bits of linux/landlock.h. The first thirteen are in every version.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
MAKE_CHAR, MAKE_BLOCK = 1 << 6, 1 << 11
FIRST_RIGHTS, REFER, TRUNCATE, IOCTL_DEV = (1 << 13) - 1, 1 << 13, 1 << 14, 1 << 15
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
RIGHTS = {
    "read": READ_FILE | READ_DIR,
    "write": (FIRST_RIGHTS | REFER | TRUNCATE) & ~(EXECUTE | MAKE_CHAR | MAKE_BLOCK),
    "device": READ_FILE | WRITE_FILE | IOCTL_DEV,
    "run": READ_FILE | EXECUTE,
}
BIND_TCP = 1
SCOPE_ABSTRACT, SCOPE_SIGNAL = 1, 2


def leashed(command: list[str], rules: tuple[str, ...] = ()) -> list[str]:
    """Wrap a command so that the kernel kills it when the spawning thread ends, and enforces these rules."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *rules, "--", *command]


def kept(command: "Sequence[str]", rules: tuple[str, ...]) -> list[str]:
    """Wrap a command for the keeper, so that the kernel enforces these rules."""
    return [sys.executable, "-I", "-S", __file__, "-", *rules, "--", *command] if rules else [*command]


def version() -> int:
    """Return the ABI version of this kernel's Landlock; 0 without it."""
    found = ctypes.CDLL(None, use_errno=True).syscall(CREATE_RULESET, None, 0, ASK_VERSION)
    return max(int(found), 0)


def handled(known: int) -> int:
    """Return the file access rights that this version of Landlock can restrict."""
    return FIRST_RIGHTS | (known >= 2) * REFER | (known >= 3) * TRUNCATE | (known >= 5) * IOCTL_DEV


def attributes(known: int, rules: list[str]) -> bytes:
    """Build a `struct landlock_ruleset_attr` as long as this version takes."""
    scoped = SCOPE_SIGNAL | (0 if "abstract" in rules else SCOPE_ABSTRACT)
    words = [handled(known), *([BIND_TCP] if known >= 4 else []), *([scoped] if known >= 6 else [])]
    return b"".join(_word(value) for value in words)


def _word(value: int) -> bytes:
    return value.to_bytes(8, sys.byteorder)


def restrict(rules: list[str]) -> None:
    """Restrict this process, and what it executes, to these rules. Raises `OSError`."""
    libc, known = ctypes.CDLL(None, use_errno=True), version()
    if not known:
        return
    attribute = attributes(known, rules)
    ruleset = _done(libc.syscall(CREATE_RULESET, attribute, len(attribute), 0))
    for rule in rules:
        kind, _, value = rule.partition("=")
        if kind in RIGHTS:
            _allow(libc, ruleset, RIGHTS[kind] & handled(known), value)
        elif kind == "bind" and known >= 4:
            first, _, last = value.partition("-")
            for port in range(int(first), int(last) + 1):
                _done(libc.syscall(ADD_RULE, ruleset, NET_PORT, _word(BIND_TCP) + _word(port), 0))
    _done(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _done(libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, rights: int, path: str) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        rights &= OF_A_FILE
    beneath = _word(rights) + place.to_bytes(4, sys.byteorder)
    _done(libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, beneath, 0))
    os.close(place)


def _done(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def main(arguments: list[str]) -> None:
    parent, end = arguments[0], arguments.index("--")
    rules, command = arguments[1:end], arguments[end + 1 :]
    if parent != "-":
        follow(int(parent))
    try:
        if rules:
            restrict(rules)
        os.execv(command[0], command)  # noqa: S606 - this is what the script is for
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        raise SystemExit(MISSING if isinstance(error, FileNotFoundError) else UNFIT) from error


def follow(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL) != 0:
        sys.stderr.write(f"cannot ask for a parent-death signal: {os.strerror(ctypes.get_errno())}\n")
    # The parent may have died before the call.
    if os.getppid() != parent:
        raise SystemExit("the node is gone already")


if __name__ == "__main__":
    main(sys.argv[1:])
