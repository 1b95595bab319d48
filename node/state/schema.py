"""The tables of the state file, and the steps by which those of an earlier node become ours."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

# Step N makes tables of version N + 1 of those of version N; version 0 is an empty file. A step that was released is
# never changed: other tables are another step.
STEPS = (
    """
    CREATE TABLE backend (one INTEGER PRIMARY KEY CHECK (one = 1), request BLOB NOT NULL, left REAL);
    CREATE TABLE users (place INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, packed BLOB NOT NULL);
    CREATE TABLE traffic (
        scope TEXT NOT NULL, key TEXT NOT NULL, name TEXT NOT NULL, uplink INTEGER NOT NULL, downlink INTEGER NOT NULL,
        PRIMARY KEY (scope, key)
    ) WITHOUT ROWID;
    """,
    "ALTER TABLE backend ADD COLUMN routing BLOB NOT NULL DEFAULT x'';",
    """
    CREATE TABLE events (sequence INTEGER PRIMARY KEY, packed BLOB NOT NULL);
    CREATE TABLE journal (
        one INTEGER PRIMARY KEY CHECK (one = 1), epoch TEXT NOT NULL, first INTEGER NOT NULL, ceiling INTEGER NOT NULL
    );
    """,
    """
    CREATE TABLE totals (
        scope TEXT NOT NULL, key TEXT NOT NULL, name TEXT NOT NULL, uplink INTEGER NOT NULL, downlink INTEGER NOT NULL,
        PRIMARY KEY (scope, key)
    ) WITHOUT ROWID;
    """,
    "CREATE TABLE limits (key TEXT PRIMARY KEY, packed BLOB NOT NULL) WITHOUT ROWID;",
    """
    CREATE TABLE booked (
        run TEXT NOT NULL, counter TEXT NOT NULL, value INTEGER NOT NULL, PRIMARY KEY (run, counter)
    ) WITHOUT ROWID;
    """,
)

# What the file of an earlier node is kept as, by its name and the version of its tables, when those are upgraded.
KEPT = "{}.v{}"

# Where all users of a backend are written before they are those who are wanted; the table then takes the other's name.
STAGED = "CREATE TABLE staged (place INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, packed BLOB NOT NULL)"


class Newer(Exception):
    """A later node has written the file, which is left as it is; the text tells the operator what to do."""


def require_known(connection: sqlite3.Connection, steps: Sequence[str] = STEPS) -> int:
    """The version of the tables. Raises `Newer` for those of a later node."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(steps):
        kept = KEPT.format("state.db", len(steps))
        raise Newer(
            f"a newer node has written it (its tables have version {version}, this node knows {len(steps)}); "
            f"run that node again, move the file away, or move {kept} into its place, which this node left to that one"
        )
    return int(version)


def upgrade(
    connection: sqlite3.Connection, steps: Sequence[str] = STEPS, keep: Callable[[int], None] = lambda _: None
) -> None:
    """Bring the tables up to date, each step whole or not at all. Raises `Newer`.

    `keep` is called before, with the version of tables that an earlier node has made.
    """
    version = require_known(connection, steps)
    if 0 < version < len(steps):
        keep(version)
    for number in range(version, len(steps)):
        connection.executescript(f"BEGIN IMMEDIATE; {steps[number]} PRAGMA user_version = {number + 1}; COMMIT;")
