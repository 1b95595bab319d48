"""The tables of the state file, and the steps by which those of an earlier node become ours."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

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
)

# Where all users of a backend are written before they are those who are wanted; the table then takes the other's name.
STAGED = "CREATE TABLE staged (place INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, packed BLOB NOT NULL)"


class Newer(Exception):
    """A later node has written the file, which is left as it is; the text tells the operator what to do."""


def require_known(connection: sqlite3.Connection, steps: Sequence[str] = STEPS) -> int:
    """The version of the tables. Raises `Newer` for those of a later node."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(steps):
        raise Newer(
            f"a newer node has written it (its tables have version {version}, this node knows {len(steps)}); "
            "run that node again, or move the file away"
        )
    return int(version)


def upgrade(connection: sqlite3.Connection, steps: Sequence[str] = STEPS) -> None:
    """Bring the tables up to date, each step whole or not at all. Raises `Newer`."""
    for number in range(require_known(connection, steps), len(steps)):
        connection.executescript(f"BEGIN IMMEDIATE; {steps[number]} PRAGMA user_version = {number + 1}; COMMIT;")
