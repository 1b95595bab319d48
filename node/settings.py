"""The node's settings, read from `.env`, the environment and options; a later source overrides an earlier one.

`all_settings` is the one list, including the settings that drivers declare: the options of `twistd node`, the table in
docs/settings.md and the validation are made from it.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from node import deployed
from node.base import env_file
from node.contract.settings import Setting, fault_of_address
from node.limits import parsing
from node.limits.limits import Defaults
from node.limits.parsing import size
from node.updates.policy import EVERY, LISTS_URL
from node.updates.policy import Policy as Updates

MIN_KEY = 16
# The name of API_KEY in logs and events.
DEFAULT_KEY = "default"
# The file of named keys in STATE_DIR.
KEYS = "api_keys"


_STATE_DIR = "var"


class BadSettings(Exception):
    """Some settings cannot be used; `faults` has one line for each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


_SERVING = (
    Setting(
        "API_KEY",
        "key that controllers must present: a UUID, or at least 16 characters",
        secret=True,
        details="Takes effect at the next start; keys of API_KEYS_FILE change without one. See [Keys](#keys).",
    ),
    Setting(
        "API_KEY_FILE",
        "file that holds the key, used if API_KEY is not set (default: api_key in STATE_DIR, if that file exists)",
        details="Set it to keep the key out of the environment. Read at the start only.",
    ),
    Setting(
        "API_KEYS_FILE",
        "file of further keys, each with a name and a scope; reloaded when it changes (default: api_keys in STATE_DIR, "
        "if that file exists)",
        details="Use it for several controllers, for keys that may only read, and to change a key without a restart. "
        "See [More keys](#more-keys).",
    ),
    Setting(
        "NODE_HOST",
        "IP address to listen on (default: all addresses, IPv4 and IPv6)",
        details="Set it if controllers should reach the node by one address only, such as that of a VPN. The inbounds "
        "of the core listen where the configuration says.",
    ),
    Setting(
        "REST_PORT",
        "TCP port of the REST interface, 1 to 65535",
        "62051",
        details="Change it if another program has the port, or if the panel expects another one. See [Ports](#ports).",
    ),
    Setting(
        "GRPC_PORT",
        "TCP port of the gRPC interface, 1 to 65535",
        "62050",
        details="Change it for the same reasons as REST_PORT.",
    ),
    Setting(
        "SERVICE_PROTOCOL",
        "serve this protocol, rest or grpc, on SERVICE_PORT, and the other one only if its own port is set",
        details="For settings that come from another node; new installs need only REST_PORT and GRPC_PORT. See "
        "[Ports](#ports).",
    ),
    Setting(
        "SERVICE_PORT",
        "TCP port of SERVICE_PROTOCOL, or of gRPC if that is not set, 1 to 65535",
        details="For settings that come from another node.",
    ),
    Setting(
        "SSL_CERT_FILE",
        "PEM file with the node's certificate chain, the node's own certificate first (default: certificate.pem in "
        "STATE_DIR)",
        details="Reloaded when it changes. Set it to serve a certificate that another program renews. OpenSSL reads a "
        "variable of this name, too: see [The certificate](#the-certificate).",
    ),
    Setting(
        "SSL_KEY_FILE",
        "PEM file with the private key of SSL_CERT_FILE, without a passphrase (default: key.pem in STATE_DIR)",
        details="Reloaded when it changes. Set it together with SSL_CERT_FILE.",
    ),
    Setting(
        "SSL_SANS",
        "further names and addresses, comma-separated, for the certificate that `nodectl certificate make` makes",
        details="Set it where controllers use a name or an address that the machine does not have itself, as behind "
        "NAT. A certificate that exists stays as it is.",
    ),
    Setting(
        "CLIENT_CA",
        "PEM file of certificate authorities; clients must then present a certificate issued by one of them",
        details="Reloaded when it changes. Set it to turn strangers away during the TLS handshake, before any request. "
        "See [Certificates of controllers](#certificates-of-controllers).",
    ),
    Setting(
        "CLIENT_CERTIFICATE",
        "with CLIENT_CA: beside (a client needs a certificate and a key), or instead (a certificate is enough, and has "
        "scope all)",
        "beside",
        details="Set `instead` for controllers that have a certificate and no key.",
    ),
    Setting(
        "TLS_MIN",
        "oldest TLS version that the node accepts: 1.2 or 1.3",
        "1.2",
        details="Set 1.3 when all your controllers speak it.",
    ),
    Setting(
        "STATE_DIR",
        "directory of the state file, certificate and keys; only one node may use it, and it gets mode 0700",
        _STATE_DIR,
        details="A relative path starts at the working directory. A service should have an absolute path, on a disk "
        "that keeps its files when the node is reinstalled.",
    ),
    Setting(
        "LOG_BUFFER_SIZE",
        "log lines kept in memory for controllers, 1 to 1000000; at most 16 Mi characters",
        "10000",
        details="Raise it if readers of the core's log lose lines (`lines were dropped`), or reconnect too late.",
    ),
    Setting(
        "LOG_FORMAT",
        "format of the node's own log: text, or json (one JSON object a line)",
        "text",
        details="Set `json` where a program collects the log. See [The node's own log](#the-nodes-own-log).",
    ),
    Setting(
        "LOG_USERS",
        "on or off: name users in the node's own log",
        "off",
        details="Off, `(LOG_USERS is off)` stands in place of each name. Turn it on to follow up one user's trouble.",
    ),
)
_BACKEND = (
    Setting(
        "STOP_GRACE",
        "seconds that a core goes on after a Stop with x-api-key, so that the next Start can take it back, 0 to 3600",
        "30",
        details="Without it a panel that sends Stop and then Start disconnects all users. 0 ends the core at once.",
    ),
    Setting(
        "DRAIN_TIMEOUT",
        "seconds that connections may stay on a core that was replaced, 1 to 86400",
        "600",
        details="After that the old core ends, and its connections with it. Raise it for long sessions; lower it where "
        "memory is short.",
    ),
    Setting(
        "DRAIN_GENERATIONS",
        "replaced cores that may drain at once, as far as memory allows, 0 to 1000; 0: restart the core instead",
        "64",
        details="Above this number the draining core with the fewest connections ends. Lower it where memory is short. "
        "With 0 each change that needs a new core ends all connections.",
    ),
    Setting(
        "UPGRADE_ON_START",
        "on or off: a Start with the running configuration replaces a core whose executable or geo files have changed "
        "on disk",
        "off",
        details="Off, such a Start keeps the running core. Turn it on if you replace these files yourself and want the "
        "next Start of the panel to bring them in.",
    ),
    Setting(
        "UPDATES",
        "on or off: keys of scope all may install other releases of the cores and of the node; see docs/updates.md",
        "off",
        details="Off, such a key cannot change programs on the machine. Turn it on to update a fleet over the "
        "interface.",
    ),
    Setting(
        "UPDATE_URL",
        "base URL of the node's wheels; the node appends /txnode-VERSION-py3-none-any.whl",
        details="Set it, with UPDATES=on, to let the node fetch other versions of itself.",
    ),
    Setting(
        "UPDATE_PROXY",
        "proxy for the downloads of updates, as http://HOST:PORT (default: that of the environment)",
        secret=True,
        details="Set it where the download servers are not reachable directly. It may hold a password, so it cannot be "
        "an option.",
    ),
    Setting(
        "GEO_UPDATES",
        "on or off: keys of scope all may replace geo files over the interface",
        "on",
        details="Turn it off if you keep these files yourself. Off also turns off GEO_UPDATE.",
    ),
    Setting(
        "GEO_UPDATE",
        "how often the node looks for newer geo files and installs them: never, daily, weekly or monthly",
        "never",
        details="Set it if neither your panel nor a timer updates them.",
    ),
    Setting(
        "GEO_URL",
        "base URL of the geo files; NAME.sha256sum beside each holds its digest",
        LISTS_URL,
        details="Set it to use other lists, or a mirror.",
    ),
    Setting(
        "ADOPT_SECONDS",
        "seconds that cores run on without a node before they are ended, 1 to 86400; not counted while a node starts",
        "300",
        details="Raise it if it can take longer until a node starts again. Nothing enforces limits in that time.",
    ),
    Setting(
        "KEEPER",
        "on or off: a keeper starts the node again when it dies, and holds the cores meanwhile; see docs/upgrades.md",
        "on",
        details="Turn it off only for development: then a debugger reaches the node itself, and cores end with it.",
    ),
    Setting(
        "KEEP_ALIVE_ACTION",
        "what the node does with the core when no controller has called for the keep-alive of its Start: stop or keep",
        "stop",
        details="Set `keep` if users should stay connected while the panel is away.",
    ),
    Setting(
        "RESUME",
        "on or off: when the node starts, start the last backend again, with its users",
        "on",
        details="Turn it off if only controllers may start a core: then a restarted node waits for a Start.",
    ),
    Setting(
        "TRAFFIC_INTERVAL",
        "seconds between the node's own readings of the core's traffic counters, 0.1 to 3600",
        "10",
        details="A core that crashes loses at most the bytes that it counted in this time. Lower it to lose fewer, "
        "raise it to save processor time with very many users. Requests for statistics read the counters anyway.",
    ),
    Setting(
        "LIMITS",
        "default limits of users without their own, such as addresses=3 down=100M bytes=500GB/month; see "
        "docs/limits.md",
        details="Set it to limit users whose panel does not send limits.",
    ),
    Setting(
        "LIMITS_INBOUNDS",
        "default limits by inbound, which take precedence over LIMITS, such as free: down=2M; trial: addresses=1",
        details="Set it if users of some inbounds have other limits than the rest.",
    ),
    Setting(
        "LIMIT_GRACE",
        "seconds without traffic after which an address gives way to a new address of the same user, 1 to 600",
        "30",
        details="Lower it if users with an address limit wait too long when they change networks; raise it if quiet "
        "connections end too early.",
    ),
    Setting(
        "LIMIT_IPV4_PREFIX",
        "length of a prefix: IPv4 addresses with this many leading bits in common count as one address, 8 to 32",
        "32",
        details="Set 24 where the NAT of a mobile carrier gives one phone a new address for each connection.",
    ),
    Setting(
        "LIMIT_IPV6_PREFIX",
        "length of a prefix: IPv6 addresses with this many leading bits in common count as one address, 32 to 128",
        "64",
        details="64 is one household as a rule. Set 56 or 48 where providers hand out larger networks.",
    ),
    Setting(
        "METRICS_PORT",
        "port of 127.0.0.1, 1 to 65535, that serves /metrics without TLS; programs that run "
        "as another user than the node need no key there (default: none)",
        details="Set it for an agent on the same machine. See [metrics.md](metrics.md#scraping).",
    ),
    Setting(
        "METRICS_USERS",
        "on or off: also report the bytes of each user as metrics, two series a user",
        "off",
        details="Turn it on for graphs by user. With many users each scrape takes processor time of the node: see "
        "[metrics.md](metrics.md#costs).",
    ),
    Setting(
        "METRICS_NAMES",
        "prefix such as v2ray: also report figures under the names that exporters of cores use; see docs/metrics.md",
        details="Set it to keep a dashboard that was made for such an exporter.",
    ),
    Setting(
        "NODE_QUOTA",
        "bytes that the machine may carry in a month, such as 2TB or 500GiB (default: no limit)",
        details="Set it where your hoster bills traffic. See [limits.md](limits.md#the-nodes-own-quota).",
    ),
    Setting(
        "NODE_QUOTA_RESET_DAY",
        "day of the month, 1 to 31, on which NODE_QUOTA starts again at midnight UTC; the last day of a shorter month",
        "1",
        details="Set the day on which your hoster's billing period begins.",
    ),
    Setting(
        "NODE_QUOTA_WAY",
        "bytes that count towards NODE_QUOTA: both, out or in",
        "both",
        details="Set the direction that your hoster bills.",
    ),
    Setting(
        "NODE_QUOTA_INTERFACE",
        "network interfaces that count towards NODE_QUOTA, comma-separated (default: those that are hardware; if there "
        "are none, all but lo)",
        details="Set it if some interface is not billed, such as one of a private network.",
    ),
    Setting(
        "NODE_QUOTA_ACTION",
        "what the node does when NODE_QUOTA is used up: warn, or close (take no new connections of users)",
        "warn",
        details="Set `close` where traffic beyond the quota costs too much.",
    ),
    Setting(
        "DEBUG",
        "1 or 0: also log every REST request, with method, path, status, time and address",
        "0",
        details="Turn it on to see what a controller asks. Bodies and headers are never logged.",
    ),
)
_YES = ("1", "true", "yes", "on", "t", "y")
_NO = ("0", "false", "no", "off", "f", "n")
_SYSTEMD = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@dataclass(frozen=True)
class Settings:
    """Valid settings. A port of None is not opened; `drivers` has the values of settings that drivers declare."""

    api_key: str = field(repr=False)
    api_key_file: Path | None
    keys_file: Path
    keys_required: bool
    host: str
    rest_port: int | None
    grpc_port: int | None
    cert_file: Path
    key_file: Path
    client_ca: Path | None
    certified: bool
    newest_tls: bool
    state_dir: Path
    log_buffer_size: int
    log_json: bool
    log_users: bool
    stop_grace: int
    drain_timeout: float
    drain_generations: int
    upgrade: bool
    updates: Updates
    adopt_seconds: float
    keeper: bool
    outlive: bool
    resume: bool
    traffic_interval: float
    limits: Defaults
    limit_grace: float
    limit_ipv4_prefix: int
    limit_ipv6_prefix: int
    metrics_port: int | None
    metrics_users: bool
    metrics_names: str
    quota: int
    quota_reset_day: int
    quota_way: str
    quota_interfaces: tuple[str, ...]
    quota_closes: bool
    debug: bool
    drivers: Mapping[str, str]
    notify: Mapping[str, str]
    # Names of settings of other nodes that are set and have no effect: see `node.deployed`.
    ignored: tuple[str, ...]


Words = Mapping[str, str]


def all_settings(drivers: Sequence[Setting] = ()) -> tuple[Setting, ...]:
    """All settings, including those of drivers."""
    return (*_SERVING, *drivers, *_BACKEND)


def given(
    options: Words, directory: Path, environ: Words | None = None, drivers: Sequence[Setting] = ()
) -> dict[str, str]:
    """Return the settings that are set anywhere, by name, without checking them. `options` is by setting name.

    Raises `BadSettings` if `.env` cannot be read.
    """
    environ = os.environ if environ is None else environ
    return _explicit((_from_file(directory / ".env"), environ, options), drivers)


def _explicit(sources: Iterable[Words], drivers: Sequence[Setting]) -> dict[str, str]:
    """Merge the sources, a later one over an earlier one; unknown names and empty values are dropped."""
    known = {setting.name for setting in all_settings(drivers)}
    explicit: dict[str, str] = {}
    for source in sources:
        explicit |= {name: value.strip() for name, value in source.items() if name in known and value.strip()}
    return explicit


def load(options: Words, directory: Path, environ: Words | None = None, *, drivers: Sequence[Setting]) -> Settings:
    """Read and check the settings of this process. `options` is by setting name. Raises `BadSettings`."""
    environ = os.environ if environ is None else environ
    sources = (_from_file(directory / ".env"), environ, options)
    explicit = _explicit(sources, drivers)
    values = {setting.name: setting.default for setting in all_settings(drivers)} | explicit
    notify = {name: value for name, value in environ.items() if name in _SYSTEMD}
    return _Check(values, explicit, directory).settings(drivers, notify, deployed.ignored(sources))


def environment() -> MutableMapping[str, str]:
    """The process environment, for the next node process."""
    return os.environ


class _Check:
    """Turns the texts of settings into values and collects the faults."""

    def __init__(self, values: dict[str, str], explicit: dict[str, str], directory: Path) -> None:
        self._values = values
        self._explicit = explicit
        self._directory = directory
        self._faults: list[str] = []

    def settings(
        self, drivers: Sequence[Setting], notify: Mapping[str, str], ignored: tuple[str, ...] = ()
    ) -> Settings:
        state_dir = self._path("STATE_DIR")
        key, key_file = self._key(state_dir)
        rest_port, grpc_port = self._ports()
        settings = Settings(
            api_key=key,
            api_key_file=key_file,
            keys_file=self._keys_file(state_dir),
            keys_required=bool(self._values["API_KEYS_FILE"]),
            host=self._values["NODE_HOST"],
            rest_port=rest_port,
            grpc_port=grpc_port,
            cert_file=self._file("SSL_CERT_FILE", state_dir / "certificate.pem"),
            key_file=self._file("SSL_KEY_FILE", state_dir / "key.pem"),
            client_ca=self._client_ca(),
            certified=self._certified(),
            newest_tls=self._word("TLS_MIN", "1.2", "1.3") == "1.3",
            state_dir=state_dir,
            log_buffer_size=self._number("LOG_BUFFER_SIZE", 1, 1_000_000),
            log_json=self._word("LOG_FORMAT", "text", "json") == "json",
            log_users=self._word("LOG_USERS", "on", "off") == "on",
            stop_grace=self._number("STOP_GRACE", 0, 3600),
            drain_timeout=self._seconds("DRAIN_TIMEOUT", 1, 86_400),
            drain_generations=self._number("DRAIN_GENERATIONS", 0, 1000),
            upgrade=self._word("UPGRADE_ON_START", "on", "off") == "on",
            updates=self._updates(),
            adopt_seconds=self._seconds("ADOPT_SECONDS", 1, 86_400),
            keeper=self._word("KEEPER", "on", "off") == "on",
            outlive=self._word("KEEP_ALIVE_ACTION", "stop", "keep") == "keep",
            resume=self._word("RESUME", "on", "off") == "on",
            traffic_interval=self._seconds("TRAFFIC_INTERVAL", 0.1, 3600),
            limits=self._limits(),
            limit_grace=self._seconds("LIMIT_GRACE", 1, 600),
            limit_ipv4_prefix=self._number("LIMIT_IPV4_PREFIX", 8, 32),
            limit_ipv6_prefix=self._number("LIMIT_IPV6_PREFIX", 32, 128),
            metrics_port=self._metrics_port(rest_port, grpc_port),
            metrics_users=self._word("METRICS_USERS", "on", "off") == "on",
            metrics_names=self._prefix("METRICS_NAMES"),
            quota=self._size("NODE_QUOTA"),
            quota_reset_day=self._number("NODE_QUOTA_RESET_DAY", 1, 31),
            quota_way=self._word("NODE_QUOTA_WAY", "both", "out", "in"),
            quota_interfaces=tuple(re.findall(r"[^,\s]+", self._values["NODE_QUOTA_INTERFACE"])),
            quota_closes=self._word("NODE_QUOTA_ACTION", "warn", "close") == "close",
            debug=self._switch("DEBUG"),
            drivers={setting.name: self._of_driver(setting) for setting in drivers},
            notify=notify,
            ignored=ignored,
        )
        if self._faults:
            raise BadSettings(self._faults)
        return settings

    def _path(self, name: str) -> Path:
        try:
            return (self._directory / Path(self._values[name]).expanduser()).absolute()
        except RuntimeError as error:
            self._faults.append(f"{name}: {error}")
            return self._directory

    def _file(self, name: str, default: Path) -> Path:
        path = self._path(name) if self._values[name] else default
        if not _is_file(path):
            self._faults.append(
                f"{name}: there is no file {path}; `nodectl certificate make` makes a certificate and key in STATE_DIR"
            )
        return path

    def _client_ca(self) -> Path | None:
        if not self._values["CLIENT_CA"]:
            return None
        path = self._path("CLIENT_CA")
        if not _is_file(path):
            self._faults.append(f"CLIENT_CA: there is no file {path}")
        return path

    def _certified(self) -> bool:
        """Whether a client certificate replaces the key."""
        instead = self._word("CLIENT_CERTIFICATE", "beside", "instead") == "instead"
        if instead and not self._values["CLIENT_CA"]:
            self._faults.append("CLIENT_CERTIFICATE: instead needs CLIENT_CA, which is not set")
        return instead

    def _number(self, name: str, least: int, most: int) -> int:
        text = self._values[name]
        if text.isascii() and text.isdigit() and len(text) <= len(str(most)) and least <= int(text) <= most:
            return int(text)
        self._faults.append(f"{name}: {text!r} is not a number from {least} to {most}")
        return 0

    def _seconds(self, name: str, least: float, most: float) -> float:
        text = self._values[name]
        if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text) and least <= float(text) <= most:
            return float(text)
        self._faults.append(f"{name}: {text!r} is not a number of seconds from {least:g} to {most:g}")
        return most

    def _size(self, name: str) -> int:
        """Bytes; 0 if the setting is empty."""
        try:
            return size(self._values[name] or "0")
        except ValueError as error:
            self._faults.append(f"{name}: {error}")
            return 0

    def _updates(self) -> Updates:
        return Updates(
            programs=self._word("UPDATES", "on", "off") == "on",
            lists=self._word("GEO_UPDATES", "on", "off") == "on",
            lists_every=EVERY.get(self._word("GEO_UPDATE", *EVERY), 0.0),
            lists_url=self._address("GEO_URL"),
            program_url=self._address("UPDATE_URL"),
            proxy=self._proxy(),
        )

    def _address(self, name: str) -> str:
        """A base URL for downloads, or ""."""
        text = self._values[name]
        if text and (fault := fault_of_address(text)):
            self._faults.append(f"{name}: {fault}")
        return text

    def _proxy(self) -> str:
        text = self._values["UPDATE_PROXY"]
        if text and not re.fullmatch(r"https?://[^\s/]\S*", text):
            self._faults.append("UPDATE_PROXY: it does not begin with https:// or http:// and a host")
        return text

    def _limits(self) -> Defaults:
        """Default limits. On a fault each setting is read alone, to find out which one is wrong."""
        try:
            return parsing.defaults(self._values["LIMITS"], self._values["LIMITS_INBOUNDS"])
        except ValueError:
            readers = ("LIMITS", parsing.limits), ("LIMITS_INBOUNDS", lambda text: parsing.defaults("", text))
            found = [(name, parsing.fault(read, self._values[name])) for name, read in readers]
            self._faults += [f"{name}: {fault}" for name, fault in found if fault]
            return Defaults()

    def _word(self, name: str, *choices: str) -> str:
        """The value, one of `choices` in lower case; without choices, the text as it is."""
        text = self._values[name].lower() if choices else self._values[name]
        if choices and text not in choices:
            self._faults.append(f"{name}: {text!r} is not one of {', '.join(choices)}")
        return text

    def _switch(self, name: str) -> bool:
        """On or off, in any spelling that deployed nodes accept."""
        return self._word(name, *_YES, *_NO) in _YES

    def _of_driver(self, setting: Setting) -> str:
        value = self._word(setting.name, *setting.choices)
        if value and setting.fault is not None and (fault := setting.fault(value)):
            self._faults.append(f"{setting.name}: {fault}")
        return value

    def _ports(self) -> tuple[int | None, int | None]:
        """The ports of REST and gRPC. Deployed nodes have one protocol on one port, by SERVICE_PORT."""
        protocol = self._values["SERVICE_PROTOCOL"].lower()
        if protocol not in ("", "rest", "grpc"):
            self._faults.append(f"SERVICE_PROTOCOL: {protocol!r} is not one of rest, grpc")
        single = self._values["SERVICE_PORT"]
        chosen = protocol or ("grpc" if single else "")
        rest, grpc = self._port("REST_PORT", "rest", chosen), self._port("GRPC_PORT", "grpc", chosen)
        if rest and rest == grpc:
            self._faults.append(f"REST_PORT and GRPC_PORT are both {rest}: set two different ports")
        return rest, grpc

    def _port(self, name: str, protocol: str, chosen: str) -> int | None:
        if chosen == protocol and self._values["SERVICE_PORT"]:
            return self._number("SERVICE_PORT", 1, 65535)
        if chosen and chosen != protocol and name not in self._explicit:
            return None
        return self._number(name, 1, 65535)

    def _metrics_port(self, *others: int | None) -> int | None:
        if not self._values["METRICS_PORT"]:
            return None
        port = self._number("METRICS_PORT", 1, 65535)
        if port in others:
            self._faults.append(f"METRICS_PORT: {port} is already the REST or gRPC port of the node")
        return port

    def _prefix(self, name: str) -> str:
        text = self._values[name].lower()
        if text and (not re.fullmatch(r"[a-z][a-z0-9]{0,31}", text) or text == "txnode"):
            self._faults.append(f"{name}: {text!r} is not a prefix: use lower-case letters and digits, and not txnode")
        return text

    def _key(self, state_dir: Path) -> tuple[str, Path | None]:
        """The key, and the file that it comes from, if any. The key may be empty where there are named keys."""
        key, configured = self._values["API_KEY"], self._values["API_KEY_FILE"]
        file = self._path("API_KEY_FILE") if configured else state_dir / "api_key"
        from_file = not key and (bool(configured) or _is_file(file))
        if from_file:
            try:
                key = file.read_text().strip()
            except (OSError, UnicodeDecodeError) as unreadable:
                self._faults.append(f"API_KEY_FILE: {file} cannot be read: {unreadable}")
                return "", file
        fault = "" if self._others(state_dir, key, from_file) else key_fault(key)
        if fault:
            self._faults.append(f"API_KEY_FILE {file}: {fault}" if from_file else f"API_KEY: {fault}")
        return key, file if from_file else None

    def _others(self, state_dir: Path, key: str, from_file: bool) -> bool:
        """Whether the key may be empty: there is a file of named keys, or client certificates replace keys."""
        named = self._values["API_KEYS_FILE"] or self._values["CLIENT_CERTIFICATE"].lower() == "instead"
        there = bool(named) or _is_file(self._keys_file(state_dir))
        return not key and not from_file and there

    def _keys_file(self, state_dir: Path) -> Path:
        return self._path("API_KEYS_FILE") if self._values["API_KEYS_FILE"] else state_dir / KEYS


def keys_file(values: Words, directory: Path) -> Path:
    """The path of the file of named keys; `values` are those that are set, by setting name. Raises `BadSettings`."""
    named, state_dir = values.get("API_KEYS_FILE"), values.get("STATE_DIR") or _STATE_DIR
    try:
        return (directory / Path(named or f"{state_dir}/{KEYS}").expanduser()).absolute()
    except RuntimeError as error:
        raise BadSettings([str(error)]) from error


def key_fault(key: str) -> str:
    """Return why this key cannot be used, or ""."""
    if not key:
        return "there is no key: make one with `nodectl key new panel`, or set one, such as a UUID"
    if len(key) < MIN_KEY:
        return f"the key has fewer than {MIN_KEY} characters"
    try:
        return "the key is the nil UUID: use a random one" if uuid.UUID(key).int == 0 else ""
    except ValueError:
        return ""


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long a name
        return False


def _from_file(path: Path) -> dict[str, str]:
    """The lines of an `.env` file, or {} if there is none. Raises `BadSettings`."""
    try:
        return env_file.read(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings([f"{path} cannot be read: {error}"]) from error
