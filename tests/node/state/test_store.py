"""The state file: written in transactions, by changes; a failing disk disturbs no caller."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock, deferLater
from twisted.logger import capturedLogs
from twisted.trial.unittest import TestCase

from node.backend.roster import changed_users
from node.contract.counters import DIRECTIONS, Row, Scope, counter_name
from node.contract.saved import Changes, Lasting, Saved
from node.state import store as store_module
from node.state.database import Damaged, Database, Unwritable
from node.state.schema import STEPS, require_known, upgrade
from node.state.store import Store

reactor: Any = installed

ROW = Row(Scope.USER, "Ann", 1, 2)
NAMES = st.text(st.characters(codec="utf-8"), max_size=9) | st.sampled_from(["a>>>traffic>>>uplink", "a\0b"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def rows(*some: Row) -> dict[tuple[Scope, str], Row]:
    return {(row.scope, row.key): row for row in some}


def reopened(file: Path) -> Saved:
    database = Database(file)
    try:
        return database.load()
    finally:
        database.close()


def reopened_copy(file: Path) -> Saved:
    """Return what a node would find now, while another one has the file open."""
    saved = Database(file).peek()
    assert saved is not None
    return saved


def has_staged(file: Path) -> bool:
    with closing(sqlite3.connect(file)) as connection:
        return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'staged'").fetchone())


def written(file: Path, *changes: Changes) -> Saved:
    """Return what a later node finds after these changes."""
    database = Database(file)
    for change in changes:
        database.write(change)
    database.close()
    return reopened(file)


def test_a_new_file_has_nothing(file: Path) -> None:
    """The first start of a node finds no backend, no users and no bytes."""
    assert reopened(file) == Saved()


def test_a_backend_with_users_and_traffic(file: Path) -> None:
    """The accepted backend is there again, with its users in their order."""
    saved = written(file, Changes(request=b"r", left=7.5, users={"b": b"B", "a": b"A"}, rows=rows(ROW)))
    assert saved == Saved(b"r", 7.5, (b"B", b"A"), (ROW,))


def test_changes_are_changes(file: Path) -> None:
    """One user, one row, the keep-alive's rest: all else stays. A user who is written again goes to the end."""
    saved = written(
        file,
        Changes(request=b"r", left=9.0, users={"a": b"A", "b": b"B", "c": b"C"}, rows=rows(ROW)),
        Changes(users={"a": b"A2", "b": None}),
        Changes(left=3.0, rows=rows(Row(Scope.INBOUND, "in", 5, 0))),
    )
    assert (saved.request, saved.left, saved.users) == (b"r", 3.0, (b"C", b"A2"))
    assert set(saved.rows) == {ROW, Row(Scope.INBOUND, "in", 5, 0)}


def test_users_one_at_a_time(file: Path) -> None:
    """A change is on disk when `write` returns, though a process that dies then closes nothing."""
    database = Database(file)
    database.write(Changes(request=b"r", users={"a": b"A", "b": b"B"}))
    for change, users in (
        ({"a": b"A2"}, (b"B", b"A2")),
        ({"c": b"C"}, (b"B", b"A2", b"C")),
        ({"b": None}, (b"A2", b"C")),
        ({"x": None}, (b"A2", b"C")),
    ):
        database.write(Changes(users=cast("dict[str, bytes | None]", change)))
        assert reopened_copy(file) == Saved(b"r", users=users)
    database.close()


def test_a_row_without_bytes_is_none(file: Path) -> None:
    """Delivered bytes are gone; a new spelling of a name replaces the old."""
    other = Row(Scope.USER, "bob", 4, 4)
    respelled, empty = Row(Scope.USER, "ANN", 6, 6), Row(Scope.USER, "bob", 0, 0)
    saved = written(file, Changes(rows=rows(ROW, other)), Changes(rows=rows(respelled, empty)))
    assert saved.rows == (respelled,)


def test_forgetting_leaves_the_traffic(file: Path) -> None:
    """Backend and users are gone; undelivered bytes stay."""
    first = Changes(request=b"r", left=1.0, users={"a": b"A"}, rows=rows(ROW))
    assert written(file, first, Changes(request=b"", clean_users=True)) == Saved(rows=(ROW,))


def test_a_new_backend_has_all_of_its_keep_alive(file: Path) -> None:
    """The rest of the previous one's keep-alive does not matter."""
    assert written(file, Changes(request=b"r", left=1.0), Changes(request=b"s")).left is None


def test_changes_of_its_routing(file: Path) -> None:
    """Routing changes are written with the backend, or alone; another backend has none."""
    first = Changes(request=b"r", left=1.0, routing=b"x")
    assert written(file, first).routing == b"x"
    saved = written(file, Changes(routing=b"y"))
    assert (saved.request, saved.left, saved.routing) == (b"r", 1.0, b"y")
    assert written(file, Changes(request=b"s")).routing == b""
    assert written(file, Changes(request=b""), Changes(routing=b"z")) == Saved()


def test_everything_is_written_again(file: Path) -> None:
    """A file that missed changes gets everything, and nothing else."""
    first = Changes(request=b"r", users={"a": b"A"}, rows=rows(ROW))
    assert written(file, first, Changes(clean=True, users={"b": b"B"})) == Saved(users=(b"B",))


def test_staged_users(file: Path) -> None:
    """Staged users are not in force until they replace all others, in their order; then they can be changed."""
    database = Database(file)
    database.write(Changes(request=b"r", users={"a": b"A"}))
    database.stage({"x": b"X"})
    many = {f"{number}.user": str(number).encode() for number in range(1000)}
    database.stage(many)
    assert database.load().users == (b"A",)
    database.write(Changes(request=b"s", clean_users=True, staged=True, users={"0.user": None, "1.user": b"one"}))
    database.write(Changes(users={"b": b"B"}))
    database.close()
    assert reopened(file) == Saved(b"s", None, (*list(many.values())[2:], b"one", b"B"))


def test_staged_users_of_a_node_that_was_killed(file: Path) -> None:
    """The next node has no staged users of the killed one, nor those of a failed Start."""
    database = Database(file)
    for staged in ({"a": b"A"}, {}):
        database.stage(staged)
    database.stage({"b": b"B"})
    database.close()
    assert reopened(file) == Saved()
    assert not has_staged(file)


people = st.dictionaries(st.sampled_from("abcdef"), st.binary(min_size=1, max_size=2))


@given(people, people)
def test_a_set_by_its_changes(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    """Applying the changes between two sets to the first gives the second, and unchanged users are not written."""
    changed = changed_users(before, after)
    made = {key: packed for key, packed in (before | changed).items() if packed is not None}
    assert made == after
    assert all(before.get(key) != packed for key, packed in changed.items())


def test_secrets_are_private(file: Path) -> None:
    """Other users cannot read the file, nor SQLite's files beside it, whatever the umask."""
    before = os.umask(0)
    try:
        database = Database(file)
        database.write(Changes(users={"a": b"A"}))
        names = sorted(path.name for path in file.parent.iterdir())
        modes = {stat.S_IMODE(path.stat().st_mode) for path in file.parent.iterdir()}
        database.close()
    finally:
        os.umask(before)
    assert (names, modes) == (["state.db", "state.db-shm", "state.db-wal"], {0o600})


def test_a_killed_writer_loses_nothing(file: Path) -> None:
    """Committed changes are there though the file was never closed."""
    Database(file).write(Changes(users={"a": b"A"}))
    assert reopened(file).users == (b"A",)


@pytest.mark.parametrize("content", [b"not a database, but long enough to be looked at as one" * 99, b"\0" * 5000])
def test_a_file_that_is_no_database(file: Path, content: bytes) -> None:
    """Such a file is moved aside and reported, and the next try finds a new one."""
    file.write_bytes(content)
    database = Database(file)
    with pytest.raises(Damaged, match=r"moved to .*state\.db\.damaged-"):
        database.load()
    [aside] = file.parent.glob("state.db.damaged-*")
    assert aside.read_bytes() == content
    assert written(file, Changes(users={"a": b"A"})).users == (b"A",)


def test_a_file_with_a_broken_page(file: Path) -> None:
    """Damage in the middle of a file is found at the start, not when the page is needed."""
    written(file, Changes(users={f"{number}": bytes(1000) for number in range(100)}))
    content = bytearray(file.read_bytes())
    content[20_000:40_000] = os.urandom(20_000)
    file.write_bytes(content)
    with pytest.raises(Damaged):
        reopened(file)


def test_a_file_of_a_newer_node(file: Path) -> None:
    """A node that reads or would write such a file refuses it with an explanation, and leaves it as it is."""
    with closing(Database(file)) as database:
        database.load()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(f"PRAGMA user_version = {len(STEPS) + 1}")
    before = file.read_bytes()
    for work in (Database(file).load, lambda: Database(file).write(Changes(request=b"x"))):
        with pytest.raises(Unwritable, match="a newer node has written it"):
            work()
    assert Database(file).peek() is None
    assert (file.read_bytes(), list(file.parent.glob("*damaged*"))) == (before, [])


def test_a_file_of_an_older_node(file: Path) -> None:
    """The node upgrades the tables step by step, with their content; a step that fails leaves them as they were."""
    with closing(Database(file)) as database:
        database.write(Changes(request=b"backend", users={"ann": b"ann"}))
    more = ("ALTER TABLE users ADD COLUMN since REAL;", "CREATE TABLE others (key TEXT PRIMARY KEY);")
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        with pytest.raises(sqlite3.Error):
            upgrade(connection, (*STEPS, more[0] + "CREATE TABLE users (x);"))
        connection.rollback()
        assert require_known(connection) == len(STEPS)
        upgrade(connection, (*STEPS, *more))
        assert require_known(connection, (*STEPS, *more)) == len(STEPS) + 2
        assert connection.execute("SELECT key, since FROM users").fetchall() == [("ann", None)]


@pytest.mark.parametrize("version", range(1, len(STEPS)))
def test_the_file_of_each_version(file: Path, version: int) -> None:
    """Each file opens in this version, with its content, and the node keeps a copy for the version that wrote it."""
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        upgrade(connection, STEPS[:version])
        connection.execute("INSERT INTO backend (one, request) VALUES (1, ?)", (b"r",))
        connection.execute("INSERT INTO users (key, packed) VALUES ('ann', ?)", (b"ann",))
    saved = reopened(file)
    assert (saved.request, saved.users) == (b"r", (b"ann",))
    kept = file.with_name(f"{file.name}.v{version}")
    with closing(sqlite3.connect(kept)) as connection:
        assert require_known(connection, STEPS[:version]) == version
        assert connection.execute("SELECT key FROM users").fetchall() == [("ann",)]
    assert kept.stat().st_mode & 0o077 == 0


def test_back_from_a_newer_version(file: Path) -> None:
    """A file that a newer version has upgraded is restored; one that it has not upgraded is left alone."""
    written(file, Changes(request=b"r"))
    assert not Database(file).go_back()
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        kept = file.with_name(f"{file.name}.v{len(STEPS)}")
        shutil.copy(file, kept)
        upgrade(connection, (*STEPS, "CREATE TABLE more (x);"))
        connection.execute("DELETE FROM backend")
    with pytest.raises(Unwritable, match=kept.name):
        Database(file).load()
    assert Database(file).go_back()
    assert reopened(file).request == b"r" and not kept.exists()


def test_a_file_from_before_routing(file: Path) -> None:
    """The node reads such a file, even if it cannot write it, and finds no routing changes."""
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        upgrade(connection, STEPS[:1])
        connection.execute("INSERT INTO backend VALUES (1, ?, ?)", (b"r", 2.0))
    assert Database(file).peek() == Saved(b"r", 2.0)
    assert written(file, Changes(routing=b"x")) == Saved(b"r", 2.0, routing=b"x")


@given(
    st.dictionaries(
        st.sampled_from(["one", "other"]),
        st.dictionaries(
            st.builds(counter_name, st.sampled_from(Scope), NAMES, st.sampled_from(DIRECTIONS)),
            st.integers(0, 2**63 - 1),
        ),
    )
)
def test_counters_from_before_both_ways(booked: dict[str, dict[str, int]]) -> None:
    """Those of each run are there after the upgrade, and in a file that cannot be written; also of one without any."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "state.db"
        with closing(sqlite3.connect(file, isolation_level=None)) as connection:
            upgrade(connection, STEPS[:6])
            entries = [(run, *each) for run, counters in booked.items() for each in {"": 0, **counters}.items()]
            connection.executemany("INSERT INTO booked VALUES (?, ?, ?)", entries)
        before = Database(file).peek()
        assert before is not None and before.booked == booked
        assert reopened(file).booked == booked


def test_counters_of_runs(file: Path) -> None:
    """A later value replaces an earlier one; a run without counters is known; those of other runs can be deleted."""
    first = Changes(booked={"one": {"user>>>ann": (1, 2), "inbound>>>in": (None, 3)}, "other": {}})
    saved = written(file, first, Changes(booked={"one": {"user>>>ann": (4, 5)}}))
    ann, inbound = ("user>>>ann>>>traffic>>>uplink", "user>>>ann>>>traffic>>>downlink"), "inbound>>>in>>>traffic>>>"
    assert saved.booked == {"one": {ann[0]: 4, ann[1]: 5, f"{inbound}downlink": 3}, "other": {}}
    assert written(file, Changes(booked_only={"other"})).booked == {"other": {}}


def test_sums_are_apart_from_the_rows(file: Path) -> None:
    """Rows that a controller took are gone; the totals of the same names stay, and grow."""
    grown, empty = Row(Scope.USER, "ann", 9, 9), Row(Scope.USER, "ann", 0, 0)
    saved = written(file, Changes(rows=rows(ROW), totals=rows(ROW)), Changes(rows=rows(empty), totals=rows(grown)))
    assert (saved.rows, saved.totals) == ((), (grown,))
    assert written(file, Changes(clean=True)).totals == ()


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """The disk is to blame, and nothing is moved aside."""
    with pytest.raises(Unwritable):
        reopened(tmp_path / "nowhere" / "state.db")


def test_a_disk_that_cannot_be_written_can_be_read(file: Path) -> None:
    """A node whose disk became read-only still resumes."""
    saved = written(file, Changes(request=b"r", users={"a": b"A"}, rows=rows(ROW)))
    assert Database(file).peek() == saved
    killed = Database(file)
    killed.write(Changes(users={"b": b"B"}))
    both = Database(file).peek()
    assert both is not None
    assert both.users == (b"A", b"B")
    assert Database(file.with_name("other")).peek() == Saved()


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """The node does not take a file that it cannot read for an empty one."""
    (tmp_path / "state.db").mkdir()
    assert Database(tmp_path / "state.db").peek() is None


class Heard(Lasting):
    """A part that notes what it hears."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.words: list[str] = []

    def restore(self, saved: Saved) -> None:
        self.words.append(f"restore {len(saved.users)}")
        if self.fails:
            raise ZeroDivisionError

    def disk(self, fault: str) -> None:
        self.words.append("disk" if fault else "disk well")

    def damaged(self, text: str) -> None:
        self.words.append("damaged")


@pytest.mark.parametrize("damaged", [False, True])
def test_a_disk_that_fails_at_the_start(tmp_path: Path, damaged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part takes what can be read, and learns of the disk only then: once, whatever other parts do."""
    clock = Clock()
    parts = Heard(fails=True), Heard()
    store = Store(cast(Any, clock), tmp_path / "state.db", parts)
    fault = Damaged("it was moved") if damaged else Unwritable("full")

    def load() -> Saved:
        raise fault

    monkeypatch.setattr(store._database, "load", load)
    monkeypatch.setattr(store._database, "peek", lambda: Saved(users=(b"A",)))
    with capturedLogs() as events:
        store.start()
    store._retry.cancel()
    store._pool.stop()
    expected = ["restore 0", "damaged"] if damaged else ["restore 1", "disk"]
    assert [part.words for part in parts] == [expected, expected]
    assert any(event.get("log_failure") for event in events)


class Whatever(Lasting):
    """A part that keeps these changes."""

    def __init__(self) -> None:
        self.changes = Changes()

    def save(self, changes: Changes) -> None:
        vars(changes).update(vars(self.changes))


class FailingDatabase(Database):
    """Fails as often as the test wants."""

    faults: list[Exception]
    unstageable: Sequence[Exception] = ()

    def stage(self, users: Mapping[str, bytes]) -> None:
        if self.unstageable:
            raise self.unstageable[0]
        super().stage(users)

    def write(self, changes: Changes) -> None:
        self.written = [*getattr(self, "written", []), changes]
        if self.faults:
            raise self.faults.pop(0)
        super().write(changes)


class StoreTests(TestCase):
    def setUp(self) -> None:
        temporary = TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.file = Path(temporary.name) / "state.db"
        self.state = Whatever()
        self.store = Store(reactor, self.file, [self.state])
        self.database = FailingDatabase(self.file)
        self.database.faults = []
        self.store._database = self.database
        self.patch(store_module, "AGAIN", 0.05)
        self.assertEqual(self.store.open(), Saved())
        self.addCleanup(self.close)
        self.closed = False

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            await self.store.stop()

    def flush(self) -> Deferred[None]:
        return ensureDeferred(self.store.flush())

    async def test_what_is_flushed_is_on_disk(self) -> None:
        """A caller that waited may promise it to a controller."""
        self.store.accept(b"r")
        self.store.users({"a": b"A"})
        await self.flush()
        self.assertEqual(reopened(self.file), Saved(b"r", None, (b"A",)))

    async def test_changes_of_one_turn_are_written_together(self) -> None:
        """A backend is never on disk with the users of another."""
        self.store.accept(b"r")
        self.store.users({"a": b"A"}, clean=True)
        await self.flush()
        self.store.forget()
        await self.flush()
        self.assertEqual(len(self.database.written), 2)

    async def test_waiting_ends_though_others_go_on(self) -> None:
        """A flush waits for the changes before it, not for later ones of others."""
        over = False

        def go_on() -> None:
            if not over:
                self.store.users({"b": os.urandom(4)})
                reactor.callLater(0, go_on)

        go_on()
        self.store.users({"a": b"A"})
        await self.flush()
        over = True
        await self.flush()
        self.assertEqual(len(reopened(self.file).users), 2)

    async def test_staged_users_are_all_there_are(self) -> None:
        """Staged users are written once; the transaction that needs them writes no users."""
        self.store.users({"a": b"A"})
        self.store.stage({"c": b"C", "b": b"B"})
        await self.flush()
        self.assertEqual(reopened_copy(self.file).users, (b"A",))
        self.store.accept(b"r")
        self.store.users({"c": b"C", "b": b"B"}, clean=True)
        self.store.users({"d": b"D"})
        await self.flush()
        self.assertEqual(reopened(self.file).users, (b"C", b"B", b"D"))
        self.assertEqual([[*changes.users] for changes in self.database.written], [["a"], ["d"]])

    async def test_users_who_changed_since_they_were_staged(self) -> None:
        """Other users, or the same in another order, are written again; no staged ones are left."""
        for users in ({"b": b"B", "c": b"C"}, {"c": b"C"}, {"b": b"B", "c": b"other"}):
            self.store.stage({"c": b"C", "b": b"B"})
            self.store.users(users, clean=True)
            await self.flush()
            self.assertEqual(reopened_copy(self.file).users, tuple(users.values()))
            self.assertFalse(has_staged(self.file))

    async def test_staged_users_who_are_not_wanted(self) -> None:
        """A failed Start leaves the users before it, and none of its own."""
        self.store.users({"a": b"A"})
        self.store.stage({"b": b"B"})
        self.store.stage({})
        self.store.users({"c": b"C"}, clean=True)
        await self.flush()
        self.assertEqual(reopened(self.file).users, (b"C",))

    async def test_staging_before_what_was_staged_is_in_force(self) -> None:
        """Two backends in one turn: each transaction has its own users."""
        self.store.stage({"a": b"A"})
        self.store.users({"a": b"A"}, clean=True)
        self.store.stage({"b": b"B"})
        await self.flush()
        self.assertEqual(reopened_copy(self.file).users, (b"A",))
        self.store.users({"b": b"B"}, clean=True)
        await self.flush()
        self.assertEqual(reopened(self.file).users, (b"B",))

    async def test_a_disk_that_is_full_when_users_are_staged(self) -> None:
        """The fault is reported once, as for any other write, and all changes are written when there is space."""
        self.state.changes = Changes(request=b"all", users={"b": b"B"})
        self.database.unstageable = [Unwritable("database or disk is full")]
        self.database.faults = [Unwritable("database or disk is full")]
        with capturedLogs() as events:
            self.store.users({"a": b"A"})
            self.store.stage({"b": b"B"})
            while not self.store.warnings:
                await turn()
            self.store.users({"b": b"B"}, clean=True)
            await self.flush()
        self.assertEqual(["NOT ON DISK" in str(event["log_format"]) for event in events], [True])
        while self.store.warnings:
            await turn()
        self.assertEqual(reopened(self.file), Saved(b"all", None, (b"B",)))

    async def test_a_disk_that_is_full_for_staged_users_alone(self) -> None:
        """A write that was under way then, and fits, does not mean that all is on disk: more was left out."""
        self.patch(store_module, "AGAIN", 1000)
        self.database.unstageable = [Unwritable("database or disk is full")]
        self.store.users({"a": b"A"})
        self.store.stage({"b": b"B"})
        with capturedLogs():
            await self.flush()
            while not getattr(self.database, "written", []):
                await turn()
            await turn()
        self.assertTrue(self.store.warnings)

    async def test_staged_users_who_were_wanted_for_a_moment(self) -> None:
        """A Stop before they are in force leaves none of them."""
        self.store.stage({"b": b"B"})
        self.store.users({"b": b"B"}, clean=True)
        self.store.forget()
        await self.flush()
        self.assertEqual(reopened_copy(self.file).users, ())
        self.assertFalse(has_staged(self.file))

    async def test_staged_users_whom_a_full_disk_kept_from_being_in_force(self) -> None:
        """Everything is written again, once."""
        self.state.changes = Changes(request=b"all", users={"b": b"B"})
        self.store.stage({"b": b"B"})
        self.database.faults = [Unwritable("database or disk is full")]
        with capturedLogs():
            self.store.users({"b": b"B"}, clean=True)
            await self.flush()
            while self.store.warnings:
                await turn()
        self.assertEqual(reopened_copy(self.file).users, (b"B",))
        self.assertFalse(has_staged(self.file))

    async def test_many_changes_of_a_user_are_the_last(self) -> None:
        """In one transaction or in several, the newest change of a user counts."""
        for packed in (b"1", b"2", None, b"3"):
            self.store.users({"a": packed})
        await self.flush()
        self.store.users({"a": b"4"})
        await self.flush()
        self.assertEqual(reopened(self.file).users, (b"4",))

    async def test_a_full_disk(self) -> None:
        """The fault is logged once, and `info` warns; no caller waits; when there is space, all changes are written."""
        self.state.changes = Changes(request=b"all", users={"b": b"B"}, rows=rows(ROW))
        self.database.faults = [Unwritable("database or disk is full")] * 3
        with capturedLogs() as events:
            self.store.users({"a": b"A"})
            await self.flush()
        self.assertEqual(["NOT ON DISK" in str(event["log_format"]) for event in events], [True])
        [warning] = self.store.warnings
        self.assertIn("database or disk is full", warning)
        self.store.users({"c": b"C"})
        await self.flush()
        while self.store.warnings:
            await turn()
        self.assertEqual(reopened(self.file), Saved(b"all", None, (b"B",), (ROW,)))

    async def test_a_file_that_breaks_meanwhile(self) -> None:
        """The node moves the damaged file aside, writes a new one, and `info` keeps the warning."""
        self.state.changes = Changes(users={"b": b"B"})
        self.database.faults = [Damaged("the state file is now elsewhere")]
        self.store.users({"a": b"A"})
        await self.flush()
        while len(self.store.warnings) > 1:
            await turn()
        self.assertEqual(self.store.warnings, ["the state file is now elsewhere"])
        self.assertEqual(reopened(self.file).users, (b"B",))

    async def test_the_last_changes_are_retried(self) -> None:
        """A disk that has space again when the node ends gets everything."""
        self.state.changes = Changes(users={"b": b"B"})
        self.patch(store_module, "AGAIN", 1000)
        self.database.faults = [Unwritable("full")]
        self.store.users({"a": b"A"})
        await self.flush()
        await self.close()
        self.assertEqual(reopened(self.file).users, (b"B",))


def turn() -> Deferred[None]:
    """Let other work go first."""
    return deferLater(reactor, 0.01)
