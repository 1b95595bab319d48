"""The kinds of events, with severity and meaning. The table in docs/interface.md is made from them."""

from __future__ import annotations

from enum import Enum, StrEnum

# The beginning of the meaning of kinds that only one reader gets.
ONE_READER = "For one reader only: "


class Severity(StrEnum):
    """The value is that of Event.severity."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Kind(Enum):
    """The value of Event.kind, the severity, the meaning."""

    NODE_STARTED = (
        "node.started",
        Severity.INFO,
        "The node has started; `clean` says whether the previous node ended in order.",
    )
    NODE_STOPPING = "node.stopping", Severity.INFO, "The node is shutting down in order."
    NODE_UPGRADING = (
        "node.upgrading",
        Severity.INFO,
        "The node upgrades to another `version` in place; the core goes on.",
    )
    NODE_UPGRADE_FAILED = (
        "node.upgrade.failed",
        Severity.ERROR,
        "The next version could not take over, and why; the node goes on with the old one.",
    )
    UPDATE_STEP = "update.step", Severity.INFO, "An update (`job`) has reached this step."
    UPDATE_DONE = "update.done", Severity.INFO, "An update has succeeded: what was in use `before`, and `after` it."
    UPDATE_FAILED = "update.failed", Severity.ERROR, "An update has failed, and why; what ran before goes on."
    STOPPED = "backend.stopped", Severity.INFO, "The backend was stopped, and why."
    STARTING = "backend.starting", Severity.INFO, "A backend is starting."
    RUNNING = "backend.running", Severity.INFO, "The backend serves."
    RESTARTING = "backend.restarting", Severity.WARNING, "The core has ended, and why; the node starts it again."
    FAILED = (
        "backend.failed",
        Severity.ERROR,
        "The core is down, and why: a controller has to act.",
    )
    CORE_STARTED = "core.started", Severity.INFO, "A core process serves: its `pid`, `core` and `version`."
    CORE_EXITED = (
        "core.exited",
        Severity.ERROR,
        "A core process ended unexpectedly; `reason` has the exit code or signal, and the core's error.",
    )
    CORE_ENDED = "core.ended", Severity.INFO, "A core process ended as the node asked it to."
    CORE_HUNG = "core.hung", Severity.WARNING, "A core process did not answer, and was ended."
    CORE_RETRY = "core.retry", Severity.WARNING, "The core is started again after `seconds`."
    CONFIG_REFUSED = "config.refused", Severity.WARNING, "A Start was refused because of its configuration, and why."
    USERS_REFUSED = (
        "users.refused",
        Severity.WARNING,
        "Users who could not be applied: `count`, the `names` of the first, and the first one's `reason`.",
    )
    USERS_CUT = (
        "users.cut",
        Severity.INFO,
        "Removed users are out of the core, and their connections cut: `count`, the `names` of the first.",
    )
    USERS_DROPPED = (
        "users.dropped",
        Severity.INFO,
        "A controller had `connections` of users ended, who may come back at once: `count` users, the `names` of the "
        "first, and what was asked for (`by`: user, address, inbound).",
    )
    LIMIT_NEAR = "limits.near", Severity.INFO, "A `user` has used four fifths of what a `limit` allows."
    LIMIT_REACHED = (
        "limits.reached",
        Severity.WARNING,
        "A `user` has reached a `limit` with the action TELL, and stays in.",
    )
    LIMIT_CUT = (
        "limits.cut",
        Severity.INFO,
        "A `user` has reached a `limit` and is barred, their connections cut. For many at once: `count`, `names`.",
    )
    LIMIT_BACK = (
        "limits.back",
        Severity.INFO,
        "A barred `user` is let in again, because of a new limit or a new period.",
    )
    LIMIT_ADDRESSES = (
        "limits.addresses",
        Severity.INFO,
        "Users were connected from more addresses than their limit: `count`, the `names` of the first, and the first "
        "one's limit as `reason`. Users whose limit has the action TELL are in events of their own.",
    )
    ABUSE_TORRENT = (
        "abuse.torrent",
        Severity.WARNING,
        "A `user` uses BitTorrent: see `abuse.scan` for the fields.",
    )
    ABUSE_SCAN = (
        "abuse.scan",
        Severity.WARNING,
        "A `user` looks for open ports, from an `address`: how many `times`, the `first` and the `last` (UTC), some "
        "`targets`, and what the node did (`action`: tell, block, slow, cut). At most one a minute.",
    )
    ABUSE_MAIL = "abuse.mail", Severity.WARNING, "A `user` sends mail (port 25): see `abuse.scan` for the fields."
    NODE_QUOTA_NEAR = (
        "node.quota.near",
        Severity.WARNING,
        "Four fifths of NODE_QUOTA are used: `used` of `bytes`.",
    )
    NODE_QUOTA_OVER = (
        "node.quota.over",
        Severity.ERROR,
        "NODE_QUOTA is used up; `closed` says whether the node takes no new connections of users.",
    )
    NODE_QUOTA_BEGUN = "node.quota.begun", Severity.INFO, "A new period of NODE_QUOTA has begun."
    DRAIN_BEGUN = "drain.begun", Severity.INFO, "A core process drains: it keeps its connections and gets no new ones."
    DRAIN_CUT = (
        "drain.cut",
        Severity.WARNING,
        "A draining core process was ended before its connections were: how many `connections` it had, and why.",
    )
    COUNTERS_LOST = (
        "counters.lost",
        Severity.WARNING,
        "A core process ended, and the traffic since its last reading is not counted: `reason` says why.",
    )
    CERTIFICATE_LOADED = "certificate.loaded", Severity.INFO, "The certificate was reloaded."
    CERTIFICATE_REFUSED = (
        "certificate.refused",
        Severity.ERROR,
        "The new certificate cannot be used; the old one stays.",
    )
    KEYS_LOADED = "keys.loaded", Severity.INFO, "The file of keys was reloaded."
    KEYS_REFUSED = "keys.refused", Severity.ERROR, "The new file of keys cannot be used; the old keys stay."
    DISK_TROUBLE = "disk.trouble", Severity.ERROR, "The state cannot be written to disk; the node goes on in memory."
    DISK_DAMAGED = "disk.damaged", Severity.ERROR, "The state file could not be read, and was moved aside."
    DISK_WELL = "disk.well", Severity.INFO, "The state is on disk again."
    CLOCK_JUMPED = "clock.jumped", Severity.WARNING, "The time of day jumped by so many `seconds`; below 0: back."
    MISSED = (
        "events.missed",
        Severity.WARNING,
        f"{ONE_READER}the events from `first` to `last` are not kept any more.",
    )
    LOST = (
        "events.lost",
        Severity.WARNING,
        f"{ONE_READER}its numbers are not of this epoch. All events that are kept follow.",
    )

    def __init__(self, word: str, severity: Severity, meaning: str) -> None:
        self.word = word
        self.severity = severity
        self.meaning = meaning


def fits(word: str, wanted: tuple[str, ...]) -> bool:
    """Whether a kind matches one of these words or their dotted prefixes; no words match all kinds."""
    return not wanted or any(word == each or word.startswith(each.rstrip(".") + ".") for each in wanted)
