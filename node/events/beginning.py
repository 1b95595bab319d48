"""The first events of a node: it continues the journal of the previous node, and reports trouble with the disk."""

from __future__ import annotations

from functools import partial

from node.events.journal import Journal
from node.events.kinds import Kind
from node.state.database import Saved
from node.state.store import Store


def begin_journal(journal: Journal, store: Store, saved: Saved, version: str) -> None:
    """Continue the previous node's events, report trouble with the disk from here on, and that this node started."""
    clean = journal.restore(saved.margins, saved.events)
    store.kept, store.trouble = journal.kept, journal.disk
    store.damaged = partial(journal.tell, Kind.DISK_DAMAGED)
    if store.fault:
        journal.disk(store.fault)
    if store.damage:
        journal.tell(Kind.DISK_DAMAGED, store.damage)
    before = "" if clean else "; the previous node was killed: its last events may be missing"
    journal.tell(Kind.NODE_STARTED, f"txnode {version} started{before}", version=version, clean=clean)


def tell_reloaded(journal: Journal, loaded: Kind, refused: Kind, fault: str) -> None:
    """Report that files were reloaded or, with `fault`, that they cannot be used."""
    journal.tell(refused if fault else loaded, fault or loaded.meaning)
