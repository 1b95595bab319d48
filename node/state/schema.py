"""The tables of the state file, and the migration steps from those of earlier nodes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

# The rows of the table "booked", which had one for each direction, as those of "counted". Names are cut as bytes: text
# would end at a NUL.
BOTH_WAYS = """
    SELECT run, ifnull(CAST(name AS TEXT), ''), max(iif(up, value, NULL)), max(iif(down, value, NULL))
    FROM (
        SELECT run, value, up, down, substr(counter, 1, length(counter) - 19 * up - 21 * down) AS name
        FROM (
            SELECT run, value, CAST(counter AS BLOB) AS counter,
                substr(CAST(counter AS BLOB), -19) = CAST('>>>traffic>>>uplink' AS BLOB) AS up,
                substr(CAST(counter AS BLOB), -21) = CAST('>>>traffic>>>downlink' AS BLOB) AS down
            FROM booked
        )
    )
    GROUP BY run, name
"""

# Step N upgrades tables from version N to N + 1; version 0 is an empty file. A released step is never changed: a change
# of the tables is a new step.
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
    "CREATE TABLE days (key TEXT PRIMARY KEY, packed BLOB NOT NULL) WITHOUT ROWID;",
    f"""
    CREATE TABLE counted (
        run TEXT NOT NULL, name TEXT NOT NULL, uplink INTEGER, downlink INTEGER, PRIMARY KEY (run, name)
    ) WITHOUT ROWID;
    INSERT INTO counted {BOTH_WAYS};
    DROP TABLE booked;
    """,
)

# The name of the copy kept before an upgrade: the file's name and the version of its tables.
KEPT = "{}.v{}"

# The users of a backend that is being tried are written here ahead; if it runs, the table is renamed to "users".
STAGED = "CREATE TABLE staged (place INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, packed BLOB NOT NULL)"


class Newer(Exception):
    """A newer node has written the file, which stays unchanged; the text tells the operator what to do."""


def require_known(connection: sqlite3.Connection, steps: Sequence[str] = STEPS) -> int:
    """The version of the tables. Raises `Newer` for those of a newer node."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(steps):
        kept = KEPT.format("state.db", len(steps))
        raise Newer(
            f"a newer node has written it (table version {version}; this node knows {len(steps)}): "
            f"run that node again, move the file away, or replace it by {kept}, the copy from before the upgrade"
        )
    return int(version)


def upgrade(
    connection: sqlite3.Connection, steps: Sequence[str] = STEPS, keep: Callable[[int], None] = lambda _: None
) -> None:
    """Upgrade the tables, each step in a transaction of its own. Raises `Newer`.

    `keep` is called before the first step with the version of an earlier node's tables; not for a new file.
    """
    version = require_known(connection, steps)
    if 0 < version < len(steps):
        keep(version)
    for number in range(version, len(steps)):
        connection.executescript(f"BEGIN IMMEDIATE; {steps[number]} PRAGMA user_version = {number + 1}; COMMIT;")
