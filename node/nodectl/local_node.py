"""The node on this machine: its settings, those of a directory or else of the service, and how to call it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from node.base import env_file
from node.base.secret_file import write_secret
from node.certificate import CERTIFICATE, names_of
from node.client import Target
from node.doctor.kernel import given as given_to
from node.doctor.kernel import node_of
from node.nodectl.nodes_file import LOCAL
from node.nodectl.output import Unusable
from node.settings import BadSettings, Settings, given, keys_file, load

# The places in `deploy/node.service`.
SERVICE_SETTINGS = Path("/etc/txnode/node.env")
SERVICE: Mapping[str, str] = {"STATE_DIR": "/var/lib/txnode", "TXNODE_CORES": "/opt/txnode/cores"}
_STATE_DIR = "var"
# Names of instances of `node@.service`: each is part of a file's name, and of a user's.
_INSTANCE = re.compile(r"[a-z0-9][a-z0-9-]*")
# OpenSSL and programs that use it read the first one, too: as the file of trusted authorities.
_PAIR = ("SSL_CERT_FILE", "SSL_KEY_FILE")
_REMEDY = "change to the node's directory, run this as the node's user or root, or name another node: --node NAME"


@dataclass(frozen=True)
class LocalNode:
    """A node: its working directory, environment and file of settings."""

    directory: Path
    environ: Mapping[str, str]
    file: Path
    service: bool = False

    @property
    def values(self) -> Mapping[str, str]:
        """All names in the file and the environment, also unknown ones. Raises `Unusable`."""
        try:
            return {**env_file.read(self.file.read_text()), **self.environ} if self.file.exists() else self.environ
        except (OSError, UnicodeDecodeError) as error:
            raise Unusable(f"{self.file} cannot be read: {error}")

    @property
    def state(self) -> Path:
        return (self.directory / Path(self.values.get("STATE_DIR") or _STATE_DIR).expanduser()).absolute()

    @property
    def keys(self) -> Path:
        """The file of keys. Raises `Unusable`."""
        try:
            return keys_file(given({}, self.directory, self.environ), self.directory)
        except BadSettings as error:
            raise Unusable(str(error))


def find(directory: Path, environ: Mapping[str, str]) -> LocalNode:
    """Find the node with settings in this directory, else the service. Raises `OSError`."""
    _require_ours(directory, (".env",) if environ.get("STATE_DIR") else (".env", _STATE_DIR))
    # /var is the system's.
    state = environ.get("STATE_DIR") or ("" if directory == Path("/") else _STATE_DIR)
    if not (directory / ".env").exists() and not (state and (directory / state).is_dir()):
        service = env_file.read(SERVICE_SETTINGS.read_text()) if SERVICE_SETTINGS.exists() else {}
        if service or Path(SERVICE["STATE_DIR"]).exists():
            return LocalNode(Path("/"), {**SERVICE, **service}, SERVICE_SETTINGS, service=True)
    return _of_clone(directory, environ)


def instance(name: str) -> LocalNode | None:
    """The node of the unit node@NAME, if its settings can be read. The places are those in `deploy/node@.conf`."""
    file = SERVICE_SETTINGS.with_name(f"{name}.env") if _INSTANCE.fullmatch(name) else SERVICE_SETTINGS
    if file == SERVICE_SETTINGS or name == LOCAL or not os.access(file, os.R_OK):
        return None
    places = {**SERVICE, "STATE_DIR": f"{SERVICE['STATE_DIR']}-{name}"}
    return LocalNode(Path("/"), {**places, **env_file.read(file.read_text())}, file, service=True)


def _of_clone(directory: Path, environ: Mapping[str, str]) -> LocalNode:
    """The node with this directory's STATE_DIR, and its settings.

    If it runs, its own environment counts, read from /proc: in the shell's, names that other programs use too
    (SSL_CERT_FILE, DEBUG, ...) may be meant for those. Only the key is the shell's, or that of `.env`, if the node got
    its own from the environment: that one is not shown there. If none runs, the certificate is the one in STATE_DIR, as
    with `scripts/run`.
    """
    found = LocalNode(directory, environ, directory / ".env")
    pid = node_of(found.state)
    # If the node has just ended or is another user's, /proc cannot be read: use what the next node would read.
    with suppress(OSError):
        if pid is not None and owner(Path(f"/proc/{pid}")) in {os.geteuid(), 0, owner(directory)}:
            there, own = given_to(pid)
            file = there / ".env"
            if own.get("API_KEY", "").isspace():
                written = env_file.read(file.read_text()) if file.exists() else {}
                own["API_KEY"] = environ.get("API_KEY") or written.get("API_KEY") or own["API_KEY"]
            running = LocalNode(there, own, file)
            if running.state == found.state:
                return running
    if (found.state / CERTIFICATE).is_file():
        environ = {name: value for name, value in environ.items() if name not in _PAIR}
    return LocalNode(directory, environ, found.file)


def _require_ours(directory: Path, names: Iterable[str]) -> None:
    """Check the owner of settings: in /tmp anyone may create them, and they name programs to run and hosts to call.

    Raises `PermissionError` for an owner other than the caller, root and the directory's owner.
    """
    trusted = {os.geteuid(), 0, owner(directory)}
    for file in (directory / name for name in names):
        if os.path.lexists(file) and owner(file) not in trusted:
            raise PermissionError(
                f"{file} is another user's, in a directory that is not theirs: change to another directory"
            )


def owner(file: Path) -> int:
    """The uid of the owner; of a link, its own."""
    return file.lstat().st_uid


def settings_of(place: LocalNode) -> Settings:
    """The node's settings, without those of its cores. Raises `BadSettings`."""
    if place.environ.get("API_KEY", "").isspace():
        raise BadSettings(["API_KEY: the node has it from its environment, and hides it there: set it here, too"])
    return load({}, place.directory, place.environ, drivers=())


def local_target(directory: Path, environ: Mapping[str, str], name: str = "") -> Target:
    """How to call this instance, else the node with settings in this directory, else the service. Raises `Unusable`."""
    try:
        place = instance(name) or find(directory, environ)
        return _target(settings_of(place))
    except BadSettings as bad:
        raise Unusable(f"no usable settings of a node found here: {'; '.join(bad.faults)}. {_REMEDY}")
    except (OSError, ValueError) as error:
        raise Unusable(f"cannot call the node on this machine: {error}. {_REMEDY}")


def _target(settings: Settings) -> Target:
    door = settings.door
    return Target(
        "rest" if door.rest_port else "grpc",
        door.own_address,
        door.rest_port or door.grpc_port or 0,
        settings.keys.key,
        door.cert_file,
        certificate_name=name_of(door.cert_file.read_bytes()) if door.strangers == "answer" else door.name,
    )


def name_of(pem: bytes) -> str:
    """A name in this certificate: localhost if it is there, else the first one, if any. Raises `ValueError`."""
    found = names_of(x509.load_pem_x509_certificate(pem))
    return "localhost" if "localhost" in found else next(iter(found), "").replace("*", "node", 1)


def write_setting(file: Path, name: str, value: str) -> None:
    """Set one setting in a file of settings, which keeps its owner and mode. Raises `OSError`, `ValueError`.

    It follows no link: root may run this in another user's directory.
    """
    if file.is_symlink():
        raise ValueError(f"{file} is a link to {file.readlink()}: write the setting there; --print prints it")
    old, mode = "", 0o600
    with suppress(FileNotFoundError):
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor) as opened:
            old, mode = opened.read(), stat.S_IMODE(os.fstat(descriptor).st_mode)
    write_secret(file, with_setting(old, name, value).encode(), mode)


def with_setting(text: str, name: str, value: str) -> str:
    """The text with the setting: in place of its last occurrence, else at the end. Raises `ValueError`."""
    if re.search(r"[\r\n\"']", value):
        raise ValueError(f"{value!r} cannot be written to a file of settings: it has quotes or line breaks")
    line = f'{name}="{value}"' if re.search(r"[\s#]", value) else f"{name}={value}"
    lines = text.splitlines()
    place = max((number for number, each in enumerate(lines) if name in env_file.read(each)), default=len(lines))
    lines[place : place + 1] = [line]
    return "\n".join(lines) + "\n"
