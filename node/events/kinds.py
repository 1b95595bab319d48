"""Every kind of event that the node tells, how severe it is, and what it means. The documentation is made of this."""

from __future__ import annotations

from enum import Enum, StrEnum


class Severity(StrEnum):
    """The value is the word in Event.severity."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Kind(Enum):
    """The word in Event.kind, the severity, the meaning."""

    NODE_STARTED = (
        "node.started",
        Severity.INFO,
        "The node is up; `clean` says whether the one before it ended in order.",
    )
    NODE_STOPPING = "node.stopping", Severity.INFO, "The node ends in order."
    NODE_UPGRADING = "node.upgrading", Severity.INFO, "The node becomes another `version` of itself; the core goes on."
    NODE_UPGRADE_FAILED = (
        "node.upgrade.failed",
        Severity.ERROR,
        "The node goes on as it was: the next version could not take over, and why.",
    )
    UPDATE_STEP = "update.step", Severity.INFO, "An update, a `job`, has come this far."
    UPDATE_DONE = "update.done", Severity.INFO, "An update is in force: what there was `before` it, and `after`."
    UPDATE_FAILED = "update.failed", Severity.ERROR, "An update is not in force, and why: what there was goes on."
    STOPPED = "backend.stopped", Severity.INFO, "No backend is wanted any more, and why."
    STARTING = "backend.starting", Severity.INFO, "A backend is on its way."
    RUNNING = "backend.running", Severity.INFO, "The backend serves."
    RESTARTING = "backend.restarting", Severity.WARNING, "The core is gone and comes again by itself, and why it went."
    FAILED = "backend.failed", Severity.ERROR, "The core is down and a controller has to do something."
    CORE_STARTED = "core.started", Severity.INFO, "A process of the core serves: its `pid`, `core` and `version`."
    CORE_EXITED = "core.exited", Severity.ERROR, "A process ended that nobody had asked to: `reason` has its own words."
    CORE_ENDED = "core.ended", Severity.INFO, "A process ended as it was asked to."
    CORE_HUNG = "core.hung", Severity.WARNING, "A process lived and did not answer, and was ended."
    CORE_RETRY = "core.retry", Severity.WARNING, "When the core is tried again: after `seconds`."
    CONFIG_REFUSED = "config.refused", Severity.WARNING, "A Start was refused for its configuration, and why."
    USERS_REFUSED = (
        "users.refused",
        Severity.WARNING,
        "Users who could not be applied: `count`, the `names` of the first, and the first one's `reason`.",
    )
    USERS_CUT = (
        "users.cut",
        Severity.INFO,
        "Users who were removed are out of the core, their connections with them: `count`, the `names` of the first.",
    )
    LIMIT_NEAR = "limits.near", Severity.INFO, "A `user` has used four fifths of what a `limit` allows."
    LIMIT_REACHED = (
        "limits.reached",
        Severity.WARNING,
        "A `user` has reached a `limit` that is only told of, and is in all the same.",
    )
    LIMIT_CUT = (
        "limits.cut",
        Severity.INFO,
        "A `user` is out of the core for a `limit`, their connections with them. Of many at once: `count`, `names`.",
    )
    LIMIT_BACK = (
        "limits.back",
        Severity.INFO,
        "A `user` who was out for a limit may come in again: by a new limit, or as a period has begun.",
    )
    LIMIT_ADDRESSES = (
        "limits.addresses",
        Severity.INFO,
        "Users were connected from more addresses than they may: `count`, the `names` of the first, and how many the "
        "first one may, as `reason`. Those whose limit is only told of are in events of their own.",
    )
    NODE_QUOTA_NEAR = (
        "node.quota.near",
        Severity.WARNING,
        "The node has used four fifths of its own quota: `used` of `bytes`.",
    )
    NODE_QUOTA_OVER = (
        "node.quota.over",
        Severity.ERROR,
        "The node has used up its own quota; `closed` says whether new connections are refused for it.",
    )
    NODE_QUOTA_BEGUN = "node.quota.begun", Severity.INFO, "Another period of the node's own quota has begun."
    DRAIN_BEGUN = "drain.begun", Severity.INFO, "A process keeps the connections that it has, and gets no others."
    DRAIN_CUT = (
        "drain.cut",
        Severity.WARNING,
        "A process that drained was ended before its connections were: how many `connections` that cost, and why.",
    )
    CERTIFICATE_LOADED = "certificate.loaded", Severity.INFO, "The certificate was read anew."
    CERTIFICATE_REFUSED = (
        "certificate.refused",
        Severity.ERROR,
        "The certificate that is there now cannot be used; the one before it stays.",
    )
    KEYS_LOADED = "keys.loaded", Severity.INFO, "The file of keys was read anew."
    KEYS_REFUSED = "keys.refused", Severity.ERROR, "The file of keys cannot be used; the keys before it stay."
    DISK_TROUBLE = "disk.trouble", Severity.ERROR, "The state cannot be written; the node goes on in memory."
    DISK_DAMAGED = "disk.damaged", Severity.ERROR, "The state file could not be read, and was moved aside."
    DISK_WELL = "disk.well", Severity.INFO, "The state is on disk again."
    MISSED = (
        "events.missed",
        Severity.WARNING,
        "Told to one reader: the events from `first` to `last` are not kept any more.",
    )
    LOST = (
        "events.lost",
        Severity.WARNING,
        "Told to one reader: the numbers that it knows are not of this epoch. What follows is all that there is.",
    )

    def __init__(self, word: str, severity: Severity, meaning: str) -> None:
        self.word = word
        self.severity = severity
        self.meaning = meaning


def fits(word: str, wanted: tuple[str, ...]) -> bool:
    """Whether a kind is among these, which may be beginnings of it, to a dot; none want all."""
    return not wanted or any(word == each or word.startswith(each.rstrip(".") + ".") for each in wanted)
