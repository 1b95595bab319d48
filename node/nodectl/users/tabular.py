"""Users in CSV with commas, semicolons or tabs: a line of headings, then one line for each user."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from io import StringIO
from typing import Any

from node.nodectl.users.supply import Entry, Supply
from protos import service_pb2 as pb

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
    for column, fields in CREDENTIALS.items():
        for proxy, field in fields if row.get(column) else ():
            message = getattr(user.proxies, proxy)
            if field == "peer_ips":
                message.peer_ips.extend(_several(row[column]))
            else:
                setattr(message, field, row[column])
    return Entry(user, "" if _enabled(row.get("enabled", "")) else "disabled")


def _enabled(cell: str) -> bool:
    if cell.lower() not in _ON + _OFF:
        raise ValueError(f"enabled is {cell!r}: write yes or no")
    return cell.lower() in _ON


def _several(cell: str) -> list[str]:
    return [value.strip() for value in cell.split(BETWEEN) if value.strip()]
