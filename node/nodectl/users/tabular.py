"""Users in CSV with commas, semicolons or tabs: a line of headings, then one line for each user."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import StringIO
from typing import Any

from node.nodectl.users.supply import Entry, Supply
from protos import service_pb2 as pb

# Separates several values in a cell. Tags may contain spaces and commas.
BETWEEN = "|"
_OFF = ("no", "off", "false", "0", "disabled")
_ON = ("", "yes", "on", "true", "1", "active", "enabled")

_Put = Callable[[pb.Proxy, str], None]


def _one(proxy: str, field: str) -> _Put:
    def put(proxies: pb.Proxy, value: str) -> None:
        setattr(getattr(proxies, proxy), field, value)

    return put


def _all(*puts: _Put) -> _Put:
    def put(proxies: pb.Proxy, value: str) -> None:
        for each in puts:
            each(proxies, value)

    return put


def _addresses(proxies: pb.Proxy, value: str) -> None:
    proxies.wireguard.peer_ips.extend(_several(value))


# Columns of credentials. Those for several protocols come first, so that a protocol's own column wins.
CREDENTIALS: Mapping[str, _Put] = {
    "id": _all(_one("vless", "id"), _one("vmess", "id")),
    "password": _all(_one("trojan", "password"), _one("shadowsocks", "password"), _one("hysteria", "auth")),
    "flow": _one("vless", "flow"),
    "method": _one("shadowsocks", "method"),
    "vless_id": _one("vless", "id"),
    "vmess_id": _one("vmess", "id"),
    "trojan_password": _one("trojan", "password"),
    "shadowsocks_password": _one("shadowsocks", "password"),
    "hysteria_auth": _one("hysteria", "auth"),
    "masque_pass": _one("masque", "pass"),
    "wireguard_public_key": _one("wireguard", "public_key"),
    "wireguard_addresses": _addresses,
}
COLUMNS = ("name", "inbounds", "enabled", *CREDENTIALS)
# The interface's field for the name, and the heading in many tables.
_ALIASES = {"email": "name"}


def read(text: str, supply: Supply) -> None:
    """Read the users of a table. Raises `ValueError` for unknown headings."""
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
    for name, put in CREDENTIALS.items():
        if row.get(name):
            put(user.proxies, row[name])
    return Entry(user, "" if _enabled(row.get("enabled", "")) else "disabled")


def _enabled(cell: str) -> bool:
    if cell.lower() not in _ON + _OFF:
        raise ValueError(f"enabled is {cell!r}: write yes or no")
    return cell.lower() in _ON


def _several(cell: str) -> list[str]:
    return [value.strip() for value in cell.split(BETWEEN) if value.strip()]
