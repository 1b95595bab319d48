"""The cores that `drivers.install` can obtain: a frozen `Core` value each, and how obtaining one fails."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType


class InstallError(Exception):
    """A core cannot be had, or the one that was named cannot be used. The text tells the operator what to do."""


class DigestMismatch(InstallError):
    """A whole file arrived that is not the pinned one. It ends the install: no other way is tried."""


class Unavailable(InstallError):
    """One way to a core is closed here (no route, no archive for this CPU, no Go); the next one may be open."""


@dataclass(frozen=True)
class Archive:
    """An official archive: its file name, the SHA-256 it must have, and the only members that are taken from it."""

    name: str
    sha256: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class Core:
    """One release of a core: how it is recognised and where it comes from.

    `minimum` is the oldest version that is taken from PATH. `archives` has one entry a CPU, by Go's names of them
    ("amd64"); `url` is what stands before `/v<version>/<archive>`. `package` is what `go install` builds, with its
    version; an empty one says that this release cannot be built. `banner` finds the version in what `<executable>
    version` prints.
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
    tags: tuple[str, ...] = field(default=())

    @property
    def label(self) -> str:
        """The release's name for people, such as `Xray 26.3.27`."""
        return f"{self.title} {self.version}"

    def variable(self, what: str) -> str:
        """The name of this core's own environment variable for `what`, such as `XRAY_EXECUTABLE_PATH`."""
        return f"{self.name.upper().replace('-', '_')}_{what}"


def _xray_archives(amd64: str, arm64: str) -> Mapping[str, Archive]:
    members = ("xray", "geoip.dat", "geosite.dat")
    return MappingProxyType(
        {
            "amd64": Archive("Xray-linux-64.zip", amd64, members),
            "arm64": Archive("Xray-linux-arm64-v8a.zip", arm64, members),
        }
    )


# The newest release that can also be built from its Go modules: what the tests run is what a user downloads.
XRAY = Core(
    name="xray",
    title="Xray",
    executable="xray",
    version="26.3.27",
    minimum="26.3.27",
    banner=re.compile(r"^Xray (\d+\.\d+\.\d+)"),
    url="https://github.com/XTLS/Xray-core/releases/download",
    archives=_xray_archives(
        amd64="23cd9af937744d97776ee35ecad4972cf4b2109d1e0fe6be9930467608f7c8ae",
        arm64="4d30283ae614e3057f730f67cd088a42be6fdf91f8639d82cb69e48cde80413c",
    ),
    package="github.com/xtls/xray-core/main@v1.260327.0",
)

_NEWER_XRAY = replace(
    XRAY,
    version="26.9.30",
    archives=_xray_archives(
        amd64="f851110beaff16e78d643f0ccfd9524b4a44dfd59bae3e34bb52bba378f7690e",
        arm64="9886f077f9fd8e6713b84c377c1c7db4e53b9bfa8c276a5bd12561139522b473",
    ),
    package="",
)

CORES: Mapping[str, tuple[Core, ...]] = MappingProxyType({XRAY.name: (XRAY, _NEWER_XRAY)})
"""The known releases of each core by its name, the pinned one first."""


def choose(name: str, version: str | None = None) -> Core:
    """The release of the core `name` to obtain: the pinned one, or the one of this version.

    Raises InstallError for a version whose digest is not known.
    """
    releases = CORES[name]
    for core in releases:
        if version in (None, core.version):
            return core
    known = ", ".join(core.version for core in releases)
    raise InstallError(
        f"no digest of {releases[0].title} {version} is known here (known: {known}); "
        f"install it yourself and set {releases[0].variable('EXECUTABLE_PATH')}"
    )
