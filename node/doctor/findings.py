"""The list of checks with their remedies, and the findings of a check. The table in docs/doctor.md is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum


class Level(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(Enum):
    """The name of a check, what has to hold, and what to do if it does not."""

    SETTINGS = (
        "settings",
        "the node's settings can be used",
        "Correct the setting; docs/settings.md has the values that it accepts.",
    )
    NODE = "node", "a node runs in STATE_DIR", "Start it: systemctl start node, or scripts/run in a clone."
    KEY_FILES = (
        "key-files",
        "files with keys are readable by their owner alone",
        "chmod 600 the file, and replace its keys: nodectl key new NAME.",
    )
    CERTIFICATE = (
        "certificate",
        "the certificate and its key can be read, and match",
        "Install a matching pair that the node's user can read, or make one: nodectl certificate make --force.",
    )
    EXPIRY = (
        "certificate-expiry",
        "the certificate is valid for at least 30 days more",
        "Renew it, or make one: nodectl certificate make --force; then give controllers the new PEM.",
    )
    NAMES = (
        "certificate-names",
        "the certificate is valid for NODE_HOST, or for a name or an address of this machine",
        "Make one with the name that controllers use: nodectl certificate make --force --san NAME.",
    )
    SUBJECT = (
        "certificate-subject",
        "the certificate does not tell strangers that this is a node",
        "Make one that does not: nodectl certificate make --force; then give controllers the new PEM.",
    )
    CLOCK = (
        "clock",
        "the kernel's clock is synchronised",
        "Synchronise it: timedatectl set-ntp true, or chrony. TLS, REALITY and VMess fail if clocks differ.",
    )
    PORTS = (
        "ports",
        "the node listens on its ports",
        "Stop the program that has the port (ss -ltnp), or choose another port.",
    )
    FIREWALL = (
        "firewall",
        "ufw or firewalld allows the ports of the node and of the inbounds",
        "Open them: ufw allow PORT, or firewall-cmd --permanent --add-port=PORT/tcp and firewall-cmd --reload.",
    )
    INBOUNDS = (
        "inbounds",
        "each inbound of the running configuration accepts connections on its ports",
        "Look for the core's error: nodectl logs; then start it: nodectl start. Or another program has the port.",
    )
    REALITY = (
        "reality",
        "the destinations of REALITY inbounds can be reached from this machine",
        "Choose a destination with TLS 1.3 that this machine can reach: without it no REALITY client gets in.",
    )
    CORE = (
        "core",
        "a core is installed, in the release that this node was tested with",
        "Install or update it: nodectl core install CORE, or nodectl core update CORE.",
    )
    GEO = (
        "geo-files",
        "geoip.dat and geosite.dat exist, and are at most 90 days old",
        "nodectl update geo, or put current files where docs/settings.md says, or beside the core's executable.",
    )
    FILES = (
        "open-files",
        "the node may open 65,536 files",
        "Set LimitNOFILE=65536 in the unit, or ulimit -n 65536.",
    )
    CONNTRACK = (
        "conntrack",
        "the kernel's connection tracking table has room",
        "sysctl net.netfilter.nf_conntrack_max=1048576, or exempt the proxied ports from tracking (notrack).",
    )
    BACKLOG = "somaxconn", "a listener's backlog may have 4,096 connections", "sysctl net.core.somaxconn=4096."
    BUFFERS = (
        "tcp-buffers",
        "a connection's buffers may grow to 4 MiB",
        'sysctl net.ipv4.tcp_rmem="4096 131072 16777216" net.ipv4.tcp_wmem="4096 65536 16777216".',
    )
    CONGESTION = (
        "congestion",
        "the congestion control is bbr or cubic, which work on lines with packet loss",
        "modprobe tcp_bbr; sysctl net.ipv4.tcp_congestion_control=bbr net.core.default_qdisc=fq.",
    )
    DISK = "disk", "STATE_DIR can be written, and has 100 MiB free", "Free disk space, or mount the disk for writing."
    MEMORY = (
        "memory",
        "128 MiB of memory are free, in the machine and within the node's own limit",
        "Stop what uses it, or give the machine or the service (MemoryMax) more.",
    )
    PYTHON = (
        "python",
        "Python was built with optimisations: a plain build needs more processor time",
        "Install the Python of the distribution, or build one with --enable-optimizations; then run scripts/install.",
    )
    STATE = (
        "state",
        "the core runs, or was stopped",
        "Look for the core's error: nodectl logs; then start it: nodectl start.",
    )
    MECHANISMS = (
        "mechanisms",
        "the kernel lets the node do all that it needs: steer connections, reach its cores' sockets, confine them",
        "Allow it: docs/install.md has what each needs, and what is lost without it.",
    )
    WARNINGS = "warnings", "the node has no other warnings", "Do what each warning says."
    CRASHES = (
        "crashes",
        "no core has crashed within the last day",
        "Look for the core's error: nodectl logs. A newer core may help: nodectl core update CORE.",
    )

    REACH = (
        "reach",
        "this machine reaches the node's port",
        "Start the node, and open its port there and on the way; or take another way: docs/reach.md.",
    )
    TRUST = (
        "trust",
        "the node shows the certificate that this machine trusts, which is valid now",
        "Copy the node's certificate.pem to this machine. If it is the same already, a proxy on the way shows its own.",
    )
    NAME = (
        "name",
        "the node's certificate has the name that the node is called by",
        "Call it by a name in the certificate, set certificate_name, or: nodectl certificate make --force --san NAME.",
    )
    DIFFERENCE = (
        "clock-difference",
        "the clocks of this machine and of the node differ by less than 30 seconds",
        "Synchronise both: timedatectl set-ntp true, or chrony. TLS, REALITY and VMess fail if clocks differ.",
    )
    HTTP2 = (
        "http2",
        "the way to the node carries HTTP/2, which gRPC needs",
        "Let the proxy on the way pass TCP as it is (docs/reach.md), or let it speak HTTP/2 and gRPC; or use REST.",
    )
    KEY = "key", "the node knows the key", "Give the node's key, as key_file or NODECTL_KEY; nodectl key list has them."

    def __init__(self, word: str, wanted: str, remedy: str) -> None:
        self.word = word
        self.wanted = wanted
        self.remedy = remedy


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: Check
    level: Level
    found: str

    @property
    def document(self) -> dict[str, str]:
        """The JSON form; the remedy is empty if all is well."""
        remedy = "" if self.level is Level.OK else self.check.remedy
        return {"name": self.check.word, "level": str(self.level), "found": self.found, "remedy": remedy}


def ok(check: Check, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def warn(check: Check, found: str) -> Finding:
    return Finding(check, Level.WARN, found)


def fail(check: Check, found: str) -> Finding:
    return Finding(check, Level.FAIL, found)


def by(check: Check, found: str, *, failing: bool = False, warning: bool = False) -> Finding:
    """A finding with the worst level that holds."""
    return (fail if failing else warn if warning else ok)(check, found)
