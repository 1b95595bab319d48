"""Read users files: tables and JSON of this interface. See docs/nodectl-users.md."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message

from node.contract.accounts import key_of
from node.nodectl.output import Unusable, note
from protos import service_pb2 as pb

M = TypeVar("M", bound=Message)
# A user of a file, and in a word why they are left out, if they are.
Entry = tuple[pb.User, str]

# Faults in one error.
LISTED = 20
# How JSON begins; all else is a table.
_JSON = ("{", "[")
# Fields of users, and of inbounds, in exports of panels.
_OF_PANELS = {"username", "protocol"}
_FOREIGN = (
    "no users of this interface found; if it is an export of a panel, make a users file of it, in a clone: "
    "python -m scripts.import_users FILE > users.json"
)


@dataclass
class Supply:
    """Takes users one by one. `inbounds` are for users without inbounds in the file."""

    inbounds: Sequence[str] = ()
    users: dict[str, pb.User] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    # Functions, because searching a long text for a place is slow.
    _places: dict[str, Callable[[], str]] = field(default_factory=dict)
    _faults: list[str] = field(default_factory=list)

    def take(self, place: Callable[[], str], make: Callable[[], Entry]) -> None:
        """Add the user made by `make`. `finish` reports their faults."""
        try:
            self._take(place, *make())
        except ValueError as error:
            self._faults.append(f"{place()}: {error}" if len(self._faults) < LISTED else "")

    def finish(self) -> Supply:
        """Check that there were no faults. Raises `ValueError` with one fault a line."""
        if self._faults:
            more = len(self._faults) - LISTED
            raise ValueError("\n".join(self._faults[:LISTED] + ([f"and {more} more faults"] if more > 0 else [])))
        return self

    def _take(self, place: Callable[[], str], user: pb.User, off: str) -> None:
        if not user.email:
            raise ValueError("the user has no name")
        key = key_of(user.email)
        if key in self._places:
            raise ValueError(f"{user.email} is already in {self._places[key]()}" if len(self._faults) < LISTED else "")
        self._places[key] = place
        if off:
            self.left_out[off] += 1
            return
        if not user.inbounds:
            user.inbounds.extend(self.inbounds)
        if not user.inbounds:
            raise ValueError(f"{user.email} has no inbounds: add them to the file, or give --inbound")
        self.users[key] = user


def parse(text: str, inbounds: Sequence[str] = ()) -> Supply:
    """Parse the users of a text. Raises `ValueError` with one fault a line, and where it is."""
    supply = Supply(inbounds)
    if text.lstrip().startswith(_JSON):
        _read_document(text, supply)
    else:
        _read_table(text, supply)
    return supply.finish()


def read(
    path: Path, inbounds: Sequence[str] = (), parsed: Callable[[str, Sequence[str]], Supply] = parse
) -> list[pb.User]:
    """Read the users of a file, print how many were left out. `inbounds`: for users without. Raises `Unusable`."""
    try:
        supply = parsed(path.read_text("utf-8-sig"), inbounds)
    except (OSError, ValueError) as error:
        lines = str(error).splitlines()
        faults = lines[0] if len(lines) == 1 else "\n".join(["", *(f"  {line}" for line in lines)])
        raise Unusable(f"{path} cannot be used: {faults}")
    for reason, count in sorted(supply.left_out.items()):
        note(f"{path}: {count} {'user' if count == 1 else 'users'} left out: {reason}")
    return list(supply.users.values())


def load(text: str) -> Any:
    """Parse JSON. Raises `ValueError`, with the line if it is known."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def place_of(text: str, number: int, name: object) -> str:
    """Where a user is in the text: the line on which their name first occurs, if any, and their number, if any."""
    at = text.find(json.dumps(name, ensure_ascii=False)) if name and isinstance(name, str) else -1
    line = f"line {text.count(chr(10), 0, at) + 1}" if at >= 0 else ""
    return ", ".join(filter(None, (line, f"user {number}" if number else str(name))))


def message_of(fields: dict[str, Any], empty: M) -> M:
    """Parse fields of a JSON document into a message. Raises `ValueError`."""
    try:
        return ParseDict(fields, empty)
    except (ParseError, TypeError) as error:
        raise ValueError(str(error)) from error


# JSON of this interface


def _read_document(text: str, supply: Supply) -> None:
    """Read users, or the output of `nodectl users list --json --credentials` for one node. Raises `ValueError`."""
    document = load(text)
    if isinstance(document, list) and len(document) == 1 and isinstance(document[0], dict) and "result" in document[0]:
        document = document[0]["result"]
    users = document.get("users") if isinstance(document, dict) else document
    if not isinstance(users, list) or any(isinstance(user, dict) and user.keys() & _OF_PANELS for user in users):
        raise ValueError(_FOREIGN)
    for number, user in enumerate(users, 1):
        if not isinstance(user, dict):
            raise ValueError(f"user {number} is not an object")
        name = user.get("email", user.get("name"))
        supply.take(partial(place_of, text, number, name), partial(_user, name, user))


def _user(name: object, entry: dict[str, Any]) -> Entry:
    """A `User` of this interface, or a row of a list."""
    if entry.get("shortened"):
        raise ValueError("the row was shortened: its user is not complete")
    inbounds, unknown = entry.get("inbounds") or [], entry.get("unknown") or []
    if not (isinstance(inbounds, list) and isinstance(unknown, list)):
        raise ValueError("inbounds is not an array")
    wanted = {"email": name or "", "inbounds": [*inbounds, *unknown]}
    if (limits := entry.get("limits")) is not None:
        if not isinstance(limits, dict):
            raise ValueError("limits is not an object")
        # null means not given; 0 means no limit.
        wanted["limits"] = {name: value for name, value in limits.items() if value is not None}
    proxies = entry.get("proxies") or {}
    if isinstance(proxies, dict):
        proxies = {name: value for name, value in proxies.items() if value}
    return message_of({**wanted, "proxies": proxies}, pb.User()), ""


# Tables


# Separates several values in a cell. Tags may contain spaces and commas.
BETWEEN = "|"
_OFF = ("no", "off", "false", "0", "disabled")
_ON = ("", "yes", "on", "true", "1", "active", "enabled")

# Columns of credentials, with the proxies and fields that they set. Those for several protocols come first, so that a
# protocol's own column wins.
CREDENTIALS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "id": (("vless", "id"), ("vmess", "id")),
    "password": (("trojan", "password"), ("shadowsocks", "password"), ("hysteria", "auth")),
    "flow": (("vless", "flow"),),
    "method": (("shadowsocks", "method"),),
    "vless_id": (("vless", "id"),),
    "vmess_id": (("vmess", "id"),),
    "trojan_password": (("trojan", "password"),),
    "shadowsocks_password": (("shadowsocks", "password"),),
    "hysteria_auth": (("hysteria", "auth"),),
    "masque_pass": (("masque", "pass"),),
    "wireguard_public_key": (("wireguard", "public_key"),),
    "wireguard_addresses": (("wireguard", "peer_ips"),),
}
COLUMNS = ("name", "inbounds", "enabled", *CREDENTIALS)
# The interface's field for the name, and the heading in many tables.
_ALIASES = {"email": "name"}


def _read_table(text: str, supply: Supply) -> None:
    """Read CSV with commas, semicolons or tabs: headings, then a line for each user. Raises `ValueError`."""
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    lines = csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True)
    headings: list[str] = []
    for number, cells in _numbered(lines):
        if not any(map(str.strip, cells)):
            continue
        if not headings:
            headings = _headings(number, cells)
        else:
            supply.take(partial("line {}".format, number), partial(_entry, headings, cells))
    if not headings:
        raise ValueError(f"the file is empty; the first line must have headings, of {', '.join(COLUMNS)}")


def _numbered(lines: Any) -> Iterator[tuple[int, list[str]]]:
    """Rows with the line number on which each begins."""
    while True:
        begin = lines.line_num + 1
        try:
            yield begin, next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(f"line {begin}: {error}") from error


def _headings(number: int, cells: Sequence[str]) -> list[str]:
    spelled = [cell.strip().lower() for cell in cells]
    found = [_ALIASES.get(name, name) for name in spelled]
    unknown = [name for name in found if name not in COLUMNS]
    if unknown:
        known = ", ".join(COLUMNS)
        raise ValueError(f"line {number}: unknown column {', '.join(map(repr, unknown))}; known are {known}")
    if double := sorted({name for name in found if found.count(name) > 1}):
        raise ValueError(f"line {number}: duplicate column: {', '.join(double)}")
    if "name" not in found:
        raise ValueError(f"line {number}: the column name is missing")
    return found


def _entry(headings: Sequence[str], cells: Sequence[str]) -> Entry:
    if len(cells) != len(headings):
        raise ValueError(f"{len(cells)} cells, but {len(headings)} columns")
    row = dict(zip(headings, map(str.strip, cells), strict=True))
    user = pb.User(email=row["name"], inbounds=_several(row.get("inbounds", "")))
    for column, fields in CREDENTIALS.items():
        for proxy, part in fields if row.get(column) else ():
            message = getattr(user.proxies, proxy)
            if part == "peer_ips":
                message.peer_ips.extend(_several(row[column]))
            else:
                setattr(message, part, row[column])
    return user, "" if _enabled(row.get("enabled", "")) else "disabled"


def _enabled(cell: str) -> bool:
    if cell.lower() not in _ON + _OFF:
        raise ValueError(f"enabled is {cell!r}: write yes or no")
    return cell.lower() in _ON


def _several(cell: str) -> list[str]:
    return [value.strip() for value in cell.split(BETWEEN) if value.strip()]
