"""What a check says: how it is, what was found, and what to do. The documentation is made of the checks here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum


class Level(StrEnum):
    """How it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(Enum):
    """The name of a check, what it looks at, and what to do where it is not well."""

    SETTINGS = "settings", "the node's settings can be used", "Mend the setting; docs/settings.md says what it takes."
    NODE = "node", "a node runs in STATE_DIR", "Start it: systemctl start node, or twistd --nodaemon --pidfile= node."
    KEY_FILES = (
        "key-files",
        "nobody else reads files with keys",
        "chmod 600 the file, and make new keys: nodectl key new.",
    )
    CERTIFICATE = (
        "certificate",
        "the certificate and its key can be read, and belong together",
        ("Put a pair there that the node's user can read, or have one made: nodectl certificate make --force."),
    )
    EXPIRY = (
        "certificate-expiry",
        "the certificate is valid, for 30 days at least",
        ("Renew it, or have one made: nodectl certificate make --force; then give controllers the new PEM."),
    )
    NAMES = (
        "certificate-names",
        "the certificate is for NODE_HOST, or for a name or an address of this machine",
        ("Have one made with the name that controllers use: nodectl certificate make --force --san NAME."),
    )
    CLOCK = (
        "clock",
        "the kernel's clock is kept in time",
        ("Have it kept: timedatectl set-ntp true, or chrony. TLS, REALITY and VMess fail where clocks differ."),
    )
    PORTS = "ports", "the node's ports are its own", "End what has the port (ss -ltnp), or choose another port."
    FIREWALL = (
        "firewall",
        "ufw or firewalld lets the node's and the inbounds' ports in",
        ("Open them: ufw allow PORT, or firewall-cmd --permanent --add-port=PORT/tcp and firewall-cmd --reload."),
    )
    INBOUNDS = (
        "inbounds",
        "each inbound of what runs has its port, and accepts there",
        ("nodectl logs has the core's words; start it again: nodectl start. A port that another program has is taken."),
    )
    REALITY = (
        "reality",
        "the sites that REALITY inbounds show to strangers are reached from here",
        ("Choose a destination with TLS 1.3 that this machine reaches: without it no client of REALITY gets in."),
    )
    CORE = (
        "core",
        "a core is installed, and is the pinned release",
        "nodectl core install CORE, or nodectl core update.",
    )
    GEO = (
        "geo-files",
        "geoip.dat and geosite.dat are there, and younger than 90 days",
        ("Put current files where docs/settings.md says, or beside the core's executable."),
    )
    FILES = (
        "open-files",
        "the node may open 65,536 files",
        "LimitNOFILE=65536 in the unit, else ulimit -n 65536.",
    )
    CONNTRACK = (
        "conntrack",
        "the table of connections has room",
        ("sysctl net.netfilter.nf_conntrack_max=1048576, or leave proxied ports out of it (notrack)."),
    )
    BACKLOG = "somaxconn", "4,096 connections may wait to be accepted", "sysctl net.core.somaxconn=4096."
    BUFFERS = (
        "tcp-buffers",
        "a connection's buffers may grow to 4 MiB",
        ('sysctl net.ipv4.tcp_rmem="4096 131072 16777216" net.ipv4.tcp_wmem="4096 65536 16777216".'),
    )
    CONGESTION = (
        "congestion",
        "the congestion control carries over lines with loss: bbr or cubic",
        ("modprobe tcp_bbr; sysctl net.ipv4.tcp_congestion_control=bbr net.core.default_qdisc=fq."),
    )
    DISK = "disk", "STATE_DIR can be written, and has 100 MiB free", "Free the disk, or mount it for writing."
    MEMORY = (
        "memory",
        "128 MiB are free, in the machine and below the node's own limit",
        ("End what takes it, or give the machine or the service (MemoryMax) more."),
    )
    SOCKETS = (
        "sockets",
        "a node may have duplicates of its cores' sockets: no change drops anybody",
        ("Let pidfd_open and pidfd_getfd pass, and kernel.yama.ptrace_scope be 0 or 1; docs/install.md has a table."),
    )
    LANDLOCK = (
        "landlock",
        "Landlock confines the core",
        ("Take Linux 5.13 or later with Landlock, and let its system calls pass; docs/install.md says which."),
    )
    STATE = "state", "the node's core runs, or none is wanted", "nodectl logs has the core's words; nodectl start."
    WARNINGS = "warnings", "the node itself warns of nothing", "Each says what to do."
    CRASHES = (
        "crashes",
        "no core has crashed within a day",
        "nodectl logs has its words; a newer core may do better.",
    )

    def __init__(self, word: str, wanted: str, remedy: str) -> None:
        self.word = word
        self.wanted = wanted
        self.remedy = remedy


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: Check
    level: Level
    found: str

    @property
    def document(self) -> dict[str, str]:
        """For scripts; the remedy where there is something to do."""
        remedy = "" if self.level is Level.OK else self.check.remedy
        return {"name": self.check.word, "level": str(self.level), "found": self.found, "remedy": remedy}


def ok(check: Check, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def warn(check: Check, found: str) -> Finding:
    return Finding(check, Level.WARN, found)


def fail(check: Check, found: str) -> Finding:
    return Finding(check, Level.FAIL, found)


def by(check: Check, found: str, failing: bool, warning: bool) -> Finding:
    """The worst that holds."""
    return (fail if failing else warn if warning else ok)(check, found)
