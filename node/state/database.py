"""The state file: SQLite, blocking. Used from one thread at a time, which `node.state.store` ensures.

WAL with synchronous=NORMAL: committed changes survive the death of any process, kill -9 included. A power cut may
lose the last commits but never corrupts the file: controllers repair users when they come back, and some seconds of
traffic are the price of not waiting for the disk with every change.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from node.contract.counters import Counters, Row, Scope, by_name
from node.contract.saved import Changes, Margins, Packed, Saved
from node.state.schema import BOTH_WAYS, KEPT, STAGED, STEPS, Newer, require_known, upgrade

_WAL_BYTES = 4 * 1024 * 1024
# Rows written by one statement: one at a time takes half as long again.
_AT_ONCE = 50


class Unwritable(Exception):
    """The state file cannot be written or read now; the text has the reason and what to do."""


class Damaged(Exception):
    """The state file is damaged and was moved aside; the text has its new path."""


class Database:
    """The state file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def load(self) -> Saved:
        """Read everything. Raises `Unwritable` and `Damaged`."""
        with self._converted_errors():
            saved = _load(self._connected())
            _forget_pages(self._connected())
            return saved

    def peek(self) -> Saved | None:
        """Read the file without writing, for a read-only disk; None if there is one that cannot be read now."""
        try:
            self._path.stat()
        except FileNotFoundError:
            return Saved()
        except OSError:
            return None
        # With the WAL if possible, else without it.
        for mode in ("mode=ro", "immutable=1"):
            with suppress(sqlite3.Error, Newer):
                uri = f"{self._path.absolute().as_uri()}?{mode}"
                with closing(sqlite3.connect(uri, uri=True)) as connection:
                    require_known(connection)
                    return _load(connection)
        return None

    def write(self, changes: Changes) -> None:
        """Write changes in one transaction. Raises `Unwritable` and `Damaged`."""
        with self._converted_errors():
            if len(changes.users) == 1 and changes == Changes(users=changes.users):
                # One statement is a transaction of its own.
                _write_packed(self._connected(), "users", changes.users)
            else:
                with self._transaction() as connection:
                    _write(connection, changes)
                if changes.staged:
                    _forget_pages(connection)

    def stage(self, users: Mapping[str, bytes]) -> None:
        """Write a whole set of users ahead, for `Changes.staged`; with none, drop it. Raises as `write`."""
        with self._converted_errors():
            with self._transaction() as connection:
                connection.execute("DROP TABLE IF EXISTS staged")
                if users:
                    connection.execute(STAGED)
                    _write_packed(connection, "staged", users)
            _forget_pages(connection)

    def close(self) -> None:
        """Close the file. SQLite merges the WAL into it then."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _converted_errors(self) -> Iterator[None]:
        """Convert errors: `Damaged` if the file is to blame, `Unwritable` for the disk (permissions, space, locks)."""
        try:
            yield
        except Newer as error:
            raise Unwritable(str(error)) from error
        except (sqlite3.Error, OSError) as error:
            if type(error) is not sqlite3.DatabaseError:
                raise Unwritable(f"{error}; free disk space or repair its permissions") from error
            try:
                aside = self._move_aside(error)
            except OSError as refusal:
                raise Unwritable(f"the state file is damaged ({error}) and cannot be moved aside: {refusal}") from error
            raise Damaged(aside) from error

    def _move_aside(self, fault: Exception) -> str:
        """Move a damaged file aside. Returns one line for the operator."""
        self.close()
        aside = self._path.with_name(f"{self._path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
        for suffix in ("", "-wal", "-shm"):
            file = self._path.with_name(self._path.name + suffix)
            if file.exists():
                file.rename(aside.with_name(aside.name + suffix))
        return (
            f"the state file could not be read ({fault}) and was moved to {aside}: the node does not use what is in it"
        )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._connected()
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.rollback()
            raise
        connection.commit()

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            self._path.touch(mode=0o600)
            connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            try:
                _prepare(connection, partial(self._keep, connection))
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def go_back(self) -> bool:
        """Restore the copy from before a newer node upgraded the file. Returns False if there was no such upgrade.

        Call it before anything is read. Raises `OSError`.
        """
        kept = self._kept(len(STEPS))
        if not (self._path.exists() and kept.exists()):
            return False
        try:
            with closing(sqlite3.connect(self._path)) as connection:
                (version,) = connection.execute("PRAGMA user_version").fetchone()
        except sqlite3.Error as error:
            raise OSError(str(error)) from error
        if version <= len(STEPS):
            return False
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        kept.replace(self._path)
        return True

    def _kept(self, version: int) -> Path:
        return self._path.with_name(KEPT.format(self._path.name, version))

    def _keep(self, connection: sqlite3.Connection, version: int) -> None:
        """Keep a copy with this version of the tables, for a node that does not know later ones."""
        kept = self._kept(version)
        new = kept.with_name(f"{kept.name}.new")
        new.unlink(missing_ok=True)
        new.touch(mode=0o600)
        connection.execute("VACUUM INTO ?", (str(new),))
        new.replace(kept)


def _load(connection: sqlite3.Connection) -> Saved:
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)
    # A read-only file of an earlier node lacks the last column.
    _, request, left, routing = (*next(iter(_all(connection, "backend")), (1, b"", None)), b"")[:4]
    margins = [Margins(*row) for row in _all(connection, "journal", "epoch, first, ceiling")]
    counted: dict[str, dict[str, Counters]] = {}
    # A read-only file of an earlier node has a row for each direction.
    rows = connection.execute(BOTH_WAYS).fetchall() if _all(connection, "booked", "1") else _all(connection, "counted")
    for run, name, up, down in rows:
        counted.setdefault(run, {})[name] = up, down
    return Saved(
        request=request,
        left=left,
        users=tuple(packed for _, packed in _all(connection, "users", "place, packed")),
        rows=_rows(connection, "traffic"),
        routing=routing,
        margins=margins[0] if margins else None,
        events=tuple(Packed(*row) for row in _all(connection, "events", "sequence, packed")) if margins else (),
        totals=_rows(connection, "totals"),
        limits=tuple(_all(connection, "limits", "key, packed")),
        booked={run: by_name(counters) for run, counters in counted.items()},
        days=tuple(_all(connection, "days", "key, packed")),
    )


def _all(connection: sqlite3.Connection, table: str, columns: str = "*") -> list[Any]:
    """All rows, by their first column; none if the table is missing in a read-only file of an earlier node."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
        return []
    return connection.execute(f"SELECT {columns} FROM {table} ORDER BY 1").fetchall()  # noqa: S608 - ours


def _forget_pages(connection: sqlite3.Connection) -> None:
    """Return the memory of the pages that SQLite keeps of all users: 2 MB, and the kernel has them, too."""
    connection.execute("PRAGMA shrink_memory")


def _rows(connection: sqlite3.Connection, table: str) -> tuple[Row, ...]:
    found = _all(connection, table, "scope, name, uplink, downlink")
    # A newer node may have had other scopes.
    known = {scope.value: scope for scope in Scope}
    return tuple(Row(known[scope], name, up, down) for scope, name, up, down in found if scope in known)


def _prepare(connection: sqlite3.Connection, keep: Callable[[int], None]) -> None:
    require_known(connection)  # before anything is written
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    upgrade(connection, keep=keep)
    # Left by a node that was killed meanwhile.
    connection.execute("DROP TABLE IF EXISTS staged")


def _write(connection: sqlite3.Connection, changes: Changes) -> None:
    if changes.clean:
        for table in ("traffic", "totals", "limits", "counted", "days"):
            connection.execute(f"DELETE FROM {table}")  # noqa: S608 - ours
        connection.execute("DROP TABLE IF EXISTS staged")
    if changes.staged:
        connection.execute("DROP TABLE users")
        connection.execute("ALTER TABLE staged RENAME TO users")
    elif changes.clean or changes.clean_users:
        connection.execute("DELETE FROM users")
    _write_backend(connection, changes)
    _write_packed(connection, "users", changes.users)
    _write_rows(connection, "traffic", changes.rows)
    _write_rows(connection, "totals", changes.totals)
    _write_packed(connection, "limits", changes.limits)
    _write_packed(connection, "days", changes.days)
    _write_events(connection, changes)
    _write_counted(connection, changes)


def _write_backend(connection: sqlite3.Connection, changes: Changes) -> None:
    if changes.clean or changes.request is not None:
        connection.execute("DELETE FROM backend")
    if changes.request:
        row = changes.request, changes.left, changes.routing or b""
        connection.execute("INSERT INTO backend VALUES (1, ?, ?, ?)", row)
        return
    if changes.left is not None:
        connection.execute("UPDATE backend SET left = ?", (changes.left,))
    if changes.routing is not None:
        connection.execute("UPDATE backend SET routing = ?", (changes.routing,))


def _write_packed(connection: sqlite3.Connection, table: str, packed: Mapping[str, bytes | None]) -> None:
    """Write rows by key; each user goes to the end of the order, as in `node.backend.roster.Roster`."""
    gone = [(key,) for key, one in packed.items() if one is None]
    connection.executemany(f"DELETE FROM {table} WHERE key = ?", gone)  # noqa: S608 - ours
    _replace(connection, f"{table} (key, packed)", (entry for entry in packed.items() if entry[1] is not None))


def _write_rows(connection: sqlite3.Connection, table: str, rows: Mapping[tuple[Scope, str], Row]) -> None:
    # In the order of the table: random places cost a third more.
    placed = sorted((scope.value, key, *row[1:]) for (scope, key), row in rows.items())
    for scope, some in groupby((row for row in placed if not (row[3] or row[4])), itemgetter(0)):
        keys = (key for _, key, *_ in some)
        while part := [*islice(keys, _AT_ONCE)]:
            places = ", ".join("?" * len(part))
            connection.execute(f"DELETE FROM {table} WHERE scope = ? AND key IN ({places})", (scope, *part))  # noqa: S608 - ours
    _replace(connection, table, (row for row in placed if row[3] or row[4]))


def _write_counted(connection: sqlite3.Connection, changes: Changes) -> None:
    for run, counters in changes.booked.items():
        # The empty name is always written: it tells a run without counters from an unknown run.
        entries = sorted({"": (None, None), **counters}.items())
        _replace(connection, "counted", ((run, name, *both) for name, both in entries))
    if changes.booked_only is not None:
        runs = tuple(changes.booked_only)
        connection.execute(f"DELETE FROM counted WHERE run NOT IN ({', '.join('?' * len(runs))})", runs)  # noqa: S608 - ours


def _replace(connection: sqlite3.Connection, table: str, rows: Iterable[Sequence[object]]) -> None:
    """Write rows, some by each statement."""
    some = iter(rows)
    while part := [*islice(some, _AT_ONCE)]:
        place = f"({', '.join('?' * len(part[0]))})"
        statement = f"INSERT OR REPLACE INTO {table} VALUES {', '.join([place] * len(part))}"  # noqa: S608 - ours
        connection.execute(statement, [*chain.from_iterable(part)])


def _write_events(connection: sqlite3.Connection, changes: Changes) -> None:
    if changes.margins is None:
        return
    first = changes.margins.first
    if changes.clean:
        connection.execute("DELETE FROM events")
    connection.execute("DELETE FROM events WHERE sequence < ?", (first,))
    kept = [event for event in changes.events if event.sequence >= first]
    connection.executemany("INSERT OR REPLACE INTO events VALUES (?, ?)", kept)
    connection.execute("INSERT OR REPLACE INTO journal VALUES (1, ?, ?, ?)", changes.margins)
