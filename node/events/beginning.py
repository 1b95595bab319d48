"""How a node's journal begins: behind the events of the node before, with what became of the disk."""

from __future__ import annotations

from functools import partial

from node.events.journal import Journal
from node.events.kinds import Kind
from node.state.database import Saved
from node.state.store import Store


def begin_journal(journal: Journal, store: Store, saved: Saved, version: str) -> None:
    """Go on with the events of the node before, tell of the disk from here on, and that this node has started."""
    clean = journal.restore(saved.margins, saved.events)
    store.kept, store.trouble = journal.kept, journal.disk
    store.damaged = partial(journal.tell, Kind.DISK_DAMAGED)
    if store.fault:
        journal.disk(store.fault)
    if store.damage:
        journal.tell(Kind.DISK_DAMAGED, store.damage)
    before = "" if clean else "; the one before it was killed, and what it told last may be missing"
    journal.tell(Kind.NODE_STARTED, f"txnode {version} started{before}", version=version, clean=clean)


def tell_reloaded(journal: Journal, loaded: Kind, refused: Kind, fault: str) -> None:
    """Files were read anew, or cannot be used for this reason."""
    journal.tell(refused if fault else loaded, fault or loaded.meaning)
