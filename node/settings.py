"""The node's settings: `.env`, then the environment, then options, the later over the earlier; checked all at once.

`all_settings` is the one list, with those that drivers declare: options of `twistd node`, documentation and validation
are made from it.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from node import deployed, env_file
from node.contract.settings import Setting, fault_of_address
from node.limits import wording
from node.limits.defaults import Defaults
from node.limits.words import size
from node.updates.policy import EVERY, LISTS_URL
from node.updates.policy import Policy as Updates

MIN_KEY = 16
# The name of the key that is API_KEY.
DEFAULT_KEY = "default"
# The file of other keys in STATE_DIR.
KEYS = "api_keys"


_STATE_DIR = "var"


class BadSettings(Exception):
    """Some settings cannot be used: one line for each fault."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


_SERVING = (
    Setting("API_KEY", "the key that controllers must present: a UUID, or at least 16 characters", secret=True),
    Setting("API_KEY_FILE", "a file with the key instead (default: api_key in STATE_DIR, if it is there)"),
    Setting(
        "API_KEYS_FILE",
        "a file with more keys, each with a name and a scope; it is reloaded (default: api_keys in STATE_DIR, if it is "
        "there)",
    ),
    Setting("NODE_HOST", "the address to listen on (default: all addresses, IPv4 and IPv6)"),
    Setting("REST_PORT", "the port of the REST interface", "62051"),
    Setting("GRPC_PORT", "the port of the gRPC interface", "62050"),
    Setting("SERVICE_PROTOCOL", "rest or grpc: SERVICE_PORT serves it, and the other only if its own port is set"),
    Setting("SERVICE_PORT", "the port of SERVICE_PROTOCOL; alone, of gRPC"),
    Setting("SSL_CERT_FILE", "the certificate chain, PEM (default: certificate.pem in STATE_DIR)"),
    Setting("SSL_KEY_FILE", "its key, PEM (default: key.pem in STATE_DIR)"),
    Setting("SSL_SANS", "more names and addresses, by commas, for the certificate that `node.certificate` makes"),
    Setting(
        "CLIENT_CA",
        "a file with the authorities of clients' certificates, reloaded; then nobody is served without one of theirs",
    ),
    Setting(
        "CLIENT_CERTIFICATE",
        "with CLIENT_CA, beside: a client needs a key, too; instead: the certificate does, and may do all",
        "beside",
    ),
    Setting("TLS_MIN", "1.2 or 1.3: the oldest version of TLS that is spoken", "1.2"),
    Setting("STATE_DIR", "where the node keeps what must outlive it; its own, mode 0700", _STATE_DIR),
    Setting("LOG_BUFFER_SIZE", "how many log lines are kept for readers", "10000"),
    Setting("LOG_FORMAT", "text or json: how the node writes its own log; json is one line an event", "text"),
    Setting("LOG_USERS", "on: the node's own log may name users", "off"),
)
_BACKEND = (
    Setting("STOP_GRACE", "seconds a core lives on after a Stop with x-api-key, for the Start that follows it", "30"),
    Setting("DRAIN_TIMEOUT", "seconds that connections may stay with a core whose place another one took", "600"),
    Setting("DRAIN_GENERATIONS", "how many such cores there may be at once; 0: a change restarts the core", "4"),
    Setting(
        "UPGRADE_ON_START",
        "on: a Start brings in a core or geo files that changed on disk, also if its configuration is the same",
        "off",
    ),
    Setting(
        "UPDATES",
        "on: keys of scope all may have the node fetch another core, or another version of itself: see docs/updates.md",
        "off",
    ),
    Setting("UPDATE_URL", "where wheels of the node are: what stands before /txnode-VERSION-py3-none-any.whl"),
    Setting(
        "UPDATE_PROXY",
        "the proxy by which updates are fetched, as http://HOST:PORT (default: the environment's)",
        secret=True,
    ),
    Setting("GEO_UPDATES", "off: nobody replaces the geo files of this node over the interface", "on"),
    Setting("GEO_UPDATE", "never, daily, weekly or monthly: how often the node itself looks for newer ones", "never"),
    Setting("GEO_URL", "where geo files are, each with its digest beside it as NAME.sha256sum", LISTS_URL),
    Setting("ADOPT_SECONDS", "seconds for which cores live on without a node, with ADOPT=on", "300"),
    Setting("KEEP_ALIVE_ACTION", "stop or keep: what becomes of a backend when its keep-alive is over", "stop"),
    Setting("RESUME", "on: the node starts the backend that ran when it ended, and its users, by itself", "on"),
    Setting(
        "TRAFFIC_INTERVAL",
        "seconds between two readings of a core's counters by the node itself; each request has them read as well",
        "10",
    ),
    Setting(
        "LIMITS",
        "what users may use who say nothing of it: addresses=3 down=100M bytes=500GB/month, see docs/limits.md",
    ),
    Setting("LIMITS_INBOUNDS", "the same by inbound, which goes before that: free: down=2M; trial: addresses=1"),
    Setting("LIMIT_GRACE", "seconds for which an address is silent before it gives way to another of its user", "30"),
    Setting("LIMIT_IPV4_PREFIX", "IPv4 addresses with as many first bits in common count as one address", "32"),
    Setting("LIMIT_IPV6_PREFIX", "IPv6 addresses with as many first bits in common count as one address", "64"),
    Setting(
        "METRICS_PORT",
        "a port of 127.0.0.1 for /metrics without TLS and, for other users of the machine, without a key",
    ),
    Setting("METRICS_USERS", "on: bytes are told by user, too: two series for each", "off"),
    Setting(
        "METRICS_NAMES",
        "a prefix: figures are told as well by the names that exporters of cores have for them, see docs/metrics.md",
    ),
    Setting("NODE_QUOTA", "bytes that the machine may carry in a month, as 2TB or 500GiB (default: no limit)"),
    Setting("NODE_QUOTA_RESET_DAY", "the day of the month on which it begins anew, by UTC; or its last day", "1"),
    Setting("NODE_QUOTA_WAY", "both, out or in: which bytes count", "both"),
    Setting(
        "NODE_QUOTA_INTERFACE",
        "the network interfaces that count, by commas (default: those that are hardware; without any all but lo)",
    ),
    Setting("NODE_QUOTA_ACTION", "warn or close: when it is used up, close takes no new connections of users", "warn"),
    Setting("DEBUG", "1 or true: log every request too", "0"),
)
_YES = ("1", "true", "yes", "on", "t", "y")
_NO = ("0", "false", "no", "off", "f", "n")
_SYSTEMD = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@dataclass(frozen=True)
class Settings:
    """Valid settings. A port of None is not opened; `drivers` is for the cores' drivers."""

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
    # Settings of other deployed nodes that somebody set, by name: see `node.deployed`.
    ignored: tuple[str, ...]


Words = Mapping[str, str]


def all_settings(drivers: Sequence[Setting] = ()) -> tuple[Setting, ...]:
    """All settings, with those of drivers."""
    return (*_SERVING, *drivers, *_BACKEND)


def given(
    options: Words, directory: Path, environ: Words | None = None, drivers: Sequence[Setting] = ()
) -> dict[str, str]:
    """The settings that somebody set, by name, unchecked. `options` by setting name. Raises `BadSettings`."""
    environ = os.environ if environ is None else environ
    return _explicit((_from_file(directory / ".env"), environ, options), drivers)


def _explicit(sources: Iterable[Words], drivers: Sequence[Setting]) -> dict[str, str]:
    """What sources say of settings of this node, the later over the earlier."""
    known = {setting.name for setting in all_settings(drivers)}
    explicit: dict[str, str] = {}
    for source in sources:
        explicit |= {name: value.strip() for name, value in source.items() if name in known and value.strip()}
    return explicit


def load(options: Words, directory: Path, environ: Words | None = None, *, drivers: Sequence[Setting]) -> Settings:
    """The settings of this process. `options` by setting name. Raises `BadSettings`."""
    environ = os.environ if environ is None else environ
    sources = (_from_file(directory / ".env"), environ, options)
    explicit = _explicit(sources, drivers)
    values = {setting.name: setting.default for setting in all_settings(drivers)} | explicit
    notify = {name: value for name, value in environ.items() if name in _SYSTEMD}
    return _Check(values, explicit, directory).settings(drivers, notify, deployed.ignored(sources))


def environment() -> MutableMapping[str, str]:
    """All of the process's own, for a next program of it."""
    return os.environ


class _Check:
    """Turns words into values and gathers the faults."""

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
            drain_generations=self._number("DRAIN_GENERATIONS", 0, 100),
            upgrade=self._word("UPGRADE_ON_START", "on", "off") == "on",
            updates=self._updates(),
            adopt_seconds=self._seconds("ADOPT_SECONDS", 1, 86_400),
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
            self._faults.append(f"{name}: there is no file {path}; `python -m node.certificate DIR` makes a pair")
        return path

    def _client_ca(self) -> Path | None:
        if not self._values["CLIENT_CA"]:
            return None
        path = self._path("CLIENT_CA")
        if not _is_file(path):
            self._faults.append(f"CLIENT_CA: there is no file {path}")
        return path

    def _certified(self) -> bool:
        """A certificate does without a key."""
        instead = self._word("CLIENT_CERTIFICATE", "beside", "instead") == "instead"
        if instead and not self._values["CLIENT_CA"]:
            self._faults.append("CLIENT_CERTIFICATE: without CLIENT_CA nobody shows a certificate, so a key is needed")
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
        """Bytes, 0 if nothing is said."""
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
        """An address to fetch from, or nothing."""
        text = self._values[name]
        if text and (fault := fault_of_address(text)):
            self._faults.append(f"{name}: {fault}")
        return text

    def _proxy(self) -> str:
        text = self._values["UPDATE_PROXY"]
        if text and not re.fullmatch(r"https?://[^\s/]\S*", text):
            self._faults.append("UPDATE_PROXY: it does not begin with https:// or http://, and a host")
        return text

    def _limits(self) -> Defaults:
        """Each setting by itself, so that a fault has its name."""
        try:
            return wording.defaults(self._values["LIMITS"], self._values["LIMITS_INBOUNDS"])
        except ValueError:
            faults = ("LIMITS", wording.limits), ("LIMITS_INBOUNDS", lambda text: wording.defaults("", text))
            told = [(name, wording.fault(read, self._values[name])) for name, read in faults]
            self._faults += [f"{name}: {fault}" for name, fault in told if fault]
            return Defaults()

    def _word(self, name: str, *choices: str) -> str:
        """One of these, which are in lower case; without any, whatever is said."""
        text = self._values[name].lower() if choices else self._values[name]
        if choices and text not in choices:
            self._faults.append(f"{name}: {text!r} is none of {', '.join(choices)}")
        return text

    def _switch(self, name: str) -> bool:
        """On or off, in any word that deployed nodes take for it."""
        return self._word(name, *_YES, *_NO) in _YES

    def _of_driver(self, setting: Setting) -> str:
        value = self._word(setting.name, *setting.choices)
        if value and setting.fault is not None and (fault := setting.fault(value)):
            self._faults.append(f"{setting.name}: {fault}")
        return value

    def _ports(self) -> tuple[int | None, int | None]:
        """REST's and gRPC's. SERVICE_PORT is how deployed nodes are configured: one protocol, one port."""
        protocol = self._values["SERVICE_PROTOCOL"].lower()
        if protocol not in ("", "rest", "grpc"):
            self._faults.append(f"SERVICE_PROTOCOL: {protocol!r} is none of rest, grpc")
        single = self._values["SERVICE_PORT"]
        chosen = protocol or ("grpc" if single else "")
        rest, grpc = self._port("REST_PORT", "rest", chosen), self._port("GRPC_PORT", "grpc", chosen)
        if rest and rest == grpc:
            self._faults.append(f"REST_PORT and GRPC_PORT are both {rest}")
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
            self._faults.append(f"METRICS_PORT is {port}, which is another port of the node")
        return port

    def _prefix(self, name: str) -> str:
        text = self._values[name].lower()
        if text and (not re.fullmatch(r"[a-z][a-z0-9]{0,31}", text) or text == "txnode"):
            self._faults.append(
                f"{name}: {text!r} is no prefix: lower-case letters and digits, and another than txnode"
            )
        return text

    def _key(self, state_dir: Path) -> tuple[str, Path | None]:
        """The key, and the file that it is from. There may be none where a file has others."""
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
        """No key is set here, and there is a file for others, or none is needed."""
        named = self._values["API_KEYS_FILE"] or self._values["CLIENT_CERTIFICATE"].lower() == "instead"
        there = bool(named) or _is_file(self._keys_file(state_dir))
        return not key and not from_file and there

    def _keys_file(self, state_dir: Path) -> Path:
        return self._path("API_KEYS_FILE") if self._values["API_KEYS_FILE"] else state_dir / KEYS


def keys_file(values: Words, directory: Path) -> Path:
    """Where the keys are that have names; `values` are the given ones, by setting name. Raises `BadSettings`."""
    named, state_dir = values.get("API_KEYS_FILE"), values.get("STATE_DIR") or _STATE_DIR
    try:
        return (directory / Path(named or f"{state_dir}/{KEYS}").expanduser()).absolute()
    except RuntimeError as error:
        raise BadSettings([str(error)]) from error


def key_fault(key: str) -> str:
    """Why this key cannot be used; empty if it can."""
    if not key:
        return "there is no key; set one, a UUID for instance: python3 -c 'import uuid; print(uuid.uuid4())'"
    if len(key) < MIN_KEY:
        return f"the key has fewer than {MIN_KEY} characters"
    try:
        return "the nil UUID is not a key" if uuid.UUID(key).int == 0 else ""
    except ValueError:
        return ""


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long a name
        return False


def _from_file(path: Path) -> dict[str, str]:
    """What a file says, if it is there. Raises `BadSettings`."""
    try:
        return env_file.read(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings([f"{path} cannot be read: {error}"]) from error
