"""What `scripts/install` leaves behind if it fails at some moment: a node that runs, and all that this node needs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from node.handover.launch import words_of

SCRIPT = Path(__file__).parents[2] / "scripts" / "install"
DEFINITIONS, _, _ = SCRIPT.read_text().partition("\nfrom='' version=''")
# A service in files: `runs` has the version of the node that runs, and is missing without one; "off" is a node without
# a keeper. A hand-over goes to the versions in `takes`.
MACHINE = """
trap - EXIT
home=$PWD/opt current=$PWD/opt/current state=$PWD/state settings=$PWD/node.env template=$PWD/none
service=$PWD/unit work=$PWD/work manager=systemd wanted=$PWD/wanted purge='' no_start='' remove='' incomplete='' ran=''
requested='' updater=$PWD/none
python=python3 handing_over=2 new=$home/versions/new-1
running() { [ -e runs ]; }
runs_from() { [ "$(cat runs 2>/dev/null)" = "$1" ]; }
stop() { rm -f runs; }
is_ready() { grep -qx "$(basename "$(cat runs)")" ready; }
comes_up() { readlink "$current" >runs && is_ready; }
keeper() { [ ! -e runs ] || echo 1; }
service_text() { cat unit.new; }
reread() { :; }
end_of_log() { echo 0; }
log_after() { :; }
print_last_lines() { :; }
systemctl() { if grep -qx "$(basename "$(readlink "$current")")" takes; then readlink "$current" >runs; fi; }
in_use() { [ "$(cat runs 2>/dev/null)" = "$1" ]; }
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A server whose node runs from old-1, and to which new-1 was added. Both take over, and are ready."""
    for name in ("old-1", "new-1", "third-1"):
        (tmp_path / "opt" / "versions" / name).mkdir(parents=True)
    for name in ("state", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "opt" / "current").symlink_to(version(tmp_path, "old-1"))
    (tmp_path / "runs").write_text(f"{version(tmp_path, 'old-1')}\n")
    for name in ("takes", "ready"):
        (tmp_path / name).write_text("old-1\nnew-1\n")
    for name in ("unit", "unit.new"):
        (tmp_path / name).write_text("ExecStart=node\n")
    return tmp_path


def version(server: Path, name: str) -> Path:
    return server / "opt" / "versions" / name


def versions(server: Path) -> list[str]:
    return sorted(path.name for path in (server / "opt" / "versions").iterdir())


def activates(server: Path, more: str = "") -> subprocess.CompletedProcess[str]:
    return runs(server, f"{more}\nactivate")


def runs(server: Path, program: str) -> subprocess.CompletedProcess[str]:
    words = ["sh", "-c", f"{DEFINITIONS}\n{MACHINE}\n{program}\n", str(SCRIPT)]
    return subprocess.run(words, cwd=server, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def now(server: Path) -> tuple[str, str]:
    """The names of the versions that run, and that the link names."""
    return Path((server / "runs").read_text().strip()).name, (server / "opt" / "current").readlink().name


def test_an_upgrade(server: Path) -> None:
    """The new version and the previous one stay on disk."""
    assert activates(server).returncode == 0
    assert now(server) == ("new-1", "new-1") and versions(server) == ["new-1", "old-1"]


def test_a_link_to_a_version_that_was_never_tried(server: Path) -> None:
    """The version to go back to is the one that runs: after --no-start, or a run that was killed."""
    (server / "opt" / "current").unlink()
    (server / "opt" / "current").symlink_to(version(server, "new-1"))
    (server / "takes").write_text("old-1\n")
    done = activates(server)
    assert done.returncode == 1 and "The previous version goes on" in done.stderr
    assert now(server) == ("old-1", "old-1") and "old-1" in versions(server)


def test_two_versions_that_wait_for_a_start(server: Path) -> None:
    """The version that runs stays on disk, however many are put in place after it."""
    assert runs(server, "put_in_place; new=$home/versions/third-1; mkdir -p $new; put_in_place").returncode == 0
    assert versions(server) == ["new-1", "old-1", "third-1"]


def test_a_version_that_is_not_ready_and_does_not_hand_back(server: Path) -> None:
    """The previous version is started again, and the script says that it failed."""
    (server / "takes").write_text("new-1\n")
    (server / "ready").write_text("old-1\n")
    done = activates(server)
    assert done.returncode == 1 and "The previous version runs again. The version that did not" in done.stderr
    assert now(server) == ("old-1", "old-1") and "old-1" in versions(server)


def test_settings_with_which_no_version_is_ready(server: Path) -> None:
    """Two hand-overs, and no restart: it would end all connections for nothing."""
    (server / "ready").write_text("")
    done = activates(server, "stop() { echo stopped; }")
    assert done.returncode == 1 and "it is not ready either" in done.stderr and "stopped" not in done.stdout
    assert now(server) == ("old-1", "old-1")


def test_a_unit_of_the_running_version_that_differs(server: Path) -> None:
    """The new unit may be in place since --no-start: the running node still has the one of its version."""
    done = activates(server, 'service_text() { if [ "$1" = "$new" ]; then cat unit; else echo Other=1; fi; }')
    assert done.returncode == 0 and "unit changes" in done.stdout
    assert now(server) == ("new-1", "new-1")


def test_no_space_for_the_copy_of_the_state(server: Path) -> None:
    """The previous version starts again, with its state."""
    (server / "state" / "state.db").write_text("the users")
    (server / "unit.new").write_text("ExecStart=other\n")
    done = activates(
        server, 'cp() { case $* in *state.db*) : >"$work/saving/state.db"; return 1 ;; esac; command cp "$@"; }'
    )
    assert done.returncode == 1 and "The previous version runs again." in done.stderr
    assert now(server) == ("old-1", "old-1")
    assert (server / "state" / "state.db").read_text() == "the users"


def test_no_space_for_the_unit(server: Path) -> None:
    """The one that is there stays whole."""
    (server / "unit.new").write_text("ExecStart=other\n")
    done = activates(server, 'install() { : >"$4"; return 1; }')
    assert done.returncode == 1 and "The previous version runs again." in done.stderr
    assert (server / "unit").read_text() == "ExecStart=node\n" and now(server) == ("old-1", "old-1")


@pytest.mark.parametrize("name", ["INT", "HUP", "TERM"])
def test_an_interrupt_while_the_service_is_stopped(server: Path, name: str) -> None:
    (server / "unit.new").write_text("ExecStart=other\n")
    done = activates(server, f"stop() {{ rm -f runs; kill -{name} $$; }}")
    assert done.returncode == 0 and now(server) == ("new-1", "new-1")


def test_a_terminal_that_goes(server: Path) -> None:
    (server / "unit.new").write_text("ExecStart=other\n")
    done = activates(server, "exec >/dev/full; stop() { rm -f runs; exec >&-; }")
    assert done.returncode == 0 and now(server) == ("new-1", "new-1")


def test_no_space_for_a_version(server: Path) -> None:
    """It does not stay half installed: the disk would stay full."""
    full = 'python=venv; venv() { mkdir -p "$3"; return 1; }; trap clean_up EXIT'
    assert runs(server, f'{full}; install_version "$home/versions/x-1" wheel').returncode == 1
    assert versions(server) == ["new-1", "old-1", "third-1"]


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["/venv/bin/python", *words_of("/venv/lib/node/handover/keeper.py")[1:]], "7"),
        (["/venv/bin/python", "-I", "-S", "/venv/lib/node/handover/keeper.py", "/venv/bin/twistd"], "7"),
        (["/venv/bin/python", "/venv/bin/twistd", "--nodaemon", "node", "--keeper=off"], ""),
    ],
    ids=["keeper", "older keeper", "no keeper"],
)
def test_which_process_is_a_keeper(command: list[str], found: str, server: Path) -> None:
    """The main process of the service is the node itself if that has no keeper: it cannot hand over."""
    [own] = re.findall(r"^keeper\(\) \{\n.*?^\}\n", DEFINITIONS, re.MULTILINE | re.DOTALL)
    fakes = f"systemctl() {{ echo 7; }}\ncommand_of() {{ echo {shlex.quote(' '.join(command))}; }}\n"
    assert runs(server, f"{own}{fakes}keeper").stdout.strip() == found


def test_what_is_in_use(server: Path, tmp_path: Path) -> None:
    """A version from which any process runs: further nodes may not have handed over yet."""
    python = version(server, "old-1") / "python"
    shutil.copy(shutil.which("sleep") or "sleep", python)
    [own] = [line for line in DEFINITIONS.splitlines() if line.startswith("in_use() ")]
    asks = f'{own}\nfor v in old-1 new-1; do if in_use "$home/versions/$v"; then echo "$v"; fi; done'
    process = subprocess.Popen([python, "60"])
    try:
        assert runs(server, asks).stdout.split() == ["old-1"]
    finally:
        process.kill()
        process.wait()


def test_modules_in_the_current_directory(server: Path) -> None:
    """The script runs as root, maybe in a directory where every user can write: nothing there is imported."""
    for name in ("zipfile", "uuid", "venv", "ensurepip", "urllib", "node", "drivers"):
        (server / f"{name}.py").write_text("open('imported', 'a').write(__name__)\n")
    runs(server, f"python={sys.executable}; find_python; name_of none; download none none; python -m venv made")
    assert not (server / "imported").exists()


def test_a_script_beside_a_directory_of_others(tmp_path: Path) -> None:
    """A copy of the script, say in /tmp/mine, runs nothing from /tmp."""
    (tmp_path / "mine").mkdir()
    copy = shutil.copy(SCRIPT, tmp_path / "mine" / "install")
    for path in ("node/doctor/interpreter.py", "drivers/install/__main__.py", "drivers/install.py", "setup.cfg"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write(__file__)\n")
    (tmp_path / "version" / "bin").mkdir(parents=True)
    (tmp_path / "version" / "bin" / "python").symlink_to(sys.executable)
    program = f"{DEFINITIONS}\nfind_python\ncores=xray\nget_cores {tmp_path / 'version'}\n"
    words = ["sh", "-c", program, copy]
    subprocess.run(words, cwd=tmp_path / "mine", capture_output=True, timeout=60, check=False)
    assert not (tmp_path / "imported").exists()


def test_links_that_the_service_has_made(server: Path) -> None:
    """OpenRC's service owns its state, and may have linked a file of root there."""
    (server / "opt" / "current" / "bin").mkdir()
    (server / "opt" / "current" / "bin" / "python").symlink_to(shutil.which("true") or "true")
    (server / "node.env").touch()
    done = runs(server, 'manager=openrc sans=""; chown() { echo "chown $*"; }; make_settings "$current"')
    assert "chown -hR txnode:txnode" in done.stdout, done.stderr


@contextmanager
def endless() -> Iterator[str]:
    """A server whose replies do not end."""

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(1 << 20))
            except OSError:
                pass

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as there:
        Thread(target=there.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{there.server_port}/"
        there.shutdown()


def test_an_endless_wheel(server: Path) -> None:
    with endless() as url:
        done = runs(server, f"download {url} got")
    assert done.returncode == 1 and "It has more than 256 MiB." in done.stderr
    assert (server / "got").stat().st_size <= 1 << 28


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--from", "a.whl", "--sha256", "0" * 64, "--key", ""], "--key needs a value"),
        (["--from", "a.whl", "--sha256", "0" * 64, "--signature", "a.sig"], "--signature needs --key"),
    ],
)
def test_a_signature_that_nothing_would_verify(words: list[str], reason: str) -> None:
    """An unset variable in place of the key must not turn the check off."""
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and reason in done.stderr
